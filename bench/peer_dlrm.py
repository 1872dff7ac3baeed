# SPDX-License-Identifier: Apache-2.0
"""Tables on different ranks, written on torch.distributed alone.

It is what a program would write without a layer, with the same care: one parameter for
all tables of a rank, one message for lengths and indices, one for rows, and rows that
travel while the program computes. It has only what the benchmark needs: whole tables of
one size, and bags with indices in all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.function import once_differentiable

__all__ = ["PackedTables"]

Tensor: TypeAlias = torch.Tensor


class PackedTables(nn.Module):  # type: ignore[misc]
    """Whole tables of one size, each on its owner.

    Args:
        owners: the rank of each table.
        num_embeddings, embedding_dim: of each table.
        group: the ranks.
    """

    def __init__(
        self,
        owners: Sequence[int],
        num_embeddings: int,
        embedding_dim: int,
        group: dist.ProcessGroup,
    ) -> None:
        super().__init__()
        self.group = group
        ranks, rank = dist.get_world_size(group), dist.get_rank(group)
        self.order = sorted(range(len(owners)), key=lambda table: owners[table])
        self.tables_of = [owners.count(each) for each in range(ranks)]
        numbers = [number for each in self.tables_of for number in range(each)]
        self.first_rows = [number * num_embeddings for number in numbers]
        self.weight = nn.EmbeddingBag(
            max(self.tables_of[rank], 1) * num_embeddings,
            embedding_dim,
            mode="sum",
            sparse=True,
            include_last_offset=False,
        ).weight

    def start(self, bags: Sequence[Tensor]) -> _Pending:
        """Send indices, look rows up, and start to send them."""
        samples = len(bags[0])
        ordered = [bags[table] for table in self.order]
        counts = [0] * len(self.tables_of)
        parts = []
        at = 0
        for rank, number in enumerate(self.tables_of):
            own = ordered[at : at + number]
            firsts = self.first_rows[at : at + number]
            at += number
            parts += [each.new_full((samples,), each.shape[1]) for each in own]
            rows = [
                each.view(-1) + first for each, first in zip(own, firsts, strict=True)
            ]
            parts += rows
            counts[rank] = sum(map(len, rows))
        message = torch.cat(parts).to(torch.int32)
        leaving = torch.tensor(
            [[samples, count] for count in counts], dtype=torch.int64
        )
        coming = torch.empty_like(leaving)
        dist.all_to_all_single(coming, leaving, group=self.group)
        mine = self.tables_of[dist.get_rank(self.group)]
        sends = [
            samples * number + count
            for number, count in zip(self.tables_of, counts, strict=True)
        ]
        recvs = [each * mine + count for each, count in coming.tolist()]
        arrived = message.new_empty(sum(recvs))
        dist.all_to_all_single(arrived, message, recvs, sends, group=self.group)
        lengths, rows = [], []
        for part, (each, _) in zip(arrived.split(recvs), coming.tolist(), strict=True):
            lengths.append(part[: each * mine])
            rows.append(part[each * mine :])
        length = torch.cat(lengths)
        offsets = (length.cumsum(0) - length).to(torch.int32)
        pooled = nn.functional.embedding_bag(
            torch.cat(rows), self.weight, offsets, mode="sum", sparse=True
        )
        trip = _Trip(
            self.group,
            [each * mine for each, _ in coming.tolist()],
            [samples * number for number in self.tables_of],
        )
        return _Pending(_Sent.apply(pooled, trip), trip, samples, self.order)


class _Trip:
    """One way for rows, and back for their gradients."""

    def __init__(
        self, group: dist.ProcessGroup, sends: list[int], recvs: list[int]
    ) -> None:
        self.group, self.sends, self.recvs = group, sends, recvs
        self.work: Any = None
        self.landing: Any = None

    def start(self, rows: Tensor, sends: list[int], recvs: list[int]) -> Tensor:
        self.landing = rows.new_empty((sum(recvs), rows.shape[1]))
        self.work = dist.all_to_all_single(
            *(self.landing, rows.contiguous(), recvs, sends),
            group=self.group,
            async_op=True,
        )
        return self.landing

    def wait(self) -> Tensor:
        self.work.wait()
        landing: Tensor = self.landing
        self.work = self.landing = None
        return landing


class _Pending:
    """Rows on their way."""

    def __init__(
        self, landing: Tensor, trip: _Trip, samples: int, order: Sequence[int]
    ) -> None:
        self._landing, self._trip = landing, trip
        self._samples, self._order = samples, order

    def wait(self) -> list[Tensor]:
        """Return the rows of each table."""
        rows = _Arrived.apply(self._landing, self._trip)
        parts = rows.split([self._samples] * len(self._order))
        found: list[Any] = [None] * len(parts)
        for table, part in zip(self._order, parts, strict=True):
            found[table] = part
        return found


class _Sent(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, rows: Tensor, trip: _Trip) -> Tensor:
        ctx.trip = trip
        return trip.start(rows, trip.sends, trip.recvs)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:
        return ctx.trip.wait(), None


class _Arrived(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, landing: Tensor, trip: _Trip) -> Tensor:
        ctx.trip = trip
        return trip.wait().view_as(landing)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.trip.start(gradient, ctx.trip.recvs, ctx.trip.sends)
        return gradient, None
