# SPDX-License-Identifier: Apache-2.0
"""Elements of a cut dimension that other ranks have: fetched, and their gradients back.

Pattern: one nonblocking list of point-to-point messages, one message for each part of
a window and each rank that has elements of it. The backward pass sends the gradients of
these elements the other way, where the owner adds them in the order of ranks.

Bytes a rank sends: the elements of its piece that lie in other ranks' windows, each
once for every part of a window, times the product of the other extents and the size of
an element. The backward pass: likewise the elements of its window that others own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from commrt.comm import Communicator
from commrt.errors import UsageError, shown
from commrt.layers.spatial.cut import Cut
from commrt.layers.spatial.windows import (
    Kernel,
    Message,
    Range,
    Transfers,
    Window,
    clipped,
    transfers,
)

__all__ = [
    "Strips",
    "fetch",
    "start_messages",
    "start_strips",
    "window",
    "window_of_outputs",
]


def fetch(x: Any, dim: int, cut: Cut, needs: Sequence[Range]) -> Any:
    """Return the elements of a dimension that this rank needs; differentiable.

    Args:
        x: this rank's piece, any shape.
        dim: the dimension that is cut.
        cut: how it is cut; ``x.shape[dim]`` is this rank's size.
        needs: for each rank ``(low, high)`` in the whole dimension, equal on all ranks.
            They may overlap, lie anywhere, and be empty.

    Collective over the cut's ranks, also in the backward pass, where the gradients of
    an element are summed at its owner. ``x`` must need a gradient on all ranks or none.
    Raises UsageError where arguments do not fit, before anything is sent.
    """
    extent = cut.extent
    if len(needs) != cut.comm.size:
        raise UsageError(
            f"fetch: needs={shown(needs)} must have a range for each of the "
            f"{cut.comm.size} ranks"
        )
    for rank, (low, high) in enumerate(needs):
        if not 0 <= low <= high <= extent:
            raise UsageError(
                f"fetch: needs[{rank}]={shown(needs[rank])} must lie within the "
                f"{extent} elements of dimension {dim}"
            )
    return window(x, dim, cut, [clipped(low, high, extent) for low, high in needs])


def window(
    x: Any, dim: int, cut: Cut, windows: Sequence[Window], *, fill: float = 0.0
) -> Any:
    """Return this rank's window of a dimension; differentiable.

    Args:
        x: this rank's piece; ``x.shape[dim]`` is its size in the cut.
        dim: the dimension that is cut.
        cut: how it is cut.
        windows: what each rank needs; equal on all ranks.
        fill: the value of elements that no part of the window covers.

    Collective over the cut's ranks, also in the backward pass. Where the window is the
    own piece, the result is ``x`` itself. Raises UsageError for an ``x`` of another
    size, before anything is sent.
    """
    if not 0 <= dim < x.dim() or x.shape[dim] != cut.sizes[cut.comm.rank]:
        raise UsageError(
            f"window: x of shape {tuple(x.shape)} has not the "
            f"{cut.sizes[cut.comm.rank]} elements in dimension {dim} that rank "
            f"{cut.comm.rank} has in the cut {cut.sizes}"
        )
    length = windows[cut.comm.rank].length
    moved = transfers(cut.pieces, cut.comm.rank, windows)
    if not moved.sends and not moved.recvs and _is_whole(moved, x.shape[dim], length):
        return x
    return _Gather.apply(x, dim, cut.comm, moved, length, fill)


def window_of_outputs(
    x: Any, dim: int, cut: Cut, kernel: Kernel, outputs: Cut, *, fill: float = 0.0
) -> Any:
    """Return what this rank's outputs read along a cut, with ``fill`` as padding.

    Args:
        x: this rank's piece.
        dim: the dimension that is cut.
        cut: how it is cut.
        kernel: what outputs read in this dimension.
        outputs: how the result is cut there.
        fill: the value of padding.

    Collective like ``window``.
    """
    reads = [kernel.reads(*out) for out in outputs.pieces]
    windows = [clipped(*each, cut.extent) for each in reads]
    return window(x, dim, cut, windows, fill=fill)


def _is_whole(moved: Transfers, size: int, length: int) -> bool:
    """Return whether a window is the own piece and nothing else."""
    return size == length and (size == 0 or moved.kept == ((0, size, 0),))


class _Gather(torch.autograd.Function):  # type: ignore[misc]
    """Pieces to windows."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Any,
        dim: int,
        comm: Communicator,
        moved: Transfers,
        length: int,
        fill: float,
    ) -> Any:
        ctx.args = dim, comm, moved, x.shape[dim]
        strips = start_strips(x, dim, comm, moved.sends, moved.recvs)
        shape = [*x.shape]
        shape[dim] = length
        covered = sum(high - low for low, high, _ in moved.kept)
        covered += sum(high - low for _, low, high in moved.recvs)
        out = x.new_empty(shape) if covered == length else x.new_full(shape, fill)
        for low, high, at in moved.kept:
            out.narrow(dim, at, high - low).copy_(x.narrow(dim, low, high - low))
        for (_, low, high), strip in zip(moved.recvs, strips.wait(), strict=True):
            out.narrow(dim, low, high - low).copy_(strip)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> tuple[Any, ...]:
        return _ScatterAdd.apply(gradient, *ctx.args), None, None, None, None, None


class _ScatterAdd(torch.autograd.Function):  # type: ignore[misc]
    """Windows to pieces: what windows have of an element is summed at its owner."""

    @staticmethod
    def forward(
        ctx: Any, x: Any, dim: int, comm: Communicator, moved: Transfers, size: int
    ) -> Any:
        ctx.args = dim, comm, moved, x.shape[dim], 0.0
        strips = start_strips(x, dim, comm, moved.recvs, moved.sends)
        shape = [*x.shape]
        shape[dim] = size
        kept = moved.kept
        if len(kept) == 1 and kept[0].low == 0 and kept[0].high == size:
            out = x.narrow(dim, kept[0].at, size).clone(
                memory_format=torch.contiguous_format
            )
        else:
            out = x.new_zeros(shape)
            for low, high, at in kept:
                out.narrow(dim, low, high - low).add_(x.narrow(dim, at, high - low))
        for (_, low, high), strip in zip(moved.sends, strips.wait(), strict=True):
            out.narrow(dim, low, high - low).add_(strip)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> tuple[Any, ...]:
        return _Gather.apply(gradient, *ctx.args), None, None, None, None


# -- messages --------------------------------------------------------------------------


class Strips:
    """Strips of a tensor on their way; ``wait()`` returns those that come."""

    def __init__(self, request: Any, coming: list[Any], leaving: list[Any]) -> None:
        self._request = request
        self._coming = coming
        self._leaving = leaving

    def wait(self) -> list[Any]:
        """Return the strips that came, in the order of their messages."""
        if self._request is not None:
            self._request.wait()
        return self._coming


def start_strips(
    x: Any,
    dim: int,
    comm: Communicator,
    sends: Sequence[Message],
    recvs: Sequence[Message],
) -> Strips:
    """Start to send strips of a tensor, and to receive others; nothing is waited for.

    Args:
        x: the tensor; ``sends`` are ranges of its dimension ``dim``.
        dim: the dimension that is cut.
        comm: the ranks along it.
        sends: what leaves; strips that are not contiguous are copied.
        recvs: what comes: strips of ``high - low`` elements in this dimension.
    """
    leaving = [x.narrow(dim, low, high - low).contiguous() for _, low, high in sends]
    shape = [*x.shape]
    coming = []
    for _, low, high in recvs:
        shape[dim] = high - low
        coming.append(x.new_empty(shape))
    return start_messages(comm, leaving, sends, coming, recvs)


def start_messages(
    comm: Communicator,
    leaving: list[Any],
    sends: Sequence[Message],
    coming: list[Any],
    recvs: Sequence[Message],
) -> Strips:
    """Start messages of contiguous strips; a strip without elements is not sent."""
    out = [
        (strip, message.peer)
        for strip, message in zip(leaving, sends, strict=True)
        if strip.numel()
    ]
    into = [
        (strip, message.peer)
        for strip, message in zip(coming, recvs, strict=True)
        if strip.numel()
    ]
    request = None
    if out or into:
        request = comm.multi_sendrecv(sends=out, recvs=into, nonblocking=True)
    return Strips(request, coming, leaving)
