# SPDX-License-Identifier: Apache-2.0
"""Comparisons turn red where channel and filter parallelism has a typical mistake."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from channel_cases import Case, compare

from commrt.layers.process_grid import ProcessGrid
from commrt.layers.spatial import exchange
from commrt.layers.tensors import Placement, channels, convolution, moves
from commrt.local import run


def largest(stationary: str, times: int = 2) -> dict[str, float]:
    """Return how far a convolution on two axes is from torch's, after some calls."""
    case = Case(
        *(False, (2, 4, 9, 5), 6, (3, 3)),
        {"stride": 1, "padding": 1, "dilation": 1, "groups": 1},
        *(True, False, Placement(None, "a", "b", None), ("a",), stationary),
    )

    def main(comm: Any) -> dict[str, float]:
        with ProcessGrid(comm, {"a": 2, "b": 2}) as grid:
            rng = random.Random(5)
            found = [compare(rng, grid, case) for _ in range(times)]
            return found[-1]

    ranks = run(4, main)
    return {name: max(rank[name] for rank in ranks) for name in ranks[0]}


RESULT, OF_X = "result", "gradient of x"
OF_WEIGHT, OF_BIAS = "gradient of weight", "gradient of bias"
Patch = Callable[[pytest.MonkeyPatch], None]


def weight_gradients_are_summed_twice(patch: pytest.MonkeyPatch) -> None:
    tile_of = channels.tile_of

    def twice(weight: Any, grid: Any, dims: Any, shared: Any) -> Any:
        tile = tile_of(weight, grid, dims, shared)
        return moves.summed_backward(tile, grid, ["b"]) if tile.dim() > 1 else tile

    patch.setattr(convolution, "tile_of", twice)


def weight_tiles_have_gradients_of_their_own_only(patch: pytest.MonkeyPatch) -> None:
    def alone(whole: Any, grid: Any, dims: Any, shared: Any) -> Any:
        part = whole
        for number, cut in enumerate(dims):
            if cut is not None:
                low, high, _ = Placement(cut).runs(0, grid, whole.shape[number])[0]
                part = part.narrow(number, low, high - low)
        return part

    patch.setattr(convolution, "tile_of", alone)


def gradients_of_inputs_are_not_summed(patch: pytest.MonkeyPatch) -> None:
    def kept(
        local: Any, grid: Any, shape: Any, source: Any, target: Any, axes: Any
    ) -> Any:
        return moves.moved(local, grid, shape, source, target)

    patch.setattr(channels, "moved_for_parts", kept)


def bias_is_added_by_each_part(patch: pytest.MonkeyPatch) -> None:
    biased = channels.biased

    def added_twice(y: Any, bias: Any, form: Any, shared: Any, dim: int = 1) -> Any:
        once = biased(y, bias, form, shared, dim)
        return biased(once, bias, form, shared, dim)

    patch.setattr(convolution, "biased", added_twice)


def channel_halos_are_stale(patch: pytest.MonkeyPatch) -> None:
    wait = exchange.Strips.wait

    def stale(self: exchange.Strips) -> list[Any]:
        return [torch.zeros_like(each) for each in wait(self)]

    patch.setattr(exchange.Strips, "wait", stale)


@pytest.mark.parametrize("stationary", ["x", "y"])
def test_no_comparison_of_channels_is_red_without_a_mistake(stationary: str) -> None:
    assert max(largest(stationary).values()) < 1e-12


@pytest.mark.parametrize(
    ("mistake", "stationary", "red"),
    [
        (weight_gradients_are_summed_twice, "x", {OF_WEIGHT}),
        (weight_gradients_are_summed_twice, "y", {OF_WEIGHT}),
        (weight_tiles_have_gradients_of_their_own_only, "x", {OF_WEIGHT}),
        (weight_tiles_have_gradients_of_their_own_only, "y", {OF_WEIGHT, OF_BIAS}),
        (gradients_of_inputs_are_not_summed, "y", {OF_X}),
        (bias_is_added_by_each_part, "x", {RESULT, OF_BIAS}),
        (channel_halos_are_stale, "x", {RESULT, OF_X, OF_WEIGHT}),
        (channel_halos_are_stale, "y", {RESULT, OF_X, OF_WEIGHT}),
    ],
)
def test_mistakes_with_channels_turn_the_comparison_red(
    mistake: Patch, stationary: str, red: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    mistake(monkeypatch)
    found = {name for name, off in largest(stationary).items() if off > 1e-3}
    assert found == red
