# SPDX-License-Identifier: Apache-2.0
"""Ranks that share a core pay for each end of a message."""

from __future__ import annotations

import pytest

from commrt import algorithms
from commrt.planning.prediction import schedule_us
from commrt.schedule.cost import cost
from commrt.select.facts import CommFacts, Query
from commrt.select.model import constants

ALPHA_US, BETA, GAMMA = 20.0, 1e-2, 1e-3


def short_us(name: str, crowd: float) -> float:
    """Return the time of an allgather of 4 ranks on 4 nodes."""
    schedule = algorithms.schedule("allgather", name, 4)
    return cost(schedule, 32, ALPHA_US, BETA, GAMMA, crowd=crowd)


@pytest.mark.parametrize(
    ("name", "ends"), [("direct", 6), ("recursive_doubling", 4), ("ring", 6)]
)
def test_each_end_costs_what_it_keeps_a_core_busy(name: str, ends: int) -> None:
    alone = short_us(name, 1.0)
    assert short_us(name, 2.0) == pytest.approx(alone + 10.0 * ends)
    assert short_us(name, 3.0) == pytest.approx(alone + 20.0 * ends)


def test_few_messages_win_where_cores_are_shared() -> None:
    assert short_us("direct", 1.0) < short_us("recursive_doubling", 1.0)
    assert short_us("direct", 2.0) > short_us("recursive_doubling", 2.0)


def test_containers_of_one_machine_share_its_cores() -> None:
    query, one = Query("allgather", 8), constants("network", "messages")
    times = {}
    for cores in (1, 0.5):
        facts = CommFacts(4, 4, 1, cores, "network")
        assert facts.crowd == 1 / cores
        times[cores] = schedule_us(facts, query, "direct", {}, one, False)
        least = schedule_us(facts, query, "direct", {}, one, True)
        assert least <= times[cores]
    assert times[0.5] > times[1]
