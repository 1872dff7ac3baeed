# SPDX-License-Identifier: Apache-2.0
"""The exact sum of sparse vectors over all ranks: the steps of one call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from commrt.group.stepped import Steps
from commrt.sparse.agreement import HEADER_FIELDS, Header, check_headers
from commrt.sparse.cost import Question, choose, estimated_fill, prices_of, rules
from commrt.sparse.messages import Talk
from commrt.sparse.order import same_results
from commrt.sparse.pieces import Piece, even_bounds
from commrt.sparse.recursive_doubling import recursive_doubling
from commrt.sparse.result import Output
from commrt.sparse.ring import ring_sum, two_level_ring, why_not_two_level
from commrt.sparse.shared import Desk
from commrt.sparse.split import can_share, lay_out, shared_split, split

__all__ = ["SparseReport", "agree", "sparse_allreduce"]

_WIDE_BITS = 40
"""Arrays of 2**63 elements and more count as one of this many bits with as many
entries: no sum of them becomes dense, and rules begin at a fill of 1e-7."""
_MOST_BESIDE = 1
"""Most integers that an operation sends beside its header and one per rank."""


@dataclass
class SparseReport:
    """Report of one sparse operation on this rank."""

    operation: str
    algorithm: str = ""
    """The algorithm that ran."""
    candidates: tuple[str, ...] = ()
    """The algorithms it was chosen from: fewer with ``deterministic=True``."""
    estimated_fill: float = 0.0
    """Estimated fill, which decided the choice."""
    counts: tuple[int, ...] = ()
    """Entries of every rank."""
    output_nnz: int = -1
    """Entries of the output; -1 where it is dense."""
    shared: bool = False
    """True if ranks read each other's entries in shared memory, without messages."""
    phases: tuple[dict[str, int], ...] = ()
    """Numbers of each exchange: entries sent and received, bytes received, dense pieces
    received. The first exchange with dense pieces is where sums became dense."""


def agree(
    talk: Talk, what: str, header: Header, more: Sequence[int] = ()
) -> Steps[tuple[list[int], list[list[int]]]]:
    """Return every rank's number of entries, once all ranks make the same call.

    And a row of what each of them says beside it, equally many integers. Rows of all
    operations have one length: so those that differ are still compared.
    """
    unused = _MOST_BESIDE + talk.comm.size - len(more)
    row = np.array([*header.row(), talk.ended, *more, *[0] * unused], np.int64)
    everybody = np.empty((talk.comm.size, row.size), np.int64)
    yield [talk.comm.allgather(row, out=everybody, nonblocking=True)]
    rows: list[list[int]] = everybody.tolist()
    counts = check_headers(what, rows)
    if talk.room is not None:
        talk.room.all_ended(min(said[HEADER_FIELDS] for said in rows))
    beside = slice(HEADER_FIELDS + 1, HEADER_FIELDS + 1 + len(more))
    return counts, [said[beside] for said in rows]


def sparse_allreduce(
    talk: Talk, what: str, header: Header, output: Output, report: SparseReport
) -> Steps[Any]:
    """Return the output of one call."""
    mine = talk.elements.whole(output.argument)
    # Told here it is nearly free; later it would be a round of headers.
    bounds = even_bounds(0, output.length, talk.comm.size)
    offsets = talk.elements.offsets(mine, bounds)
    desk = lay_out(talk, mine, offsets) if header.algorithm in (None, "split") else None
    lengths = [end - begin for begin, end in pairwise(offsets)]
    room = 0 if desk is None else desk.most(talk.elements)
    counts, rows = yield from agree(talk, what, header, [room, *lengths])
    per_range = [said[1:] for said in rows]
    least = min(said[0] for said in rows)
    if least == 0 or not can_share(talk, least, mine, per_range):
        desk = None  # somebody's entries are not there, or the sums would not be
    report.counts = tuple(counts)
    report.estimated_fill = estimated_fill(counts, output.length)
    algorithm = header.algorithm
    report.candidates = _algorithms(output)
    if algorithm is None:
        algorithm = _chosen(talk, output, report.estimated_fill, desk is not None)
    report.algorithm = algorithm
    result = yield from _run(talk, report, mine, output, per_range, desk)
    report.phases = tuple(talk.phases)
    report.output_nnz = getattr(result, "nnz", -1) if result is not output.out else -1
    return result


def _chosen(talk: Talk, output: Output, fill: float, shared: bool) -> str:
    elements = talk.elements
    length_bits = _length_bits(output)
    if elements.is_wide:
        fill = min(1.0, fill * (output.length >> _WIDE_BITS))
    types = elements.index_nbytes, elements.dtype.itemsize
    kind = length_bits, *types, output.format, shared, _algorithms(output)
    found = talk.rules.get(kind)
    if found is None:
        found = talk.rules[kind] = rules(question(talk, output, shared))
    return choose(found, fill)


def question(talk: Talk, output: Output, shared: bool) -> Question:
    """Return the kind of call, with the length as a power of two: few kinds do."""
    comm, elements = talk.comm, talk.elements
    return Question(
        size=comm.size,
        nodes=comm.facts.nodes,
        length=1 << _length_bits(output),
        index_nbytes=elements.index_nbytes,
        item_nbytes=elements.dtype.itemsize,
        format=output.format,
        prices=prices_of(comm.facts),
        even=why_not_two_level(comm.nodes) is None,
        shared=shared,
        algorithms=_algorithms(output),
    )


def _length_bits(output: Output) -> int:
    """Return the power of two that stands for the length."""
    if output.elements.is_wide:
        return _WIDE_BITS
    return max(0, output.length - 1).bit_length()


def _algorithms(output: Output) -> tuple[str, ...]:
    elements = output.elements
    return same_results(elements.in_order, elements.dtype, output.format)


def _run(
    talk: Talk,
    report: SparseReport,
    mine: Piece,
    output: Output,
    per_range: Sequence[Sequence[int]],
    desk: Desk | None,
) -> Steps[Any]:
    algorithm = report.algorithm
    if talk.comm.size == 1:
        return output.from_piece(mine)
    if algorithm == "recursive_doubling":
        whole = yield from recursive_doubling(talk, mine)
        return output.from_piece(whole)
    if algorithm == "two_level_ring":
        pieces = yield from two_level_ring(talk, mine)
        return output.joined(pieces)
    if algorithm == "split" and desk is not None:
        report.shared = True
        summed = yield from shared_split(talk, desk, mine, per_range)
        return output.joined(summed)
    if algorithm == "ring":
        part = yield from ring_sum(talk, range(talk.comm.size), mine)
    else:
        dense = algorithm == "split_dense"
        part = yield from split(talk, mine, dense=dense, counts=per_range)
    result = yield from output.gathered(talk, part)
    return result
