# SPDX-License-Identifier: Apache-2.0
"""Comparisons with torch turn red where spatial convolution has a typical mistake."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from spatial_reference import NEAR, CutGrid, difference, drawn
from torch.nn import functional

from commrt.comm import Communicator
from commrt.layers.process_grid import ProcessGrid
from commrt.layers.spatial import (
    Cut,
    exchange,
    grid_convolution,
    output_split,
)
from commrt.layers.spatial.convolution import conv
from commrt.layers.spatial.pooling import avg_pool
from commrt.layers.spatial.transposed_convolution import conv_transpose
from commrt.layers.spatial.weight_gradients import GradientSum
from commrt.layers.spatial.windows import Sliding, Window, clipped
from commrt.local import run


def largest(overlap: bool, dims: int, times: int = 1) -> dict[str, float]:
    """Return how far a convolution is from torch's, after some calls of it."""

    def main(comm: Communicator) -> dict[str, float]:
        along = ProcessGrid(comm, {"row": 2, "column": 0})
        comms = {2: along["row"], 3: along["column"]} if dims > 1 else {2: comm}
        grid, rng = CutGrid(comm, comms), random.Random(5)
        found: dict[str, float] = {}
        for _ in range(times):
            x, weight = drawn(rng, (2, 3, 13, 9)), drawn(rng, (4, 3, 3, 3))
            bias = drawn(rng, (4,))
            sizes = {2: (6, 7), 3: (5, 4)}
            cuts = {dim: Cut(each, sizes[dim]) for dim, each in comms.items()}
            found = difference(
                *(grid, cuts, x, [weight, bias]),
                lambda x, w, b, cuts=cuts: conv(
                    *(x, w, b),
                    cuts=cuts,
                    padding=1,
                    overlap=overlap,
                    sum_weight_gradients_over=comm,
                ),
                lambda x, w, b: functional.conv2d(x, w, b, padding=1),
                rng,
                are_summed=True,
            ).of
        return found

    ranks = run(2**dims, main)
    return {name: max(rank[name] for rank in ranks) for name in ranks[0]}


EVERYTHING = {"result", "gradient of x", "gradient of weight 0"}
WEIGHTS = {"gradient of weight 0", "gradient of weight 1"}
Patch = Callable[[pytest.MonkeyPatch], None]


def one_halo_row_is_missing(patch: pytest.MonkeyPatch) -> None:
    def short(low: int, high: int, extent: int) -> Window:
        window = clipped(low, high, extent)
        parts = [
            part._replace(high=part.high - 1) if part.high < extent else part
            for part in window.parts
        ]
        return Window(window.length, tuple(parts))

    patch.setattr(output_split, "clipped", short)
    patch.setattr(grid_convolution, "clipped", short)
    patch.setattr(exchange, "clipped", short)


def low_and_high_are_swapped(patch: pytest.MonkeyPatch) -> None:
    def swapped(self: Sliding, low: int, high: int) -> tuple[int, int]:
        first, last = reads(self, low, high)
        # One more element before the window instead of behind it.
        return (first - 1, last - 1) if first > 0 else (first + 1, last + 1)

    reads = Sliding.reads
    patch.setattr(Sliding, "reads", swapped)


def weight_gradients_are_summed_twice(patch: pytest.MonkeyPatch) -> None:
    def twice(self: GradientSum) -> list[Any]:
        return GradientSum(wait(self), self.comm).wait_once()

    wait = GradientSum.wait
    made = GradientSum.__init__

    def init(self: Any, gradients: list[Any], comm: Communicator | None) -> None:
        made(self, gradients, comm)
        self.comm = comm

    patch.setattr(GradientSum, "__init__", init)
    patch.setattr(GradientSum, "wait_once", wait, raising=False)
    patch.setattr(GradientSum, "wait", twice)


def halos_are_stale(patch: pytest.MonkeyPatch) -> None:
    def stale(self: exchange.Strips) -> list[Any]:
        came = [each.clone() for each in wait(self)]
        key = tuple(each.shape for each in came)
        before = earlier.__dict__.get(str(key), came)
        earlier.__dict__[str(key)] = came
        return before

    wait = exchange.Strips.wait
    earlier = threading.local()  # each rank's
    patch.setattr(exchange.Strips, "wait", stale)


@pytest.mark.parametrize("dims", [1, 2])
@pytest.mark.parametrize("overlap", [True, False])
def test_nothing_is_red_without_a_mistake(overlap: bool, dims: int) -> None:
    assert max(largest(overlap, dims).values()) < NEAR


MISTAKES: list[tuple[Patch, set[str]]] = [
    (one_halo_row_is_missing, EVERYTHING),
    (low_and_high_are_swapped, {"result"}),
    (weight_gradients_are_summed_twice, WEIGHTS),
    (halos_are_stale, EVERYTHING),
]
CASES = [
    (*mistake, overlap, dims)
    for mistake in MISTAKES
    for overlap in (True, False)
    for dims in (1, 2)
    # The interior would begin outside of the piece, which torch refuses.
    if (mistake[0], overlap, dims) != (low_and_high_are_swapped, True, 2)
]


@pytest.mark.parametrize(("mistake", "red", "overlap", "dims"), CASES)
def test_mistakes_turn_the_comparison_red(
    mistake: Patch,
    red: set[str],
    overlap: bool,
    dims: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mistake(monkeypatch)
    found = {name for name, off in largest(overlap, dims, 2).items() if off > 1e-3}
    assert red <= found
    if mistake is weight_gradients_are_summed_twice:
        assert found == WEIGHTS


def averaged(x: Any, **cut: Any) -> Any:
    if cut:
        return avg_pool(x, 3, stride=1, padding=1, **cut)
    return functional.avg_pool2d(x, 3, stride=1, padding=1)


def spread(x: Any, **cut: Any) -> Any:
    weight = torch.arange(1.0, 28, dtype=x.dtype).view(3, 1, 3, 3)
    function = conv_transpose if cut else functional.conv_transpose2d
    return function(x, weight, padding=1, **cut)


@pytest.mark.parametrize("mistake", [None, one_halo_row_is_missing, halos_are_stale])
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("layer", [averaged, spread])
def test_mistakes_turn_poolings_and_transposed_convolutions_red(
    layer: Any, overlap: bool, mistake: Patch | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def main(comm: Communicator) -> dict[str, float]:
        grid, rng = CutGrid(comm, {2: comm}), random.Random(5)
        cuts = {2: Cut(comm, (6, 7))}
        found: dict[str, float] = {}
        for _ in range(2):
            found = difference(
                *(grid, cuts, drawn(rng, (2, 3, 13, 9)), []),
                lambda x: layer(x, cuts=cuts, overlap=overlap),
                layer,
                rng,
            ).of
        return found

    if mistake is not None:
        mistake(monkeypatch)
    ranks = run(2, main)
    red = {name for rank in ranks for name, off in rank.items() if off > NEAR}
    assert red == ({"result", "gradient of x"} if mistake else set())
