# SPDX-License-Identifier: Apache-2.0
"""The largest elements of a sum, with error feedback (Ok-Topk, PPoPP 2022).

1. Each rank takes the k largest of its array plus what it still owes, its residual.
2. Ranges are cut where the ranks' entries are, not evenly: each rank says where it
would cut
   its own, and the mean of that is taken. So all ranks have nearly as much to sum.
3. Split: each rank sums its range.
4. Each rank counts its sums by magnitude, in 2048 classes; all counts together say from
   which class on there are k. Only such sums are gathered, and the k largest of them
   taken.
5. A rank's residual is what it has, without what of it came into the result.

The classes make the result exactly the k largest of the sums of step 3; Ok-Topk guesses
a threshold for both selections, and finds it anew every so many calls. It also evens
out the gathered parts; here they stay where they were summed.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import numpy as np

from commrt import _native
from commrt.arrays.host import HostView, view, view_anywhere
from commrt.arrays.plain import as_array
from commrt.arrays.residual import check_residual
from commrt.errors import BufferError_, UsageError, shown
from commrt.group.stepped import Steps
from commrt.sparse.agreement import Header
from commrt.sparse.allreduce import SparseReport, agree
from commrt.sparse.coordinates import Keys
from commrt.sparse.cost import estimated_fill
from commrt.sparse.memory import Pool
from commrt.sparse.messages import Talk, allgather, share_rows
from commrt.sparse.pieces import Elements, Piece
from commrt.sparse.result import Output, bytes_at, bytes_from, like
from commrt.sparse.split import split
from commrt.sparse.vector import SparseArgument, check_shape
from commrt.vocabulary.checks import as_integer

__all__ = ["Largest", "check_largest", "topk_allreduce"]

_kernels = _native.sparse
_NUM_CLASSES = 2048


@dataclass(frozen=True)
class Largest:
    """One rank's argument: its largest elements, and where the rest shall go."""

    k: int
    output: Output
    """Form and memory of the sum."""
    had: Any
    """All elements with the residual added, as bytes."""
    residual: HostView | None

    @classmethod
    def of(
        cls,
        what: str,
        x: Any,
        k: Any,
        residual: Any,
        pool: Pool,
        in_order: bool = False,
    ) -> Largest:
        """Select the largest elements; UsageError says what is wrong."""
        array, owed, number = check_largest(what, x, k, residual)
        had = bytes_at(array)
        if owed is not None:
            had = pool.take(array.nbytes)
            had[:] = bytes_at(owed)
            code, to = array.dtype.code, had.ctypes.data
            _kernels.add_dense(code, array.address, to, array.count)
        argument = _entries(array, had, number)
        elements = Elements.of(what, argument, pool, in_order)
        return cls(number, Output(argument, elements, "sparse", None), had, owed)


def check_largest(
    what: str, x: Any, k: Any, residual: Any
) -> tuple[HostView, HostView | None, int]:
    """Return a call's arguments, of host or device; UsageError says what is wrong."""
    array = view_anywhere(as_array(x, f"{what}: x"), f"{what}: x")
    check_shape(what, array.shape)
    number = as_integer(k)
    if number is None or not 0 <= number <= array.count:
        raise UsageError(
            f"{what}: k={shown(k)} must be an integer in 0..{array.count}, the "
            "elements of x"
        )
    if array.dtype.kind in ("bool", "complex"):
        raise BufferError_(
            f"{what}: x has dtype {array.dtype.name}, whose elements have no largest; "
            f"expected integers or floats"
        )
    owed = None if residual is None else check_residual(what, array, residual)
    return array, owed, number


def _entries(x: HostView, had: Any, k: int) -> SparseArgument:
    """Return the k largest elements as a sparse vector."""
    at = _largest(x.dtype.code, had.ctypes.data, x.count, k)
    item = x.dtype.itemsize
    rows = had.reshape(-1, item)[at].reshape(-1)
    narrow = np.int32 if x.count <= 2**31 else np.int64
    indices: Any = at.astype(narrow)
    values = like(x, rows)
    if hasattr(values, "new_empty"):  # torch's
        indices = sys.modules["torch"].from_numpy(indices)
    return SparseArgument(view(indices, "indices"), view(values, "values"), x.shape)


def _largest(code: int, address: int, count: int, k: int) -> Any:
    positions = np.empty(k, np.int64)
    _kernels.largest(code, address, count, k, positions.ctypes.data)
    return positions


def topk_allreduce(
    talk: Talk, what: str, header: Header, mine: Largest, report: SparseReport
) -> Steps[Any]:
    """Return the largest elements of the sum; update the residual."""
    elements, output = talk.elements, mine.output
    size = talk.comm.size
    whole = elements.whole(output.argument)
    indices = output.argument.indices
    assert not isinstance(indices, Keys), "they are positions in an array"
    own = np.asarray(indices.array).astype(np.int64)
    cuts = [len(own) * part // size for part in range(1, size)]
    wanted = own[cuts].tolist() if len(own) else [0] * len(cuts)
    counts, said = yield from agree(talk, what, header, wanted)
    report.algorithm, report.counts = "split by what there is", tuple(counts)
    report.estimated_fill = estimated_fill(counts, output.length)
    bounds = [0, *np.mean(said, axis=0).astype(np.int64).tolist(), output.length]
    summed = yield from split(talk, whole, bounds=bounds)
    summed = elements.sparsified(summed)
    candidates = yield from _above_threshold(talk, summed, mine.k)
    found = yield from allgather(talk, range(size), [candidates])
    result = _final(output, found, mine.k)
    report.phases, report.output_nnz = tuple(talk.phases), result.nnz
    _owe(mine, own, np.asarray(result.indices))
    return result


def _above_threshold(talk: Talk, summed: Piece, k: int) -> Steps[Piece]:
    """Return those sums of this rank that may be among the k largest of all."""
    code = talk.elements.dtype.code
    counted = np.zeros(_NUM_CLASSES, np.int64)
    _kernels.count_magnitudes(code, summed.values, summed.count, counted.ctypes.data)
    rows = yield from share_rows(talk, counted)
    # Sums in this class and above; the classes with at least k of them, from below.
    from_here = rows.sum(axis=0)[::-1].cumsum()[::-1]
    enough = np.flatnonzero(from_here >= k)
    threshold = int(enough[-1]) if len(enough) else 0
    at = np.empty(summed.count, np.int64)
    number = _kernels.take_buckets(
        code, summed.values, summed.count, threshold, at.ctypes.data
    )
    return _taken(talk.elements, summed, at[:number])


def _taken(elements: Elements, piece: Piece, at: Any) -> Piece:
    """Return the entries at these positions."""
    item = elements.dtype.itemsize
    indices = bytes_from(piece.indices, piece.count * elements.index_nbytes)
    values = bytes_from(piece.values, piece.count * item)
    room = elements.entries(len(at))
    room[0][:] = indices.view(elements.index_type)[at]
    room[1].reshape(-1, item)[:] = values.reshape(-1, item)[at]
    return elements.piece(piece.first, piece.last, room, len(at))


def _final(output: Output, candidates: list[Piece], k: int) -> Any:
    elements = output.elements
    joined, room = output.side_by_side(candidates)
    for piece, to in zip(candidates, joined, strict=True):
        elements.copy(piece, to)
    whole = elements.piece(0, output.length, room, len(room[0]))
    code = elements.dtype.code
    at = _largest(code, whole.values, whole.count, min(k, whole.count))
    taken = _taken(elements, whole, at)
    return output.from_piece(taken)


def _owe(mine: Largest, own: Any, sent: Any) -> None:
    """Write the residual: all this rank had, without what came into the result."""
    if mine.residual is None:
        return
    owed = bytes_at(mine.residual)
    owed[:] = mine.had
    item = mine.output.elements.dtype.itemsize
    owed.reshape(-1, item)[np.intersect1d(own, sent, assume_unique=True)] = 0
