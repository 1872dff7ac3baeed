# SPDX-License-Identifier: Apache-2.0
"""Transfers of a training step, and the cost of each in the Hockney model.

A strategy says what is sent; a cost says how long that takes. So one list of transfers
is counted in bytes, priced by ParaDL's formulas, and priced by measured or simulated
times.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from commrt.errors import UsageError, shown

__all__ = ["COLLECTIVES", "AlphaBeta", "CollectiveCosts", "Group", "Transfer"]

_ROUNDS = {"allreduce": 2, "allgather": 1, "reduce_scatter": 1, "alltoall": 1}
"""Times that a ring, or a pairwise exchange, goes around its p - 1 peers."""
MESSAGE = "message"
COLLECTIVES = (*_ROUNDS, MESSAGE)
"""The operations of a strategy; a message goes to one peer while one comes back."""


@dataclass(frozen=True)
class Group:
    """The ranks of one transfer: ``ranks`` of them, ``stride`` apart in the job.

    All ranks of the job are in such a group, and all groups send at one time.
    """

    axis: str
    """The way of cutting that these ranks share, such as ``data``."""
    ranks: int
    stride: int
    world: int
    """Ranks of the job."""

    @property
    def members(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each group, which has them in this order."""
        span = self.ranks * self.stride
        return tuple(
            tuple(range(base + first, base + span, self.stride))
            for base in range(0, self.world, span)
            for first in range(self.stride)
        )


@dataclass(frozen=True)
class Transfer:
    """One operation of a step, or several that are alike."""

    coll: str
    """One of ``COLLECTIVES``."""
    group: Group
    nbytes: float
    """Bytes of the whole vector: the buffer of an allreduce or an alltoall, the result
    of an allgather, the input of a reduce_scatter, or the message."""
    times: float
    """How often a step has it."""
    purpose: str
    """The values that are sent, such as ``gradients``."""

    @property
    def sent_nbytes(self) -> float:
        """Bytes that a rank sends in a step, by a ring or a pairwise exchange."""
        if self.coll == MESSAGE:
            return self.times * self.nbytes
        ranks = self.group.ranks
        return self.times * _ROUNDS[self.coll] * self.nbytes * (ranks - 1) / ranks


class CollectiveCosts(Protocol):
    """Prices of transfers."""

    @property
    def origin(self) -> str:
        """Where the times come from, in words for a table's head."""

    def seconds(self, transfer: Transfer) -> float:
        """Return the seconds that one of the transfer's operations takes."""


@dataclass(frozen=True)
class AlphaBeta:
    """ParaDL's cost: rings, with a latency and a time for each byte.

    An allreduce over p ranks costs 2 (p - 1) (alpha + n beta / p), and an allgather or
    a reduce_scatter half of it. A message costs alpha + n beta (Kahira et al., "An
    Oracle for Guiding Large-Scale Model/Hybrid Parallel Training of Convolutional
    Neural Networks", HPDC'21, section 4).

    Raises:
        UsageError: a number is negative or not finite, or a penalty is below 1.
    """

    alpha_s: float
    """Seconds of a message without bytes."""
    beta_s: float
    """Seconds of a byte."""
    contention: Mapping[str, float] = field(default_factory=dict)
    """Penalties by a group's axis: beta is multiplied by it; 1, if left out."""

    def __post_init__(self) -> None:
        for name in ("alpha_s", "beta_s"):
            if not 0 <= getattr(self, name) < math.inf:
                raise UsageError(
                    f"{name} is {shown(getattr(self, name))}; expected a finite number "
                    f"from 0"
                )
        for axis, penalty in self.contention.items():
            if not 1 <= penalty < math.inf:
                raise UsageError(
                    f"contention of {axis} is {shown(penalty)}; expected a finite "
                    f"number from 1"
                )

    @property
    def origin(self) -> str:
        """The words for a table's head."""
        return (
            f"ring formulas, alpha {self.alpha_s * 1e6:.4g} us, "
            f"{1e-9 / self.beta_s if self.beta_s else math.inf:.4g} GB/s (projected)"
        )

    def seconds(self, transfer: Transfer) -> float:
        """Return the seconds that one of the transfer's operations takes."""
        beta = self.beta_s * self.contention.get(transfer.group.axis, 1.0)
        if transfer.coll == MESSAGE:
            return self.alpha_s + transfer.nbytes * beta
        ranks = transfer.group.ranks
        each = self.alpha_s + transfer.nbytes * beta / ranks
        return _ROUNDS[transfer.coll] * (ranks - 1) * each
