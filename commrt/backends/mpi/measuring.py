# SPDX-License-Identifier: Apache-2.0
"""Costs of messages and of MPI's collectives between the nodes, measured in 50 ms.

Libraries differ by factors, and so do networks: no constant fits. So the ranks send
some messages, run the library's collectives at a few lengths, and one schedule, which
tells how near predictions are. Nothing is begun once the time is used up.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import numpy as np

from commrt.backends.base import Calls
from commrt.backends.mpi.collectives import NATIVE
from commrt.backends.mpi.prediction import calibrated
from commrt.group.group import Group
from commrt.job.links import SendRecv, message_costs, times_us, worst_of
from commrt.select.facts import Candidate, Query
from commrt.select.model import MpiBetweenNodes, Points
from commrt.vocabulary.operations import operation

__all__ = ["COLLS", "in_order", "lengths", "measure", "native_times", "steady_us"]

COLLS = ("allreduce", "allgather", "reduce_scatter", "alltoall", "bcast")
"""Operations of the library that are measured."""
BUDGET_S = 0.04
"""Time of a rank's core after which no other collective is begun. A waiting rank polls,
so that is time of the clock, too, unless other programs have the core meanwhile."""
_DISTURBED_S = 0.12
"""The most time of the clock where they do."""
_SHORT_NBYTES, _LEAST_NBYTES, _MOST_NBYTES = 8, 8 << 10, 1 << 20
_PROBE_NBYTES, _QUICK_US = 16 << 10, 100.0
"""Length of a long message where it takes longer than this."""
_LONG_NBYTES = 256 << 10
"""Length of a long message else."""
_LONGEST_NBYTES, _SOON_US = 1 << 20, 5000.0
"""Length of another one that commrt's own connections carry, where it seems to take
less than this. Buckets of tokens, as in clouds, let shorter ones pass at once."""
_OF_A_SCHEDULE = 0.25
"""Part of a message's time that one of a schedule takes at least over them: it is no
call of its own."""
_LONG_US = 200.0
"""Time that the bytes of the longest vectors may take on their way, once."""
_YARDSTICK = "allreduce"
_SCHEDULES = ("recursive_doubling", "halving_doubling")
"""Schedules of it that run, for short and for long vectors."""
_PLANNED_RANKS = 16
"""Most ranks for which schedules run: of more, Python predicts no time soon enough."""
_TIMES, _TOGETHER, _STEADY = 3, 5, 1.5


def lengths(beta_us: float) -> tuple[int, ...]:
    """Return the bytes of the full vectors to measure with, most telling first.

    The longest takes so long that its bytes count more than its messages, and no
    longer: on a slow network that is a short one.
    """
    longest = _LEAST_NBYTES
    while longest < _MOST_NBYTES and 2 * longest * beta_us <= _LONG_US:
        longest *= 2
    return _SHORT_NBYTES, longest, longest // 8


def in_order(beta_us: float) -> list[tuple[str, int]]:
    """Return operations and bytes of the full vectors, the most telling first."""
    short, longest, middle = lengths(beta_us)
    return [(coll, n) for n in (longest, short, middle) for coll in COLLS]


class _Clock:
    """How much of the time is used up."""

    def __init__(self, most_s: float) -> None:
        """``most_s``: of the clock; ranks that share a core poll in turns."""
        self._end_s = time.perf_counter() + most_s
        self._end_on_core_s = time.thread_time() + BUDGET_S

    def late_s(self) -> float:
        """Return by how much it is exceeded; negative: what is left."""
        on_core_s = time.thread_time() - self._end_on_core_s
        return max(on_core_s, time.perf_counter() - self._end_s)


def measure(
    group: Group,
    sendrecv: SendRecv,
    private_calls: Callable[[], AbstractContextManager[Calls]],
    by: str = NATIVE.backend,
) -> MpiBetweenNodes:
    """Return what MPI costs between the nodes; collective over all ranks of the job.

    Messages and schedules are those of the backend ``by``, which carries them here.
    """
    world = group.world
    # A rank that is still on its way here would be measured, too.
    world.meet(range(world.size), "mpi/start")
    clock = _Clock(BUDGET_S if group.facts.ppn > group.facts.cores else _DISTURBED_S)
    # The least of each: what disturbs the ranks here is not the network's.
    cost = _messages(group, sendrecv, _PROBE_NBYTES, "mpi/messages")
    if cost["beta"] * _PROBE_NBYTES < _QUICK_US:
        cost |= {"beta": _messages(group, sendrecv, _LONG_NBYTES, "mpi/long")["beta"]}
    if by != NATIVE.backend:
        if cost["beta"] * _LONGEST_NBYTES < _SOON_US:
            more = _messages(group, sendrecv, _LONGEST_NBYTES, "mpi/longest")
            cost |= {"beta": more["beta"]}
        cost |= {"alpha": _OF_A_SCHEDULE * cost["alpha"]}
    between = MpiBetweenNodes(cost["alpha"], cost["beta"])
    with private_calls() as calls:
        took = _measured(group, between, calls, clock, by)
    slowest = {
        name: us
        for name, us in worst_of(world, "mpi/took", took).items()
        if us < math.inf
    }
    yardsticks = _yardsticks(group, between, slowest)
    if len(yardsticks) == 2:
        between = calibrated(group.facts, between, *yardsticks)
    _, longest, _ = lengths(cost["beta"])
    needed = {coll: _query(coll, longest, group.size).nbytes for coll in COLLS}
    # Times of short vectors alone say nothing of long ones.
    told = {
        coll: times
        for coll, times in native_times(slowest).items()
        if times[-1][0] == needed[coll]
    }
    long = max(between.beta_us, cost["beta"])
    return replace(between, native_us=told, facts=group.facts, long_beta_us=long)


def _messages(
    group: Group, sendrecv: SendRecv, long_nbytes: int, key: str
) -> dict[str, float]:
    mine = message_costs(
        *(group.world, sendrecv, long_nbytes),
        typical=min,
        times=_TIMES,
        together=_TOGETHER,
    )
    return worst_of(group.world, key, mine)


def _measured(
    group: Group, between: MpiBetweenNodes, calls: Calls, clock: _Clock, by: str
) -> dict[str, float]:
    """Return microseconds of the library's collectives, and of schedules.

    By names such as ``allreduce 8 native``; every rank has the same names.
    """
    mine: dict[str, float] = {}
    short, longest, _ = lengths(between.beta_us)
    todo = [(coll, n, "native") for coll, n in in_order(between.beta_us)]
    if group.size <= _PLANNED_RANKS:
        schedules = zip((short, longest), _SCHEDULES, strict=True)
        todo[1:1] = [(_YARDSTICK, n, name) for n, name in schedules]
    # To ask whether time is left takes some, too.
    asks = {done for done in range(len(todo)) if done < 3 or done % 3 == 0}
    for done, (coll, full_nbytes, algorithm) in enumerate(todo):
        backend = NATIVE.backend if algorithm == NATIVE.algorithm else by
        call = _call(calls, coll, full_nbytes, group.size, backend, algorithm)
        nbytes = _query(coll, full_nbytes, group.size).nbytes
        together = _TOGETHER if full_nbytes == short else 1
        took_us = steady_us(times_us(call, _TIMES, together))
        mine[f"{coll} {nbytes} {algorithm}"] = took_us
        if done in asks and _any_late(calls, clock, by):
            break
    return mine


def steady_us(took: Sequence[float]) -> float:
    """Return the least of some times; infinity where no other one is near it.

    Something else had the cores then, or the network.
    """
    least, second = sorted(took)[:2]
    return least if second <= _STEADY * least else math.inf


def _any_late(calls: Calls, clock: _Clock, by: str) -> bool:
    """Return whether the time is over on any rank; collective."""
    late_s = np.array([clock.late_s()])
    by_schedule = {"op": "max", "algorithm": f"{by}/{_SCHEDULES[0]}"}
    calls.run(_YARDSTICK, (late_s,), by_schedule)
    return bool(late_s[0] > 0)


def _yardsticks(
    group: Group, between: MpiBetweenNodes, took: Mapping[str, float]
) -> list[tuple[Query, Candidate, float]]:
    """Return the schedules that ran, and their times, the shorter vectors first."""
    found: list[tuple[Query, Candidate, float]] = []
    for full_nbytes, name in zip(lengths(between.beta_us), _SCHEDULES, strict=False):
        query = _query(_YARDSTICK, full_nbytes, group.size)
        us = took.get(f"{_YARDSTICK} {query.nbytes} {name}")
        if us is not None:
            found.append((query, Candidate(NATIVE.backend, name), us))
    return found


def native_times(took: Mapping[str, float]) -> dict[str, Points]:
    """Return the library's microseconds, by operation and rule bytes.

    ``took`` has them by names such as ``allreduce 8 native``.
    """
    found: dict[str, dict[int, float]] = {}
    for name, us in took.items():
        coll, nbytes, algorithm = name.split()
        if algorithm == NATIVE.algorithm:
            found.setdefault(coll, {})[int(nbytes)] = us
    return {coll: tuple(sorted(points.items())) for coll, points in found.items()}


def _query(coll: str, full_nbytes: int, size: int) -> Query:
    """Return the question for a full vector of so many bytes, at least one a block."""
    spec = operation(coll)
    elements = _elements(full_nbytes, size)
    whole = spec.rule_bytes == "whole"
    nbytes = 4 * elements * (size if whole else 1)
    return Query(
        coll,
        nbytes,
        op="sum" if spec.reduces else None,
        root=0 if spec.has_root else None,
    )


def _elements(full_nbytes: int, size: int) -> int:
    """Return the elements of a block."""
    return max(1, full_nbytes // 4 // size)


def _call(
    calls: Calls, coll: str, full_nbytes: int, size: int, backend: str, algorithm: str
) -> Callable[[], Any]:
    """Return a call of an operation by an algorithm of a backend.

    It is bound to its arrays: to read the arguments of each call anew takes longer than
    a message on a quick network.
    """
    spec, block = operation(coll), _elements(full_nbytes, size)
    grows = spec.out_count == "times_size"
    x = np.ones(block if grows else block * size, np.float32)
    given: dict[str, Any] = {"algorithm": f"{backend}/{algorithm}"}
    if spec.input_on == "all":
        shrinks = spec.out_count == "div_size"
        given["out"] = np.empty(block if shrinks else block * size, np.float32)
    return calls.binders[coll](x, **given)
