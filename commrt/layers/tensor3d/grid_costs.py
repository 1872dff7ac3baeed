# SPDX-License-Identifier: Apache-2.0
"""Ranks the grids of a number of processes by what layers send on them.

This is the model of Singh and Bhatele, "A 4D hybrid algorithm to scale parallel
training to thousands of GPUs" (SC'24), section 5, with a latency for each message
besides. It takes ring algorithms: a rank sends (p - 1) / p of an array's bytes in an
allgather or a reduce-scatter over p ranks, and twice that in an allreduce. It does not
count computation, which is the same for all grids but for its shape.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from commrt.errors import UsageError, shown
from commrt.layers.tensor3d.roles import AXES

__all__ = ["GridCost", "LayerShape", "rank_grids"]

ORDER = ("data", "z", "y", "x")
"""Axes as a ProcessGrid takes them: ranks along ``x`` are the nearest."""


class LayerShape(NamedTuple):
    """A linear layer, and how often a model has it.

    A convolution is one whose features are channels times the kernel's elements.
    """

    in_features: int
    out_features: int
    transpose: bool | None = None
    """None: transposed for every second layer of the list."""
    is_whole: bool = False
    """True if it takes and returns whole features."""


@dataclass(frozen=True)
class GridCost:
    """Bytes and time of one training step on one grid.

    Its fields are of one rank.
    """

    axes: dict[str, int]
    """Ranks along each axis, as ProcessGrid takes them."""
    seconds: float
    """Time of all messages, one after the other."""
    nbytes: dict[str, float]
    """Bytes that a rank sends along each axis."""
    parameter_nbytes: float
    """Bytes of the parameters that a rank stores."""

    @property
    def total_nbytes(self) -> float:
        """Bytes that a rank sends along all axes."""
        return sum(self.nbytes.values())


def rank_grids(
    world_size: int,
    layer_shapes: Sequence[tuple[int, int] | LayerShape],
    *,
    samples: int,
    element_nbytes: int = 4,
    bandwidth: float = 10e9,
    node_bandwidth: float = 100e9,
    ranks_per_node: int = 8,
    latency_s: float = 0.0,
    most_parameter_nbytes: float | None = None,
) -> list[GridCost]:
    """Return all grids of some ranks, the one with the least communication first.

        best = rank_grids(8, [(512, 2048), (2048, 512)] * 12, samples=8192)[0]
        grid = ProcessGrid(comm, best.axes)

    Args:
        world_size: the ranks.
        layer_shapes: input and output features of each layer, in their order.
        samples: rows of the input of a layer in one step, of all ranks together: the
            batch, times the length of sequences.
        element_nbytes: bytes of an element, in activations and in gradients.
        bandwidth: bytes a second of a node's link to other nodes.
        node_bandwidth: bytes a second between ranks of a node.
        ranks_per_node: ranks of a node.
        latency_s: seconds of a message without bytes; a ring over p ranks has p - 1 of
            them, an allreduce twice as many.
        most_parameter_nbytes: leave out grids whose ranks store more than this; None:
            none.

    Raises UsageError for numbers that make no sense.
    """
    for name, number in (("world_size", world_size), ("samples", samples)):
        if type(number) is not int or number < 1:
            raise UsageError(
                f"rank_grids: {name}={shown(number)} must be an integer above 0"
            )
    if not layer_shapes or bandwidth <= 0 or node_bandwidth <= 0 or ranks_per_node < 1:
        raise UsageError(
            f"rank_grids: {len(layer_shapes)} layers, bandwidth={bandwidth}, "
            f"node_bandwidth={node_bandwidth}, ranks_per_node={ranks_per_node}: all "
            f"must be above 0"
        )
    layers = [_numbered(at, *shape) for at, shape in enumerate(layer_shapes)]
    found = []
    for sizes in _factorisations(world_size, len(ORDER)):
        axes = dict(zip(ORDER, sizes, strict=True))
        sent = [each for layer in layers for each in _sent(layer, axes, samples)]
        nbytes = {
            axis: element_nbytes * sum(one.elements for one in sent if one.axis == axis)
            for axis in AXES
        }
        messages = sum(one.messages for one in sent)
        speeds = _speeds(axes, bandwidth, node_bandwidth, ranks_per_node)
        seconds = sum(nbytes[axis] / speeds[axis] for axis in AXES)
        stored = element_nbytes * sum(n * k for k, n, _, _ in layers)
        found.append(
            GridCost(
                axes,
                seconds + latency_s * messages,
                nbytes,
                stored * axes["data"] / world_size,
            )
        )
    if most_parameter_nbytes is not None:
        found = [
            each for each in found if each.parameter_nbytes <= most_parameter_nbytes
        ]
    return sorted(found, key=lambda each: (each.seconds, [*each.axes.values()]))


def _numbered(
    at: int, k: int, n: int, transpose: bool | None = None, is_whole: bool = False
) -> LayerShape:
    """Return a layer of a list, transposed where it says so, or is an odd one."""
    turned = bool(at % 2) if transpose is None else transpose
    return LayerShape(k, n, turned, is_whole)


def _factorisations(number: int, factors: int) -> Iterator[tuple[int, ...]]:
    """Yield all ways to write a number as a product."""
    if factors == 1:
        yield (number,)
        return
    for first in range(1, number + 1):
        if number % first == 0:
            for rest in _factorisations(number // first, factors - 1):
                yield first, *rest


class _Sent(NamedTuple):
    """Traffic of a rank along one axis: elements, and messages of a ring."""

    axis: str
    elements: float
    messages: int


def _sent(layer: LayerShape, axes: dict[str, int], samples: int) -> Iterator[_Sent]:
    """Yield what a rank sends for one layer in a step."""
    k, n = layer.in_features, layer.out_features
    inputs, outputs = ("x", "y") if layer.transpose else ("y", "x")
    c, r, d = axes[inputs], axes[outputs], axes["z"]
    m = samples / (axes["data"] * d)
    block = k * n / (c * r)
    for _ in range(3):  # gathered twice, and its gradient scattered
        yield _part("z", d, block)
    yield _twice(inputs, c, m * n / r)
    yield _twice(outputs, r, m * k / c)
    yield _twice("data", axes["data"], block / d)
    if layer.is_whole:
        yield _part(outputs, r, m * n)
        yield _part(inputs, c, m * k)


def _part(axis: str, ranks: int, elements: float) -> _Sent:
    return _Sent(axis, elements * (ranks - 1) / ranks, ranks - 1)


def _twice(axis: str, ranks: int, elements: float) -> _Sent:
    return _Sent(axis, 2 * elements * (ranks - 1) / ranks, 2 * (ranks - 1))


def _speeds(
    axes: dict[str, int], bandwidth: float, node_bandwidth: float, ranks_per_node: int
) -> dict[str, float]:
    """Return the bytes a second along each axis.

    An axis lies within a node where it and all nearer ones do. Else the rings of nearer
    axes share the node's link.
    """
    found, nearer = {}, 1
    for axis in reversed(ORDER):
        if nearer * axes[axis] <= ranks_per_node:
            found[axis] = node_bandwidth
        else:
            found[axis] = bandwidth / min(ranks_per_node, nearer)
        nearer *= axes[axis]
    return found
