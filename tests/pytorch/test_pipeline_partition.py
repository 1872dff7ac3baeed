# SPDX-License-Identifier: Apache-2.0
"""Partitions are the best of all cuts, and Shisha's come near in few trials."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

import pytest

from commrt.errors import UsageError
from commrt.layers.pipeline import Placement, Shisha, partition, stage_seconds


def cuts(num_layers: int, stages: int) -> Iterator[tuple[range, ...]]:
    for inner in itertools.combinations(range(1, num_layers), stages - 1):
        ends = [*inner, num_layers]
        yield tuple(map(range, [0, *inner], ends))


def every(num_layers: int, num_places: int, stages: int, order: str) -> Any:
    chosen = itertools.permutations if order == "any" else itertools.combinations
    for places in chosen(range(num_places), stages):
        for ranges in cuts(num_layers, stages):
            yield Placement(ranges, tuple(places))


def fits(each: Placement, nbytes: Any, limits: Any) -> bool:
    return limits is None or all(
        sum(nbytes[layer] for layer in layers) <= limits[place]
        for layers, place in zip(*each, strict=True)
    )


@pytest.mark.full(sample=60)
@pytest.mark.parametrize("seed", range(60))
@pytest.mark.parametrize("order", ["any", "given"])
@pytest.mark.parametrize("has_transfers", [False, True])
@pytest.mark.parametrize("has_limits", [False, True])
def test_a_partition_is_the_best_of_all(
    seed: int, order: str, has_transfers: bool, has_limits: bool
) -> None:
    draws = random.Random(seed)
    num_layers, num_places = draws.randint(1, 7), draws.randint(1, 4)
    stages = draws.randint(1, min(num_layers, num_places))
    costs = [draws.choice([0.0, 1.0, draws.random() * 9]) for _ in range(num_layers)]
    speeds = [draws.choice([1.0, 2.0, 0.5 + draws.random()]) for _ in range(num_places)]
    more: dict[str, Any] = {}
    if has_transfers:
        more["transfers"] = [draws.random() for _ in range(num_layers - 1)]
    nbytes = limits = None
    if has_limits:
        nbytes = [draws.randint(0, 9) for _ in range(num_layers)]
        limits = [draws.randint(4, 25) for _ in range(num_places)]
        more.update(nbytes=nbytes, limits=limits)

    def slowest(each: Placement) -> float:
        return max(stage_seconds(each, costs, speeds, more.get("transfers")))

    good = [
        each
        for each in every(num_layers, num_places, stages, order)
        if fits(each, nbytes, limits)
    ]
    if not good:
        with pytest.raises(UsageError, match="no cut into"):
            partition(costs, speeds, stages, order=order, **more)
        return
    found = partition(costs, speeds, stages, order=order, **more)
    assert found in good
    assert slowest(found) == pytest.approx(min(map(slowest, good)), abs=1e-12)


def test_stage_seconds_by_hand() -> None:
    cut = Placement((range(2), range(2, 3), range(3, 5)), (1, 0, 2))
    found = stage_seconds(cut, [1, 2, 3, 4, 5], [1, 2, 4], [9, 0.5, 0.25, 9])
    assert found == (3 / 2 + 0.5, 3 / 1 + 0.5 + 0.25, 9 / 4 + 0.25)


@pytest.mark.parametrize("place", [-1, 2, 1.0])
def test_places_without_a_speed_are_refused(place: Any) -> None:
    cut = Placement((range(2), range(2, 3)), (0, place))
    with pytest.raises(UsageError, match="stage 1 of the placement has place"):
        stage_seconds(cut, [1, 2, 3], [1, 2])


def test_many_places_of_two_kinds_are_cut_quickly() -> None:
    costs = [1.0 + (layer % 5) for layer in range(60)]
    speeds = [1.0, 2.0] * 8
    found = partition(costs, speeds)
    assert sorted(found.places) == [*range(16)]
    assert [layer for each in found.ranges for layer in each] == [*range(60)]
    assert max(stage_seconds(found, costs, speeds)) < 1.25 * sum(costs) / sum(speeds)


def test_too_many_kinds_in_any_order_are_refused() -> None:
    costs, speeds = [1.0] * 40, [1.0 + place / 100 for place in range(30)]
    with pytest.raises(UsageError, match="pass order='given'"):
        partition(costs, speeds)
    assert len(partition(costs, speeds, order="given").ranges) == 30


def test_small_costs_behind_large_ones_count() -> None:
    found = partition(
        *([1e17, 3.0, 1.0, 1.0, 1.0], [1e17, 1.0, 1.0]),
        nbytes=[9, 1, 1, 1, 1],
        limits=[9, 9, 9],
    )
    assert found.ranges == (range(1), range(1, 2), range(2, 5))


WRONG: dict[str, tuple[tuple[Any, ...], dict[str, Any], str]] = {
    "stages": (([1, 1], [1, 1, 1], 3), {}, "3 stages are more than 2 layers"),
    "places": (([1, 1, 1], [1, 1], 3), {}, "3 stages are more than 2 places"),
    "default": (([1], [1, 1]), {}, "2 stages are more than 1 layers"),
    "none": (([1], [1], 0), {}, "stages=0 must be an integer from 1"),
    "half": (([1], [1], 0.5), {}, "stages=0.5 must be an integer from 1"),
    "no costs": (([], [1]), {}, "costs=[] must be a list"),
    "negative": (([1, -1], [1]), {}, "costs[1]=-1 must be a finite number from 0"),
    "nan": (([float("nan")], [1]), {}, "costs[0]=nan must be a finite number"),
    "text": ((["1"], [1]), {}, "costs[0]='1' must be a finite number"),
    "standing": (([1], [0]), {}, "speeds[0]=0 must be a finite number above 0"),
    "order": (([1], [1]), {"order": "best"}, "order='best' must be"),
    "transfers": (([1, 1], [1]), {"transfers": [1, 1]}, "expected 1, one for each"),
    "no limits": (([1], [1]), {"nbytes": [1]}, "pass both, or none"),
    "limits": (([1], [1]), {"nbytes": [1], "limits": [1, 2]}, "one for each place"),
    "nbytes": (([1, 2], [1]), {"nbytes": [1], "limits": [1]}, "one for each layer"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments_of_a_partition_are_refused(case: str) -> None:
    given, more, text = WRONG[case]
    with pytest.raises(UsageError) as raised:
        partition(*given, **more)
    assert text in str(raised.value)


def test_seconds_of_another_models_placement_are_refused() -> None:
    cut = partition([1, 2], [1])
    with pytest.raises(UsageError, match="has 2 layers, and costs has 3"):
        stage_seconds(cut, [1, 2, 3], [1])


# -- Shisha ----------------------------------------------------------------------------


def platform(seed: int) -> tuple[list[float], list[float]]:
    draws = random.Random(seed)
    costs = [draws.lognormvariate(0, 0.75) for _ in range(12)]
    return costs, [draws.uniform(1, 4) for _ in range(4)]


def settle(search: Shisha, costs: Any, speeds: Any) -> float:
    """Return the time of the slowest stage that a search settles for."""
    while not search.is_settled:
        search.observe(stage_seconds(search.propose(), costs, speeds))
    return max(stage_seconds(search.propose(), costs, speeds))


def test_shisha_comes_near_the_best_cut_in_few_trials() -> None:
    """At least 0.95 of it on average, in a tenth of an exhaustive search's trials."""
    fractions, trials = [], []
    for seed in range(60):
        costs, speeds = platform(seed)
        best = max(stage_seconds(partition(costs, speeds), costs, speeds))
        search = Shisha(costs, speeds)
        fractions.append(best / settle(search, costs, speeds))
        trials.append(search.num_trials)
    exhaustive = sum(1 for _ in every(12, 4, 4, "any"))
    assert sum(fractions) / len(fractions) >= 0.95
    assert max(fractions) <= 1 + 1e-12
    assert max(trials) <= exhaustive / 10


def test_only_the_order_of_speeds_counts() -> None:
    for seed in range(10):
        costs, speeds = platform(seed)
        ranks = [1 + sorted(speeds).index(each) for each in speeds]
        one, other = Shisha(costs, speeds), Shisha(costs, ranks)
        assert settle(one, costs, speeds) == settle(other, costs, speeds)
        assert one.num_trials == other.num_trials


def test_the_first_cut_by_hand() -> None:
    # 1 and 2 merge to 3, then 3 with 4; the heaviest of 8, 7, 5 gets the fastest place.
    search = Shisha([8, 4, 1, 2, 5], [3, 1, 2])
    assert search.propose() == Placement(
        (range(1), range(1, 4), range(4, 5)), (0, 2, 1)
    )


def test_a_layer_moves_from_the_slowest_stage_to_the_lightest() -> None:
    search = Shisha([1] * 9, [1, 1, 1])
    first = search.propose()
    search.observe([9, 5, 2])
    ends = [layers.stop for layers in search.propose().ranges]
    assert ends == [first.ranges[0].stop - 1, first.ranges[1].stop - 1, 9]


def test_patience_bounds_fruitless_trials() -> None:
    for patience in (1, 3):
        search = Shisha([1] * 30, [1] * 3, patience)
        while not search.is_settled:
            search.observe([1.0, 2.0, 1.0])
        assert search.num_trials == 1 + patience
    best = Shisha([1] * 30, [1] * 3, 1).propose()
    assert search.propose() == best


def test_it_adapts_when_a_place_slows_down() -> None:
    gained = 0
    for seed in range(20):
        costs, speeds = platform(seed)
        search = Shisha(costs, speeds)
        settle(search, costs, speeds)
        slowed = [
            speed / (3 if place == 0 else 1) for place, speed in enumerate(speeds)
        ]
        before = max(stage_seconds(search.propose(), costs, slowed))
        search.observe(stage_seconds(search.propose(), costs, slowed))
        after = settle(search, costs, slowed)
        assert after <= before
        gained += after < 0.8 * before
    assert gained >= 10


def test_a_settled_search_stays_while_times_are_alike() -> None:
    costs, speeds = platform(1)
    search = Shisha(costs, speeds)
    best = settle(search, costs, speeds)
    kept, trials = search.propose(), search.num_trials
    search.observe([best * 1.05] * 4)
    assert search.is_settled
    assert (search.propose(), search.num_trials) == (kept, trials)
    assert search.best_seconds == best


def test_one_stage_settles_at_once() -> None:
    search = Shisha([1, 2], [5])
    search.observe([3.0])
    assert search.is_settled
    assert search.propose() == Placement((range(2),), (0,))


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (([1], [1, 1]), "2 stages are more than 1 layers"),
        (([1, 1], [1], 0), "patience=0 must be an integer from 1"),
        (([1, -1], [1]), "layer_costs"),
        (([1, 1], [-1]), "speeds"),
    ],
)
def test_wrong_arguments_of_a_search_are_refused(given: Any, text: str) -> None:
    with pytest.raises(UsageError) as raised:
        Shisha(*given)
    assert text in str(raised.value)


@pytest.mark.parametrize("seconds", [[1.0], [1.0, float("nan")], [1.0, -1.0], 3.0])
def test_wrong_times_are_refused(seconds: Any) -> None:
    search = Shisha([1, 1, 1], [1, 1])
    with pytest.raises(UsageError, match="stage_seconds"):
        search.observe(seconds)
    assert search.num_trials == 0
