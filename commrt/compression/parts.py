# SPDX-License-Identifier: Apache-2.0
"""The message between two ranks of a compressed operation: a header and a wire.

The header says which call it belongs to. Ranks that called different things could send
as many bytes as expected, and without it they would take them for what they are not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from commrt import _native
from commrt.errors import MismatchError
from commrt.sparse.memory import Pool
from commrt.vocabulary.dtypes import DTYPES, ReduceOp
from commrt.vocabulary.operations import OPERATIONS
from commrt.vocabulary.wire_formats import WIRE_FORMATS, WireFormat

__all__ = ["HEADER_NBYTES", "Header", "check_headers", "part_nbytes", "take_aligned"]

HEADER_NBYTES = 64
"""A line, so that what follows lies as the kernels like it."""
_FIELDS = HEADER_NBYTES // 8
_FIRST = 0x436F6D6D52743031
"""First word of every header: it tells a header from memory that nobody wrote."""


def part_nbytes(wire: WireFormat, num_elements: int) -> int:
    """Return the bytes of a part: a multiple of a line."""
    return HEADER_NBYTES + _native.wire.nbytes(wire.code, num_elements)


def take_aligned(pool: Pool, nbytes: int) -> Any:
    """Return so many bytes that begin at a line."""
    memory = pool.take(nbytes + HEADER_NBYTES)
    first = -memory.ctypes.data % HEADER_NBYTES
    return memory[first : first + nbytes]


@dataclass(frozen=True)
class Header:
    """Facts of a part's call; all but ``elements`` are equal on all ranks."""

    operation: int
    wire: int
    dtype: int
    op: int
    elements: int
    """Elements of the whole vector; for an alltoallv, elements of the pair's block."""
    seq: int

    def write(self, part: Any) -> None:
        """Put it at the beginning of a part."""
        row = part[:HEADER_NBYTES].view(np.int64)
        row[:] = (_FIRST, *self.values(), 0)

    def values(self) -> tuple[int, ...]:
        """Return the fields in the order in which a part has them."""
        return (
            self.operation,
            self.wire,
            self.dtype,
            self.op,
            self.elements,
            self.seq,
        )


_NAMES = ("operation", "compress", "dtype", "op", "elements", "call")


def check_headers(what: str, rank: int, expected: list[Header], parts: Any) -> None:
    """Raise MismatchError unless each rank's part begins with the header expected.

    Args:
        what: names the call in messages.
        rank: this rank.
        expected: of each rank's part.
        parts: what came from each rank.
    """
    wrong = []
    for source, (header, part) in enumerate(zip(expected, parts, strict=True)):
        row = part[:HEADER_NBYTES].view(np.int64).tolist()
        if row != [_FIRST, *header.values(), 0]:
            wrong.append((source, _described(row)))
    if not wrong:
        return
    mine = _described([_FIRST, *expected[rank].values(), 0])
    differing = [
        name
        for name in _NAMES
        if any(said.get(name) != mine[name] for _, said in wrong)
    ]
    lines = [
        f"  rank {source}: " + ", ".join(f"{n}={said.get(n, '?')}" for n in differing)
        for source, said in [(rank, mine), *wrong]
    ]
    raise MismatchError(
        f"{what}: the ranks disagree on {', '.join(differing)}; x, out and residual "
        f"are as they were:\n" + "\n".join(lines)
    )


def _described(row: list[int]) -> dict[str, str]:
    if row[0] != _FIRST:
        return {}
    operation, wire, dtype, op, elements, seq = row[1:-1]
    return {
        "operation": OPERATIONS[operation].name,
        "compress": WIRE_FORMATS[wire].name,
        "dtype": DTYPES[dtype].name,
        "op": ReduceOp(op).name.lower(),
        "elements": str(elements),
        "call": f"#{seq}",
    }
