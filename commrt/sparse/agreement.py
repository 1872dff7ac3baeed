# SPDX-License-Identifier: Apache-2.0
"""The header that starts a sparse operation: what each rank calls, and how much it has.

Ranks differ in how many entries they have, and the choice of an algorithm depends on
all of them; so one small allgather goes first. It carries everything that must be
equal, too: where that differs every rank raises the same error, and no entries have
been sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from commrt.errors import MismatchError
from commrt.sparse.coordinates import WIDE_NBYTES
from commrt.sparse.cost import ALGORITHMS
from commrt.sparse.result import FORMATS
from commrt.sparse.vector import MAX_DIMS
from commrt.vocabulary.dtypes import DTYPES
from commrt.vocabulary.operations import names_of

__all__ = ["HEADER_FIELDS", "Header", "check_headers"]

OPERATIONS = names_of("sparse")
_CODES = {dtype.name: dtype.code for dtype in DTYPES}
HEADER_FIELDS = 9 + MAX_DIMS
"""The last of them, the number of entries, is each rank's own."""


@dataclass(frozen=True)
class Header:
    """One rank's call."""

    operation: str
    dtype: str
    index_nbytes: int
    format: str
    algorithm: str | None
    k: int
    shape: tuple[int, ...]
    count: int
    """Entries of this rank."""
    seq: int

    def row(self) -> list[int]:
        """Return it as integers."""
        asked = -1 if self.algorithm is None else ALGORITHMS.index(self.algorithm)
        dims = list(self.shape) + [-1] * (MAX_DIMS - len(self.shape))
        return [
            OPERATIONS.index(self.operation),
            _CODES[self.dtype],
            self.index_nbytes,
            FORMATS.index(self.format),
            asked,
            self.k,
            self.seq,
            *dims,
            len(self.shape),
            self.count,
        ]


_NAMES = (
    "operation",
    "values' dtype",
    "index type",
    "result",
    "algorithm",
    "k",
    "call",
)


def check_headers(what: str, rows: Sequence[list[int]]) -> list[int]:
    """Return every rank's number of entries; MismatchError where the calls differ."""
    shared = rows[0][: HEADER_FIELDS - 1]
    if all(row[: HEADER_FIELDS - 1] == shared for row in rows):
        return [row[HEADER_FIELDS - 1] for row in rows]
    described = [_described(row[:HEADER_FIELDS]) for row in rows]
    differing = [
        name
        for name in described[0]
        if any(each[name] != described[0][name] for each in described)
    ]
    lines = [
        f"  rank {rank}: " + ", ".join(f"{name}={each[name]}" for name in differing)
        for rank, each in enumerate(described)
    ]
    called = " / ".join(dict.fromkeys(each["operation"] for each in described))
    _, _, which = what.partition(" ")  # the same text on ranks that called another one
    raise MismatchError(
        f"{called} {which}: the ranks disagree on {', '.join(differing)}, which must "
        f"be equal; no entries were sent:\n" + "\n".join(lines)
    )


def _described(row: list[int]) -> dict[str, str]:
    operation, dtype, index_nbytes, form, algorithm, k, seq = row[:7]
    dims = row[7 : 7 + row[-2]]
    values = (
        OPERATIONS[operation],
        next(each.name for each in DTYPES if each.code == dtype),
        f"int{8 * index_nbytes}" if index_nbytes != WIDE_NBYTES else "by dimension",
        FORMATS[form],
        "unsaid" if algorithm < 0 else ALGORITHMS[algorithm],
        str(k),
        f"#{seq}",
    )
    return {**dict(zip(_NAMES, values, strict=True)), "shape": str(tuple(dims))}
