# SPDX-License-Identifier: Apache-2.0
"""Simulates a schedule on a network: messages are flows that share links fairly.

The schedule is the object that commrt verifies and runs; its steps go to the engine as
they are. A message waits for its steps, takes the latency of its way, and then flows.
Flows share each link max-min fairly (Bertsekas and Gallager, *Data Networks*, 2nd
edition, section 6.5.2): no flow can get more unless one that has less gets less. Events
of one time are handled in a fixed order, so equal inputs give equal results.

All results are simulated. They say how a schedule and a network fit together; they do
not replace a measurement.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from commrt import _native
from commrt.errors import ScheduleError, UsageError
from commrt.schedule.columns import step_programs
from commrt.schedule.execute import explained
from commrt.schedule.ir import RankProgram, Schedule
from commrt.sim.costs import Costs
from commrt.sim.placements import place
from commrt.sim.topologies.network import Floats, Ints, Network

__all__ = ["LinkLoads", "Messages", "Simulated", "StepTimes", "simulate"]

_EVENTS = 200_000
"""Events between two looks at Ctrl-C."""


@dataclass(frozen=True)
class Messages:
    """All messages, in the order of their senders' programs; times in microseconds."""

    send: Ints
    """The step that sends, numbered over all ranks (``Simulated.place_of``)."""
    recv: Ints
    """The step that receives."""
    nbytes: Floats
    posted_us: Floats
    """Time at which the sender was ready."""
    begun_us: Floats
    """Time at which it left: after ``posted_us`` where it waited for its receive."""
    flowing_us: Floats
    """Time at which its first byte arrived."""
    ended_us: Floats
    """Time at which its last byte arrived."""
    way: npt.NDArray[np.int32]
    """The way that it took, of those of its pair of ranks."""
    bottleneck: npt.NDArray[np.int32]
    """The link that held it back when most flows shared one; -1: none was shared."""
    sharers: npt.NDArray[np.int32]
    """Flows on that link then, itself included."""


@dataclass(frozen=True)
class LinkLoads:
    """All links of the network, in its order."""

    nbytes: Floats
    """Bytes that passed."""
    busy_us: Floats
    """Time during which some flow was on it."""
    peak_rate: Floats
    """Bytes per microsecond at most."""
    peak_flows: npt.NDArray[np.int32]
    """Flows at most."""


@dataclass(frozen=True)
class StepTimes:
    """All steps of all ranks."""

    ready_us: Floats
    done_us: Floats
    cause: Ints
    """The step that this one was waiting for last, or -1."""


@dataclass(frozen=True, eq=False)
class Simulated:
    """A simulated run of one schedule on one network."""

    schedule: Schedule
    network: Network
    hosts: Ints
    """The host of each rank."""
    num_elements: int
    itemsize: int
    time_us: float
    """Simulated time until the last step of the last rank is done."""
    num_events: int
    num_shared: int
    """Flows that were given a rate, each as often as it was."""
    _run: _native.FlowSimulation

    @cached_property
    def messages(self) -> Messages:
        """The columns of all messages."""
        return Messages(**self._run.messages())

    @cached_property
    def links(self) -> LinkLoads:
        """The columns of all links."""
        return LinkLoads(**self._run.links())

    @cached_property
    def steps(self) -> StepTimes:
        """The columns of all steps."""
        return StepTimes(**self._run.steps())

    @cached_property
    def bases(self) -> Ints:
        """The number of each rank's first step, and in the end that of all steps."""
        lengths = [len(program.steps) for program in self.schedule.programs()]
        return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)

    def place_of(self, step: int) -> tuple[int, int]:
        """Return rank and index of a step."""
        rank = int(np.searchsorted(self.bases, step, side="right")) - 1
        return rank, step - int(self.bases[rank])

    def ranks_of(self, steps: Ints) -> Ints:
        """Return the ranks of steps."""
        return np.searchsorted(self.bases, steps, side="right") - 1

    @cached_property
    def rank_end_us(self) -> Floats:
        """Time at which the last step of each rank is done."""
        done, bases = self.steps.done_us, self.bases
        return np.array(
            [
                done[bases[rank] : bases[rank + 1]].max(initial=0.0)
                for rank in range(self.schedule.size)
            ]
        )

    def way_of(self, message: int) -> list[int]:
        """Return the links that a message took."""
        ranks = self.ranks_of(
            np.array([self.messages.send[message], self.messages.recv[message]])
        )
        source, target = self.hosts[ranks]
        found = self.network.find_ways(np.array([source]), np.array([target]))
        way = int(self.messages.way[message])
        return [
            int(link) for link in found.links[found.starts[way] : found.starts[way + 1]]
        ]


def simulate(
    schedule: Schedule,
    network: Network,
    nbytes: int,
    hosts: Ints | None = None,
    *,
    itemsize: int = 4,
    costs: Costs | None = None,
    planted_bug: str = "none",
) -> Simulated:
    """Return the simulated run of ``schedule`` on ``network``.

    Args:
        schedule: what the ranks do; ``commrt.algorithms.schedule`` makes one.
        network: where they do it.
        nbytes: bytes of the operation's full vector: the whole buffer of an allreduce,
            all ranks' blocks together of an allgather (docs/internals/schedules.md).
        hosts: the host of each rank; ranks 0, 1, ... on hosts 0, 1, ... if left out.
        itemsize: bytes of an element.
        costs: what is added to the time on links; nothing, if left out.
        planted_bug: a wrong rule of sharing, for tests.

    Raises:
        UsageError: the length fits no vector, or the ranks have no hosts.
        ScheduleError: messages do not match, ranks wait for each other for ever, or the
            blocks have no lengths before the call (``boxes``).
    """
    multiple = schedule.length_unit
    num_elements = _num_elements(nbytes, itemsize, multiple)
    hosts = place(network, schedule.size) if hosts is None else hosts
    if len(hosts) != schedule.size:
        raise UsageError(
            f"hosts of {len(hosts)} ranks for a schedule of {schedule.size} ranks"
        )
    programs = schedule.programs()
    tables: dict[object, int] = {}
    for program in programs:
        tables.setdefault(program.spaces, len(tables))
    bounds = [[space.bounds(num_elements) for space in each] for each in tables]  # type: ignore[attr-defined]
    own = np.array([tables[program.spaces] for program in programs], np.int32)
    pairs, peers = _peers(programs)
    ranks = np.repeat(np.arange(schedule.size), np.diff(pairs))
    ways = network.find_ways(hosts[ranks], hosts[peers])
    with explained(programs):
        run = _native.FlowSimulation(
            programs=[program.steps.columns for program in programs],
            bounds=bounds,
            bounds_of_rank=own,
            itemsize=itemsize,
            shared=network.links.shared_rate,
            per_flow=network.links.flow_rate,
            latencies=network.links.latency_us,
            pairs=pairs,
            peers=peers.astype(np.int32),
            ways=ways.of_pair,
            starts=ways.starts,
            links=ways.links,
            costs=(costs or Costs()).native(),
        )
    if planted_bug != "none":
        run.plant_bug(planted_bug)
    while not run.advance(_EVENTS):
        pass
    if run.num_done < sum(len(program.steps) for program in programs):
        _explain_stop(programs)
    time_us = float(run.time_us)
    return Simulated(
        *(schedule, network, hosts, num_elements, itemsize, time_us),
        *(run.num_events, run.num_shared, run),
    )


def _explain_stop(programs: list[RankProgram]) -> None:
    """Raise ScheduleError: some steps never ran."""
    with explained(programs):
        step_programs(programs).events()
    raise ScheduleError(
        "the simulation stopped before all steps were done, though no circle of waits "
        "is to be found; prove the schedule by python -m commrt verify"
    )


def _num_elements(nbytes: int, itemsize: int, multiple: int) -> int:
    if itemsize < 1:
        raise UsageError(f"itemsize is {itemsize}; expected 1 or more")
    if nbytes < 0 or nbytes % (itemsize * multiple):
        raise UsageError(
            f"{nbytes} bytes of elements with {itemsize} bytes: expected a multiple of "
            f"{itemsize * multiple}, the lengths that the schedule is for"
        )
    return nbytes // itemsize


def _peers(programs: list[RankProgram]) -> tuple[Ints, Ints]:
    """Return the peers of all ranks, rank by rank, and where each rank's begin."""
    found = [program.steps.columns.peers() for program in programs]
    starts = np.zeros(len(found) + 1, np.int64)
    np.cumsum([len(peers) for peers in found], out=starts[1:])
    parts = [np.array(peers, np.int64) for peers in found]
    return starts, np.concatenate([np.empty(0, np.int64), *parts])
