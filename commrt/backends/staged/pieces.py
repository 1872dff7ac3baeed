# SPDX-License-Identifier: Apache-2.0
"""Pieces that a call on device memory is cut into, and what is copied for each.

Where elements do not depend on each other a piece is some of them. Operations that move
blocks, one for each rank, are cut across: a piece has a part of every block, and is the
same operation with shorter blocks. All ranks cut alike, by what all of them know; an
alltoallv goes whole, as no rank knows how long the others' blocks are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from commrt import _native
from commrt.planning.spec import PlanSpec

__all__ = ["cut_blocks", "cut_elements"]

_LINE = 64
_X, _OUT = 0, 1
_LEAST_NBYTES = 64 << 10
"""Least bytes of a piece of a block, unless the caller asks for shorter pieces. Each
piece is a copy, and the driver takes about as long to start one as to move so much."""
_MOST_PIECES = 256
_Copies = list[tuple[int, int, int, int, int]]
_MakePlan = Callable[[PlanSpec], Any]


def cut_elements(
    spec: PlanSpec, plan: _MakePlan, rank: int, most: int
) -> _native.StagedPlan:
    """Return a plan of pieces of ``most`` bytes; ``plan`` makes that of the host."""
    itemsize, whole = spec.dtype.itemsize, spec.num_elements
    length = max(1, most // itemsize)
    pieces = max(1, -(-whole // length))
    length = min(length, whole)
    rest = whole - (pieces - 1) * length
    takes, gives = _sides(spec, rank)
    stride = length * itemsize

    def part(elements: int) -> _native.StagedPart:
        runs = plan(
            replace(
                spec,
                num_elements=elements,
                in_elements=elements if spec.in_elements else 0,
                out_elements=elements if spec.out_elements else 0,
            )
        )
        nbytes = elements * itemsize
        taken: _Copies = [(_X, 0, stride, nbytes, 0)] if takes else []
        given: _Copies = [(_OUT, 0, stride, nbytes, 0)] if gives else []
        return _native.StagedPart(runs, taken, given)

    last = part(rest)
    parts = [last] if pieces == 1 or rest == length else [part(length), last]
    return _native.staged_plan(parts, pieces, stride)


def cut_blocks(
    spec: PlanSpec, plan: _MakePlan, rank: int, size: int, most: int, asked: bool
) -> _native.StagedPlan:
    """Return a plan of pieces that have a part of every block."""
    takes, gives = _sides(spec, rank)
    itemsize = spec.dtype.itemsize
    counts = _block_counts(spec, size)
    pieces = 1
    if counts:
        least = most if asked else max(most, _LEAST_NBYTES * len(counts))
        pieces = min(_MOST_PIECES, max(1, -(-sum(counts) * itemsize // least)))
        pieces = min(pieces, max(1, *counts))
    if pieces == 1:
        in_nbytes, out_nbytes = takes * itemsize, gives * itemsize
        at = _aligned(in_nbytes)
        part = _native.StagedPart(
            plan(spec),
            [(_X, 0, 0, in_nbytes, 0)],
            [(_OUT, 0, 0, out_nbytes, at)],
            out_at=at,
        )
        return _native.staged_plan([part], 1, at + out_nbytes)

    gathers = spec.op.out_count == "times_size"
    all_in = spec.op.out_count == "div_size" or spec.op.by_pair
    all_out = gathers or spec.op.by_pair
    own = [counts[rank] if block == rank else 0 for block in range(size)]
    plans: dict[tuple[int, ...], Any] = {}
    parts, longest = [], 0
    for number in range(pieces):
        lengths = tuple(
            count * (number + 1) // pieces - count * number // pieces
            for count in counts
        )
        if lengths not in plans:
            plans[lengths] = plan(_shorter(spec, lengths, rank, all_in, all_out))
        ins, in_nbytes = _across(
            _X, counts if all_in else own, number, pieces, itemsize, 0
        )
        at = _aligned(in_nbytes) if takes else 0
        outs, end = _across(
            _OUT, counts if all_out else own, number, pieces, itemsize, at
        )
        parts.append(
            _native.StagedPart(
                plans[lengths], ins if takes else [], outs if gives else [], out_at=at
            )
        )
        longest = max(longest, end if gives else at)
    return _native.staged_plan(parts, pieces, longest)


def _block_counts(spec: PlanSpec, size: int) -> Sequence[int]:
    """Return the elements of each rank's block; nothing where it is not to be cut."""
    if spec.op.rule_bytes in ("none", "any"):
        return ()
    if spec.counts:
        return spec.counts[0]
    return [spec.num_elements // size] * size


def _shorter(
    spec: PlanSpec, lengths: tuple[int, ...], rank: int, all_in: bool, all_out: bool
) -> PlanSpec:
    """Return the same operation with blocks of these lengths."""
    total = sum(lengths)
    held_in, held_out = (
        total if everything else lengths[rank] for everything in (all_in, all_out)
    )
    return replace(
        spec,
        num_elements=total,
        in_elements=held_in if spec.in_elements else 0,
        out_elements=held_out if spec.out_elements else 0,
        counts=(lengths,) if spec.counts else (),
    )


def _across(
    array: int,
    counts: Sequence[int],
    number: int,
    pieces: int,
    itemsize: int,
    pinned: int,
) -> tuple[_Copies, int]:
    """Return the copies of a piece's part of every block, and where they end."""
    copies: _Copies = []
    start = 0
    for count in counts:
        low, high = count * number // pieces, count * (number + 1) // pieces
        nbytes = (high - low) * itemsize
        if nbytes:
            copies.append((array, (start + low) * itemsize, 0, nbytes, pinned))
        start += count
        pinned += nbytes
    return copies, pinned


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _LINE) * _LINE


def _sides(spec: PlanSpec, rank: int) -> tuple[int, int]:
    """Return the numbers of elements that go to the host, and that come back."""
    # The first rank's output keeps its content.
    untouched = spec.op.output_on == "all but rank 0" and rank == 0
    return spec.in_elements, 0 if untouched else spec.out_elements
