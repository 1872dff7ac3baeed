# SPDX-License-Identifier: Apache-2.0
"""The meaning of "bytes" in a log, per operation, and the bytes on the wire.

An operation's bytes are those of its logical buffer, which is the same on all ranks:
the vector that all of them reduce, or what all of their parts make together. These are
the bytes of the usual formulas: an allreduce of gradients has those of the parameters,
an allgather of shards and a reduce_scatter of gradients, too. Only an all-to-all and a
message count by rank: what this rank sends.
"""

from __future__ import annotations

from dataclasses import dataclass

from commrt.vocabulary.operations import OTHERS, ROWS

__all__ = ["MEANING", "MESSAGES", "Volume", "wire_nbytes"]

MEANING = {row.name: row.logged_bytes for row in ROWS if row.logged_bytes}
"""Arrays whose bytes count as an operation's, by operation."""

MESSAGES = tuple(row.name for row in OTHERS if row.ends == "one")
_SHARES = {row.name: row.wire_share for row in ROWS}


@dataclass
class Volume:
    """The bytes that calls of one kind have moved."""

    calls: int = 0
    """Number of calls."""
    nbytes: int = 0
    """Their bytes, as MEANING says."""
    wire_nbytes: float = 0.0
    """The least that a rank sends and receives for them, each way."""

    def add(self, nbytes: int, wire: float) -> None:
        """Count one more."""
        self.calls += 1
        self.nbytes += nbytes
        self.wire_nbytes += wire


def wire_nbytes(op: str, nbytes: int, size: int) -> float:
    """Return the least that a rank sends in an operation on average, bytes.

    2(P-1)/P of an allreduce's bytes; (P-1)/P of those of an allgather, a
    reduce_scatter, an all-to-all, a gather and a scatter; all of a message's, of a
    broadcast's and a reduction's to a root. Nothing where there is one rank only.
    """
    if size <= 1:
        return 0.0
    share = _SHARES.get(op)
    return float(nbytes) if share is None else share(size) * nbytes
