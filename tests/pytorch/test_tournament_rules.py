# SPDX-License-Identifier: Apache-2.0
"""Rules name the sources that a reader finds by hand, from scores in a table."""

from __future__ import annotations

import math

import pytest

from commrt.layers.tournament import (
    Consensus,
    Draws,
    Evolution,
    Judgement,
    Pairwise,
    Selection,
    Standing,
    Truncation,
)

NAN = math.nan
INF = math.inf


def sources_of(
    rule: Selection,
    *judgements: tuple[float | None, float | None],
    mode: str = "min",
    number: int = 0,
) -> tuple[int, ...]:
    standing = Standing(tuple(Judgement(*each) for each in judgements), mode)
    return rule.sources(Draws(0, number), standing)


def alone(*scores: float) -> list[tuple[float, None]]:
    return [(score, None) for score in scores]


@pytest.mark.parametrize(
    ("first", "second", "least", "most"),
    [
        ((1.0, 4.0), (2.0, 9.0), (0, 1), (1, 0)),
        ((4.0, 1.0), (9.0, 2.0), (1, 0), (0, 1)),
        ((4.0, 1.0), (2.0, 9.0), (1, 1), (0, 0)),
        ((1.0, 1.0), (1.0, 1.0), (0, 1), (0, 1)),
        ((1.0, NAN), (NAN, 1.0), (0, 0), (0, 0)),
        ((NAN, NAN), (NAN, NAN), (0, 1), (0, 1)),
        ((NAN, INF), (-INF, NAN), (1, 1), (1, 1)),
    ],
)
def test_pairwise_by_hand(
    first: tuple[float, float],
    second: tuple[float, float],
    least: tuple[int, ...],
    most: tuple[int, ...],
) -> None:
    assert sources_of(Pairwise(), first, second) == least
    assert sources_of(Pairwise(), first, second, mode="max") == most


@pytest.mark.parametrize(
    ("first", "second", "least", "most"),
    [
        # Model 0 has the scores 1 and 9, model 1 has 2 and 4.
        ((1.0, 4.0), (2.0, 9.0), 1, 0),
        ((9.0, 2.0), (4.0, 1.0), 1, 0),
        ((2.0, 9.0), (1.0, 4.0), 0, 1),
        ((1.0, 3.0), (2.0, 4.0), 0, 0),
        ((1.0, 3.0), (2.0, NAN), 1, 1),
        ((1.0, NAN), (2.0, 3.0), 0, 0),
        ((NAN, 1.0), (NAN, 1.0), 0, 0),
        ((INF, 1.0), (1.0, -INF), 1, 1),
    ],
)
def test_consensus_by_hand(
    first: tuple[float, float], second: tuple[float, float], least: int, most: int
) -> None:
    assert sources_of(Consensus(), first, second) == (least,) * 2
    assert sources_of(Consensus(), first, second, mode="max") == (most,) * 2


def test_pairs_judge_each_other() -> None:
    for rule in (Pairwise(), Consensus()):
        for num_trainers in range(1, 9):
            draws = Draws(1, num_trainers)
            partners = rule.partners(draws, num_trainers)
            assert partners.count(None) == num_trainers % 2
            for trainer, partner in enumerate(partners):
                assert partner is None or partners[partner] == trainer != partner


@pytest.mark.parametrize(
    ("rule", "scores", "least", "most"),
    [
        (Truncation(0), (1.0, 2.0, 3.0, 4.0), (0, 1, 2, 3), (0, 1, 2, 3)),
        (Truncation(1), (3.0, 1.0, 4.0, 2.0), (0, 1, 1, 3), (0, 2, 2, 3)),
        (Truncation(2), (3.0, 1.0, 4.0, 2.0), (3, 1, 1, 3), (0, 2, 2, 0)),
        (Truncation(2), (1.0, 1.0, 1.0, 0.0), (0, 1, 3, 3), (0, 1, 2, 0)),
        (Truncation(1), (NAN, 1.0, 2.0, 3.0), (1, 1, 2, 3), (3, 1, 2, 3)),
        (Truncation(2), (NAN, NAN, NAN, 3.0), (0, 1, 3, 3), (0, 1, 3, 3)),
        (Truncation(), (1.0, 2.0, 3.0), (0, 1, 0), (2, 1, 2)),
        (Truncation(), (1.0,), (0,), (0,)),
        (
            Truncation(),
            (1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0),
            *((0, 1, 2, 3, 4, 5, 1, 0), (7, 6, 2, 3, 4, 5, 6, 7)),
        ),
    ],
)
def test_truncation_by_hand(
    rule: Truncation,
    scores: tuple[float, ...],
    least: tuple[int, ...],
    most: tuple[int, ...],
) -> None:
    assert sources_of(rule, *alone(*scores)) == least
    assert sources_of(rule, *alone(*scores), mode="max") == most


@pytest.mark.parametrize("number", range(8))
def test_evolution_by_hand(number: int) -> None:
    sample = Draws(0, number).shuffled(4)
    oldest = number % 4
    scores = alone(4.0, 3.0, 2.0, 1.0)
    for size, members in ((None, sample[:2]), (1, sample[:1]), (3, sample[:3])):
        for mode, best in (("min", max(members)), ("max", min(members))):
            right = [0, 1, 2, 3]
            right[oldest] = best
            found = sources_of(Evolution(size), *scores, mode=mode, number=number)
            assert found == tuple(right)
    sick = sources_of(Evolution(4), *alone(NAN, NAN, 5.0, NAN), number=number)
    assert sick == tuple(2 if each == oldest else each for each in range(4))
    nobody = sources_of(Evolution(4), *alone(NAN, NAN, NAN, NAN), number=number)
    assert nobody == (0, 1, 2, 3)


def test_all_judge_their_own_models_where_scores_are_ranked() -> None:
    for rule in (Truncation(), Evolution()):
        assert rule.partners(Draws(0, 0), 3) == (0, 1, 2)
