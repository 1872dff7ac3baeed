# SPDX-License-Identifier: Apache-2.0
"""Tables of layers: sizes and times, from which every projection is made.

A table has no shapes and no tensors, so it may come from a model, a file or a paper.
Sizes are elements, not bytes, and those of activations are of one sample.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Literal, TypeAlias, get_args

from commrt.errors import UsageError, shown

__all__ = ["CUTS", "Cut", "Layer", "LayerTable", "Piece", "contiguous"]

Cut: TypeAlias = Literal["filter", "channel", "space"]
"""Dimensions along which a layer's work may be cut, besides samples."""
CUTS: tuple[Cut, ...] = get_args(Cut)


@dataclass(frozen=True)
class Piece:
    """Times of one rank's piece of a layer that is cut."""

    sample_s: float
    """Forward and backward time of one sample."""
    call_s: float
    """Time of a call, beside its samples."""


@dataclass(frozen=True)
class Layer:
    """One layer of a network: sizes in elements, times in seconds.

    Raises:
        UsageError: a size or a time is negative or not finite, or the spatial fields
            differ in length.
    """

    name: str
    input_elements: float
    """Elements of the input of one sample: |x| of ParaDL."""
    output_elements: float
    """Elements of the output of one sample: |y|."""
    weight_elements: float = 0.0
    """Elements of the weights and biases: |w|."""
    forward_s: float = 0.0
    """Forward time of one sample."""
    backward_s: float = 0.0
    """Backward time of one sample."""
    update_s: float = 0.0
    """Time of the weights' update, once a step."""
    forward_call_s: float = 0.0
    """Forward time that a call takes for any number of samples. ParaDL has none."""
    backward_call_s: float = 0.0
    """Backward time of a call, likewise."""
    flops: float = 0.0
    """Multiplications and additions of one sample's forward pass."""
    is_product: bool = True
    """True if it sums over channels or features, as convolutions and linear layers."""
    channels: int = 0
    """Input channels or features of a product; 0: unknown."""
    filters: int = 0
    """Output channels or features of a product; 0: unknown."""
    extent: tuple[int, ...] = ()
    """Length of each spatial dimension of the input; none: there is no space to cut."""
    halo_rows: tuple[float, ...] = ()
    """Rows that a piece reads beyond each end, for each spatial dimension."""
    statistic_elements: float = 0.0
    """Elements of the statistics that a batch normalization shares over ranks."""
    experts: int = 0
    """Experts whose weights these are; 0: none."""
    experts_of_token: int = 1
    """Experts that each token goes to."""
    pieces: Mapping[tuple[Cut, int], Piece] = field(default_factory=dict)
    """Measured times of a piece, by what is cut, and into how many. ParaDL has none:
    there a piece takes its part of the layer's time."""

    def __post_init__(self) -> None:
        for one in fields(self):
            value = getattr(self, one.name)
            values = value if isinstance(value, tuple) else (value,)
            if one.name in ("name", "pieces") or isinstance(value, bool):
                continue
            if not all(0 <= number < math.inf for number in values):
                raise UsageError(
                    f"layer {shown(self.name)}: {one.name} is {shown(value)}; expected "
                    f"finite numbers from 0"
                )
        if self.halo_rows and len(self.halo_rows) != len(self.extent):
            raise UsageError(
                f"layer {shown(self.name)}: {len(self.halo_rows)} halo_rows for "
                f"{len(self.extent)} spatial dimensions; expected one for each"
            )
        if 0 in self.extent:
            raise UsageError(
                f"layer {shown(self.name)}: extent is {self.extent}; expected lengths "
                f"above 0"
            )

    @property
    def sample_s(self) -> float:
        """Forward and backward time of one sample."""
        return self.forward_s + self.backward_s

    @property
    def call_s(self) -> float:
        """Forward and backward time of a call, beside its samples."""
        return self.forward_call_s + self.backward_call_s

    def piece(self, cut: Cut, ways: int) -> Piece:
        """Return the times of a piece: measured ones, or its part of the layer's."""
        known = self.pieces.get((cut, ways))
        return known or Piece(self.sample_s / ways, self.call_s)

    def halo_elements(self, elements: float, dim: int) -> float:
        """Return the elements beyond one end of a piece that is cut along ``dim``.

        Args:
            elements: those of the input or of the output's gradient.
            dim: a spatial dimension.
        """
        if not self.halo_rows:
            return 0.0
        return elements * self.halo_rows[dim] / self.extent[dim]


@dataclass(frozen=True)
class LayerTable:
    """The layers of a network in the order of their forward pass.

    Raises:
        UsageError: there is no layer.
    """

    name: str
    layers: tuple[Layer, ...]
    times: str = "given"
    """Where the times come from, as in "measured by 4 ranks on 2 cores"."""

    def __post_init__(self) -> None:
        if not self.layers:
            raise UsageError(f"{self.name}: the table has no layers; expected one")

    def __iter__(self) -> Iterator[Layer]:
        return iter(self.layers)

    def __len__(self) -> int:
        return len(self.layers)

    @property
    def products(self) -> tuple[Layer, ...]:
        """The layers that sum over channels."""
        return tuple(layer for layer in self.layers if layer.is_product)

    @property
    def weight_elements(self) -> float:
        """Elements of all weights."""
        return sum(layer.weight_elements for layer in self.layers)

    @property
    def sample_s(self) -> float:
        """Forward and backward time of one sample in all layers."""
        return sum(layer.sample_s for layer in self.layers)

    @property
    def call_s(self) -> float:
        """Forward and backward time of a call of all layers, beside its samples."""
        return sum(layer.call_s for layer in self.layers)

    @property
    def update_s(self) -> float:
        """Time of the update of all weights."""
        return sum(layer.update_s for layer in self.layers)

    def with_flops_per_s(self, rate: float) -> LayerTable:
        """Return the table with times from floating-point operations.

        The backward pass of a product costs twice its forward pass: gradients of the
        input and of the weight.

        Args:
            rate: operations a second.

        Raises:
            UsageError: the rate is not above 0, or no layer has operations.
        """
        if not 0 < rate < math.inf:
            raise UsageError(f"rate of operations is {rate}; expected one above 0")
        if not any(layer.flops for layer in self.layers):
            raise UsageError(f"{self.name}: no layer has flops; give times instead")
        made = [_timed(layer, rate) for layer in self.layers]
        return replace(self, layers=tuple(made), times=f"flops at {rate:.4g} a second")


def _timed(layer: Layer, rate: float) -> Layer:
    forward_s = layer.flops / rate
    # An update reads and writes each weight, with one multiplication and addition.
    return replace(
        layer,
        forward_s=forward_s,
        backward_s=(2 if layer.is_product else 1) * forward_s,
        update_s=2 * layer.weight_elements / rate,
    )


def contiguous(layers: Sequence[Layer], parts: int) -> list[tuple[Layer, ...]]:
    """Return the layers in so many runs, whose slowest one is as fast as can be.

    This is the linear partition problem by dynamic programming (Skiena, *The Algorithm
    Design Manual*, 3rd edition, section 10.7). Without times, layers count alike.
    """
    count = len(layers)
    if not 1 <= parts <= count:
        raise UsageError(f"{parts} parts of {count} layers; expected 1 to {count}")
    costs = [layer.sample_s + layer.call_s for layer in layers]
    if not any(costs):
        costs = [1.0] * count
    sums = [0.0]
    for cost in costs:
        sums.append(sums[-1] + cost)
    best = [sums[1:]]
    cuts: list[list[int]] = [[0] * count]
    for part in range(1, parts):
        row, places = [math.inf] * count, [0] * count
        for last in range(part, count):
            for cut in range(part, last + 1):
                slowest = max(best[-1][cut - 1], sums[last + 1] - sums[cut])
                if slowest < row[last]:
                    row[last], places[last] = slowest, cut
        best.append(row)
        cuts.append(places)
    found: list[tuple[Layer, ...]] = []
    end = count
    for part in range(parts - 1, -1, -1):
        begin = cuts[part][end - 1] if part else 0
        found.append(tuple(layers[begin:end]))
        end = begin
    return found[::-1]
