# SPDX-License-Identifier: Apache-2.0
"""A table for a network that nobody here has: its times are simulated.

``commrt-tune simulate`` plays every candidate of an operation on a network, size by
size, and writes a rule for each range of sizes, divided as measured times are
(``decide.divide``). Each rule says that it was simulated. More bytes never take less
time, so a candidate that is slower at few bytes than the best one at many is not played
there.

Where connections of commrt's own are to carry the messages, long ones are played in
pieces, as ranks send them.
"""

from __future__ import annotations

import argparse
import datetime
import math
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from commrt import algorithms
from commrt.errors import UsageError
from commrt.planning.footprint import DIRECT_CHUNK_NBYTES
from commrt.planning.prediction import full_nbytes
from commrt.schedule.ir import Op, Schedule, full_multiple
from commrt.select.facts import Candidate, Query
from commrt.select.fingerprint import this_machine
from commrt.select.rules import Evidence, Match, Point, Rule, RunnerUp
from commrt.select.schema import DEFAULT_TIE_MARGIN
from commrt.select.table import Table
from commrt.sim.costs import Costs
from commrt.sim.fragments import CONNECTIONS, fragmented, num_fragments
from commrt.sim.network_files import Described, load_network
from commrt.sim.placements import machines, place
from commrt.sim.quantities import nbytes_text, parse_nbytes, time_text
from commrt.sim.simulate import simulate
from commrt.sim.topologies.network import Ints
from commrt.tuning.decide import Range, divide
from commrt.tuning.fit import Curve
from commrt.tuning.statistics import estimate
from commrt.tuning.table_writer import write_table
from commrt.version import __version__
from commrt.vocabulary.operations import SCHEDULED, operation

__all__ = ["Setting", "Times", "add_simulate", "rules_of", "simulated_times"]

_ITEM_NBYTES = 4
_LEAST, _MOST = "64", "256MiB"
_STEP = 4
_TCP = "tcp"
_BACKENDS = {"one": ("shm", "mpi"), "several": (_TCP, "mpi", "gloo")}
"""Backends that run schedules on one node, and on several; the rules name one."""
_MOST_MESSAGES = 1 << 15
"""Messages of one run, beyond which pieces are longer than ranks make them. To fill a
pipeline of n pieces takes an n-th of a vector: more than some change little."""

Times = Mapping[Candidate, Mapping[int, float]]
"""Simulated microseconds by candidate and rule bytes, the simpler candidates first."""


@dataclass(frozen=True)
class Setting:
    """Ranks on a network."""

    described: Described
    hosts: Ints
    """The host of each rank."""
    backend: str
    """The backend that runs schedules between these ranks."""

    @cached_property
    def costs(self) -> Costs:
        """Costs of the network, and of the backend's messages."""
        given = self.described.costs
        if self.backend != _TCP:
            return given
        queued = given.queued_nbytes or CONNECTIONS["queued_nbytes"]
        return replace(given, in_order=CONNECTIONS["in_order"], queued_nbytes=queued)

    def as_sent(self, one: Schedule, nbytes: int) -> Schedule:
        """Return a schedule with its messages as the backend sends them."""
        if self.backend != _TCP:
            return one
        elements = nbytes // _ITEM_NBYTES
        number = num_fragments(one, elements, _ITEM_NBYTES, DIRECT_CHUNK_NBYTES)
        if number == 1:
            return one
        most = max(1, _MOST_MESSAGES // max(1, _num_sends(one)))
        return fragmented(one, elements, _ITEM_NBYTES, min(number, most))

    @cached_property
    def nodes(self) -> tuple[int, ...]:
        """The number of the node of each rank."""
        network = self.described.network
        each = machines(network) if network.hosts_per_node > 1 else None
        nodes = self.hosts if each is None else each[self.hosts]
        _, numbers = np.unique(nodes, return_inverse=True)
        return tuple(int(number) for number in numbers)

    def candidates(self, op: str) -> list[tuple[Candidate, Schedule]]:
        """Return what can run an operation, those with the fewest steps first."""
        found = []
        ranks, nodes = len(self.hosts), self.nodes
        for name in algorithms.names(op, ranks, nodes):
            where = nodes if algorithms.get(op, name).spans_nodes else None
            for params in algorithms.offered_params(op, name, ranks, nodes):
                one = algorithms.schedule(op, name, ranks, 0, params, where)
                found.append((Candidate(self.backend, name, params), one))
        # A root has the most steps, a leaf the fewest: the last rank is mostly one.
        steps = [
            (len(one.program(0).steps), len(one.program(ranks - 1).steps))
            for _, one in found
        ]
        order = sorted(range(len(found)), key=lambda at: (max(steps[at]), at))
        return [found[at] for at in order]


def simulated_times(setting: Setting, op: str, sizes: Sequence[int]) -> Times:
    """Return the time of each candidate, without sizes at which it cannot be the best.

    Args:
        setting: the ranks.
        op: the operation.
        sizes: rule bytes, ascending.
    """
    times: dict[Candidate, dict[int, float]] = {}
    best = dict.fromkeys(sizes, math.inf)
    for candidate, one in setting.candidates(op):
        mine: dict[int, float] = {}
        least = 0.0
        for size in sizes:
            if least > best[size]:
                continue
            nbytes = _vector_nbytes(op, size, one.size)
            sent = setting.as_sent(one, nbytes)
            run = simulate(
                *(sent, setting.described.network, nbytes),
                setting.hosts,
                itemsize=_ITEM_NBYTES,
                costs=setting.costs,
            )
            mine[size] = least = run.time_us
            best[size] = min(best[size], least)
        one.forget_programs()
        times[candidate] = mine
    return times


def _vector_nbytes(op: str, size: int, ranks: int) -> int:
    """Return the bytes of the whole vector, a multiple of what the ranks share."""
    whole = full_nbytes(Query(op, size, "float32"), ranks)
    unit = _ITEM_NBYTES * full_multiple(op, ranks)
    return max(1, whole // unit) * unit


def rules_of(
    op: str, times: Times, sizes: Sequence[int], match: Match, date: str
) -> list[Rule]:
    """Return the rules that the times make.

    ``match`` is what calls must have; its bytes are replaced.
    """
    best = {
        size: min(us[size] for us in times.values() if size in us) for size in sizes
    }
    curves = {
        one: Curve(
            {size: estimate([[us]]) for size, us in mine.items()},
            {size: us for size, us in best.items() if size not in mine},
        )
        for one, mine in times.items()
    }
    # Single times count as tied within twice the margin.
    return [
        Rule(
            op,
            replace(match, lo=each.lo, hi=each.hi),
            each.candidate,
            _evidence(times, each, sizes, date),
        )
        for each in divide(curves, DEFAULT_TIE_MARGIN / 2)
    ]


def _evidence(times: Times, chosen: Range, sizes: Sequence[int], date: str) -> Evidence:
    mine = times[chosen.candidate]
    inside = [
        size
        for size in sizes
        if chosen.lo <= size < (math.inf if chosen.hi is None else chosen.hi)
    ]
    points = tuple(
        Point(size, mine[size], (mine[size], mine[size]), 1, 1)
        for size in inside
        if size in mine
    )
    second = None
    for middle in inside[len(inside) // 2 :][:1]:
        others = {
            one: us[middle]
            for one, us in times.items()
            if one != chosen.candidate and middle in us
        }
        if others:
            one = min(others, key=lambda each: others[each])
            second = RunnerUp(one, middle, others[one], (others[one], others[one]))
    return Evidence("simulated", points, second, chosen.crossover, date)


def _num_sends(one: Schedule) -> int:
    """Return the messages of a schedule."""
    programs = (one.program(rank) for rank in range(one.size))
    return sum(step.op is Op.SEND for program in programs for step in program.steps)


# -- the command -----------------------------------------------------------------------


def add_simulate(commands: Any) -> None:
    """Add the command to the parser's."""
    parser = commands.add_parser(
        "simulate", help="a table for a network that is only described"
    )
    parser.set_defaults(command=_simulate)
    add = parser.add_argument
    add("--topology", required=True, metavar="T", help="as for commrt-sim run")
    add("--ranks", type=int, required=True, help="number of ranks")
    add("--placement", default="block", help="as for commrt-sim run (block)")
    add("--ops", default="allreduce", help="operations (allreduce)")
    add(
        "--bytes",
        default=f"{_LEAST}:{_MOST}",
        metavar="MIN:MAX",
        help=f"rule bytes, each {_STEP} times the one before ({_LEAST}:{_MOST})",
    )
    add(
        "--backend",
        help="what carries messages between the ranks that will use the table: tcp, "
        "mpi or gloo; on one node shm or mpi (the first of these)",
    )
    add("--out", type=Path, required=True, metavar="FILE", help="the table")


def _simulate(arguments: argparse.Namespace) -> int:
    ops = arguments.ops.split(",")
    for op in ops:
        if op not in SCHEDULED or operation(op).vector_of is not None:
            raise UsageError(
                f"--ops {op}: expected operations with blocks of one length, of "
                f"{', '.join(SCHEDULED)}"
            )
    sizes = _sizes(arguments.bytes)
    described = load_network(arguments.topology)
    if arguments.ranks < 2:
        raise UsageError(f"--ranks {arguments.ranks}: expected 2 or more")
    hosts = place(described.network, arguments.ranks, arguments.placement)
    setting = Setting(described, hosts, arguments.backend or "")
    counts = np.bincount(setting.nodes)
    able = _BACKENDS["one" if len(counts) == 1 else "several"]
    setting = replace(setting, backend=arguments.backend or able[0])
    if setting.backend not in able:
        raise UsageError(
            f"--backend {setting.backend}: these ranks are on {len(counts)} nodes, "
            f"where {' or '.join(able)} runs schedules"
        )
    match = Match(
        0,
        None,
        ranks=len(hosts),
        nodes=len(counts),
        ppn=int(counts.max()),
        link_class="network" if len(counts) > 1 else None,
        device="host",
    )
    date = datetime.date.today().isoformat()
    rules: list[Rule] = []
    for op in ops:
        times = simulated_times(setting, op, sizes)
        found = rules_of(op, times, sizes, match, date)
        rules += found
        for rule in found:
            sys.stdout.write(_line(rule))
    method = {
        "simulated": described.network.name,
        "date": date,
        "command": _command(arguments),
    }
    software = {"commrt": __version__}
    write_table(Table(this_machine(), tuple(rules), software, method), arguments.out)
    sys.stdout.write(f"wrote {arguments.out}: every time in it is simulated\n")
    return 0


def _command(arguments: argparse.Namespace) -> str:
    said = ("topology", "ranks", "placement", "ops", "bytes", "backend")
    words = ["commrt-tune", "simulate"]
    for name in said:
        if getattr(arguments, name) is not None:
            words += [f"--{name}", str(getattr(arguments, name))]
    return shlex.join(words)


def _line(rule: Rule) -> str:
    lo, hi = rule.match.lo, rule.match.hi
    ends = f"[{nbytes_text(lo)}, {'inf' if hi is None else nbytes_text(hi)})"
    assert rule.evidence is not None
    points = rule.evidence.points
    seen = ", ".join(f"{nbytes_text(p.nbytes)} {time_text(p.us)}" for p in points)
    return f"{rule.op} {ends}: {rule.use}; simulated: {seen}\n"


def _sizes(text: str) -> list[int]:
    low, colon, high = text.partition(":")
    least, most = parse_nbytes(low), parse_nbytes(high) if colon else parse_nbytes(low)
    if not 1 <= least <= most:
        raise UsageError(f"--bytes {text}: expected MIN:MAX, as {_LEAST}:{_MOST}")
    sizes = [least]
    while sizes[-1] * _STEP <= most:
        sizes.append(sizes[-1] * _STEP)
    return sizes
