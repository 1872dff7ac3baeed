# SPDX-License-Identifier: Apache-2.0
"""A table for a network that nobody here has: its times are simulated.

``commrt-tune simulate`` plays every candidate of an operation on a network, size by
size, and writes a rule for each range of sizes. Each rule says that it was simulated.
More bytes never take less time, so a candidate that is slower at few bytes than the
best one at many is not played there.
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
from commrt.planning.prediction import full_nbytes
from commrt.schedule.ir import Schedule, full_multiple
from commrt.select.facts import Candidate, Query
from commrt.select.fingerprint import this_machine
from commrt.select.rules import Evidence, Match, Point, Rule, RunnerUp
from commrt.select.schema import DEFAULT_TIE_MARGIN
from commrt.select.table import Table
from commrt.sim.network_files import Described, load_network
from commrt.sim.placements import machines, place
from commrt.sim.quantities import nbytes_text, parse_nbytes, time_text
from commrt.sim.simulate import simulate
from commrt.sim.topologies.network import Ints
from commrt.tuning.table_writer import write_table
from commrt.version import __version__
from commrt.vocabulary.operations import SCHEDULED, operation

__all__ = ["Setting", "Times", "add_simulate", "rules_of", "simulated_times"]

_ITEM_NBYTES = 4
_LEAST, _MOST = "64", "256MiB"
_STEP = 4
_BACKENDS = {"one": ("shm", "mpi"), "several": ("mpi", "gloo")}
"""Backends that run schedules on one node, and on several; the rules name one."""

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
            run = simulate(
                *(one, setting.described.network, _vector_nbytes(op, size, one.size)),
                setting.hosts,
                itemsize=_ITEM_NBYTES,
                costs=setting.described.costs,
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
    """Return the rules that the times make: the simplest of what is within the margin.

    ``match`` is what calls must have; its bytes are replaced.
    """
    chosen = [_best_at(times, size) for size in sizes]
    rules: list[Rule] = []
    first = 0
    for at in range(1, len(sizes) + 1):
        if at < len(sizes) and chosen[at] == chosen[first]:
            continue
        lo = rules[-1].match.hi if rules else 0
        assert lo is not None
        hi = None
        if at < len(sizes):
            hi = _crossover(times, chosen[first], chosen[at], sizes[at - 1], sizes[at])
        inside = sizes[first:at]
        evidence = _evidence(times, chosen[first], inside, date)
        here = Match(
            lo,
            hi,
            ranks=match.ranks,
            nodes=match.nodes,
            ppn=match.ppn,
            link_class=match.link_class,
            device=match.device,
        )
        rules.append(Rule(op, here, chosen[first], evidence))
        first = at
    return rules


def _best_at(times: Times, size: int) -> Candidate:
    """Return the first of the candidates that nothing beats by more than the margin."""
    there = {one: mine[size] for one, mine in times.items() if size in mine}
    limit = min(there.values()) * (1 + DEFAULT_TIE_MARGIN)
    return next(one for one, us in there.items() if us <= limit)


def _crossover(
    times: Times, before: Candidate, after: Candidate, low: int, high: int
) -> int:
    """Return the size from which the latter is chosen, above ``low``."""
    corners = [times[one].get(size) for one in (before, after) for size in (low, high)]
    if None in corners:
        return max(low + 1, math.isqrt(low * high))
    one_low, one_high, other_low, other_high = (float(us or 0.0) for us in corners)
    gap_low, gap_high = one_low - other_low, one_high - other_high
    if gap_low * gap_high >= 0:  # within the margin on one side
        return max(low + 1, math.isqrt(low * high))
    part = gap_low / (gap_low - gap_high)
    return min(high, max(low + 1, round(low + part * (high - low))))


def _evidence(
    times: Times, chosen: Candidate, sizes: Sequence[int], date: str
) -> Evidence:
    points = tuple(
        Point(size, us, (us, us), 1, 1)
        for size, us in times[chosen].items()
        if size in sizes
    )
    middle = sizes[len(sizes) // 2]
    others = {
        one: mine[middle]
        for one, mine in times.items()
        if one != chosen and middle in mine
    }
    second = None
    if others:
        one = min(others, key=lambda each: others[each])
        second = RunnerUp(one, middle, others[one], (others[one], others[one]))
    return Evidence("simulated", points, second, None, date)


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
        help="what carries messages between the ranks that will use the table: mpi "
        "or gloo; on one node shm or mpi (the first of these)",
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
