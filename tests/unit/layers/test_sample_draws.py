# SPDX-License-Identifier: Apache-2.0
"""Draws of an exchange: numbers fit between ranks, and all results are alike likely."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
from shuffle_cases import FRACTIONS, exchanged, ids_of

from commrt.layers.samples.draws import drawn_of, num_between, num_drawn, order_of


@pytest.mark.parametrize(
    ("fraction", "number", "drawn"),
    [
        *((0.0, 10, 0), (1.0, 10, 10), (1, 7, 7), (0.3, 10, 3), (0.3, 9, 2)),
        *((0.29, 100, 29), (0.1, 30, 3), (0.7, 10, 7), (0.5, 1, 0), (1.0, 0, 0)),
    ],
)
def test_a_fraction_counts_as_it_is_written(
    fraction: float, number: int, drawn: int
) -> None:
    assert num_drawn(fraction, number) == drawn


@pytest.mark.parametrize("fraction", FRACTIONS)
@pytest.mark.parametrize("number", [0, 1, 2, 3, 10, 99, 1000])
def test_no_more_than_the_fraction_is_drawn(number: int, fraction: float) -> None:
    assert number * fraction - 1 < num_drawn(fraction, number) <= number * fraction


@pytest.mark.parametrize("drawn", [(3, 0, 7, 1), (5,), (0, 0), (1, 1), (40, 2, 9)])
def test_numbers_between_ranks_fit(drawn: tuple[int, ...], seed: int) -> None:
    ranks = range(len(drawn))
    for epoch in range(20):
        both = [num_between(drawn, rank, seed, epoch) for rank in ranks]
        sends = np.array([sent for sent, _ in both])
        np.testing.assert_array_equal(sends.T, [received for _, received in both])
        assert sends.sum(0).tolist() == sends.sum(1).tolist() == [*drawn]


def test_a_global_shuffle_has_all_orders_alike() -> None:
    """All 4! orders of four samples on ranks with two, one and one."""
    ids, runs = ids_of((2, 1, 1)), 4800
    found = Counter(
        tuple(each for own in exchanged(ids, 1.0, seed, 1) for each in own)
        for seed in range(runs)
    )
    assert len(found) == math.factorial(4)
    expected = runs / len(found)
    # 23 degrees of freedom: beyond 49.7 once in a thousand; the seeds are fixed.
    assert sum((n - expected) ** 2 / expected for n in found.values()) < 49.7


@pytest.mark.parametrize("fraction", [0.5, 1.0])
def test_as_many_samples_leave_as_the_formula_says_on_average(fraction: float) -> None:
    counts, epochs = (10, 20, 30), 2000
    drawn = [num_drawn(fraction, number) for number in counts]
    for rank, number in enumerate(drawn):
        stay = [num_between(drawn, rank, 0, epoch)[0][rank] for epoch in range(epochs)]
        assert np.mean(stay) == pytest.approx(number**2 / sum(drawn), rel=0.05)


def test_epochs_ranks_and_seeds_have_draws_of_their_own() -> None:
    places = [(s, e, r) for s in (0, 1, 2**40) for e in (0, 1, 2) for r in (0, 1)]
    orders = {tuple(order_of(30, r, s, e).tolist()) for s, e, r in places}
    drawn = {tuple(drawn_of(30, 9, r, s, e).tolist()) for s, e, r in places}
    assert len(orders) == len(drawn) == len(places)
    for each in drawn:
        assert len({*each}) == 9
        assert {*each} <= {*range(30)}
