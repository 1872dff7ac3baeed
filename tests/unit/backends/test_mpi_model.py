# SPDX-License-Identifier: Apache-2.0
"""Choices between nodes, by what ranks measured of MPI when they met."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from commrt import algorithms
from commrt.backends.mpi.measuring import (
    COLLS,
    in_order,
    lengths,
    native_times,
    steady_us,
)
from commrt.backends.mpi.prediction import best_schedule, calibrated, predicted_us
from commrt.select.facts import Candidate, CommFacts, Query
from commrt.select.model import MpiBetweenNodes, interpolated
from commrt.vocabulary.operations import operation

NATIVE = Candidate("mpi", "native")
NODES = [
    CommFacts(2, 2, 1, 1, "network"),
    CommFacts(3, 3, 1, 2, "network"),
    CommFacts(4, 2, 2, 2, "network"),
    CommFacts(5, 3, 2, 1, "network"),
]
FAST = MpiBetweenNodes(2.0, 2e-4)
SLOW = MpiBetweenNodes(50.0, 1.6e-2)


def asked(coll: str, nbytes: int) -> Query:
    spec = operation(coll)
    op, root = "sum" if spec.reduces else None, 0 if spec.has_root else None
    return Query(coll, nbytes, op=op, root=root)


def schedules(facts: CommFacts, coll: str) -> list[Candidate]:
    names = algorithms.names(coll, facts.size)
    return [Candidate("mpi", name) for name in names]


def native_us(
    facts: CommFacts,
    query: Query,
    between: MpiBetweenNodes,
    only_floor: bool = False,
) -> float:
    return predicted_us(facts, query, NATIVE, between, only_floor=only_floor)


@pytest.mark.parametrize("facts", NODES, ids=str)
@pytest.mark.parametrize("coll", COLLS)
@pytest.mark.parametrize("part", [0.5, 1.0, 2.0])
def test_the_librarys_collective_takes_its_measured_part(
    facts: CommFacts, coll: str, part: float
) -> None:
    for nbytes in (1, 4096, 1 << 20):
        query = asked(coll, nbytes)
        for between in (FAST, SLOW):
            _, best_us = best_schedule(facts, query, schedules(facts, coll), between)
            took = {coll: ((nbytes, part * best_us),)}
            measured = replace(between, native_us=took, facts=facts)
            said_us = native_us(facts, query, measured)
            assert said_us == pytest.approx(part * best_us)
            floor_us = native_us(facts, query, measured, only_floor=True)
            assert floor_us <= said_us * (1 + 1e-9)


def test_of_schedules_messages_decide_when_short_and_bytes_when_long() -> None:
    facts = CommFacts(8, 8, 1, 2, "network")
    short = best_schedule(
        facts, asked("allreduce", 8), schedules(facts, "allreduce"), SLOW
    )
    long = best_schedule(
        facts, asked("allreduce", 64 << 20), schedules(facts, "allreduce"), SLOW
    )
    assert short[1] < 8 * SLOW.alpha_us
    limit_us = 2 * 7 / 8 * (64 << 20) * SLOW.beta_us
    assert limit_us < long[1] < 1.3 * limit_us
    assert short[0] != long[0]


def test_between_lengths_it_follows_their_logarithm_and_beyond_it_stays() -> None:
    points = ((8, 1.0), (800, 4.0), (8000, 2.0))
    found = [interpolated(points, n) for n in (0, 8, 80, 800, 8000, 1 << 40)]
    assert found == pytest.approx([1.0, 1.0, 2.0, 4.0, 2.0, 2.0])
    assert interpolated(((0, 3.0), (4, 12.0)), 2) == pytest.approx(6.0)


def test_what_was_not_measured_is_taken_to_be_like_the_best_schedule() -> None:
    for between in (FAST, replace(FAST, native_us={"bcast": ((8, 1.0),)})):
        assert between.native_part("gather", 100, lambda *_: 50.0) == 1.0


@pytest.mark.parametrize("facts", NODES, ids=str)
@pytest.mark.parametrize("factors", [(1.0, 1.0), (7.0, 1.5), (3.0, 4.0)])
def test_costs_are_those_that_schedules_showed(
    facts: CommFacts, factors: tuple[float, float]
) -> None:
    true = MpiBetweenNodes(factors[0] * FAST.alpha_us, factors[1] * FAST.beta_us)
    runs = []
    for nbytes, name in ((8, "recursive_doubling"), (1 << 20, "halving_doubling")):
        query, one = asked("allreduce", nbytes), Candidate("mpi", name)
        runs.append((query, one, best_schedule(facts, query, [one], true)[1]))
    found = calibrated(facts, FAST, runs[0], runs[1])
    for query, one, took_us in runs:
        said_us = best_schedule(facts, query, [one], found)[1]
        assert said_us == pytest.approx(took_us, rel=0.02)
    if facts.ppn == 1:
        assert found.alpha_us == pytest.approx(true.alpha_us, rel=0.05)
        assert found.beta_us == pytest.approx(true.beta_us, rel=0.05)


def test_times_of_a_disturbed_machine_give_costs_above_zero() -> None:
    query, one = asked("allreduce", 1 << 20), Candidate("mpi", "halving_doubling")
    short = asked("allreduce", 8), Candidate("mpi", "recursive_doubling"), 1e5
    found = calibrated(NODES[0], FAST, short, (query, one, 0.0))
    assert found.alpha_us > FAST.alpha_us
    assert found.beta_us > 0


def test_other_ranks_take_in_proportion_to_their_best_schedule() -> None:
    world = CommFacts(12, 6, 2, 2, "network")
    query = asked("allreduce", 1 << 20)
    best_us = best_schedule(world, query, schedules(world, "allreduce"), FAST)[1]
    took = {"allreduce": ((1 << 20, 3 * best_us),)}
    found = replace(FAST, native_us=took, facts=world)
    for few in NODES:
        here_us = best_schedule(few, query, schedules(few, "allreduce"), FAST)[1]
        assert native_us(few, query, found) == pytest.approx(3 * here_us)


def test_the_librarys_times_by_operation_and_bytes() -> None:
    took = {
        "bcast 1048576 native": 300.0,
        "allreduce 8 recursive_doubling": 7.0,
        "bcast 8 native": 5.0,
        "allreduce 8 native": 4.0,
    }
    expected = {"bcast": ((8, 5.0), (1048576, 300.0)), "allreduce": ((8, 4.0),)}
    assert native_times(took) == expected
    assert native_times({}) == {}


def test_times_that_something_disturbed_count_for_nothing() -> None:
    assert steady_us([9.0, 5.0, 6.0]) == 5.0
    assert steady_us([900.0, 5.0, 800.0]) == math.inf
    assert steady_us([700.0, 5.0, 5.1]) == 5.0


def test_all_operations_are_measured_at_all_lengths() -> None:
    order = in_order(FAST.beta_us)
    assert len({*order}) == 3 * len(COLLS) == len(order)
    assert {n for _, n in order} == {*lengths(FAST.beta_us)}


@pytest.mark.parametrize("beta_us", [0.0, 1e-5, 1.6e-4, 1.6e-2, 1.0, 1e9])
def test_lengths_take_some_time_and_not_more(beta_us: float) -> None:
    """At any rate of the network, what some of the longest take is bounded."""
    short, longest, middle = lengths(beta_us)
    assert short == 8
    assert short < middle < longest <= 1 << 20
    assert longest == 8 << 10 or longest * beta_us <= 200.0
    assert longest == 1 << 20 or 2 * longest * beta_us > 200.0
