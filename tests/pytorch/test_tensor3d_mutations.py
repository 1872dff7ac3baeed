# SPDX-License-Identifier: Apache-2.0
"""Comparisons with torch turn red where a layer on a grid has a typical mistake."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensor3d_cases import NEAR, batches_of, compare, filled
from torch import nn

from commrt.layers.tensor3d import activations, gradients, parallelize, products
from commrt.layers.tensor3d.depth import DepthShards, Gathered, Reduced
from commrt.layers.tensor3d.overlap import LateGradients
from commrt.layers.tensor3d.overlap_communication import overlap_communication

GRID = (2, 2, 2, 1), (1, 2, 1, 2)
Patch = Callable[[pytest.MonkeyPatch], None]


def found(on: bool) -> dict[str, float]:
    """Return how far a network is from one process, on two grids."""
    layers = [nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 12), nn.Linear(12, 4)]
    serial = filled(nn.Sequential(*layers), 4)
    largest: dict[str, float] = {}

    def build(model: nn.Module, places: Any) -> nn.Module:
        model = parallelize(model, places)
        if on:
            overlap_communication(model)
        return model

    for grid in GRID:
        batches = batches_of(grid, 4, 3, 4)
        for name, off in compare(serial, grid, build, batches, passes=2).items():
            largest[name] = max(largest.get(name, 0.0), off)
    return largest


CUT_WEIGHTS = {f"gradient of {at}.weight" for at in (0, 2, 3)}
CUT_BIASES = {f"gradient of {at}.bias" for at in (0, 2, 3)}
WHOLE = {"gradient of 1.weight", "gradient of 1.bias"}


def weights_are_summed_twice_over_depth(patch: pytest.MonkeyPatch) -> None:
    def twice(self: DepthShards, gradient: Any) -> Reduced:
        if self.comm is not None:
            self.comm.allreduce(gradient)
        return once(self, gradient)

    once = DepthShards.reduce
    patch.setattr(DepthShards, "reduce", twice)


def weights_are_summed_over_depth_again(patch: pytest.MonkeyPatch) -> None:
    def also_depth(each: Any, grid: Any) -> Any:
        return along(each._replace(cut=None), grid)

    along = gradients._summed_along
    patch.setattr(gradients, "_summed_along", also_depth)


def biases_are_not_summed_over_depth(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DepthShards, "add_up", lambda self, gradient: Reduced(gradient, None))


def input_gradients_are_summands(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(products.Product, "gradient_sums", None)


def whole_gradients_are_summed(patch: pytest.MonkeyPatch) -> None:
    """The gradient of a whole output is taken for a summand of it."""

    def summed(ctx: Any, gradient: Any) -> Any:
        _, _, along = ctx.args
        return taken(ctx, along.comm.allreduce(gradient.clone()))

    taken = activations._Whole.backward
    patch.setattr(activations._Whole, "backward", staticmethod(summed))


def gathered_weights_are_wrong(patch: pytest.MonkeyPatch) -> None:
    """Each block is another one than that of the shards."""

    def wrong(self: Gathered) -> Any:
        return wait(self) * 0.5

    wait = Gathered.wait
    patch.setattr(Gathered, "wait", wrong)


def late_gradients_replace_earlier_ones(patch: pytest.MonkeyPatch) -> None:
    def finish(self: LateGradients) -> None:
        waiting, self._waiting = self._waiting, []
        for parameter, wait in waiting:
            parameter.grad = wait()

    patch.setattr(LateGradients, "_finish", finish)


@pytest.mark.parametrize("on", [False, True])
def test_nothing_is_red_without_a_mistake(on: bool) -> None:
    assert max(found(on).values()) < NEAR


@pytest.mark.parametrize(
    ("mistake", "on", "red"),
    [
        (weights_are_summed_twice_over_depth, False, CUT_WEIGHTS),
        (weights_are_summed_twice_over_depth, True, CUT_WEIGHTS),
        (weights_are_summed_over_depth_again, False, CUT_WEIGHTS | CUT_BIASES),
        (biases_are_not_summed_over_depth, False, CUT_BIASES),
        (input_gradients_are_summands, True, {"gradient of input"}),
        (whole_gradients_are_summed, False, {"gradient of input", *CUT_WEIGHTS}),
        (gathered_weights_are_wrong, True, {"output", "gradient of input"}),
        (late_gradients_replace_earlier_ones, True, CUT_WEIGHTS),
    ],
)
def test_mistakes_turn_the_comparison_red(
    mistake: Patch, on: bool, red: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    mistake(monkeypatch)
    turned = {name for name, off in found(on).items() if off > 1e-3}
    assert red <= turned
    if mistake is weights_are_summed_twice_over_depth:
        assert turned == CUT_WEIGHTS
    if mistake is biases_are_not_summed_over_depth:
        assert turned == CUT_BIASES


def test_a_block_that_came_early_is_dropped_where_its_shard_has_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without the look at versions a layer computes with weights of before."""

    def build(model: Any, places: Any) -> nn.Module:
        model = parallelize(model, places)
        overlap_communication(model)
        shard, overlap = model[0].weight, model[0].overlap
        depth = model[0].product.depth
        right = shard.detach().clone()
        with torch.no_grad():
            shard.zero_()
            # As a forward pass that ended before this layer would leave it.
            overlap.early[depth] = depth.start(shard, shard.dtype)
            overlap.early[depth].wait()
            shard.copy_(right)
        return nn.Sequential(*model)  # without the hook, which drops such blocks

    serial = filled(nn.Sequential(nn.Linear(4, 4)), 4)
    grid = (1, 2, 1, 1)

    def off() -> float:
        return max(compare(serial, grid, build, batches_of(grid, 4, 3, 4)).values())

    assert off() < NEAR
    monkeypatch.setattr(Gathered, "is_of", lambda *args: True)
    assert off() > 1e-3
