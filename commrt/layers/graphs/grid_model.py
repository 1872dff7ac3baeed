# SPDX-License-Identifier: Apache-2.0
"""Costs of a training step on each grid: bytes, and seconds by an alpha-beta model.

    best = rank_grids(8, num_nodes=1797, num_entries=16000, widths=(64, 32, 10))[0]
    grid = ProcessGrid(comm, dict(zip("xyz", best.shape)))

``calls_of_step`` lists the collectives of a step exactly, as logs count them. A
collective of n bytes over p ranks takes

    allreduce        2 ceil(log2 p) alpha + 2 (p - 1) / p n beta
    allgatherv, reduce_scatterv   ceil(log2 p) alpha + (p - 1) / p n beta

and products take the multiplications of the largest piece over a rate. Nothing is
assumed to overlap. The model is to order grids; its seconds are no promise.

Source: Plexus (SC'25), "performance model", with the formulas of Thakur, Rabenseifner
and Gropp (2005) for collectives.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from commrt.errors import UsageError, shown
from commrt.layers.spatial.windows import even_sizes
from commrt.trace.volumes import wire_nbytes

__all__ = ["Call", "GridCost", "Machine", "calls_of_step", "rank_grids"]

Shape = tuple[int, int, int]


@dataclass(frozen=True)
class Machine:
    """The constants of the model."""

    alpha_s: float = 2e-6
    """Seconds of a message, whatever its length."""
    beta_s: float = 1e-10
    """Seconds of a byte."""
    sparse_per_s: float = 2e9
    """Multiplications of sparse products in a second; ``bench spmm`` measures it."""
    dense_per_s: float = 2e10
    """Multiplications of dense products in a second."""


class Call(NamedTuple):
    """A collective of a step."""

    axis: int
    """The number of the grid's axis that it goes over."""
    op: str
    """Its name in logs."""
    nbytes: int
    """Its bytes, as logs count them."""


@dataclass(frozen=True)
class GridCost:
    """A grid, and what a step costs on it, for the rank with the largest pieces."""

    shape: Shape
    """Ranks along each axis."""
    seconds: float
    """Of communication and products together."""
    communication_s: float
    """Of communication."""
    nbytes: int
    """Of all collectives, as logs count them."""
    wire_nbytes: float
    """The least that the rank sends for them."""


def rank_grids(
    num_ranks: int,
    *,
    num_nodes: int,
    num_entries: int,
    widths: Sequence[int],
    machine: Machine | None = None,
    itemsize: int = 4,
    trains_features: bool = False,
) -> list[GridCost]:
    """Return every grid of three axes for a number of ranks, the fastest first; local.

    Args:
        num_ranks: the product of the three axes.
        num_nodes: of the graph.
        num_entries: of its matrix.
        widths: features of the input, of each layer's result, and so on; the last one
            is the number of classes.
        machine: constants; None: those of a fast node.
        itemsize: bytes of an element.
        trains_features: whether the input has a gradient.

    Grids of equal seconds are ordered by their bytes.
    """
    if type(num_ranks) is not int or num_ranks < 1 or len(widths) < 2:
        raise UsageError(
            f"rank_grids: num_ranks={shown(num_ranks)} and widths={shown(widths)}: "
            f"expected a number from 1, and two widths at least"
        )
    machine = machine or Machine()
    shapes = [
        (x, y, num_ranks // (x * y))
        for x in _divisors(num_ranks)
        for y in _divisors(num_ranks // x)
    ]
    found = []
    for shape in shapes:
        calls = calls_of_step(
            num_nodes,
            widths,
            shape,
            itemsize=itemsize,
            trains_features=trains_features,
        )
        seconds = [_seconds(call, shape[call.axis], machine) for call in calls]
        wire = [wire_nbytes(call.op, call.nbytes, shape[call.axis]) for call in calls]
        products = _products_s(
            num_nodes, num_entries, widths, shape, machine, trains_features
        )
        found.append(
            GridCost(
                shape,
                sum(seconds) + products,
                sum(seconds),
                sum(call.nbytes for call in calls),
                sum(wire),
            )
        )
    return sorted(found, key=lambda each: (each.seconds, each.nbytes, each.shape))


def calls_of_step(
    num_nodes: int,
    widths: Sequence[int],
    shape: Shape,
    coords: Shape | None = None,
    *,
    itemsize: int = 4,
    trains_features: bool = False,
    bias: bool = True,
) -> list[Call]:
    """Return the collectives of a step of a network of ``GCNConv3d`` and its loss.

    Args:
        num_nodes, widths: as for ``rank_grids``.
        shape: ranks along each axis.
        coords: this rank's place; None: the last one, whose pieces are the largest.
        itemsize: bytes of an element.
        trains_features: whether the input has a gradient.
        bias: whether layers have one.

    Allreduces in chunks count as one. Collectives of one rank, and of nothing, are left
    out.
    """
    at = coords or tuple(extent - 1 for extent in shape)

    def piece(extent: int, axis: int) -> int:
        return even_sizes(extent, shape[axis])[at[axis]]

    calls: list[Call] = []

    def add(axis: int, op: str, elements: int, nbytes: int = itemsize) -> None:
        if shape[axis] > 1 and elements:
            calls.append(Call(axis, op, elements * nbytes))

    last = len(widths) - 2
    for layer, (width, out) in enumerate(pairwise(widths)):
        inner, features, rows = ((axis - layer) % 3 for axis in range(3))
        given = piece(num_nodes, inner) * piece(width, features)
        aggregated = piece(num_nodes, rows) * piece(width, features)
        weight = piece(width, features) * piece(out, inner)
        needs_gradient = layer > 0 or trains_features
        if layer == 0:
            add(rows, "allgatherv", given)
        add(inner, "allreduce", aggregated)
        add(rows, "allgatherv", weight)
        add(features, "allreduce", piece(num_nodes, rows) * piece(out, inner))
        if bias:
            add(rows, "allreduce", piece(out, inner))
        if needs_gradient:
            add(rows, "allgatherv", weight)
            add(inner, "allreduce", aggregated)
            add(rows, "allreduce" if layer else "reduce_scatterv", given)
        add(rows, "reduce_scatterv", weight)
        if layer == last:
            add(inner, "allreduce", piece(num_nodes, rows))
            add(inner, "allreduce", 2 * piece(num_nodes, rows))
            add(rows, "allreduce", 3, 8)
    return calls


def _products_s(
    num_nodes: int,
    num_entries: int,
    widths: Sequence[int],
    shape: Shape,
    machine: Machine,
    trains_features: bool,
) -> float:
    """Return the seconds of products, of a rank with an even share of the entries."""
    sparse = dense = 0.0
    for layer, (width, out) in enumerate(pairwise(widths)):
        inner, features, rows = (shape[(axis - layer) % 3] for axis in range(3))
        both = 2 if layer or trains_features else 1
        piece = math.ceil(width / features)
        sparse += both * num_entries / (rows * inner) * piece
        dense += (1 + both) * num_nodes / rows * piece * math.ceil(out / inner)
    return sparse / machine.sparse_per_s + dense / machine.dense_per_s


def _seconds(call: Call, ranks: int, machine: Machine) -> float:
    moved = wire_nbytes(call.op, call.nbytes, ranks)
    # An allreduce passes over its bytes twice, once to sum and once to spread them.
    passes = wire_nbytes(call.op, ranks, ranks) / (ranks - 1)
    rounds = passes * math.ceil(math.log2(ranks))
    return rounds * machine.alpha_s + moved * machine.beta_s


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]
