# SPDX-License-Identifier: Apache-2.0
"""The time that a choice is expected to take: measured, or modelled."""

from __future__ import annotations

import math

import pytest

from commrt.select.expected import expected_us
from commrt.select.facts import Candidate, Query
from commrt.select.match import Hit
from commrt.select.rules import Evidence, Match, Point, Rule

RING, OTHER = Candidate("shm", "ring"), Candidate("shm", "direct")


def model(query: Query, candidate: Candidate) -> float:
    return 2.0 + query.nbytes / 100


def hit(*points: tuple[int, float]) -> Hit:
    seen = tuple(Point(n, us, (us, us), 30, 3) for n, us in points)
    evidence = Evidence("win", seen)
    return Hit(0, Rule("allreduce", Match(0, None), RING, evidence), None)


def asked(nbytes: int) -> Query:
    return Query("allreduce", nbytes, "float32", op="sum")


def test_without_a_table_the_model_says_it() -> None:
    assert expected_us(asked(800), RING, None, model) == 10.0


def test_where_a_rule_was_measured_its_time_holds() -> None:
    found = hit((100, 7.0), (10_000, 50.0))
    assert expected_us(asked(100), RING, found, model) == 7.0
    assert expected_us(asked(10_000), RING, found, model) == 50.0


def test_between_sizes_the_model_changes_the_nearest_time() -> None:
    found = hit((100, 6.0), (10_000, 50.0))
    assert expected_us(asked(400), RING, found, model) == pytest.approx(6.0 * 6 / 3)
    assert expected_us(asked(0), RING, found, model) == pytest.approx(6.0 * 2 / 3)


def test_times_of_another_candidate_say_nothing() -> None:
    assert expected_us(asked(100), OTHER, hit((100, 7.0)), model) == 3.0
    assert expected_us(asked(100), RING, hit(), model) == 3.0


def test_what_the_model_does_not_know_takes_the_nearest_time() -> None:
    def unknown(query: Query, candidate: Candidate) -> float:
        return math.inf

    assert expected_us(asked(400), RING, hit((100, 6.0)), unknown) == 6.0
    assert expected_us(asked(400), RING, None, unknown) == math.inf


def test_times_of_other_ranks_say_nothing() -> None:
    there = hit((100, 7.0))
    other = Hit(0, there.rule, "measured on 4 ranks")
    assert expected_us(asked(100), RING, there, model) == 7.0
    assert expected_us(asked(100), RING, other, model) == 3.0
