# SPDX-License-Identifier: Apache-2.0
"""Samples on their way to branches, outputs on their way back, and their gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch

from commrt.comm import Communicator
from commrt.layers.differentiable_once import differentiable_once

__all__ = ["exchanged", "gathered", "part_of", "tied"]

Tensor: TypeAlias = torch.Tensor
Counts: TypeAlias = Sequence[int]


def exchanged(x: Tensor, comm: Communicator, sends: Counts, recvs: Counts) -> Tensor:
    """Return the elements that ranks send each other; differentiable, collective.

    Args:
        x: flat; elements for rank 0, then for rank 1, and so on.
        comm: the ranks.
        sends: elements for each rank.
        recvs: elements from each rank.
    """
    result: Tensor = _Exchanged.apply(x, comm, tuple(sends), tuple(recvs))
    return result


def part_of(x: Tensor, comm: Communicator, low: int, high: int) -> Tensor:
    """Return some samples of those that all ranks have; differentiable.

    Backward it is collective: the gradient of all samples is the sum of all ranks'.
    """
    result: Tensor = _Part.apply(x, comm, low, high)
    return result


def gathered(x: Tensor, comm: Communicator, counts: Counts) -> Tensor:
    """Return the elements of all ranks, flat; differentiable, collective.

    Backward it is local: all ranks have the same gradient of all elements.
    """
    result: Tensor = _Gathered.apply(x, comm, tuple(counts))
    return result


def tied(y: Tensor, x: Tensor) -> Tensor:
    """Return ``y``, whose backward pass runs that of ``x``, too.

    A branch may use no sample, or ignore its input. Its rank sends gradients of its
    samples all the same, as the others wait for them.
    """
    result: Tensor = _Tied.apply(y, x) if x.requires_grad else y
    return result


def _alltoallv(x: Tensor, comm: Communicator, sends: Counts, recvs: Counts) -> Tensor:
    out = x.new_empty(sum(recvs))
    comm.alltoallv(
        x.detach().contiguous(), send_counts=sends, recv_counts=recvs, out=out
    )
    return out


class _Exchanged(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, comm: Communicator, sends: Counts, recvs: Counts
    ) -> Tensor:
        ctx.way = comm, recvs, sends
        return _alltoallv(x, comm, sends, recvs)

    @staticmethod
    @differentiable_once("Branches")
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return _alltoallv(gradient, *ctx.way), None, None, None


class _Part(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Communicator, low: int, high: int) -> Tensor:
        ctx.facts = comm, low, high, x.shape
        return x[low:high].clone()

    @staticmethod
    @differentiable_once("Branches")
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        comm, low, high, shape = ctx.facts
        total = gradient.new_zeros(shape)
        total[low:high] = gradient
        comm.allreduce(total)
        return total, None, None, None


class _Gathered(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Communicator, counts: Counts) -> Tensor:
        low = sum(counts[: comm.rank])
        ctx.own = low, low + counts[comm.rank]
        out = x.new_empty(sum(counts))
        comm.allgatherv(x.detach().contiguous(), counts=counts, out=out)
        return out

    @staticmethod
    @differentiable_once("Branches")
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        low, high = ctx.own
        return gradient[low:high], None, None


class _Tied(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, y: Tensor, x: Tensor) -> Tensor:
        return y.view_as(y)

    @staticmethod
    @differentiable_once("Branches")
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None
