# SPDX-License-Identifier: Apache-2.0
"""Blocking operations, which are differentiable where they are linear.

Gradients follow Horovod, so that programs learn what they learned with it. They are not
always the transposed operation: see docs/reference/horovod.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch

from commrt.errors import UsageError
from commrt.hvd.compression import Compression, Compressor
from commrt.hvd.current import current
from commrt.hvd.handles import synchronize
from commrt.hvd.operators import Average, ReduceOp, Sum, reduction_of
from commrt.hvd.process_sets import ProcessSet, global_process_set
from commrt.hvd.submitting import (
    Splits,
    allreduce_async_,
    alltoall_async,
    barrier_async,
    broadcast_async,
    broadcast_async_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
    grouped_reducescatter_async,
    refusing,
    rows_allgather_async,
)

__all__ = [
    "allgather",
    "allreduce",
    "allreduce_",
    "alltoall",
    "barrier",
    "broadcast",
    "broadcast_",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_reducescatter",
    "join",
    "reducescatter",
]

Tensor: TypeAlias = torch.Tensor
Gradients: TypeAlias = tuple[Any, ...]
Compressing: TypeAlias = type[Compressor]


def _of_backward(name: str | None) -> str | None:
    """Return the name of the operation in the backward pass."""
    return None if name is None else f"{name}.gradient"


def _rank_of(process_set: ProcessSet) -> int:
    rank = process_set.rank()
    assert rank is not None  # it has submitted an operation there
    return rank


# -- allreduce -------------------------------------------------------------------------


class _Allreduce(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(
        ctx: Any,
        name: str | None,
        op: ReduceOp,
        factors: tuple[float, float],
        process_set: ProcessSet,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.call = name, op, factors, process_set
        handle = grouped_allreduce_async(
            list(tensors), None, name, op, *factors, process_set
        )
        return tuple(synchronize(handle))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Gradients:
        name, op, factors, process_set = ctx.call
        if not op.is_linear:
            raise UsageError(
                f"hvd.allreduce with op={op} has no gradient: use hvd.Sum or "
                f"hvd.Average, or detach the tensor"
            )
        found = _Allreduce.apply(
            _of_backward(name), op, factors, process_set, *gradients
        )
        return None, None, None, None, *found


def allreduce(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: Compressing = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Return the average of all ranks' tensors, or another reduction; differentiable.

    Args:
        tensor: of equal type and shape on all ranks; it stays as it is.
        average: the old form of ``op``.
        name: equal on all ranks. None: the n-th unnamed call meets the others' n-th.
        compression: such as ``hvd.Compression.fp16``, for the way.
        op: ``Average`` by itself; ``Sum``, ``Adasum``, ``Min``, ``Max``, ``Product``.
        prescale_factor, postscale_factor: multiply before and after the reduction.
        process_set: the ranks.
    """
    return grouped_allreduce(
        *([tensor], average, name, compression, op),
        *(prescale_factor, postscale_factor, process_set),
    )[0]


def grouped_allreduce(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: Compressing = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """Return the reductions of several tensors; arguments as of ``allreduce``."""
    with refusing("grouped_allreduce", "allreduce", name, process_set):
        reduction = reduction_of("hvd.grouped_allreduce", op, average)
        packed = [compression.compress(tensor) for tensor in tensors]
    factors = prescale_factor, postscale_factor
    found = _Allreduce.apply(
        name, reduction, factors, process_set, *(tensor for tensor, _ in packed)
    )
    return [
        compression.decompress(tensor, context)
        for tensor, (_, context) in zip(found, packed, strict=True)
    ]


def allreduce_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Reduce in place, and return the tensor; arguments as of ``allreduce_async_``."""
    found: Tensor = synchronize(
        allreduce_async_(
            *(tensor, average, name, op),
            *(prescale_factor, postscale_factor, process_set),
        )
    )
    return found


def grouped_allreduce_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """Reduce several tensors in place, and return them in a list."""
    found: list[Tensor] = synchronize(
        grouped_allreduce_async_(
            *(tensors, average, name, op),
            *(prescale_factor, postscale_factor, process_set),
        )
    )
    return found


# -- allgather and broadcast -----------------------------------------------------------


class _Allgather(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(
        ctx: Any, name: str | None, process_set: ProcessSet, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        handle = rows_allgather_async(tensors, name, process_set)
        found, rows = synchronize(handle)
        ctx.call = name, process_set
        rank = _rank_of(process_set)
        ctx.rows = [(sum(each[:rank]), each[rank]) for each in rows]
        return tuple(found)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Gradients:
        name, process_set = ctx.call
        means = _Allreduce.apply(
            *(_of_backward(name), Average, (1.0, 1.0), process_set), *gradients
        )
        own = [
            mean.narrow(0, begin, count)
            for mean, (begin, count) in zip(means, ctx.rows, strict=True)
        ]
        return None, None, *own


def allgather(
    tensor: Tensor,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Return all ranks' rows, in the order of ranks; differentiable.

    Args:
        tensor: this rank's rows; ranks may have different numbers of them.
        name: equal on all ranks, or None.
        process_set: the ranks.
    """
    return grouped_allgather([tensor], name, process_set)[0]


def grouped_allgather(
    tensors: Sequence[Tensor],
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """Return all ranks' rows of several tensors; arguments as of ``allgather``."""
    with refusing("grouped_allgather", "allgather", name, process_set):
        listed = list(tensors)
    return list(_Allgather.apply(name, process_set, *listed))


class _Broadcast(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(
        ctx: Any,
        tensor: Tensor,
        root_rank: int,
        name: str | None,
        process_set: ProcessSet,
    ) -> Tensor:
        ctx.call = root_rank, name, process_set
        found: Tensor = synchronize(
            broadcast_async(tensor, root_rank, name, process_set)
        )
        return found

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Gradients:
        root_rank, name, process_set = ctx.call
        (mean,) = _Allreduce.apply(
            *(_of_backward(name), Average, (1.0, 1.0), process_set), gradient
        )
        is_root = current().comm.rank == root_rank
        return (mean if is_root else torch.zeros_like(mean)), None, None, None


def broadcast(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Return the tensor of ``root_rank``; differentiable.

    Arguments as of ``broadcast_async``.
    """
    found: Tensor = _Broadcast.apply(tensor, root_rank, name, process_set)
    return found


def broadcast_(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Give a tensor the values of ``root_rank``, and return it."""
    found: Tensor = synchronize(broadcast_async_(tensor, root_rank, name, process_set))
    return found


# -- alltoall and reducescatter --------------------------------------------------------


class _Alltoall(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(
        ctx: Any,
        tensor: Tensor,
        splits: Splits,
        name: str | None,
        process_set: ProcessSet,
    ) -> tuple[Tensor, Tensor]:
        handle = alltoall_async(tensor, splits, name, process_set)
        rows, received = synchronize(handle)
        ctx.call = received, name, process_set
        ctx.mark_non_differentiable(received)
        return rows, received

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> Gradients:
        received, name, process_set = ctx.call
        rows, _ = _Alltoall.apply(gradient, received, _of_backward(name), process_set)
        return rows, None, None, None


def alltoall(
    tensor: Tensor,
    splits: Splits = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Tensor | tuple[Tensor, Tensor]:
    """Return the rows that the ranks sent here; differentiable.

    With ``splits`` also a tensor of how many came from each rank. Arguments as of
    ``alltoall_async``.
    """
    rows, received = _Alltoall.apply(tensor, splits, name, process_set)
    return rows if splits is None else (rows, received)


class _ReduceScatter(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(
        ctx: Any,
        name: str | None,
        op: ReduceOp,
        factors: tuple[float, float],
        process_set: ProcessSet,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.call = name, op, factors, process_set
        handle = grouped_reducescatter_async(
            list(tensors), name, op, process_set, *factors
        )
        return tuple(synchronize(handle))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Gradients:
        name, op, (before, after), process_set = ctx.call
        if not op.is_linear:
            raise UsageError(
                f"hvd.reducescatter with op={op} has no gradient: use hvd.Sum or "
                f"hvd.Average, or detach the tensor"
            )
        factor = before * after * (process_set.size() if op is Sum else 1)
        scaled = [gradient * factor for gradient in gradients]
        found = _Allgather.apply(_of_backward(name), process_set, *scaled)
        return None, None, None, None, *found


def reducescatter(
    tensor: Tensor,
    name: str | None = None,
    compression: Compressing = Compression.none,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Tensor:
    """Return this rank's rows of the average, or another reduction; differentiable.

    Rows are cut evenly; the first ranks get one more where they do not divide.
    Arguments as of ``allreduce``.
    """
    return grouped_reducescatter(
        *([tensor], name, compression, op, process_set),
        *(prescale_factor, postscale_factor),
    )[0]


def grouped_reducescatter(
    tensors: Sequence[Tensor],
    name: str | None = None,
    compression: Compressing = Compression.none,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Tensor]:
    """Return this rank's rows of the reductions of several tensors."""
    with refusing("grouped_reducescatter", "reducescatter", name, process_set):
        packed = [compression.compress(tensor) for tensor in tensors]
    factors = prescale_factor, postscale_factor
    found = _ReduceScatter.apply(
        name, op, factors, process_set, *(tensor for tensor, _ in packed)
    )
    return [
        compression.decompress(tensor, context)
        for tensor, (_, context) in zip(found, packed, strict=True)
    ]


# -- without tensors -------------------------------------------------------------------


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Return once all ranks of the process set have called it."""
    synchronize(barrier_async(process_set))


def join(device: int = -1) -> int:
    """Say that this rank has no more data; return once all ranks have called it.

    Meanwhile it adds zeros to sums and averages of the others, which still divide by
    the number of all ranks. Returns the rank that was the last to call it.

    Args:
        device: ignored: the other ranks' tensors say where zeros are made.
    """
    del device
    return current().join()
