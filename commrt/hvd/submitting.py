# SPDX-License-Identifier: Apache-2.0
"""Nonblocking operations: each returns a handle for ``synchronize`` and ``poll``.

A call that one rank refuses fails on all of them: the rank that refuses it raises at
once, and the others are told why when they wait.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeAlias

import torch

from commrt.arrays.tensors import is_dense
from commrt.errors import UsageError, shown
from commrt.hvd.adasum import check_ranks
from commrt.hvd.current import current
from commrt.hvd.entries import Entry
from commrt.hvd.handles import Handle
from commrt.hvd.operators import Adasum, Average, ReduceOp, reduction_of
from commrt.hvd.process_sets import ProcessSet, global_process_set
from commrt.hvd.signatures import Signature
from commrt.vocabulary.checks import as_integer

__all__ = [
    "MOVED",
    "Call",
    "allgather_async",
    "allreduce_async",
    "allreduce_async_",
    "alltoall_async",
    "barrier_async",
    "broadcast_async",
    "broadcast_async_",
    "gradients_allreduce_async_",
    "grouped_allgather_async",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter_async",
    "reducescatter_async",
    "refusing",
    "rows_allgather_async",
]

Tensor: TypeAlias = torch.Tensor
REDUCED = (
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
)
MOVED = (torch.bool, *REDUCED)
Splits: TypeAlias = Sequence[int] | Tensor | None


class Call:
    """One call of a user's: its process set, its name, and its refusal.

    Args:
        what: name of the function.
        kind: of operation.
        name: given by the user, or None.
        process_set: given by the user.
    """

    def __init__(
        self, what: str, kind: str, name: str | None, process_set: ProcessSet
    ) -> None:
        self.what = f"hvd.{what}"
        self.kind = kind
        if not isinstance(process_set, ProcessSet):
            raise UsageError(
                f"{self.what}: process_set={shown(process_set)} must be a ProcessSet"
            )
        self.session = current()
        self.number = process_set.number(self.what)
        self.session.set_of(self.number)
        self.ranks = self.session.ranks_of(self.number)
        if name is not None and not isinstance(name, str):
            raise UsageError(f"{self.what}: name={shown(name)} must be a string")
        self.place: int | None = None
        if name is None:
            self.place = self.session.next_number(self.number, kind)
            name = f"{kind}.noname.{self.place}"
        self.name = name

    def entry(
        self,
        tensors: Sequence[Tensor],
        signature: Callable[[], dict[str, Any]],
        types: Sequence[torch.dtype],
        *,
        in_place: bool = False,
    ) -> Entry:
        """Return the operation, submitted.

        Args:
            tensors: this rank's.
            signature: returns fields of the signature, or refuses the call.
            types: the element types that the operation takes.
            in_place: whether results go into the tensors.
        """
        try:
            self._check(tensors, types)
            fields = signature()
        except UsageError as error:
            self.refuse(error)
            raise
        described = tuple(
            (str(x.dtype).removeprefix("torch."), tuple(x.shape)) for x in tensors
        )
        device = tensors[0].device.type if tensors else "cpu"
        full = Signature(self.kind, described, device, **fields)
        inputs = [x.detach() for x in tensors]
        entry = Entry(self.name, full, inputs, in_place=in_place, number=self.place)
        self.session.submit(self.number, entry)
        return entry

    def refuse(self, error: Exception) -> None:
        """Tell the other ranks that this rank cannot make the call."""
        refusal = Signature(self.kind, refusal=str(error) or repr(error))
        entry = Entry(self.name, refusal, number=self.place)
        self.session.refuse(self.number, entry)

    def _check(self, tensors: Sequence[Tensor], types: Sequence[torch.dtype]) -> None:
        for x in tensors:
            if not isinstance(x, torch.Tensor):
                raise UsageError(f"{self.what}: {shown(x)} is no torch tensor")
            if not is_dense(x):
                raise UsageError(
                    f"{self.what}: {self.name} is a tensor of layout {x.layout}: use "
                    f"hvd.sparse_allreduce_async, or x.to_dense()"
                )
            if x.dtype not in types:
                listed = ", ".join(str(t).removeprefix("torch.") for t in types)
                raise UsageError(
                    f"{self.what}: {self.name} has elements of {x.dtype}; it takes "
                    f"{listed}"
                )
        if len({x.device.type for x in tensors}) > 1:
            raise UsageError(
                f"{self.what}: the tensors of {self.name} are on different devices"
            )

    def check_rows(self, tensors: Sequence[Tensor]) -> None:
        """Refuse tensors without a first dimension."""
        for x in tensors:
            if x.dim() == 0:
                raise UsageError(
                    f"{self.what}: {self.name} has no dimension: its first one is that "
                    f"of rows; pass x.reshape(1)"
                )

    def handle(self, entry: Entry, result: Callable[[], Any]) -> Handle:
        """Return the handle of a submitted operation."""
        return Handle(self.session, self.number, [entry], result)


@contextmanager
def refusing(
    what: str, kind: str, name: str | None, process_set: ProcessSet
) -> Iterator[None]:
    """Tell the other ranks of an error that comes before a call, and raise it.

    Without this they would wait for the call, and unnamed calls would be numbered
    otherwise than here. Arguments as of ``Call``.
    """
    try:
        yield
    except Exception as error:
        Call(what, kind, name, process_set).refuse(error)
        raise


def _factor(what: str, name: str, factor: float) -> float:
    try:
        found = float(factor)
    except (TypeError, ValueError, OverflowError):
        found = math.nan
    if math.isnan(found):
        raise UsageError(f"{what}: {name}={shown(factor)} must be a number")
    return found


class _Wanted(NamedTuple):
    """The arguments that all reductions have."""

    average: bool | None
    name: str | None
    op: ReduceOp | None
    factors: tuple[float, float]
    process_set: ProcessSet
    pieces: str = ""


def _reduced(call: Call, tensors: Sequence[Tensor], wanted: _Wanted) -> dict[str, Any]:
    """Return the fields of the signature of a reduction."""
    reduction = reduction_of(call.what, wanted.op, wanted.average)
    if reduction is Adasum:
        check_ranks(len(call.ranks))
        if call.number != 0:
            raise UsageError(
                f"{call.what}: op=hvd.Adasum is for the set of all ranks, not for "
                f"process set {call.number}"
            )
        if not all(x.is_floating_point() for x in tensors):
            raise UsageError(
                f"{call.what}: op=hvd.Adasum is for floating-point tensors"
            )
    before, after = wanted.factors
    return {
        "op": reduction.value,
        "prescale": _factor(call.what, "prescale_factor", before),
        "postscale": _factor(call.what, "postscale_factor", after),
        "pieces": wanted.pieces,
    }


def _listed(
    what: str,
    kind: str,
    tensors: Sequence[Tensor],
    name: str | None,
    process_set: ProcessSet,
) -> list[Tensor]:
    """Return the tensors of a grouped call as a list, or refuse the call."""
    with refusing(what, kind, name, process_set):
        if isinstance(tensors, torch.Tensor) or not isinstance(tensors, Sequence):
            raise UsageError(f"hvd.{what}: {shown(tensors)} must be a list of tensors")
        if not tensors:
            raise UsageError(f"hvd.{what}: there are no tensors in the list")
        return list(tensors)


# -- allreduce -------------------------------------------------------------------------


def _allreduce(
    what: str,
    tensors: Sequence[Tensor],
    in_place: bool,
    result: Callable[[Entry], Any],
    wanted: _Wanted,
) -> Handle:
    call = Call(what, "allreduce", wanted.name, wanted.process_set)
    entry = call.entry(
        tensors, lambda: _reduced(call, tensors, wanted), REDUCED, in_place=in_place
    )
    return call.handle(entry, lambda: result(entry))


def allreduce_async(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start an ``allreduce`` of a tensor, which stays as it is.

    Args:
        tensor: of equal type and shape on all ranks.
        average: the old form of ``op``.
        name: equal on all ranks. None: the n-th unnamed call meets the others' n-th.
        op: ``Average`` by itself; ``Sum``, ``Adasum``, ``Min``, ``Max``, ``Product``.
        prescale_factor, postscale_factor: multiply before and after the reduction.
        process_set: the ranks.
    """
    factors = prescale_factor, postscale_factor
    wanted = _Wanted(average, name, op, factors, process_set)
    return _allreduce(
        "allreduce_async", [tensor], False, lambda entry: entry.outputs[0], wanted
    )


def allreduce_async_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start an ``allreduce`` in place. Arguments as of ``allreduce_async``."""
    factors = prescale_factor, postscale_factor
    wanted = _Wanted(average, name, op, factors, process_set)
    return _allreduce("allreduce_async_", [tensor], True, lambda _: tensor, wanted)


def grouped_allreduce_async(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start an ``allreduce`` of several tensors, none before all are there.

    Arguments as of ``allreduce_async``. The result is a list.
    """
    factors = prescale_factor, postscale_factor
    wanted = _Wanted(average, name, op, factors, process_set)
    what = "grouped_allreduce_async"
    listed = _listed(what, "allreduce", tensors, name, process_set)
    return _allreduce(what, listed, False, lambda entry: list(entry.outputs), wanted)


def gradients_allreduce_async_(
    gradients: Sequence[Tensor],
    pieces: str,
    name: str,
    op: ReduceOp,
    factors: tuple[float, float],
    process_set: ProcessSet,
) -> Handle:
    """Start an ``allreduce`` of gradients in place; the result is their list.

    ``pieces`` says which places of cut parameters they belong to: the same on all
    ranks, or the call fails on all.
    """
    what = "DistributedOptimizer"
    wanted = _Wanted(None, name, op, factors, process_set, pieces)
    return _allreduce(what, gradients, True, lambda _: gradients, wanted)


def grouped_allreduce_async_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start an ``allreduce`` of several tensors in place; the result is their list."""
    factors = prescale_factor, postscale_factor
    wanted = _Wanted(average, name, op, factors, process_set)
    what = "grouped_allreduce_async_"
    listed = _listed(what, "allreduce", tensors, name, process_set)
    return _allreduce(what, listed, True, lambda _: listed, wanted)


def _allgather(
    what: str,
    tensors: Sequence[Tensor],
    result: Callable[[Entry], Any],
    name: str | None,
    process_set: ProcessSet,
) -> Handle:
    call = Call(what, "allgather", name, process_set)

    def signature() -> dict[str, Any]:
        call.check_rows(tensors)
        return {}

    entry = call.entry(tensors, signature, MOVED)
    return call.handle(entry, lambda: result(entry))


def allgather_async(
    tensor: Tensor,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start an ``allgather``: all ranks' rows, in the order of ranks.

    Ranks may have different numbers of rows; types and other dimensions are equal.
    """
    return _allgather(
        "allgather_async", [tensor], lambda entry: entry.outputs[0], name, process_set
    )


def grouped_allgather_async(
    tensors: Sequence[Tensor],
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start an ``allgather`` of several tensors, none before all are there."""
    what = "grouped_allgather_async"
    listed = _listed(what, "allgather", tensors, name, process_set)
    return _allgather(
        what, listed, lambda entry: list(entry.outputs), name, process_set
    )


def rows_allgather_async(
    tensors: Sequence[Tensor], name: str | None, process_set: ProcessSet
) -> Handle:
    """Start an ``allgather``; the result is tensors, and each one's rows by rank."""

    def result(entry: Entry) -> tuple[list[Any], list[tuple[int, ...]]]:
        numbers = range(len(tensors))
        return list(entry.outputs), [entry.gathered_rows[each] for each in numbers]

    listed = _listed("grouped_allgather", "allgather", tensors, name, process_set)
    return _allgather("allgather", listed, result, name, process_set)


def _broadcast(
    what: str,
    tensor: Tensor,
    in_place: bool,
    root_rank: int,
    name: str | None,
    process_set: ProcessSet,
) -> Handle:
    call = Call(what, "broadcast", name, process_set)

    def signature() -> dict[str, Any]:
        root = as_integer(root_rank)
        if root not in call.ranks:
            raise UsageError(
                f"{call.what}: root_rank={shown(root_rank)} must be one of the ranks "
                f"{call.ranks} of the process set, as hvd.rank() numbers them"
            )
        return {"root": call.ranks.index(root)}

    entry = call.entry([tensor], signature, MOVED, in_place=in_place)
    return call.handle(entry, lambda: tensor if in_place else entry.outputs[0])


def broadcast_async(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start a ``broadcast`` of a rank's tensor; this rank's stays as it is.

    Args:
        tensor: of equal type and shape on all ranks.
        root_rank: the rank that has the values, as ``hvd.rank()`` numbers ranks.
        name: equal on all ranks, or None.
        process_set: the ranks.
    """
    return _broadcast("broadcast_async", tensor, False, root_rank, name, process_set)


def broadcast_async_(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start a ``broadcast`` in place. Arguments as of ``broadcast_async``."""
    return _broadcast("broadcast_async_", tensor, True, root_rank, name, process_set)


# -- alltoall, reducescatter, barrier --------------------------------------------------


def alltoall_async(
    tensor: Tensor,
    splits: Splits = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start an ``alltoall`` of rows.

    Args:
        tensor: the rows for rank 0, then those for rank 1, and so on.
        splits: rows for each rank of the set; None: equally many.
        name: equal on all ranks, or None.
        process_set: the ranks.

    The result is the rows that came, and a tensor with how many came from each rank.
    """
    call = Call("alltoall_async", "alltoall", name, process_set)

    def signature() -> dict[str, Any]:
        call.check_rows([tensor])
        return {"splits": _splits_of(call, len(tensor), splits)}

    entry = call.entry([tensor], signature, MOVED)
    dtype, device = torch.int32, torch.device("cpu")
    if isinstance(splits, torch.Tensor):
        dtype, device = splits.dtype, splits.device

    def result() -> tuple[Tensor | None, Tensor]:
        received = torch.tensor(entry.received_splits, dtype=dtype, device=device)
        return entry.outputs[0], received

    return call.handle(entry, result)


def _splits_of(call: Call, num_rows: int, splits: Splits) -> tuple[int, ...]:
    size = len(call.ranks)
    if splits is None:
        if num_rows % size:
            raise UsageError(
                f"{call.what}: {call.name} has {num_rows} rows, which {size} ranks "
                f"cannot have in equal parts: pass splits, the rows for each rank"
            )
        return (num_rows // size,) * size
    if isinstance(splits, torch.Tensor):
        splits = splits.tolist()
    try:
        given = [as_integer(each) for each in splits]
    except TypeError:
        given = [None]
    rows = tuple(each for each in given if each is not None and each >= 0)
    if len(rows) < len(given) or len(rows) != size or sum(rows) != num_rows:
        raise UsageError(
            f"{call.what}: splits={shown(splits)} must be {size} whole numbers from 0, "
            f"the rows of {call.name} for each rank, which are {num_rows} in all"
        )
    return rows


def _reducescatter(
    what: str,
    tensors: Sequence[Tensor],
    result: Callable[[Entry], Any],
    wanted: _Wanted,
) -> Handle:
    call = Call(what, "reducescatter", wanted.name, wanted.process_set)

    def signature() -> dict[str, Any]:
        call.check_rows(tensors)
        if wanted.op is Adasum:
            raise UsageError(f"{call.what}: op=hvd.Adasum is for hvd.allreduce alone")
        return _reduced(call, tensors, wanted)

    entry = call.entry(tensors, signature, REDUCED)
    return call.handle(entry, lambda: result(entry))


def reducescatter_async(
    tensor: Tensor,
    name: str | None = None,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Start a ``reducescatter``: each rank gets some rows of the reduction.

    Rows are cut evenly; the first ranks get one more where they do not divide.
    Arguments as of ``allreduce_async``.
    """
    factors = prescale_factor, postscale_factor
    wanted = _Wanted(None, name, op, factors, process_set)
    return _reducescatter(
        "reducescatter_async", [tensor], lambda entry: entry.outputs[0], wanted
    )


def grouped_reducescatter_async(
    tensors: Sequence[Tensor],
    name: str | None = None,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Start a ``reducescatter`` of several tensors, none before all are there."""
    factors = prescale_factor, postscale_factor
    wanted = _Wanted(None, name, op, factors, process_set)
    what = "grouped_reducescatter_async"
    listed = _listed(what, "reducescatter", tensors, name, process_set)
    return _reducescatter(what, listed, lambda entry: list(entry.outputs), wanted)


def barrier_async(process_set: ProcessSet = global_process_set) -> Handle:
    """Start a barrier: it is over once all ranks of the set have come to it."""
    call = Call("barrier", "barrier", None, process_set)
    entry = call.entry([], dict, ())
    return call.handle(entry, lambda: None)
