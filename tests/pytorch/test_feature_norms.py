# SPDX-License-Identifier: Apache-2.0
"""LayerNorm and RMSNorm over features that are cut, against one process."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from dist_tensor_cases import SHAPES, draw_placement, drawn, leaf, off_by
from recorded import logs_of
from tensor3d_cases import Grid, axes_of, batches_of, compare, filled, grids_of
from torch import nn
from torch.nn import functional

import commrt.trace
from commrt.errors import UsageError
from commrt.layers.process_grid import ProcessGrid
from commrt.layers.tensor3d import (
    FeatureNorm,
    Features,
    Linear3d,
    clip_grad_norm_,
    state_dict,
)
from commrt.layers.tensor3d.linear import Form
from commrt.layers.tensors import DistTensor, Placement
from commrt.local import run

NEAR = 1e-12


@pytest.mark.parametrize("name", ["layer_norm", "rms_norm"])
def test_norms_of_dist_tensors_take_all_features(name: str, seed: int) -> None:
    function = getattr(functional, name)

    def check(rng: random.Random, grid: ProcessGrid) -> None:
        shape = tuple(rng.randint(1, 7) for _ in range(rng.randint(1, 3)))
        shape = (*shape, rng.randint(3, 9))
        last = shape[-rng.randint(1, len(shape)) :]
        whole, weight, bias = drawn(rng, shape), drawn(rng, last), drawn(rng, last)
        x = leaf(whole, grid, draw_placement(rng, grid, shape))
        cut = draw_placement(rng, grid, last)
        mine = leaf(weight, grid, cut)
        one, right = whole.clone().requires_grad_(), weight.clone().requires_grad_()
        plain = bias.clone().requires_grad_()
        other = bias.clone().requires_grad_()
        both = name == "layer_norm" and rng.random() < 0.7
        expected = function(one, last, right, *[other] * both, eps=0.01)
        found = function(x, last, mine, *[plain] * both, eps=0.01)
        assert found.placement == x.placement
        assert off_by(found.whole(), expected) < NEAR
        factor = drawn(rng, shape)
        (expected * factor).sum().backward()
        lying = DistTensor.from_whole(factor, grid, found.placement)
        (found * lying).sum().redistribute().backward()
        assert x.grad is not None
        assert mine.grad is not None
        assert off_by(x.grad.whole(), one.grad) < NEAR, (x, last)
        assert off_by(mine.grad.whole(), right.grad) < NEAR, (x, last)
        if both:
            assert off_by(plain.grad, other.grad) < NEAR, (x, last)

    for axes in SHAPES:

        def main(comm: Any, axes: dict[str, int] = axes) -> None:
            with ProcessGrid(comm, axes) as grid:
                for case in range(10):
                    check(random.Random(f"{seed} {axes} {case}"), grid)

        run(math.prod(axes.values()), main)


def serial_model(norm: Any) -> Any:
    return nn.Sequential(nn.Linear(5, 9), norm, nn.GELU(), nn.Linear(9, 4))


def on_grid(model: Any, grid: ProcessGrid, transpose: bool) -> Any:
    """Return a pair of layers with a normalization of what lies cut between them."""
    cut = Features((9,), 3)
    first, norm, function, last = model
    ahead = Form(transpose=transpose, whole_output=False, outputs=cut)
    behind = Form(transpose=not transpose, whole_input=False, inputs=cut)
    axis = "y" if transpose else "x"
    return nn.Sequential(
        Linear3d.from_linear(first, grid, ahead),
        FeatureNorm(norm, grid, axis, cut),
        function,
        Linear3d.from_linear(last, grid, behind),
    )


NORMS = {
    "layer": lambda: nn.LayerNorm(9),
    "without bias": lambda: nn.LayerNorm(9, bias=False),
    "plain": lambda: nn.LayerNorm(9, elementwise_affine=False),
    "rms": lambda: nn.RMSNorm(9, eps=1e-6),
    "rms of torch": lambda: nn.RMSNorm(9),
}


@pytest.mark.full(sample=6)
@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("kind", NORMS)
@pytest.mark.parametrize("grid", grids_of(1, 2, 4, 6, 8))
def test_norms_between_cut_layers_are_those_of_one_process(
    grid: Grid, kind: str, transpose: bool, seed: int
) -> None:
    serial = filled(serial_model(NORMS[kind]()), seed)
    found = compare(
        serial,
        grid,
        lambda model, places: on_grid(model, places, transpose),
        batches_of(grid, seed, 2, 3, 5),
    )
    assert max(found.values()) < NEAR, found


def test_states_and_clipping_count_each_feature_once() -> None:
    serial = filled(serial_model(nn.LayerNorm(9)), 4)
    for parameter in serial.parameters():
        parameter.grad = torch.ones_like(parameter)
    expected = torch.nn.utils.clip_grad_norm_(serial.parameters(), 1.0)

    def main(comm: Any) -> None:
        with ProcessGrid(comm, {"data": 2, "y": 2, "x": 2}) as grid:
            model = on_grid(serial, grid, False)
            whole = state_dict(model)
            assert whole is not None
            for name, value in serial.state_dict().items():
                assert torch.equal(whole[name], value)
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            assert off_by(clip_grad_norm_(model, 1.0), expected) < NEAR

    run(8, main)


@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_norms_send_the_bytes_of_the_docstring(kind: str) -> None:
    def main(comm: Any) -> None:
        with ProcessGrid(comm, axes_of((1, 1, 2, 2))) as grid:
            norm = FeatureNorm(NORMS[kind]().double(), grid, "y")
            own = norm.weight.shape[0]
            x = torch.ones(7, own, dtype=torch.float64, requires_grad=True)
            comm.barrier()
            norm(x).sum().backward()
            comm.barrier()

    with commrt.trace.record() as recording:
        run(4, main)
    rows = 7 * 8
    expected = [rows, rows, 2 * rows] if kind == "layer" else [rows, rows]
    for log in logs_of(recording):
        calls = [(call.op, call.nbytes) for call in log.operations]
        first, last = (at for at, (op, _) in enumerate(calls) if op == "barrier")
        assert calls[first + 1 : last] == [("allreduce", n) for n in expected]


def test_norms_under_autocast_and_in_bfloat16() -> None:
    whole = torch.linspace(-3, 4, 48).view(4, 12).to(torch.bfloat16)
    norm = nn.LayerNorm(12, dtype=torch.bfloat16)
    expected = norm(whole)

    def main(comm: Any) -> None:
        with ProcessGrid(comm, {"x": 3}) as grid:
            mine = FeatureNorm(norm, grid)
            piece = whole[:, 4 * comm.rank : 4 * comm.rank + 4]
            found = mine(piece)
            assert found.dtype == torch.bfloat16
            right = expected[:, 4 * comm.rank : 4 * comm.rank + 4]
            torch.testing.assert_close(found, right, rtol=0.02, atol=0.02)

    run(3, main)


def test_norms_that_do_not_fit_are_refused_before_anything_is_sent() -> None:
    def main(comm: Any) -> None:
        with ProcessGrid(comm, {"x": 2}) as grid:
            with pytest.raises(UsageError, match="must be torch's LayerNorm or RMS"):
                FeatureNorm(nn.GroupNorm(2, 4), grid)
            with pytest.raises(UsageError, match="expected one dimension of feat"):
                FeatureNorm(nn.LayerNorm((2, 4)), grid)
            with pytest.raises(UsageError, match="and 'x' or 'y'"):
                FeatureNorm(nn.LayerNorm(4), grid, "z")
            with pytest.raises(UsageError, match="has 3 features; the layer has 4"):
                FeatureNorm(nn.LayerNorm(4), grid, "x", Features((3,)))
            norm = FeatureNorm(nn.LayerNorm(4), grid)
            with pytest.raises(UsageError, match="must have 2 features"):
                norm(torch.ones(3, 4))
            x = DistTensor.from_whole(torch.ones(3, 4), grid, Placement(None, "x"))
            with pytest.raises(UsageError, match="must be the last dimensions"):
                functional.layer_norm(x, (3,))
            with pytest.raises(UsageError, match=r"weight of shape \(1,\)"):
                functional.rms_norm(x, (4,), torch.ones(1))
            again = x.redistribute(None, None, partial="x")
            with pytest.raises(UsageError, match=r"redistribute\(\) it first"):
                functional.layer_norm(again, (4,))

    run(2, main)
