# SPDX-License-Identifier: Apache-2.0
"""Arguments of collectives among neighbours: who is beside whom, and whose blocks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

from commrt.arrays.host import HostView, overlap, view_anywhere, zeros_like_array
from commrt.errors import BufferError_, UsageError, shown
from commrt.schedule.boxes import Box, Move
from commrt.vocabulary.checks import as_integer, as_items
from commrt.vocabulary.operations import CallSpec, other_call

__all__ = [
    "BoundBlocks",
    "Counts",
    "Neighborhood",
    "Ranges",
    "bind_blocks",
    "blocks_of",
    "grid_neighborhood",
    "make_neighborhood",
    "moves_of",
    "out_shape",
]

_X, _OUT = 0, 1
_LARGEST = 2**63 - 1
Counts = Sequence[int] | None
Ranges = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Neighborhood:
    """The ranks beside one rank, in order; None where there is nobody."""

    sources: tuple[int | None, ...]
    """Whom it receives from."""
    destinations: tuple[int | None, ...]
    """Ranks that it sends to."""
    source_numbers: tuple[int, ...]
    """Numbers of the messages, among those from the same rank; sender and receiver
    count alike."""
    destination_numbers: tuple[int, ...]


def grid_neighborhood(neighbors: Sequence[int | None]) -> Neighborhood:
    """Return that of a grid's -x, +x, -y, +y and so on."""
    numbers = tuple(range(len(neighbors)))
    return Neighborhood(
        tuple(neighbors), tuple(neighbors), numbers, tuple(each ^ 1 for each in numbers)
    )


def make_neighborhood(sources: list[int], destinations: list[int]) -> Neighborhood:
    """Return that of a graph: the k-th edge between two ranks is the k-th for both."""
    return Neighborhood(
        tuple(sources),
        tuple(destinations),
        _occurrence(sources),
        _occurrence(destinations),
    )


def _occurrence(ranks: list[int]) -> tuple[int, ...]:
    seen: Counter[int] = Counter()
    found = []
    for rank in ranks:
        found.append(seen[rank])
        seen[rank] += 1
    return tuple(found)


@dataclass(frozen=True)
class BoundBlocks:
    """One call's arrays, and the elements of each neighbour's block."""

    what: str
    x: HostView
    out: HostView
    result: Any
    sends: Ranges
    """Begin and end in x of each destination's block."""
    receives: Ranges
    """Begin and end in out of each source's block."""
    around: Neighborhood
    rank: int

    @property
    def moves(self) -> list[Move]:
        """The blocks of a call among neighbours, by this rank's counts."""
        return moves_of(self.around, self.rank, self.sends, self.receives)

    @property
    def on(self) -> Any:
        """The device of its arrays; None for host memory."""
        return self.x.on


def bind_blocks(
    rank: int,
    around: Neighborhood,
    name: str,
    what: str,
    x: Any,
    out: Any,
    sends: Counts,
    receives: Counts,
) -> BoundBlocks:
    """Return the call of a name; ``what`` says also where an argument is wrong."""
    source = view_anywhere(x, f"{what}: x")
    row = other_call(name)
    count, given = source.count, (sends, receives)
    leaving, coming = blocks_of(rank, around, row, what, count, out, *given)
    total = coming[-1][1] if coming else 0
    if out is None:
        out = zeros_like_array(source, out_shape(around, row, source.shape, coming))
    target = view_anywhere(out, f"{what}: out")
    _check_out(what, source, target, total)
    return BoundBlocks(name, source, target, out, leaving, coming, around, rank)


def blocks_of(
    rank: int,
    around: Neighborhood,
    row: CallSpec,
    what: str,
    count: int,
    out: Any,
    sends: Counts,
    receives: Counts,
) -> tuple[Ranges, Ranges]:
    """Return the blocks in ``x``, of ``count`` elements, and those in ``out``."""
    outgoing, incoming = len(around.destinations), len(around.sources)
    gathers, takes_counts = row.sends_whole, bool(row.count_arguments)
    if takes_counts and not gathers:
        leaving = _ranges(_checked(what, "send_counts", sends, outgoing))
    elif gathers:
        leaving = ((0, count),) * outgoing
    else:
        if outgoing and count % outgoing:
            raise UsageError(
                f"{what}: x has {count} elements, expected a multiple of the "
                f"{outgoing} neighbours it goes to; pad it"
            )
        leaving = _ranges([count // max(1, outgoing)] * outgoing)
    if takes_counts:
        coming = _ranges(_checked(what, "recv_counts", receives, incoming))
    else:
        each = leaving[0][1] - leaving[0][0] if leaving else None
        if each is None:
            each = count if gathers else 0
            if out is not None and incoming:
                each = view_anywhere(out, f"{what}: out").count // incoming
        coming = _ranges([each] * incoming)
    expected = leaving[-1][1] if leaving else count
    if expected != count:
        raise UsageError(
            f"{what}: x has {count} elements, expected {expected}, the sum of "
            f"send_counts; correct one of them"
        )
    if takes_counts:
        _check_own(around, rank, what, leaving, coming)
    return leaving, coming


def out_shape(
    around: Neighborhood, row: CallSpec, shape: tuple[int, ...], coming: Ranges
) -> tuple[int, ...]:
    """Return the shape of the result of an ``x`` of that shape."""
    if not coming:
        return (0,)
    outgoing, total = len(around.destinations), coming[-1][1]
    if row.count_arguments or total != len(coming) * coming[0][1]:
        return (total,)
    if row.sends_whole:
        return len(coming), *shape
    return (len(coming), *shape[1:]) if shape[:1] == (outgoing,) else (total,)


def _check_out(what: str, x: HostView, out: HostView, total: int) -> None:
    if not out.writable:
        raise BufferError_(f"{what}: out is read-only: pass a writable array")
    if out.dtype is not x.dtype:
        raise BufferError_(
            f"{what}: out has dtype {out.dtype.name}, x has {x.dtype.name}; they must "
            f"be equal"
        )
    if out.count != total:
        raise UsageError(
            f"{what}: out has {out.count} elements, expected {total}, what the "
            f"neighbours send; pass such an array, or leave out= away"
        )
    if overlap(x, out):
        raise UsageError(f"{what}: out overlaps x; pass separate arrays")


def _checked(what: str, argument: str, counts: Any, expected: int) -> list[int]:
    items = as_items(counts)
    found = [None] if items is None else [*map(as_integer, items)]
    right = [count for count in found if count is not None and count >= 0]
    if len(right) != len(found) or len(found) != expected:
        raise UsageError(
            f"{what}: {argument}={shown(counts)} must be {expected} numbers of "
            "elements from 0, one for each neighbour"
        )
    if sum(right) > _LARGEST:
        raise UsageError(
            f"{what}: {argument} add up to {shown(sum(right))}: too many, expected at "
            f"most {_LARGEST} elements; check the numbers, or split the call"
        )
    return right


def _ranges(counts: list[int]) -> Ranges:
    return tuple(pairwise(accumulate(counts, initial=0)))


def _check_own(
    around: Neighborhood, rank: int, what: str, sends: Ranges, receives: Ranges
) -> None:
    """Raise UsageError where a rank expects other counts of itself than it sends."""
    for (low, high), (begin, end) in _own_blocks(around, rank, sends, receives):
        if high - low != end - begin:
            raise UsageError(
                f"{what}: it sends itself {high - low} elements and expects "
                f"{end - begin} by recv_counts; the counts must be equal"
            )


def _own_blocks(
    around: Neighborhood, rank: int, sends: Ranges, receives: Ranges
) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """Yield the ranges in x and in out of what a rank sends itself."""
    if rank not in around.sources:
        return
    leaving = zip(around.destinations, around.destination_numbers, sends, strict=True)
    own = {number: block for peer, number, block in leaving if peer == rank}
    for peer, number, block in zip(
        around.sources, around.source_numbers, receives, strict=True
    ):
        if peer == rank:
            yield own[number], block


def moves_of(
    around: Neighborhood, rank: int, sends: Ranges, receives: Ranges
) -> list[Move]:
    own: dict[int, Box] = {}
    moves = []
    for peer, number, (low, high) in zip(
        around.destinations, around.destination_numbers, sends, strict=True
    ):
        box = Box(_X, (low,), (high,))
        if peer == rank:
            own[number] = box
        elif peer is not None:
            moves.append(Move(0, number, peer, box, None))
    for peer, number, (low, high) in zip(
        around.sources, around.source_numbers, receives, strict=True
    ):
        box = Box(_OUT, (low,), (high,))
        if peer == rank:
            moves.append(Move(0, number, None, own[number], box))
        elif peer is not None:
            moves.append(Move(0, number, peer, None, box))
    return moves
