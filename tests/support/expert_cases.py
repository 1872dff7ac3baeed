# SPDX-License-Identifier: Apache-2.0
"""Mixtures of experts beside a plain loop over experts, on ranks as threads."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tensor3d_cases import Difference, drawn_in, filled
from torch import nn
from torch.nn import functional

from commrt.comm import Communicator
from commrt.layers.experts import MoE, load_state_dict, sync_gradients
from commrt.layers.process_grid import ProcessGrid
from commrt.layers.tensor3d.gradients import cut_parameters
from commrt.local import run

ORDER = ("data", "expert", "tensor")
Split = tuple[int, int, int]
BALANCE, Z = 0.7, 0.3
"""The factors of the losses: large, so that a wrong one is seen."""


def splits_of(*sizes: int) -> list[Split]:
    """Return all factorisations of numbers of ranks into data, expert and tensor."""
    found = []
    for size in sizes:
        for split in itertools.product(range(1, size + 1), repeat=3):
            if math.prod(split) == size:
                found.append(split)
    return found


def axes_of(split: Split) -> dict[str, int]:
    """Return the axes of a ProcessGrid."""
    return dict(zip(ORDER, split, strict=True))


@dataclass(frozen=True)
class Form:
    """A mixture of experts, as all ranks make it."""

    d_model: int = 6
    num_experts: int = 5
    d_hidden: int = 7
    top_k: int = 2
    capacity_factor: float | None = None
    normalize: bool = False
    num_shared: int = 1
    activation: str = "swiglu"
    of_modules: bool = False


def expert_of(form: Form) -> Callable[[int], nn.Module]:
    """Return a function that makes an expert of torch's modules."""

    def made(number: int) -> nn.Module:
        layers = [nn.Linear(form.d_model, form.d_hidden + number % 2), nn.Tanh()]
        layers.append(nn.Linear(form.d_hidden + number % 2, form.d_model))
        return nn.Sequential(*layers).double()

    return made


class Stack(nn.Module):
    """Weights of experts, with the names that the layer's have."""

    def __init__(self, form: Form, number: int) -> None:
        super().__init__()
        gate = ("gate",) if form.activation == "swiglu" else ()
        for name in (*gate, "up", "down"):
            shape = number, form.d_hidden, form.d_model
            self.register_parameter(name, nn.Parameter(torch.empty(shape)))
        self.activation = form.activation

    def one(self, number: int, x: Any) -> Any:
        hidden = functional.linear(x, self.up[number])
        if self.activation == "swiglu":
            gate = functional.linear(x, self.gate[number])
            return (functional.silu(gate) * hidden) @ self.down[number]
        return getattr(functional, self.activation)(hidden) @ self.down[number]


class PlainMoE(nn.Module):
    """The layer in one process, as one would write it: a loop over experts."""

    def __init__(self, form: Form) -> None:
        super().__init__()
        self.form = form
        self.router = nn.Linear(form.d_model, form.num_experts, bias=False)
        last = form.num_experts + form.num_shared
        if form.of_modules:
            made = expert_of(form)
            self.experts: Any = nn.ModuleDict(
                {str(n): made(n) for n in range(form.num_experts)}
            )
            self.shared: Any = nn.ModuleDict(
                {str(n): made(n) for n in range(form.num_experts, last)}
            )
        else:
            self.experts = Stack(form, form.num_experts)
            self.shared = Stack(form, form.num_shared) if form.num_shared else None

    def _expert(self, number: int, x: Any) -> Any:
        if self.form.of_modules:
            return self.experts[str(number)](x)
        return self.experts.one(number, x)

    def _shared(self, number: int, x: Any) -> Any:
        if self.form.of_modules:
            return self.shared[str(number + self.form.num_experts)](x)
        return self.shared.one(number, x)

    def forward(self, x: Any) -> Any:
        form = self.form
        logits = self.router(x)
        likely = logits.softmax(-1)
        weights, experts = likely.topk(form.top_k, -1)
        counts = torch.bincount(experts.reshape(-1), minlength=form.num_experts)
        if form.normalize:
            weights = weights / weights.sum(-1, keepdim=True)
        is_kept = torch.ones_like(experts, dtype=torch.bool)
        dropped = 0
        if form.capacity_factor is not None:
            mean = form.capacity_factor * form.top_k * len(x) / form.num_experts
            room = [math.ceil(mean)] * form.num_experts
            for token, slot in itertools.product(range(len(x)), range(form.top_k)):
                expert = int(experts[token, slot])
                is_kept[token, slot] = room[expert] > 0
                dropped += room[expert] == 0
                room[expert] -= room[expert] > 0
        y = torch.zeros_like(x)
        for number in range(form.num_experts):
            tokens, slots = ((experts == number) & is_kept).nonzero(as_tuple=True)
            if len(tokens):
                output = self._expert(number, x[tokens])
                y = y.index_add(0, tokens, output * weights[tokens, slots, None])
        for number in range(form.num_shared):
            y = y + self._shared(number, x)
        if len(x) == 0:
            return y, logits.sum(), logits.sum(), dropped
        part = counts.double() / counts.sum()
        balance = form.num_experts * (part * likely.mean(0)).sum()
        return y, balance, logits.logsumexp(-1).square().mean(), dropped


class Network(nn.Module):
    """A layer that is whole on all ranks, and a mixture of experts."""

    def __init__(self, form: Form, mixture: nn.Module) -> None:
        super().__init__()
        self.first = nn.Linear(form.d_model, form.d_model, dtype=torch.float64)
        self.moe = mixture

    def forward(self, x: Any) -> Any:
        return self.moe(self.first(x))


def serial_of(form: Form, seed: int = 0) -> Network:
    """Return a network in float64 whose parameters depend on the seed alone."""
    return filled(Network(form, PlainMoE(form)), seed)  # type: ignore[return-value]


def layer_of(form: Form, grid: ProcessGrid) -> MoE:
    """Return the layer on a grid."""
    return MoE(
        *(form.d_model, form.num_experts),
        None if form.of_modules else form.d_hidden,
        grid=grid,
        top_k=form.top_k,
        capacity_factor=form.capacity_factor,
        normalize_weights=form.normalize,
        num_shared=form.num_shared,
        activation=form.activation,
        expert=expert_of(form) if form.of_modules else None,
        dtype=torch.float64,
    )


def network_of(form: Form, serial: nn.Module, grid: ProcessGrid) -> Network:
    """Return a serial network on a grid, with its parameters."""
    model = Network(form, layer_of(form, grid))
    load_state_dict(model, serial.state_dict())
    return model


def batches_of(split: Split, seed: int, form: Form, most: int = 5) -> list[Any]:
    """Return tokens for each place along data and expert; some have none."""
    places = split[0] * split[1]
    counts = [(seed + 3 * place) % (most + 1) for place in range(places)]
    return [
        drawn_in(100 * seed + place, count, form.d_model)
        for place, count in enumerate(counts)
    ]


def compare(
    form: Form,
    split: Split,
    batches: Sequence[Any],
    *,
    serial: nn.Module | None = None,
    axes: dict[str, int] | None = None,
    synchronize: Callable[[nn.Module], None] | None = None,
) -> dict[str, float]:
    """Return how far outputs, losses and gradients are from those of a plain loop.

    Args:
        form: of the mixture.
        split: ranks along data, expert and tensor.
        batches: the tokens of each place along data and expert, in this order.
        serial: the whole network; None: ``serial_of(form)``.
        axes: the grid's axes, where they are not those of the split in its order.
        synchronize: sums gradients; None: ``sync_gradients`` does.
    """
    serial = copy.deepcopy(serial or serial_of(form))
    x = torch.cat([*batches]).requires_grad_()
    y, balance, z, dropped = serial(x)
    factor = drawn_in(7, *y.shape)
    ((y * factor).sum() + BALANCE * balance + Z * z).backward()
    ends = [0, *itertools.accumulate(map(len, batches))]

    def main(comm: Communicator) -> dict[str, float]:
        found = Difference()
        with ProcessGrid(comm, axes or axes_of(split)) as grid:
            place = grid.coords.get("data", 0) * split[1] + grid.coords.get("expert", 0)
            own = slice(ends[place], ends[place + 1])
            model = network_of(form, serial, grid)
            given = batches[place].clone().requires_grad_()
            mixture = model(given)
            aux = BALANCE * mixture.balance_loss + Z * mixture.z_loss
            ((mixture.output * factor[own]).sum() + aux / len(batches)).backward()
            if synchronize is None:
                sync_gradients(model, average=False)
            else:
                synchronize(model)
            found.note("output", mixture.output, y[own])
            found.note("balance", mixture.balance_loss, balance)
            found.note("z", mixture.z_loss, z)
            found.of["dropped"] = float(abs(mixture.num_dropped - dropped))
            found.note("gradient of input", given.grad, x.grad[own])
            expected = dict(serial.named_parameters())
            for name, parameter, cut, _ in cut_parameters(model):
                right = expected[name]
                if right.grad is None:
                    assert parameter.grad is None or not parameter.grad.any(), name
                    continue
                gradient, mine = parameter.grad, parameter.detach()
                if gradient is None:
                    assert mine.numel() == 0, name
                    gradient = torch.zeros_like(mine)
                if cut is not None:
                    assert tuple(mine.shape) == cut.shard_shape
                    gradient, mine = cut.whole(gradient), cut.whole(mine)
                assert torch.equal(mine, right)
                found.note(f"gradient of {name}", gradient, right.grad)
        return found.of

    ranks = run(math.prod(split), main, timeout_s=240)
    return {
        name: max(rank.get(name, 0.0) for rank in ranks)
        for name in {name for rank in ranks for name in rank}
    }
