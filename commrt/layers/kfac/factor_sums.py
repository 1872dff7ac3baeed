# SPDX-License-Identifier: Apache-2.0
"""Sums of factors over all ranks, which start while the backward pass goes on.

Each rank starts the sums of all layers in one order, the last layer first. So it does
not matter which layers a rank uses, nor in which order its gradients come.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import torch

from commrt.comm import Communicator
from commrt.layers.kfac.model_layers import Layer
from commrt.layers.kfac.scalars import on_host
from commrt.layers.kfac.triangles import packed, packed_length
from commrt.request import Request

__all__ = ["FactorSums", "LayerSums", "Part"]

Tensor: TypeAlias = torch.Tensor


class Part:
    """Products that one rank adds to the factors of one layer.

    Args:
        layer: the one whose factors they are of.
    """

    def __init__(self, layer: Layer) -> None:
        self.layer = layer
        self.is_complete = False
        """True once no more comes in this step."""
        self.places = 0
        """How often the layer's weight was applied."""
        self._sums: tuple[Tensor, Tensor] | None = None

    def add(self, x: Tensor, gradient: Tensor, factor: float) -> None:
        """Add the products of one use.

        Args:
            x: the layer's input.
            gradient: of its output.
            factor: by which gradients are multiplied.
        """
        rows = self.layer.rows
        outer = rows.gradients(gradient)
        if factor != 1:
            outer = outer * factor
        if self._sums is None:
            inner_side, outer_side = rows.sides
            self._sums = (
                outer.new_zeros(inner_side, inner_side),
                outer.new_zeros(outer_side, outer_side),
            )
        for part in rows.inputs(x):
            self._sums[0].addmm_(part.t(), part)
        self._sums[1].addmm_(outer.t(), outer)
        self.places += len(outer)

    def flat(self, gradient_factor: float) -> Tensor:
        """Return both triangles and the number of places, as they travel."""
        rows, like = self.layer.rows, self.layer.weight
        if self._sums is None:
            length = sum(map(packed_length, rows.sides)) + 1
            return torch.zeros(length, dtype=rows.dtype, device=like.device)
        inner, outer = map(packed, self._sums)
        outer *= gradient_factor
        flat = torch.cat([inner, outer, inner.new_tensor([self.places])])
        self._sums = None
        return flat


class LayerSums(NamedTuple):
    """Sums over all ranks, the same bits on each."""

    inputs: Tensor
    """Of products of inputs, a triangle."""
    gradients: Tensor
    """Of products of gradients, a triangle."""
    places: float


class FactorSums:
    """The sums of one step.

    Args:
        comm: the ranks; nothing else uses it.
        layers: all, in the same order on all ranks.

    Bytes: for each layer an ``allreduce`` of both triangles and one element.
    """

    def __init__(self, comm: Communicator, layers: Sequence[Layer]) -> None:
        self._comm = comm
        self.parts = [Part(each) for each in layers]
        """Of this rank, in the order of layers."""
        self._started: list[tuple[Tensor, Request | None]] = []

    @property
    def num_started(self) -> int:
        """Layers whose sums have left this rank."""
        return len(self._started)

    def has_started(self, number: int) -> bool:
        """Return whether a layer's sum has left this rank."""
        return number >= len(self.parts) - len(self._started)

    def advance(self, gradient_factor: float, *, are_all: bool = False) -> bool:
        """Start the sums whose turn it is; return whether there were any.

        Args:
            gradient_factor: by which products of gradients are multiplied.
            are_all: also start those to which this rank has nothing to add.
        """
        for _, request in self._started[-2:]:
            if request is not None:
                request.test()  # a little progress, while gradients are computed
        before = len(self._started)
        while len(self._started) < len(self.parts):
            part = self.parts[-1 - len(self._started)]
            if not (are_all or part.is_complete):
                break
            flat = part.flat(gradient_factor)
            request = None
            if self._comm.size > 1:
                request = self._comm.allreduce(flat, nonblocking=True)
            self._started.append((flat, request))
        return len(self._started) > before

    def under_way(self) -> list[Request]:
        """Return the requests of all sums that have started."""
        return [each for _, each in self._started if each is not None]

    def wait(self) -> None:
        """Wait for all sums that have started; collective."""
        for each in self.under_way():
            each.wait()

    def results(self) -> list[LayerSums]:
        """Return all sums, in the order of layers; after ``wait`` for all of them."""
        places = on_host([flat[-1] for flat, _ in self._started])
        found = []
        for part, (flat, _), count in zip(
            reversed(self.parts), self._started, places, strict=True
        ):
            sides = part.layer.rows.sides
            inner, outer, _ = flat.split([*map(packed_length, sides), 1])
            # Of their own: a view would keep both alive.
            found.append(LayerSums(inner.clone(), outer.clone(), count))
        return found[::-1]
