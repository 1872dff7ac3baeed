# SPDX-License-Identifier: Apache-2.0
"""Costs of collectives as commrt measures, models or simulates them.

Each class prices a transfer as ``AlphaBeta`` does. ``MeasuredCosts`` has times of real
calls, or of a selection table. ``ModelledCosts`` asks the model by which commrt chooses
algorithms without a table. ``SimulatedCosts`` plays schedules on a network.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import TypeAlias

import numpy as np

from commrt import algorithms
from commrt.errors import UsageError
from commrt.oracle.contention import LinkAudit, link_audit
from commrt.oracle.transfers import COLLECTIVES, MESSAGE, Group, Transfer
from commrt.planning.prediction import schedule_us
from commrt.select.facts import CommFacts, LinkClass, Query
from commrt.select.model import constants
from commrt.select.table import Table
from commrt.sim.costs import Costs
from commrt.sim.placements import machines
from commrt.sim.simulate import Simulated, simulate
from commrt.sim.topologies.network import Ints, Network
from commrt.vocabulary.operations import rule_nbytes

__all__ = [
    "MeasuredCosts",
    "ModelledCosts",
    "Points",
    "SimulatedCosts",
    "interpolated_s",
    "tabled_costs",
]

Points: TypeAlias = tuple[tuple[int, float], ...]
"""Bytes of the whole vector, ascending, and the seconds that each takes."""


def interpolated_s(points: Points, nbytes: float) -> float:
    """Return the seconds at a length: on lines between points, and along the last one.

    A length below the first point takes as long as that.
    """
    sizes, times = zip(*points, strict=True)
    if len(points) == 1 or nbytes <= sizes[-1]:
        return float(np.interp(nbytes, sizes, times))
    # Beyond the last point, a byte costs what it did before it, and not less than none.
    slope = (times[-1] - times[-2]) / (sizes[-1] - sizes[-2])
    return float(times[-1] + max(slope, 0.0) * (nbytes - sizes[-1]))


@dataclass(frozen=True)
class MeasuredCosts:
    """Times of calls that were measured, on groups of the same number of ranks.

    Raises:
        UsageError: there is no point, or one is not above 0.
    """

    points: Mapping[tuple[str, int, int], Points]
    """By operation, ranks of a group, and their stride in the job."""
    source: str
    """Who measured, as in "measured by 4 ranks"."""

    def __post_init__(self) -> None:
        if not any(self.points.values()):
            raise UsageError(f"{self.source}: no measured times; expected one at least")
        for (coll, ranks, stride), points in self.points.items():
            if coll not in COLLECTIVES:
                raise UsageError(
                    f"{self.source}: {coll!r} is no operation that a strategy uses; "
                    f"expected one of {', '.join(COLLECTIVES)}"
                )
            sizes = [nbytes for nbytes, _ in points]
            good = all(0 < seconds < math.inf for _, seconds in points)
            if not good or sizes != sorted({*sizes}) or min(sizes, default=1) < 0:
                raise UsageError(
                    f"{self.source}: {coll} on {ranks} ranks, stride {stride}: "
                    f"expected ascending bytes with seconds above 0"
                )

    @property
    def origin(self) -> str:
        """The words for a table's head."""
        return self.source

    def seconds(self, transfer: Transfer) -> float:
        """Return the seconds that one of the transfer's operations takes.

        Raises:
            UsageError: nobody measured that operation on so many ranks.
        """
        group = transfer.group
        points = self.points.get((transfer.coll, group.ranks, group.stride), ())
        if not points:  # ranks that lie in another way are the next best
            strides = [
                stride
                for coll, ranks, stride in self.points
                if (coll, ranks) == (transfer.coll, group.ranks)
            ]
            if strides:
                nearest = min(strides, key=lambda each: abs(each - group.stride))
                points = self.points[transfer.coll, group.ranks, nearest]
        if not points:
            known = sorted({(coll, ranks) for coll, ranks, _ in self.points})
            raise UsageError(
                f"{self.source}: no times of {transfer.coll} on {group.ranks} ranks; "
                f"there are {', '.join(f'{c} on {r}' for c, r in known)}: measure on "
                f"as many ranks, or take modelled or simulated costs"
            )
        return interpolated_s(points, transfer.nbytes)


def tabled_costs(table: Table, source: str) -> MeasuredCosts:
    """Return the times that ``commrt-tune`` has measured for a selection table.

    A table has no times of messages: those are taken as half of the allreduce on two
    ranks, which sends as much each way and waits for it.

    Args:
        table: with evidence in its rules.
        source: what messages call it.

    Raises:
        UsageError: no rule of it has points.
    """
    found: dict[tuple[str, int, int], dict[int, float]] = {}
    for rule in table.rules:
        ranks = rule.match.ranks
        if rule.evidence is None or ranks is None or rule.op not in COLLECTIVES:
            continue
        whole = rule_nbytes(rule.op, ranks, ranks)  # 1 where rules go by blocks
        times = ranks if whole == 1 else 1
        for point in rule.evidence.points:
            at = found.setdefault((rule.op, ranks, 1), {})
            seconds = point.us * 1e-6
            nbytes = point.nbytes * times
            at[nbytes] = min(seconds, at.get(nbytes, math.inf))
    pair = found.get(("allreduce", 2, 1), {})
    if pair:
        for key in {ranks for _, ranks, _ in found}:
            found[MESSAGE, key, 1] = {n: s / 2 for n, s in pair.items()}
    points = {key: tuple(sorted(each.items())) for key, each in found.items()}
    return MeasuredCosts(points, f"measured by commrt-tune, {source}")


@dataclass(frozen=True)
class ModelledCosts:
    """The model by which commrt chooses where there is no table: the best schedule."""

    link_class: LinkClass = "near"
    """Distance of ranks; ``network``: each rank is on a node of its own."""
    cores: int = 0
    """Cores of a node that ranks share; 0: one for each rank."""
    _known: dict[tuple[str, int, int], float] = field(
        default_factory=dict, repr=False, compare=False
    )

    @property
    def origin(self) -> str:
        """The words for a table's head."""
        return f"commrt's model of {self.link_class} ranks (projected)"

    def seconds(self, transfer: Transfer) -> float:
        """Return the seconds that one of the transfer's operations takes."""
        ranks = transfer.group.ranks
        apart = self.link_class == "network"
        nbytes = -(-math.ceil(transfer.nbytes) // (4 * ranks)) * 4 * ranks
        if transfer.coll == MESSAGE:
            one = constants(self.link_class, "messages" if apart else "memory")
            return (one.alpha_us + one.beta_us * transfer.nbytes) * 1e-6
        key = transfer.coll, ranks, nbytes
        if key not in self._known:
            self._known[key] = self._best_us(transfer.coll, ranks, nbytes) * 1e-6
        return self._known[key]

    def _best_us(self, coll: str, ranks: int, nbytes: int) -> float:
        apart = self.link_class == "network"
        nodes = ranks if apart else 1
        layout = tuple(range(ranks)) if apart else ()
        facts = CommFacts(
            ranks, nodes, ranks // nodes, self.cores or ranks, self.link_class, layout
        )
        query = Query(coll, rule_nbytes(coll, nbytes, ranks))
        one = constants(self.link_class, "messages" if apart else "memory")
        return min(
            schedule_us(facts, query, name, {}, one, False, shares=not apart)
            for name in _tried(coll, ranks)
        )


_FEW = 32
_MANY: Mapping[str, tuple[str, ...]] = {
    "allreduce": ("halving_doubling", "recursive_doubling"),
    "allgather": ("recursive_doubling", "dissemination"),
    "reduce_scatter": ("halving_doubling",),
    "alltoall": ("dissemination",),
}
"""Algorithms of few messages, for so many ranks that others take minutes."""
_MOST_RING = 128


def _tried(coll: str, ranks: int) -> list[str]:
    """Return the algorithms among which the fastest is taken."""
    known = algorithms.names(coll, ranks)
    if ranks <= _FEW:
        return [*known]
    wanted = [*_MANY[coll], *(("ring", "pairwise") if ranks <= _MOST_RING else ())]
    return [name for name in known if name in wanted] or [known[0]]


@dataclass(frozen=True)
class SimulatedCosts:
    """Schedules on a network; the fastest algorithm of each operation counts.

    Lengths between four that are simulated are interpolated. Groups that send at one
    time slow each other down as the link audit says.

    Raises:
        UsageError: a placement has no ranks.
    """

    network: Network
    hosts: Ints
    """The host of each rank of the job."""
    names: Sequence[str] = ()
    """Algorithms to choose from; commrt's own, if left out."""
    costs: Costs = field(default_factory=Costs)
    audits: bool = True
    """False: groups do not hinder each other, as if each were alone."""
    _known: dict[tuple[str, Group], tuple[Points, LinkAudit]] = field(
        default_factory=dict, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        if not len(self.hosts):
            raise UsageError("SimulatedCosts: hosts is empty; expected one for a rank")

    @property
    def origin(self) -> str:
        """The words for a table's head."""
        return f"schedules on {self.network.name} (simulated)"

    def seconds(self, transfer: Transfer) -> float:
        """Return the simulated seconds that one of the transfer's operations takes.

        Raises:
            UsageError: the job has more ranks than ``hosts``, or no algorithm fits.
        """
        points, audit = self._of(transfer.coll, transfer.group)
        least = points[0][1]
        alone = interpolated_s(points, transfer.nbytes)
        return least + audit.penalty * (alone - least)

    def audit(self, coll: str, group: Group) -> LinkAudit:
        """Return what the groups of a transfer cost each other."""
        return self._of(coll, group)[1]

    @cached_property
    def _machines(self) -> Ints:
        return machines(self.network)

    def _of(self, coll: str, group: Group) -> tuple[Points, LinkAudit]:
        if group.world > len(self.hosts):
            raise UsageError(
                f"{self.network.name}: hosts of {len(self.hosts)} ranks for a job of "
                f"{group.world}; place more ranks"
            )
        key = coll, group
        if key not in self._known:
            made = self._message if coll == MESSAGE else self._collective
            self._known[key] = made(coll, group)
        return self._known[key]

    def _message(self, coll: str, group: Group) -> tuple[Points, LinkAudit]:
        """Return the times of messages between neighbours of a group: the slowest."""
        members = self.hosts[list(group.members[0])].tolist()
        pairs = [*pairwise(members)]
        points = tuple(
            (nbytes, max(self._message_us(*pair, nbytes) for pair in pairs) * 1e-6)
            for nbytes in (0, 1 << 20)
        )
        ranks = np.arange(group.ranks)
        ends = ranks[:-1], ranks[1:]
        audit = LinkAudit(1.0, "", 0)
        if self.audits:
            nbytes = np.ones(group.ranks - 1)
            audit = link_audit(self.network, self.hosts, group.members, *ends, nbytes)
        return points, audit

    def _message_us(self, source: int, target: int, nbytes: int) -> float:
        """Return the simulated time of a message from a host to another, alone."""
        links, costs = self.network.links, self.costs
        way = self.network.way(source, target)
        if way:
            latency_us = float(links.latency_us[way].sum())
            rate = float(links.flow_rate[way].min())
        else:
            local = costs.local_gbytes_per_s
            latency_us = costs.local_latency_us
            rate = math.inf if local is None else 1000 * local
        overheads = costs.send_overhead_us + costs.receive_overhead_us
        return latency_us + overheads + nbytes / rate

    def _collective(self, coll: str, group: Group) -> tuple[Points, LinkAudit]:
        hosts = self.hosts[list(group.members[0])]
        unit = 4 * group.ranks
        sizes = [unit, *(-(-n // unit) * unit for n in (1 << 16, 1 << 20, 1 << 24))]
        best: dict[int, tuple[float, Simulated]] = {}
        for name in self.names or _tried(coll, group.ranks):
            where = self._machines[hosts] if _spans_nodes(coll, name) else None
            nodes = None if where is None else tuple(where.tolist())
            if not algorithms.get(coll, name).supports(group.ranks, nodes):
                continue
            schedule = algorithms.schedule(coll, name, group.ranks, nodes=nodes)
            for nbytes in sorted({*sizes}):
                run = simulate(schedule, self.network, nbytes, hosts, costs=self.costs)
                if nbytes not in best or run.time_us < best[nbytes][0]:
                    best[nbytes] = run.time_us, run
            schedule.forget_programs()
        if not best:
            raise UsageError(
                f"{coll} on {group.ranks} ranks: none of {', '.join(self.names)} can "
                f"do it; name another algorithm"
            )
        points = tuple((n, us * 1e-6) for n, (us, _) in sorted(best.items()))
        audit = LinkAudit(1.0, "", 0)
        if self.audits and len(group.members) > 1:
            messages = best[max(best)][1].messages
            run = best[max(best)][1]
            audit = link_audit(
                *(self.network, self.hosts, group.members),
                *(run.ranks_of(messages.send), run.ranks_of(messages.recv)),
                messages.nbytes,
            )
        return points, audit


def _spans_nodes(coll: str, name: str) -> bool:
    return algorithms.get(coll, name).spans_nodes
