# SPDX-License-Identifier: Apache-2.0
"""The arguments of calls whose blocks differ in length, checked before anything is
sent.

Counts are elements per rank. An alltoallv that is not told what it gets asks the other
ranks first: that is the one thing here that is sent.
"""

from __future__ import annotations

from math import prod
from typing import Any, Protocol

import numpy as np

from commrt.arrays.host import HostView, copy_of, empty_like_array
from commrt.calls.arguments import (
    Bound,
    Call,
    bind,
    check_overlap,
    check_pair,
    check_reduced,
    check_root,
    check_writable,
)
from commrt.errors import CommError, TimeoutError_, UsageError, shown
from commrt.group.group import CallChecker, Exchange
from commrt.vocabulary.checks import as_integer, as_items

__all__ = ["Exchanging", "bind_call", "bind_counted", "check_counts"]

_LARGEST = 2**63 - 1


class Exchanging(Exchange, Protocol):
    """A group of ranks that can exchange counts."""

    @property
    def name(self) -> str:
        """Its name in messages."""

    @property
    def checker(self) -> CallChecker | None:
        """Compares calls across ranks in check mode."""

    @property
    def nan_check(self) -> bool:
        """True if calls whose arrays have NaN or infinity are refused."""

    @property
    def next_seq(self) -> int:
        """Number of the next operation."""

    @property
    def rank(self) -> int:
        """This rank."""

    @property
    def size(self) -> int:
        """Number of ranks."""

    @property
    def timeout_s(self) -> float:
        """Default limit of a wait, in seconds."""

    def check_usable(self) -> None:
        """Raise ClosedError or RevokedError where the group cannot be used."""

    def give_up(self, why: str) -> None:
        """Make it unusable, here and for ranks of this node that wait."""


def bind_call(comm: Exchanging, call: Call) -> Bound:
    """Check the arrays of any collective; allocate the output if needed."""
    if not call.spec.count_arguments:
        return bind(call, comm.rank, comm.size)
    if len(call.counts) != 2 or call.counts[1] is not None:
        return bind_counted(call, comm.rank, comm.size)
    partly = _bind_sent(call, comm.rank, comm.size)
    if comm.checker is not None:
        comm.checker.check(call, partly)
    received = _exchange(comm, call, partly.counts[0])
    return bind_counted(call, comm.rank, comm.size, received)


def bind_counted(
    call: Call, rank: int, size: int, received: tuple[int, ...] | None = None
) -> Bound:
    """Check counts and arrays; ``received`` where the other ranks have said so."""
    check_root(call.spec, call.root, size)
    if len(call.counts) == 2:
        return _bind_pairs(call, rank, size, received)
    return _bind_known(call, rank, size)


def check_counts(
    call: Call, argument: str, value: Any, rank: int, size: int
) -> tuple[int, ...]:
    """Return the counts as integers; UsageError names rank, argument and place."""
    where = f"{call.spec.name}, rank {rank}"
    if value is None:
        raise UsageError(
            f"{where}: pass {argument}=, a number of elements for each of the {size} "
            f"ranks"
        )
    counts = _integers(value)
    if counts is None:
        raise UsageError(
            f"{where}: {argument}={shown(value)} must be {size} integers, a number of "
            f"elements for each rank"
        )
    if len(counts) != size:
        raise UsageError(
            f"{where}: {argument} has {len(counts)} numbers, expected one for each of "
            f"the {size} ranks"
        )
    for peer, count in enumerate(counts):
        if count < 0:
            raise UsageError(
                f"{where}: {argument}[{peer}]={shown(count)} is negative: give a "
                "number of elements"
            )
    if sum(counts) > _LARGEST:
        raise UsageError(
            f"{where}: {argument} add up to {shown(sum(counts))}: too many, expected "
            f"at most {_LARGEST} elements; check the numbers, or split the call"
        )
    return counts


def _integers(value: Any) -> tuple[int, ...] | None:
    if isinstance(value, np.ndarray) and value.ndim == 1 and value.dtype.kind in "iu":
        return tuple(value.tolist())
    items = as_items(value)
    if items is None:
        return None
    whole = tuple(one for one in map(as_integer, items) if one is not None)
    return whole if len(whole) == len(items) else None


def _bind_known(call: Call, rank: int, size: int) -> Bound:
    """Check the arrays of an operation whose counts all ranks know."""
    spec = call.spec
    counts = check_counts(call, "counts", call.counts[0], rank, size)
    total, own = sum(counts), counts[rank]
    is_root = rank == call.root
    gathers = spec.out_count == "times_size"
    out_count = total if gathers else own
    if call.x is None and spec.input_on == "root":
        return _bind_without_x(call, rank, counts)
    x = call.view(call.x, "x")
    if spec.reduces:
        check_reduced(call, x)
    _check_sum(call, x, own if gathers else total, rank, "counts", gathers)
    has_x = is_root or spec.input_on == "all"
    if spec.output_on == "root" and not is_root:
        return Bound(x, None, None, x.dtype, total, (counts,), x.count)
    out = _output(call, x, counts if gathers else (own,), out_count)
    is_own = has_x and _own_block(x, out, sum(counts[:rank]))
    if is_own and not gathers:
        x = copy_of(x)
    elif has_x and not is_own:
        check_overlap(call, x, out)
    result = out.array if call.out is None else call.out
    sent = x if has_x else None
    shares = is_own and gathers
    return Bound(sent, out, result, x.dtype, total, (counts,), x.count, shares)


def _bind_without_x(call: Call, rank: int, counts: tuple[int, ...]) -> Bound:
    if rank == call.root or call.out is None:
        missing = "x on the root" if rank == call.root else "out= where x is None"
        raise UsageError(f"{call.spec.name}, rank {rank}: pass {missing}")
    out = call.view(call.out, "out")
    _check_sum(call, out, counts[rank], rank, "counts", True, "out")
    check_writable(call.spec, out)
    return Bound(None, out, call.out, out.dtype, sum(counts), (counts,))


def _check_sum(
    call: Call,
    array: HostView,
    expected: int,
    rank: int,
    argument: str,
    one: bool,
    what: str = "x",
) -> None:
    if array.count == expected:
        return
    says = f"{argument}[{rank}] is" if one else f"{argument} add up to"
    raise UsageError(
        f"{call.spec.name}, rank {rank}: {what} has {array.count} elements (shape "
        f"{array.shape}), but {says} {expected}: counts are elements, not bytes or rows"
    )


def _bind_sent(call: Call, rank: int, size: int) -> Bound:
    """Check what an alltoallv sends, where the ranks are to say what it gets."""
    if call.out is not None:
        raise UsageError(
            f"{call.spec.name}, rank {rank}: out= needs recv_counts=, the number of "
            f"elements that each rank sends here; without both, the ranks exchange "
            f"them and out is allocated"
        )
    sent = check_counts(call, "send_counts", call.counts[0], rank, size)
    x = call.view(call.x, "x")
    _check_sum(call, x, sum(sent), rank, "send_counts", False)
    return Bound(x, None, None, x.dtype, x.count, (sent,))


def _bind_pairs(
    call: Call, rank: int, size: int, received: tuple[int, ...] | None
) -> Bound:
    spec = call.spec
    sent = check_counts(call, "send_counts", call.counts[0], rank, size)
    if received is None:
        received = check_counts(call, "recv_counts", call.counts[1], rank, size)
    if sent[rank] != received[rank]:
        raise UsageError(
            f"{spec.name}, rank {rank}: send_counts[{rank}] is {sent[rank]} and "
            f"recv_counts[{rank}] is {received[rank]}: what a rank sends to itself is "
            f"what it gets"
        )
    x = call.view(call.x, "x")
    _check_sum(call, x, sum(sent), rank, "send_counts", False)
    out = _output(call, x, received, sum(received))
    check_overlap(call, x, out, in_place=sent == received)
    result = out.array if call.out is None else call.out
    return Bound(x, out, result, x.dtype, x.count, (sent, received), x.count)


def _output(call: Call, x: HostView, counts: tuple[int, ...], total: int) -> HostView:
    spec = call.spec
    if call.out is None:
        shape = _joined_shape(x, counts, total)
        return call.view_new(empty_like_array(x, shape), x, shape)
    out = call.view(call.out, "out")
    check_pair(call, x, out, total)
    check_writable(spec, out)
    return out


def _joined_shape(x: HostView, counts: tuple[int, ...], total: int) -> tuple[int, ...]:
    """Return the shape of blocks put one after the other: of rows, where all are."""
    row = prod(x.shape[1:])
    if len(x.shape) > 1 and row and all(count % row == 0 for count in counts):
        return (total // row, *x.shape[1:])
    return (total,)


def _own_block(x: HostView, out: HostView, elements_before: int) -> bool:
    """Return whether one array is this rank's block of the other (NCCL's in place)."""
    small, large = (x, out) if x.nbytes <= out.nbytes else (out, x)
    at = large.address + elements_before * x.dtype.itemsize
    inside = at + small.nbytes <= large.address + large.nbytes
    return bool(small.nbytes) and small.address == at and inside


def _exchange(comm: Exchanging, call: Call, sent: tuple[int, ...]) -> tuple[int, ...]:
    """Return the number of elements that each rank sends here; every rank calls it."""
    counts = np.array(sent, np.int64)
    limit = comm.timeout_s if call.timeout_s is None else call.timeout_s
    channel = comm if comm.checker is None else comm.checker.channel
    what = f"{call.spec.name}, whose recv_counts the ranks exchange,"
    try:
        told = channel.alltoall(counts, out=np.empty_like(counts), timeout_s=limit)
    except TimeoutError_ as error:
        # Counts that come later must not be taken for what the next call sends.
        comm.give_up(f"{call.spec.name} waited in vain for the counts of other ranks")
        raise TimeoutError_(
            f"{what} was not complete, and {comm.name} cannot be used any more: "
            f"{str(error).partition('; it stays')[0]}"
        ) from error
    except CommError as error:
        raise type(error)(f"{what} failed: {error}") from error
    return tuple(told.tolist())
