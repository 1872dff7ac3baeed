# SPDX-License-Identifier: Apache-2.0
"""Costs that a plan is made of: times and bytes of blocks, and speeds of a link."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from commrt.errors import UsageError, shown

__all__ = ["MODES", "BlockCost", "Link", "Mode", "check_costs"]

Mode = Literal["keep", "swap", "recompute"]
"""The state of a block's saved tensors between its forward and its backward pass."""

MODES: tuple[Mode, ...] = get_args(Mode)


@dataclass(frozen=True)
class BlockCost:
    """Times and bytes of one block of layers."""

    forward_s: float
    """Seconds of its forward pass."""
    backward_s: float
    """Seconds of its backward pass."""
    saved_nbytes: int
    """Bytes saved for the backward pass, if kept or swapped. The block's input belongs
    to it where this block or the one before saves it, also if that one is recomputed;
    its output never does."""
    output_nbytes: int = 0
    """Bytes of the output if the block saves it. They belong to the next block, and are
    near during this block's passes, too."""
    resident_nbytes: int = 0
    """Bytes that stay near if the block is recomputed: its input, and copies of its
    buffers."""
    recomputed_nbytes: int | None = None
    """Bytes near during the backward pass if the block is recomputed, ``resident`` ones
    included; None: the sum of the three above."""
    num_transfers: int = 1
    """Storages that a swap moves each way."""
    recompute_s: float | None = None
    """Seconds of a second forward pass; None: those of the first. A block that saves
    its input alone needs none."""
    can_recompute: bool = True
    """False: a second forward pass would not do the same."""

    @property
    def replayed_nbytes(self) -> int:
        """Bytes near during the backward pass if the block is recomputed."""
        if self.recomputed_nbytes is not None:
            return self.recomputed_nbytes
        return self.resident_nbytes + self.saved_nbytes + self.output_nbytes

    @property
    def replay_s(self) -> float:
        """Seconds of a second forward pass."""
        return self.forward_s if self.recompute_s is None else self.recompute_s

    def between_nbytes(self, mode: Mode) -> int:
        """Return the bytes near from the end of its forward pass on."""
        between = {"keep": self.saved_nbytes, "recompute": self.resident_nbytes}
        return between.get(mode, 0)

    def forward_nbytes(self, mode: Mode) -> int:
        """Return the bytes near during its forward pass."""
        if mode == "recompute":
            return self.resident_nbytes
        return self.saved_nbytes + self.output_nbytes

    def backward_nbytes(self, mode: Mode) -> int:
        """Return the bytes near during its backward pass."""
        if mode == "recompute":
            return self.replayed_nbytes
        return self.saved_nbytes + self.output_nbytes


@dataclass(frozen=True)
class Link:
    """Speeds between near and far memory; the two directions work side by side."""

    out_bytes_per_s: float
    """To far memory."""
    in_bytes_per_s: float
    """From far memory."""
    latency_s: float = 0.0
    """Of each transfer."""

    def __post_init__(self) -> None:
        """Raise UsageError for speeds and latencies that no link has."""
        for name in ("out_bytes_per_s", "in_bytes_per_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise UsageError(
                    f"Link: {name}={shown(getattr(self, name))}: expected a finite "
                    f"number above 0"
                )
        if not 0 <= self.latency_s < math.inf:
            raise UsageError(
                f"Link: latency_s={shown(self.latency_s)}: expected seconds from 0"
            )

    def out_s(self, cost: BlockCost) -> float:
        """Return the seconds in which a block's saved tensors leave."""
        moved_s = cost.saved_nbytes / self.out_bytes_per_s
        return cost.num_transfers * self.latency_s + moved_s

    def in_s(self, cost: BlockCost) -> float:
        """Return the seconds in which a block's saved tensors come back."""
        moved_s = cost.saved_nbytes / self.in_bytes_per_s
        return cost.num_transfers * self.latency_s + moved_s


def check_costs(costs: Sequence[BlockCost], budget_bytes: int) -> None:
    """Raise UsageError for no blocks, and for times and bytes that are none."""
    if type(budget_bytes) is not int or budget_bytes < 0:
        raise UsageError(
            f"plan: budget_bytes={shown(budget_bytes)}: expected an integer from 0"
        )
    if not costs:
        raise UsageError("plan: no blocks; give the cost of one at least")
    for number, cost in enumerate(costs):
        times = cost.forward_s, cost.backward_s, cost.replay_s
        sizes = cost.saved_nbytes, cost.output_nbytes, cost.resident_nbytes
        counts = *sizes, cost.replayed_nbytes, cost.num_transfers
        if not all(0 <= each < math.inf for each in times) or min(counts) < 0:
            raise UsageError(
                f"plan: block {number}: {cost}: times and bytes must be finite, from 0"
            )
