# SPDX-License-Identifier: Apache-2.0
"""The cost model of sparse allreduce against public logs, and its rules."""

from __future__ import annotations

from dataclasses import replace

import pytest

from commrt.sparse.cost import (
    ALGORITHMS,
    Prices,
    Question,
    choose,
    estimated_fill,
    predicted_us,
    rules,
)

LENGTH = 1 << 24
# IPCCC 2019, ms: ranks, flat dense ring, best dense, and P*d where each breaks even
# with the best dense one.
LOGS = [
    (8, 20.5, 8.07, {"recursive_doubling": 0.33, "split": 0.31, "ring": 0.29}),
    (16, 22.0, 11.0, {"recursive_doubling": 0.31, "split": 0.32, "ring": 0.39}),
    (64, 23.6, 13.4, {"recursive_doubling": 0.32, "split": 0.37, "ring": 0.44}),
]


def of_the_logs(ranks: int, flat_ms: float) -> Question:
    beta_us = 1e3 * flat_ms / (2 * (ranks - 1) / ranks * 4 * LENGTH)
    prices = Prices(1.0, beta_us, beta_us, 0.0, 0.0, 0.0, 1.0)
    return Question(ranks, 1, LENGTH, 4, 4, "auto", prices)


def break_even(question: Question, algorithm: str, dense_ms: float) -> float:
    """Return P*d from which on the algorithm takes longer."""
    low, high = 0.0, 1.0
    for _ in range(50):
        density = (low + high) / 2
        fill = 1 - (1 - density) ** question.size
        faster = predicted_us(question, algorithm, fill) < 1e3 * dense_ms
        low, high = (density, high) if faster else (low, density)
    return question.size * low


@pytest.mark.parametrize(("ranks", "flat_ms", "best_ms", "logged"), LOGS)
def test_break_even_points_of_the_logs(
    ranks: int, flat_ms: float, best_ms: float, logged: dict[str, float]
) -> None:
    question = of_the_logs(ranks, flat_ms)
    for algorithm, seen in logged.items():
        modelled = break_even(question, algorithm, best_ms)
        if algorithm == "ring":  # no shared links: bandwidth alone decides
            assert modelled == pytest.approx(seen, rel=0.05)
        else:
            assert modelled > seen
    assert break_even(question, "ring", flat_ms) >= 3.9


def test_estimated_fill_is_the_formula_and_takes_uneven_ranks() -> None:
    assert estimated_fill([10] * 8, 1000) == pytest.approx(1 - 0.99**8)
    assert estimated_fill([100, 0, 500], 1000) == pytest.approx(1 - 0.9 * 0.5)
    assert estimated_fill([0, 0], 1000) == 0.0
    assert estimated_fill([1000, 3], 1000) == 1.0
    assert estimated_fill([0], 0) == 0.0


@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 6, 64])
@pytest.mark.parametrize("form", ["auto", "sparse", "dense"])
def test_rules_cover_every_fill_with_what_is_cheapest(
    size: int, nodes: int, form: str
) -> None:
    prices = Prices(0.75, 8e-5, 1.5e-4, 2.2e-3, 3e-3, 1.4e-4, 1.0)
    question = Question(size, min(size, nodes), LENGTH, 4, 4, form, prices)
    found = rules(question)
    fills = [rule.fill for rule in found]
    assert fills == sorted(set(fills))
    assert fills[0] == 0.0
    for rule in found:
        if rule.fill:
            costs = {a: predicted_us(question, a, rule.fill) for a in ALGORITHMS}
            assert costs[rule.algorithm] == min(costs.values())
    for fill in (0.0, 1e-9, 0.01, 0.5, 1.0):
        chosen = choose(rules(question), fill)
        assert chosen != "two_level_ring" or nodes > 1
        assert chosen != "split_dense" or form != "sparse"


@pytest.mark.parametrize("size", [2, 4, 8])
def test_in_shared_memory_split_costs_less_than_by_messages(size: int) -> None:
    """And so it is chosen wherever ranges do not become dense."""
    prices = Prices(10.75, 8e-5, 8e-5, 2.2e-3, 3e-3, 1.4e-4, 1.0)
    sent = Question(size, 1, LENGTH, 4, 4, "auto", prices)
    shared = replace(sent, shared=True)
    for fill in (1e-4, 0.01, 0.1, 0.3):
        split = predicted_us(shared, "split", fill)
        assert split < predicted_us(sent, "split", fill)
        for other in ALGORITHMS:
            if other != "split":
                cost = predicted_us(shared, other, fill)
                assert cost == predicted_us(sent, other, fill) > split
        assert choose(rules(shared), fill) == "split"
