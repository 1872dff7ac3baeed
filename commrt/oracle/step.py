# SPDX-License-Identifier: Apache-2.0
"""Training steps, and the parts of a projection: time, transfers, memory, limits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from commrt.errors import UsageError, shown
from commrt.oracle.layer_table import LayerTable
from commrt.oracle.transfers import Group, Transfer

__all__ = ["Limit", "Parts", "Step", "group_of"]


@dataclass(frozen=True)
class Step:
    """One training step of a network on a whole batch.

    Raises:
        UsageError: a number makes no sense.
    """

    table: LayerTable
    batch: int
    """Samples of a step, over all ranks: B of ParaDL."""
    item_nbytes: int = 4
    """Bytes of an element: delta."""
    reuse: float = 1.0
    """Part of the memory that is left where buffers are used again: gamma."""
    optimizer_elements: float = 0.0
    """Elements that the optimizer keeps for each weight: 0 for plain SGD, 1 with
    momentum, 2 for Adam. ParaDL counts none."""
    segments: int = 4
    """Micro-batches of a pipeline: S."""
    gradients_by_layer: bool = False
    """True if each layer's gradients have an allreduce of their own, as in
    ``parallelize_cnn``; False if one carries all, as ParaDL has it."""

    def __post_init__(self) -> None:
        for name in ("batch", "item_nbytes", "segments"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise UsageError(
                    f"{name} is {shown(value)}; expected a whole number above 0"
                )
        if not 0 < self.reuse <= 1:
            raise UsageError(
                f"reuse is {shown(self.reuse)}; expected a number above 0, at most 1"
            )
        if not 0 <= self.optimizer_elements < math.inf:
            raise UsageError(
                f"optimizer_elements is {shown(self.optimizer_elements)}; expected a "
                f"finite number from 0"
            )

    def memory_nbytes(self, activations: float, weights: float, more: float = 0) -> int:
        """Return the bytes that a rank keeps, rounded up.

        Activations and weights count twice, for themselves and their gradients, and the
        optimizer's elements count for each weight.

        Args:
            activations: elements of inputs and outputs on a rank, of its samples.
            weights: elements of weights on a rank.
            more: other elements.
        """
        elements = 2 * activations + (2 + self.optimizer_elements) * weights + more
        nbytes = self.reuse * self.item_nbytes * elements
        return math.ceil(nbytes * (1 - 1e-12))  # without what rounding has added


@dataclass(frozen=True)
class Limit:
    """The most ranks that one way of cutting can use."""

    most: int
    reason: str
    """Its limit in words, as in "the batch of 64 samples"."""


@dataclass(frozen=True)
class Parts:
    """A strategy's demands on the slowest rank."""

    sample_s: float
    """Computation of a step for each sample of the whole batch."""
    step_s: float
    """Computation of a step beside that."""
    transfers: tuple[Transfer, ...]
    """The transfers that a rank takes part in during a step."""
    memory_nbytes: int


def group_of(axes: Sequence[str], ways: Sequence[int], first: int, last: int) -> Group:
    """Return the group of ranks that differ along some axes of a grid.

    The last axis is the nearest: its ranks follow each other.

    Args:
        axes: names of all axes.
        ways: ranks along each.
        first: the first of the group's axes.
        last: the last of them.
    """
    return Group(
        "*".join(axes[first : last + 1]),
        math.prod(ways[first : last + 1]),
        math.prod(ways[last + 1 :]),
        math.prod(ways),
    )
