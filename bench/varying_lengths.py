# SPDX-License-Identifier: Apache-2.0
"""Lengths of calls that vary: how they are drawn, and what each call is to give."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from commrt.bench.varying_forms import (
    HALO,
    NEIGHBORS,
    REDISTRIBUTED,
    fills_its_input,
)
from commrt.errors import UsageError
from commrt.vocabulary.operations import OpSpec

__all__ = ["DTYPE", "ROOT", "Arrays", "Lengths", "drawn", "expected", "filled"]

ROOT = 0
"""Root of all calls that have one."""

DTYPE = np.dtype(np.float32)
"""Type of all elements."""

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Lengths:
    """The lengths of one call, in elements; equal on all ranks."""

    matrix: tuple[tuple[int, ...], ...]
    """Elements that each rank has for each other rank; equal where all blocks are."""

    @property
    def block(self) -> int:
        """Elements of the first block."""
        return self.matrix[0][0]

    @property
    def row(self) -> tuple[int, ...]:
        """Counts of an operation that has one for each rank."""
        return self.matrix[0]

    def sent(self, rank: int) -> list[int]:
        """Return the elements that a rank has for each other one."""
        return list(self.matrix[rank])

    def received(self, rank: int) -> list[int]:
        """Return the elements that each rank has for this one."""
        return [row[rank] for row in self.matrix]

    def elements(self, spec: OpSpec, rank: int) -> tuple[int, int]:
        """Return the elements of ``x`` and of ``out`` on a rank; 0 where it has none.

        An operation without blocks has one of ``block`` elements.
        """
        if spec.name == NEIGHBORS:
            return self.block, 2 * self.block
        if spec.count_arguments and spec.by_pair:
            return sum(self.sent(rank)), sum(self.received(rank))
        row = self.row if spec.count_arguments else (self.block,) * len(self.matrix)
        total = sum(row) if spec.is_blocked else self.block
        x = row[rank] if spec.out_count == "times_size" else total
        out = row[rank] if spec.out_count == "div_size" else total
        has_x = spec.input_on == "all" or rank == ROOT
        has_out = spec.output_on != "root" or rank == ROOT
        return x * has_x, out * has_out


def drawn(
    spec: OpSpec, size: int, bounds: tuple[int, int], draw: random.Random
) -> Iterator[Lengths]:
    """Yield lengths that are all different, drawn alike on all ranks.

    A block has from ``bounds[0]`` to ``bounds[1]`` elements. UsageError where all
    have been drawn.
    """
    low, high = bounds
    blocks = list(range(low, high + 1))
    draw.shuffle(blocks)
    for block in blocks:
        if spec.count_arguments:
            rows = [[draw.randint(low, high) for _ in range(size)] for _ in range(size)]
            rows[0][0] = block
        else:
            rows = [[block] * size] * size
        yield Lengths(tuple(map(tuple, rows)))
    raise UsageError(
        f"{spec.name}: blocks of {low} to {high} elements have {len(blocks)} lengths, "
        f"and more are asked for: take a wider range of -m, or fewer calls"
    )


class Arrays:
    """Memory for the calls of a rank: each call has the first part of it.

    Args:
        rank: the rank.
        size: the number of ranks.
        most: elements of the longest block.
    """

    def __init__(self, rank: int, size: int, most: int) -> None:
        self._rank = rank
        most *= max(2, size)  # a rank has two neighbours, however few ranks there are
        self._x, self._out = np.zeros(most, DTYPE), np.zeros(most, DTYPE)

    def of(self, spec: OpSpec, lengths: Lengths) -> tuple[Array, Array]:
        """Return ``x`` and ``out`` of a call."""
        x, out = lengths.elements(spec, self._rank)
        if fills_its_input(spec):
            x = out
        return self._x[:x], self._out[:out]


def filled(count: int, rank: int) -> Array:
    """Return what a rank sends in a call of so many elements: small whole numbers."""
    return ((np.arange(count) + 3 * rank) % 7 + 1).astype(DTYPE)


def expected(spec: OpSpec, lengths: Lengths, rank: int) -> Array | None:
    """Return what a call is to give a rank, None where it gives it nothing."""
    size = len(lengths.matrix)
    if spec.output_on == "root" and rank != ROOT:
        return None
    if spec.output_on == "all but rank 0" and rank == 0:
        return None
    if spec.name == HALO:
        return _exchanged(lengths.block, rank, size)
    inputs = [filled(lengths.elements(spec, r)[0], r) for r in range(size)]
    if spec.name == NEIGHBORS:
        return np.concatenate([inputs[(rank + step) % size] for step in (-1, 1)])
    if spec.name == REDISTRIBUTED:
        return np.concatenate([x.reshape(-1, size)[:, rank] for x in inputs])
    if spec.by_pair:
        parts = []
        for source, x in enumerate(inputs):
            row = lengths.sent(source)
            begin = sum(row[:rank])
            parts.append(x[begin : begin + row[rank]])
        return np.concatenate(parts)
    if spec.out_count == "times_size":
        return np.concatenate(inputs)
    if spec.reduces:
        whole = np.sum([inputs[r] for r in spec.contributors(rank, size)], axis=0)
    else:
        whole = inputs[ROOT]
    if spec.out_count != "div_size":
        return np.asarray(whole, DTYPE)
    row = list(lengths.row if spec.count_arguments else (lengths.block,) * size)
    begin = sum(row[:rank])
    return np.asarray(whole[begin : begin + row[rank]], DTYPE)


def _exchanged(count: int, rank: int, size: int) -> Array:
    """Return an array whose first and last element are its neighbours' cells."""
    x = filled(count, rank)
    x[0] = filled(count, (rank - 1) % size)[-2]
    x[-1] = filled(count, (rank + 1) % size)[1]
    return x
