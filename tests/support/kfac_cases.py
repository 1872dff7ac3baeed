# SPDX-License-Identifier: Apache-2.0
"""K-FAC in one process, written from the papers, beside K-FAC on ranks as threads."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from dist_tensor_cases import off_by
from tensor3d_cases import drawn_in, filled
from torch import nn
from torch.nn import functional

from commrt.comm import Communicator
from commrt.layers.kfac import KFAC
from commrt.local import run

NEAR = 1e-10
Array = Any


class Perceptron(nn.Module):
    """Linear layers, one of them without a bias, and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.norm = nn.LayerNorm(7)
        self.last = nn.Linear(7, 3, bias=False)

    def forward(self, x: Any) -> Any:
        return self.last(self.norm(self.first(x).tanh()))


class Convolutional(nn.Module):
    """Convolutions with strides, dilation and several kinds of padding."""

    def __init__(self) -> None:
        super().__init__()
        self.plain = nn.Conv2d(2, 3, (3, 2), stride=(2, 1), padding=(1, 0))
        self.mirrored = nn.Conv2d(
            3, 2, 3, padding="same", padding_mode="reflect", dilation=(1, 2)
        )
        self.last = nn.Linear(2 * 3 * 5, 3)

    def forward(self, x: Any) -> Any:
        x = self.mirrored(self.plain(x.reshape(-1, 2, 6, 6)).tanh())
        return self.last(x.flatten(1))


class Sequential(nn.Module):
    """A layer on each of four tokens, used twice, and one weight in two modules."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(4, 4)
        self.tied = nn.Linear(4, 4, bias=False)
        self.also = nn.Linear(4, 4, bias=False)
        self.also.weight = self.tied.weight
        self.head = nn.Linear(4, 3)

    def forward(self, x: Any) -> Any:
        x = x.reshape(len(x), 4, 4)
        x = self.mix(self.mix(x).tanh()).tanh()
        return self.head(self.also(self.tied(x).tanh()).mean(1))


MODELS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "perceptron": (Perceptron, 5),
    "convolutions": (Convolutional, 72),
    "shared": (Sequential, 16),
}
"""Models and the features of their inputs."""


def model_of(kind: str, seed: int = 0) -> nn.Module:
    """Return a model in float64 whose parameters depend on the seed alone."""
    return filled(MODELS[kind][0](), seed)


def batch_of(kind: str, count: int, seed: int) -> tuple[Any, Any]:
    """Return inputs and classes that depend on the seed alone."""
    x = drawn_in(seed, count, MODELS[kind][1])
    return x, (drawn_in(seed + 1000, count) * 10).long().abs() % 3


def windows_of(layer: nn.Conv2d, x: Array) -> Array:
    """Return the window of each place, (places, features), by plain slices."""
    pads = []
    for dim in range(2):
        whole = layer.dilation[dim] * (layer.kernel_size[dim] - 1)
        if layer.padding == "same":
            pads.append((whole // 2, whole - whole // 2))
        else:
            pads.append((layer.padding[dim], layer.padding[dim]))
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    padded = np.pad(x, [(0, 0), *pads], mode=mode)
    spans = [layer.dilation[dim] * (layer.kernel_size[dim] - 1) + 1 for dim in range(2)]
    found = []
    for row in range(0, padded.shape[1] - spans[0] + 1, layer.stride[0]):
        for column in range(0, padded.shape[2] - spans[1] + 1, layer.stride[1]):
            window = padded[:, row : row + spans[0], column : column + spans[1]]
            picked = window[:, :: layer.dilation[0], :: layer.dilation[1]]
            found.append(picked.reshape(-1))
    return np.array(found)


class SerialKFAC:
    """K-FAC of one process that has all samples, with explicit Kronecker products."""

    def __init__(self, model: nn.Module, **settings: Any) -> None:
        self.model = model
        self.set = {
            "lr": 0.1,
            "damping": 0.003,
            "momentum": 0.9,
            "weight_decay": 0.0,
            "factor_decay": 0.95,
            "factor_every": 1,
            "inverse_every": 10,
            "kl_clip": 0.001,
            **settings,
        }
        weights: dict[int, Any] = {}
        for module in model.modules():
            if isinstance(module, nn.Linear | nn.Conv2d):
                weights.setdefault(id(module.weight), module)
        self.layers = [*weights.values()]
        self.number = 0
        self.updates = [0] * len(self.layers)
        self.averages: list[Any] = [None] * len(self.layers)
        self.blocks: list[Any] = [None] * len(self.layers)
        self.momentum: dict[int, Any] = {}
        self.seen: list[Any] = []

    def step(self, x: Any, y: Any) -> float:
        """Take a step on the mean loss of a batch."""
        self.seen = []
        handles = [
            module.register_forward_hook(self.note)
            for module in self.model.modules()
            if isinstance(module, nn.Linear | nn.Conv2d)
        ]
        for each in self.model.parameters():
            each.grad = None
        loss = functional.cross_entropy(self.model(x), y)
        loss.backward()
        for handle in handles:
            handle.remove()
        if self.number % self.set["factor_every"] == 0:
            for at, layer in enumerate(self.layers):
                self.fold(at, layer, len(x))
        for at in range(len(self.layers)):
            is_due = self.number % self.set["inverse_every"] == 0
            if self.averages[at] is not None and (is_due or self.blocks[at] is None):
                self.blocks[at] = self.damped(*self.averages[at])
        self.move()
        self.number += 1
        return float(loss.detach())

    def note(self, module: nn.Module, args: Any, out: Any) -> None:
        """Keep the input and the output of a use of a layer."""
        out.retain_grad()
        self.seen.append((module, args[0].detach(), out))

    def fold(self, at: int, layer: Any, samples: int) -> None:
        """Put this step's factors into the averages."""
        inner, outer = [], []
        for module, x, out in self.seen:
            if module.weight is not layer.weight or out.grad is None:
                continue
            g = out.grad.numpy() * samples  # of each sample's own loss
            a = x.numpy()
            if isinstance(layer, nn.Conv2d):
                inner += [windows_of(layer, each) for each in a]
                outer += [each.reshape(len(each), -1).T for each in g]
            else:
                inner.append(a.reshape(-1, a.shape[-1]))
                outer.append(g.reshape(-1, g.shape[-1]))
        if not inner:
            return
        a, g = np.concatenate(inner), np.concatenate(outer)
        if layer.bias is not None:
            a = np.concatenate([a, np.ones((len(a), 1))], 1)
        new = sum(np.outer(each, each) for each in a) / samples
        new = new, sum(np.outer(each, each) for each in g) / len(g)
        self.updates[at] += 1
        old = min(1 - 1 / self.updates[at], self.set["factor_decay"])
        if self.averages[at] is None:
            self.averages[at] = new
        else:
            self.averages[at] = tuple(
                old * before + (1 - old) * now
                for before, now in zip(self.averages[at], new, strict=True)
            )

    def damped(self, a: Array, g: Array) -> Array:
        """Return the damped block of the Fisher matrix, rows of outputs slower."""
        root = math.sqrt(self.set["damping"])
        ratio = math.sqrt((np.trace(a) / len(a)) / (np.trace(g) / len(g)))
        return np.kron(
            g + root / ratio * np.eye(len(g)), a + root * ratio * np.eye(len(a))
        )

    def move(self) -> None:
        """Move all parameters along the preconditioned gradients."""
        moves: dict[int, Any] = {}
        total = 0.0
        for at, layer in enumerate(self.layers):
            if layer.weight.grad is None or self.blocks[at] is None:
                continue
            g = layer.weight.grad.numpy()
            matrix = g.reshape(len(g), -1)
            if layer.bias is not None:
                column = layer.bias.grad.numpy()[:, None]
                matrix = np.concatenate([matrix, column], 1)
            found = np.linalg.solve(self.blocks[at], matrix.reshape(-1))
            found = found.reshape(matrix.shape)
            total += float((found * matrix).sum()) * self.set["lr"] ** 2
            if layer.bias is not None:
                moves[id(layer.bias)] = found[:, -1]
                found = found[:, :-1]
            moves[id(layer.weight)] = found.reshape(g.shape)
        clip = 1.0
        if self.set["kl_clip"] is not None:
            clip = min(1.0, math.sqrt(self.set["kl_clip"] / total))
        with torch.no_grad():
            for each in self.model.parameters():
                if each.grad is None:
                    continue
                step = each.grad
                if id(each) in moves:
                    step = torch.from_numpy(moves[id(each)] * clip)
                step = step + self.set["weight_decay"] * each
                before = self.momentum.get(id(each), torch.zeros_like(each))
                self.momentum[id(each)] = self.set["momentum"] * before + step
                each -= self.set["lr"] * self.momentum[id(each)]


def counts_of(ranks: int, step: int) -> list[int]:
    """Return samples of each rank, uneven; on three ranks and more one has none."""
    found = [2 + (rank + 2 * step) % 4 for rank in range(ranks)]
    if ranks > 2:
        found[(step + 1) % ranks] = 0
    return found


def loss_of(output: Any, y: Any, kind: str, samples: int) -> Any:
    """Return a rank's loss, as the argument ``loss`` of this kind describes it."""
    if kind == "mean":
        return functional.cross_entropy(output, y)
    total = functional.cross_entropy(output, y, reduction="sum")
    return total if kind == "sum" else total / samples


def serial_run(kind: str, ranks: int, steps: int, **settings: Any) -> nn.Module:
    """Return the model that one process with all samples trains."""
    model = model_of(kind)
    serial = SerialKFAC(model, **settings)
    for step in range(steps):
        serial.step(*batch_of(kind, sum(counts_of(ranks, step)), step))
    return model


def own_part(kind: str, ranks: int, rank: int, step: int) -> tuple[Any, Any, int]:
    """Return a rank's inputs and classes, and the samples of all ranks."""
    counts = counts_of(ranks, step)
    ends = [0, *itertools.accumulate(counts)]
    x, y = batch_of(kind, ends[-1], step)
    own = slice(ends[rank], ends[rank + 1])
    return x[own], y[own], ends[-1]


def ranks_run(
    kind: str, ranks: int, steps: int, *, loss: str = "mean", **settings: Any
) -> list[nn.Module]:
    """Return the models that ranks train together."""

    def main(comm: Communicator) -> nn.Module:
        model = model_of(kind)
        with KFAC(model, comm, loss=loss, **settings) as optimizer:
            for step in range(steps):
                x, y, samples = own_part(kind, comm.size, comm.rank, step)
                optimizer.zero_grad()
                if len(x):
                    loss_of(model(x), y, loss, samples).backward()
                optimizer.step()
        return copy.deepcopy(model)

    return run(ranks, main, timeout_s=240)


def distance(one: nn.Module, other: nn.Module) -> float:
    """Return how far the parameters of two models are apart."""
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return max(off_by(a.detach(), b.detach()) for a, b in pairs)
