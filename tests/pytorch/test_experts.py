# SPDX-License-Identifier: Apache-2.0
"""Mixtures of experts on grids compute and learn what a plain loop does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from dist_tensor_cases import off_by
from expert_cases import (
    Form,
    Split,
    axes_of,
    batches_of,
    compare,
    layer_of,
    network_of,
    serial_of,
    splits_of,
)
from tensor3d_cases import NEAR, drawn_in
from torch.utils.checkpoint import checkpoint

from commrt.layers.experts import MoE, sync_gradients
from commrt.layers.process_grid import ProcessGrid
from commrt.layers.tensor3d.gradients import cut_parameters
from commrt.local import run

FORMS = {
    "top-1": Form(top_k=1, num_shared=0),
    "top-2 of 7, shared": Form(num_experts=7, num_shared=2, normalize=True),
    "gelu, top-3": Form(top_k=3, activation="gelu", num_shared=0, d_hidden=3),
    "capacity": Form(top_k=2, capacity_factor=0.8),
    "one expert": Form(num_experts=1, top_k=1, num_shared=0, activation="relu"),
    "modules": Form(num_experts=5, top_k=2, of_modules=True),
    "modules, capacity": Form(of_modules=True, capacity_factor=0.6, num_shared=0),
}


@pytest.mark.parametrize("split", [(1, 1, 1), *splits_of(2)])
@pytest.mark.parametrize("kind", FORMS)
def test_one_and_two_ranks_are_a_plain_loop(kind: str, split: Split) -> None:
    form = FORMS[kind]
    assert max(compare(form, split, batches_of(split, 4, form)).values()) < NEAR


@pytest.mark.full(sample=12)
@pytest.mark.parametrize("split", splits_of(4))
@pytest.mark.parametrize("kind", FORMS)
def test_four_ranks_are_a_plain_loop(kind: str, split: Split) -> None:
    form = FORMS[kind]
    assert max(compare(form, split, batches_of(split, 5, form)).values()) < NEAR


@pytest.mark.full(sample=4)
@pytest.mark.parametrize("split", splits_of(3, 8))
@pytest.mark.parametrize("kind", FORMS)
def test_three_and_eight_ranks_are_a_plain_loop(kind: str, split: Split) -> None:
    form = FORMS[kind]
    assert max(compare(form, split, batches_of(split, 3, form)).values()) < NEAR


@pytest.mark.parametrize("split", [(1, 4, 1), (1, 3, 2)])
def test_seven_experts_lie_unevenly(split: Split) -> None:
    form = Form(num_experts=7, top_k=2)

    def main(comm: Any) -> int:
        with ProcessGrid(comm, axes_of(split)) as grid:
            return len(layer_of(form, grid).experts.up)

    counts = {4: [1, 2, 2, 2], 6: [2, 2, 2, 2, 3, 3]}
    ranks = split[0] * split[1] * split[2]
    assert run(ranks, main) == counts[ranks]
    assert max(compare(form, split, batches_of(split, 6, form, 9)).values()) < NEAR


@pytest.mark.parametrize("capacity", [None, 0.5])
def test_all_tokens_go_to_one_expert(capacity: float | None) -> None:
    """Its rank gets all tokens, and the others none."""
    form = Form(num_experts=4, top_k=1, capacity_factor=capacity)
    serial = serial_of(form)
    with torch.no_grad():
        serial.first.weight.zero_()
        serial.first.bias.fill_(1.0)
        serial.moe.router.weight[2] += 3.0
    for split in ((1, 4, 1), (2, 2, 1)):
        batches = batches_of(split, 5, form)
        off = compare(form, split, batches, serial=serial)
        # The gradients of a layer of zeros are small; all others are as always.
        assert max(off.values()) < NEAR


@pytest.mark.parametrize("counts", [(0, 4), (3, 0), (0, 0), (1, 0), (0, 1)])
def test_ranks_without_tokens_serve_the_others(counts: tuple[int, int]) -> None:
    form = Form(num_experts=3, top_k=2, capacity_factor=1.0)
    batches = [drawn_in(n, count, form.d_model) for n, count in enumerate(counts)]
    for split in ((1, 2, 1), (2, 1, 1), (1, 2, 2)):
        assert max(compare(form, split, batches).values()) < NEAR


def test_axes_may_be_missing_and_in_any_order() -> None:
    form = Form(num_experts=3)
    for split, axes in (
        ((1, 2, 1), {"expert": 2}),
        ((1, 2, 2), {"tensor": 2, "expert": 2}),
        ((2, 2, 1), {"expert": 2, "data": 2}),
        ((2, 1, 1), {"data": 2}),
    ):
        batches = batches_of(split, 4, form)
        assert max(compare(form, split, batches, axes=axes).values()) < NEAR


@pytest.mark.parametrize("kind", [kind for kind in FORMS if "top-3" not in kind])
def test_one_rank_has_the_bits_of_the_plain_loop(kind: str) -> None:
    form = FORMS[kind]
    serial = serial_of(form)
    x, again = (drawn_in(3, 11, form.d_model).requires_grad_() for _ in range(2))
    y, _, z, dropped = serial(x)
    (y.square().sum() + z).backward()

    def main(comm: Any) -> None:
        with ProcessGrid(comm, {"expert": 1}) as grid:
            model = network_of(form, serial, grid)
            found = model(again)
            (found.output.square().sum() + found.z_loss).backward()
            assert torch.equal(found.output, y)
            assert torch.equal(found.z_loss, z)
            assert found.num_dropped == dropped
            right = dict(serial.named_parameters())
            for name, parameter in model.named_parameters():
                if right[name].grad is not None:
                    near = parameter.grad - right[name].grad
                    assert near.abs().max() <= NEAR * right[name].grad.abs().max()

    run(1, main)


def test_means_over_ranks_are_the_gradients_of_the_mean_loss() -> None:
    """Equal numbers of tokens: the mean of the ranks' mean losses is the serial one."""
    form = Form(num_experts=3, top_k=2)
    serial = serial_of(form)
    x = drawn_in(8, 8, form.d_model)
    y, balance, _, _ = serial(x)
    (y.square().mean() + 0.1 * balance).backward()
    right = dict(serial.named_parameters())

    def main(comm: Any) -> None:
        with ProcessGrid(comm, axes_of((2, 2, 1))) as grid:
            model = network_of(form, serial, grid)
            found = model(x[2 * comm.rank : 2 * comm.rank + 2])
            (found.output.square().mean() + 0.1 * found.balance_loss).backward()
            sync_gradients(model)
            for name, parameter, cut, _ in cut_parameters(model):
                gradient = parameter.grad if cut is None else cut.whole(parameter.grad)
                assert off_by(gradient, right[name].grad) < NEAR

    run(4, main)


def test_shapes_are_kept_and_losses_may_be_left_out() -> None:
    def main(comm: Any) -> None:
        with ProcessGrid(comm, {"expert": 2}) as grid:
            layer = MoE(4, 3, 5, grid=grid, losses=False)
            with torch.no_grad():
                found = layer(torch.ones(2, 3, 4))
            assert found.output.shape == (2, 3, 4)
            assert found[1:] == (None, None, None, 0)
            assert not found.output.requires_grad
            assert layer(torch.ones(4)).output.shape == (4,)

    run(2, main)


def test_frozen_parameters_wait_for_nobody() -> None:
    """One rank has no expert that is trained, and no gradient to send, and sends it."""
    form = Form(num_experts=1, top_k=1, num_shared=0)

    def main(comm: Any) -> float:
        with ProcessGrid(comm, {"expert": 2}) as grid:
            layer = layer_of(form, grid)
            layer.router.requires_grad_(False)
            x = drawn_in(comm.rank, 3, form.d_model)
            layer(x).output.sum().backward()
            sync_gradients(layer)
            assert layer.router.weight.grad is None
            grown = layer.experts.up.grad
            return 0.0 if grown is None or not len(grown) else float(grown.abs().sum())

    assert run(2, main)[1] > 0


def test_checkpoints_of_activations_change_nothing() -> None:
    form = Form(num_experts=3)

    def main(comm: Any) -> None:
        with ProcessGrid(comm, axes_of((1, 2, 2))) as grid:
            layer = layer_of(form, grid)
            x = drawn_in(grid.coords["expert"], 5, form.d_model)
            found = []
            for wrapped in (False, True):
                layer.zero_grad()
                given = x.clone().requires_grad_()
                if wrapped:
                    y = checkpoint(layer, given, use_reentrant=False).output
                else:
                    y = layer(given).output
                y.square().sum().backward()
                found.append([given.grad, *(p.grad for p in layer.parameters())])
            for one, other in zip(*found, strict=True):
                assert torch.equal(one, other)

    run(4, main)


def test_ranks_along_tensor_get_the_same_bits() -> None:
    """So that the next mixture sends their tokens to the same experts."""
    form = Form(num_experts=4)

    def main(comm: Any) -> tuple[int, Any]:
        with ProcessGrid(comm, axes_of((1, 2, 2))) as grid:
            model = network_of(form, serial_of(form), grid)
            x = drawn_in(grid.coords["expert"], 7, form.d_model).requires_grad_()
            found = model(x)
            (found.output.square().sum() + found.balance_loss).backward()
            sync_gradients(model)
            whole = [model.first.weight.grad, model.moe.router.weight.grad]
            return grid.coords["expert"], [found.output.detach(), x.grad, *whole]

    ranks = run(4, main)
    for expert in (0, 1):
        one, other = (tensors for at, tensors in ranks if at == expert)
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("num_experts", [1, 5])
def test_autocast_and_bfloat16_travel_in_the_type_of_the_input(
    num_experts: int,
) -> None:
    def main(comm: Any) -> None:
        with ProcessGrid(comm, {"expert": 2}) as grid:
            layer = MoE(8, num_experts, 6, grid=grid, num_shared=1)
            x = drawn_in(comm.rank, 5, 8).float()
            right = layer(x).output
            with torch.autocast("cpu", torch.bfloat16):
                cast = layer(x)
            cast.output.float().sum().backward()
            assert layer.router.weight.grad is not None
            low = layer.bfloat16()(x.bfloat16())
            assert low.output.dtype == torch.bfloat16
            assert low.balance_loss.dtype == torch.float32
            for found in (cast.output, low.output):
                # A token whose two likeliest experts are near goes to another one.
                near = (found.float() - right).abs().amax(1) < 0.05 * right.abs().max()
                assert near.sum() >= 3

    run(2, main)
