# SPDX-License-Identifier: Apache-2.0
"""Storages that blocks hand on, as parts, views and tuples; states; checkpoints."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from out_of_core_cases import MODES, blocks_of, close_opened, made, results, same_bits
from torch import nn
from torch.utils.checkpoint import checkpoint


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    close_opened()


class Half(nn.Module):
    """Its output is a part of a larger storage."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)[:, 1:7]


class Expanded(nn.Module):
    """Its output is larger than its storage."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).expand(-1, 6)


class Parts(Half):
    """Its outputs share a storage."""

    def forward(self, x: torch.Tensor) -> Any:
        return tuple(self.linear(x).chunk(2, 1))


class Product(nn.Module):
    def forward(self, value: Any) -> torch.Tensor:
        return value[0].tanh() * value[1].sigmoid()


class WithInput(nn.Module):
    """Hands the program's input on, beside a tensor of its own."""

    def forward(self, x: torch.Tensor) -> Any:
        return x.exp(), x


class Checkpointed(Half):
    """Recomputes a part by itself."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def inner(x: torch.Tensor) -> torch.Tensor:
            return self.linear(x).tanh()[:, :6].exp()

        return checkpoint(inner, x.sin(), use_reentrant=False)


CHAINS = {
    "parts of storages": lambda: [Half(), nn.Linear(6, 6), Half(), nn.Tanh()],
    "expanded": lambda: [Expanded(), nn.Linear(6, 6), Expanded(), nn.Tanh()],
    "tuples": lambda: [Parts(), Product(), Parts(), Product()],
    "inputs": lambda: [WithInput(), Product(), Half(), nn.Linear(6, 6)],
    "nothing saved": lambda: [nn.Flatten(), nn.Linear(6, 6), nn.Flatten(), nn.Tanh()],
}


@pytest.mark.full(sample=20)
@pytest.mark.parametrize("modes", [*itertools.product(MODES, repeat=4)])
@pytest.mark.parametrize("kind", CHAINS)
def test_bytes_of_storages_between_blocks_are_those_of_the_plan(
    kind: str, modes: Any
) -> None:
    torch.manual_seed(4)
    plain = nn.Sequential(*CHAINS[kind]())
    x = torch.randn(5, 6)
    blocks = copy.deepcopy(plain)
    right = results(plain, x, plain)
    like = x.clone().requires_grad_()  # as the inputs of the steps
    model = made(blocks, like, policy=modes)
    assert same_bits(results(model, x, model.blocks), right)
    # A plan counts an input that the block before saves, also if that is recomputed.
    at_most = kind == "inputs" and modes[0] == "recompute"
    assert model.step.peak_nbytes <= model.plan.peak_nbytes
    assert at_most or model.step.peak_nbytes == model.plan.peak_nbytes
    tight = made(blocks, like, policy=modes, budget_bytes=model.plan.peak_nbytes)
    assert same_bits(results(tight, x, tight.blocks), right)
    assert tight.near_nbytes == 0


@pytest.mark.parametrize("policy", MODES)
def test_checkpoints_within_blocks(policy: str) -> None:
    torch.manual_seed(4)
    plain = nn.Sequential(Checkpointed(), nn.Linear(6, 6), Checkpointed())
    x = torch.randn(5, 6)
    model = made(plain, x, policy=policy)
    right = results(plain, x, plain)
    assert same_bits(results(model, x, model.blocks), right)
    assert model.near_nbytes == 0


def test_states_are_those_of_the_plain_sequence() -> None:
    blocks, x = blocks_of("cnn")
    model = made(blocks, x, policy="swap")
    model.backward(model(x).sum())
    state = model.blocks.state_dict()
    assert [*state] == [*blocks.state_dict()]
    blocks.load_state_dict(state)
    again = made(blocks, x, policy="recompute")
    again.blocks.load_state_dict(blocks.state_dict())
    assert torch.equal(again.eval()(x), model.eval()(x))
