# SPDX-License-Identifier: Apache-2.0
"""The way of tokens to their experts and back, known only when the router has chosen.

A token travels once to each rank that has any of its experts. There each of these
experts gets a copy; their weighted outputs are summed, and one row travels back.

Source: the split of a mixture of experts over ranks is that of Lepikhin et al.,
"GShard", section 3; tokens that travel once for several experts are DeepEP's.
"""

from __future__ import annotations

from itertools import accumulate
from typing import TypeAlias

import numpy as np
import torch

from commrt.layers.experts.rows import Copies
from commrt.layers.experts.trips import Trip
from commrt.layers.spatial.windows import even_ranges
from commrt.layers.tensor3d.roles import Along

__all__ = ["Arrivals", "Route"]

Tensor: TypeAlias = torch.Tensor


class Route:
    """Where this rank's tokens go; collective along ``expert`` when it is made.

    A *choice* is a token and one of its experts. Choices are in the order of experts,
    then of tokens; the rows that travel are in the order of ranks, then of tokens.

    Args:
        experts: (tokens, k), int64: the chosen experts of each token, no one twice.
        kept: (tokens, k), bool: which choices count; None: all.
        num_experts: place i of p has the experts from i * num_experts // p on.
        along: the axis of the experts.

    Bytes, for p ranks along the axis, m experts of the rank with most, and c choices of
    this rank: an ``alltoall`` of 8 p (1 + m), and an ``alltoallv`` of 4 c.
    """

    def __init__(
        self, experts: Tensor, kept: Tensor | None, num_experts: int, along: Along
    ) -> None:
        device = experts.device
        num_tokens, top_k = experts.shape
        ranges = even_ranges(num_experts, along.size)
        sizes = [high - low for low, high in ranges]
        self._num_own, self._top_k = sizes[along.place], top_k
        is_kept = torch.ones_like(experts, dtype=torch.bool) if kept is None else kept
        flat = torch.nonzero(is_kept.reshape(-1)).view(-1)
        flat = flat[torch.argsort(experts.reshape(-1)[flat], stable=True)]
        self.choices = flat
        """(choices,): the place of each choice in ``experts.reshape(-1)``."""
        chosen = experts.reshape(-1)[flat]
        owner = torch.repeat_interleave(torch.tensor(sizes)).to(device)
        token, rank = flat // top_k, owner[chosen]
        width = max(num_tokens, 1)
        pairs, row = torch.unique(rank * width + token, return_inverse=True)
        # A token has at most one row for each rank, and at most k.
        self.tokens = Copies.of(pairs % width, num_tokens, min(top_k, along.size))
        """The rows that travel, as copies of tokens."""
        rows = torch.bincount(pairs // width, minlength=along.size)
        leaving = np.zeros((along.size, 1 + max(sizes)), np.int64)
        leaving[:, 0] = rows.cpu().numpy()
        load = torch.bincount(chosen, minlength=num_experts).cpu().numpy()
        for place, (low, high) in enumerate(ranges):
            leaving[place, 1 : 1 + high - low] = load[low:high]
        self._coming = leaving
        if along.comm is not None:
            self._coming = np.empty_like(leaving)
            along.comm.alltoall(leaving, out=self._coming)
        row_counts = _numbers(leaving[:, 0]), _numbers(self._coming[:, 0])
        counts = _numbers(leaving[:, 1:].sum(1)), _numbers(self._coming[:, 1:].sum(1))
        self.rows_trip = Trip(along.comm, *row_counts)
        """The way of rows to the experts."""
        self.weights_trip = Trip(along.comm, *counts)
        """The way of each choice's weight."""
        first_row = torch.tensor([0, *accumulate(row_counts[0])]).to(device)
        self._numbers = (row - first_row[rank]).to(torch.int32)
        self._trip = Trip(along.comm, *counts)
        if along.comm is not None:
            self._numbers = self._trip.start(self._numbers)

    def arrivals(self) -> Arrivals:
        """Return what comes to this rank's experts; call it once."""
        if self._trip.comm is not None:
            self._numbers = self._trip.wait()
        device = self._numbers.device
        ranks, own = len(self._coming), self._num_own
        coming = torch.from_numpy(self._coming[:, 1 : 1 + own]).reshape(-1)
        expert = torch.arange(own).repeat(ranks).repeat_interleave(coming).to(device)
        rows = self._coming[:, 0]
        first = torch.from_numpy(np.cumsum(rows) - rows)
        number = torch.from_numpy(self._coming[:, 1:].sum(1))
        source = self._numbers.long() + first.repeat_interleave(number).to(device)
        order = torch.argsort(expert, stable=True)
        most = max(1, min(self._top_k, own))
        copies = Copies.of(source[order], int(rows.sum()), most)
        counts = _numbers(self._coming[:, 1 : 1 + own].sum(0))
        return Arrivals(copies, order, counts)


class Arrivals:
    """The tokens that have come to a rank's experts.

    Args:
        copies: a copy of each row for each of its experts, sorted by expert, then by
            the rank that the token came from, then by token.
        order: the place of each copy among the weights as they arrive.
        counts: the tokens of each expert of this rank.
    """

    def __init__(self, copies: Copies, order: Tensor, counts: tuple[int, ...]) -> None:
        self.copies, self.order, self.counts = copies, order, counts


def _numbers(counts: np.ndarray) -> tuple[int, ...]:
    return tuple(counts.tolist())
