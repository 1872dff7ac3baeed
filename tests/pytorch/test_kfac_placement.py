# SPDX-License-Identifier: Apache-2.0
"""Factors go to ranks by cost, alike on all ranks."""

from __future__ import annotations

import random

import pytest

from commrt.errors import UsageError
from commrt.layers.kfac import Sides, place


def sides_of(number: int, seed: int = 0) -> list[Sides]:
    draws = random.Random(seed)
    return [Sides(draws.randint(1, 90), draws.randint(1, 90)) for _ in range(number)]


@pytest.mark.full(sample=10)
@pytest.mark.parametrize("layers", [0, 1, 2, 7, 30])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6, 8])
def test_factors_are_placed_within_the_bound_of_longest_first(
    ranks: int, layers: int
) -> None:
    """No rank has more than the mean and one task besides."""
    sides = sides_of(layers, ranks)
    for workers in [n for n in range(1, ranks + 1) if ranks % n == 0]:
        placement = place(sides, ranks, workers)
        assert placement == place(list(sides), ranks, workers)
        work = [placement.work_of(rank) for rank in range(ranks)]
        assert sum(work) == sum(side**3 for each in sides for side in each)
        both = max((a**3 + g**3 for a, g in sides), default=0)
        single = max((side**3 for each in sides for side in each), default=0)
        assert max(work) <= sum(work) / ranks + both / workers + single
        kept = [placement.layers_of(rank) for rank in range(ranks)]
        for layer, owners in enumerate(placement.owners):
            groups = {owner // workers for owner in owners}
            assert groups == {placement.group_of(layer)}
            assert sum(layer in each for each in kept) == workers
        for rank in range(ranks):
            assert placement.inverse_elements(rank) == sum(
                a * a + g * g for a, g in (sides[at] for at in kept[rank])
            )


def test_two_factors_of_one_layer_go_to_two_ranks() -> None:
    placement = place([Sides(50, 50)], 2)
    assert {*placement.owners[0]} == {0, 1}
    assert placement.work_of(0) == placement.work_of(1) == 50**3


def test_longest_tasks_are_placed_first() -> None:
    """In their own order the last one would come on top of others."""
    placement = place([Sides(1, 2), Sides(3, 3), Sides(6, 1)], 2)
    assert sorted(map(placement.work_of, range(2))) == [1 + 1 + 8 + 27 + 27, 216]


def test_one_rank_of_a_group_inverts_both_factors() -> None:
    for owners in place(sides_of(9), 4, 1).owners:
        assert owners.inputs == owners.outputs


@pytest.mark.parametrize("wrong", [0, 3, 5, -1, 2.0, True, "2"])
def test_workers_that_do_not_divide_the_ranks_are_refused(wrong: object) -> None:
    with pytest.raises(UsageError, match=r"divide .* 4; expected one of 1, 2, 4"):
        place(sides_of(2), 4, wrong)  # type: ignore[arg-type]


def test_a_report_names_the_work_of_each_rank() -> None:
    lines = place([Sides(50, 50)], 2).report().splitlines()
    assert [line.split() for line in lines[1:]] == [
        ["0", "1", "50.0%", "1"],
        ["1", "1", "50.0%", "1"],
    ]
