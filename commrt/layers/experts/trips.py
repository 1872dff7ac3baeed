# SPDX-License-Identifier: Apache-2.0
"""Rows that travel between ranks while these compute, and their gradients likewise.

``sent`` starts an ``alltoallv``, and ``arrived`` waits for it. Backward, ``arrived``
starts the mirrored ``alltoallv``, and ``sent`` waits for it. torch runs the backward
pass of what was computed between the two between them again.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import torch

from commrt.comm import Communicator
from commrt.layers.differentiable_once import differentiable_once
from commrt.request import Request

__all__ = ["Trip", "arrived", "moved", "sent"]

Tensor: TypeAlias = torch.Tensor
Counts: TypeAlias = tuple[int, ...]


class Trip:
    """One way between ranks for rows, there and back for their gradients.

    Args:
        comm: the ranks; None: one rank, and nothing is sent.
        sends: rows for each rank.
        recvs: rows from each rank.
    """

    def __init__(self, comm: Communicator | None, sends: Counts, recvs: Counts) -> None:
        self.comm = comm
        self._sends, self._recvs = sends, recvs
        self._request: Request | None = None
        self._arriving: Tensor | None = None

    def mirrored(self) -> Trip:
        """Return the way back."""
        return Trip(self.comm, self._recvs, self._sends)

    def start(self, rows: Tensor, *, back: bool = False) -> Tensor:
        """Send rows (n, ...), and return where others arrive."""
        assert self.comm is not None
        sends, recvs = self._sends, self._recvs
        if back:
            sends, recvs = recvs, sends
        each = rows.shape[1:].numel()
        out = rows.new_empty((sum(recvs), *rows.shape[1:]))
        self._arriving = out
        self._request = self.comm.alltoallv(
            rows.detach().contiguous().view(-1),
            send_counts=tuple(count * each for count in sends),
            recv_counts=tuple(count * each for count in recvs),
            out=out.view(-1),
            nonblocking=True,
        )
        return out

    def wait(self) -> Tensor:
        """Return what has arrived."""
        assert self._request is not None
        assert self._arriving is not None
        self._request.wait()
        found, self._request, self._arriving = self._arriving, None, None
        return found


def sent(rows: Tensor, trip: Trip) -> Tensor:
    """Start a trip, and return the buffer that ``arrived`` needs; differentiable."""
    if trip.comm is None:
        return rows
    buffer: Tensor = _Sent.apply(rows, trip)
    return buffer


def arrived(buffer: Tensor, trip: Trip) -> Tensor:
    """Return the rows that a trip has brought; differentiable."""
    if trip.comm is None:
        return buffer
    rows: Tensor = _Arrived.apply(buffer, trip)
    return rows


def moved(rows: Tensor, trip: Trip) -> Tensor:
    """Return the rows that come for those that leave; differentiable."""
    return arrived(sent(rows, trip), trip)


class _Sent(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, rows: Tensor, trip: Trip) -> Tensor:
        ctx.trip = trip
        return trip.start(rows)

    @staticmethod
    @differentiable_once("a mixture of experts")
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:
        """Return the gradient that has come back; the buffer's own is no message."""
        return ctx.trip.wait(), None


class _Arrived(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, buffer: Tensor, trip: Trip) -> Tensor:
        ctx.trip = trip
        return trip.wait().view_as(buffer)

    @staticmethod
    @differentiable_once("a mixture of experts")
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.trip.start(gradient, back=True)
        return gradient, None
