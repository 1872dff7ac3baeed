# SPDX-License-Identifier: Apache-2.0
"""Out-of-core training refuses what it cannot do, and then releases everything."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from out_of_core_cases import (
    ENOUGH,
    MODES,
    Shared,
    blocks_of,
    close_opened,
    made,
)
from torch import nn

from commrt.errors import MemoryError_, UsageError
from commrt.layers.out_of_core import OutOfCore, ThrottledCopy


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    close_opened()


def test_budgets_below_the_largest_block() -> None:
    blocks, x = blocks_of("mlp")
    with pytest.raises(UsageError, match=r"is less than block \d needs alone"):
        made(blocks, x, budget_bytes=100)


def test_larger_inputs_leave_or_are_refused() -> None:
    blocks, x = blocks_of("mlp")
    whole = made(blocks, x, policy="keep")
    model = made(blocks, x, policy="keep", budget_bytes=whole.plan.peak_nbytes)
    more = x.repeat(2, 1)
    y = model(more)
    assert model.step.stored_nbytes > 0  # a plan to keep all, which has no room
    y.sum().backward()
    assert model.step.peak_nbytes <= whole.plan.peak_nbytes
    with pytest.raises(MemoryError_, match="a sample as large as the input"):
        model(x.repeat(20, 1))
    assert model.near_nbytes == 0
    model(x).sum().backward()


@pytest.mark.parametrize("policy", MODES)
def test_double_backward_is_refused(policy: str) -> None:
    blocks, x = blocks_of("mlp")
    model = made(blocks, x, policy=policy)
    loss = model(x.requires_grad_()).sum()
    with pytest.raises(UsageError, match="create_graph"):
        torch.autograd.grad(loss, x, create_graph=True)
    model.abandon()
    assert model.near_nbytes == 0


@pytest.mark.parametrize("policy", ["keep", "swap"])
def test_saved_tensors_that_are_changed_in_place(policy: str) -> None:
    """Plain torch refuses it, too."""
    model = made(nn.Sequential(nn.Tanh(), nn.Tanh()), torch.ones(3), policy=policy)
    x = torch.ones(3, requires_grad=True)
    y = model(x)
    with torch.no_grad():
        y.mul_(2)
    with pytest.raises(UsageError, match="changed in place"):
        y.sum().backward()


def test_a_tensor_that_is_changed_while_it_leaves() -> None:
    """Its copy may have old bytes or new ones."""

    class Kept(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x.exp()
            self.kept = y.detach()
            return y.sin()

    ticks = Shared()
    with ThrottledCopy(1.0, clock=ticks) as far:
        x = torch.ones(3, requires_grad=True)
        model = made(nn.Sequential(Kept(), Kept()), x, far=far, policy="swap")
        y = model(x)
        model.blocks[0].kept.mul_(2)
        ticks.at += 1e6
        assert model.near_nbytes == 0
        with pytest.raises(UsageError, match="changed in place"):
            y.sum().backward()


def test_parameters_that_are_changed_between_the_passes() -> None:
    blocks, x = blocks_of("mlp")
    model = made(blocks, x, policy="swap")
    y = model(x)
    with torch.no_grad():
        model.blocks[2][0].weight.mul_(2)
    with pytest.raises(UsageError, match="changed in place"):
        y.sum().backward()


def test_blocks_that_change_their_input_are_not_recomputed() -> None:
    blocks = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4))
    x = torch.randn(2, 4)
    model = made(blocks, x)
    assert [cost.can_recompute for cost in model.plan.costs] == [True, False, True]
    with pytest.raises(UsageError, match="block 1 cannot be recomputed"):
        made(blocks, x, policy="recompute")


def test_blocks_that_do_otherwise_the_second_time() -> None:
    class Fickle(nn.Module):
        is_first = True

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.sin().exp() if self.is_first else x.sin()

    x = torch.ones(2, requires_grad=True)
    model = made(nn.Sequential(Fickle()), x, policy="recompute")
    y = model(x)
    model.blocks[0].is_first = False
    with pytest.raises(UsageError, match="must do the same each time"):
        y.sum().backward()


@pytest.mark.parametrize("policy", MODES)
@pytest.mark.parametrize("backward", [False, True])
def test_an_error_amid_a_pass_releases_everything(policy: str, backward: bool) -> None:
    class Falls(nn.Module):
        is_on = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.is_on and not backward:
                raise ValueError("falls")
            y = x * 1.0
            if self.is_on:
                y.register_hook(falls)
            return y

    def falls(_: Any) -> None:
        raise ValueError("falls")

    blocks, x = blocks_of("mlp")
    broken = Falls()
    model = made(nn.Sequential(*blocks[:2], broken, *blocks[2:]), x, policy=policy)
    for block in model.blocks:
        if isinstance(block, Falls):
            block.is_on = True
    with pytest.raises(ValueError, match="falls") as caught:
        model.backward(model(x).sum())
    assert model.near_nbytes == 0  # though the traceback holds the graph
    assert model._far.in_use == 0
    assert caught.value.args == ("falls",)
    model.blocks[2].is_on = False
    model.backward(model(x).sum())


def test_closed_models_and_copies() -> None:
    blocks, x = blocks_of("mlp")
    model = made(blocks, x)
    with pytest.raises(UsageError, match=r"copy model\.blocks"):
        copy.deepcopy(model)
    assert "modes=(keep" in repr(model)
    y = model(x)
    model.close()
    model.close()
    with pytest.raises(UsageError, match="closed"):
        model(x)
    with pytest.raises(UsageError, match="closed"):
        y.sum().backward()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"budget_bytes": -1}, "budget_bytes=-1"),
        ({"budget_bytes": 2**70}, "budget_bytes="),
        ({"repeats": 0}, "repeats=0"),
        ({"bucket_nbytes": 0}, "bucket_nbytes=0"),
        ({"far": "disk"}, "far='disk'"),
        ({"blocks": []}, "one at least"),
        ({"blocks": [len]}, "a list of modules"),
        ({"sample": 3}, "the sample is 3"),
        ({"sample": ()}, "one at least"),
    ],
)
def test_arguments_that_are_none(given: Any, message: str) -> None:
    blocks, x = blocks_of("mlp")
    with ThrottledCopy(1e9) as far:
        arguments = {"blocks": blocks, "sample": x, "budget_bytes": ENOUGH, "far": far}
        with pytest.raises(UsageError) as caught:
            OutOfCore(**{**arguments, **given})
    assert message in str(caught.value)
