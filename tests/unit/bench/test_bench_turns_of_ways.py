# SPDX-License-Identifier: Apache-2.0
"""Ways that benchmarks time in turns: none is favoured by its place."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest

from commrt.bench.step_turns import rotated


@pytest.mark.parametrize("number", [2, 3, 4, 7])
def test_no_way_runs_twice_in_a_row(number: int) -> None:
    turns = [rotated(range(number), turn) for turn in range(3 * number)]
    assert all(sorted(each) == [*range(number)] for each in turns)
    order = [way for each in turns for way in each]
    assert all(one != other for one, other in pairwise(order))


@pytest.mark.parametrize("number", [3, 4, 7])
def test_each_way_has_each_place_equally_often(number: int) -> None:
    turns = [rotated(range(number), turn) for turn in range(2 * number)]
    for place in range(number):
        assert Counter(each[place] for each in turns) == dict.fromkeys(range(number), 2)
    order = [way for each in turns for way in each]
    for way in range(number):
        before = {one for one, other in pairwise(order) if other == way}
        assert len(before) == 2


def test_one_way_or_none_is_its_own_order() -> None:
    assert rotated([], 3) == []
    assert rotated(["only"], 3) == ["only"]
