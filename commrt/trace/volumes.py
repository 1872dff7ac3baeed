# SPDX-License-Identifier: Apache-2.0
"""What "bytes" means in a log, per operation, and what of them crosses the wire.

An operation's bytes are those of its logical buffer, which is the same on all ranks:
the vector that all of them reduce, or what all of their parts make together. These are
the bytes of the usual formulas: an allreduce of gradients has those of the parameters,
an allgather of shards and a reduce_scatter of gradients, too. Only an all-to-all and a
message count by rank: what this rank sends.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["MEANING", "MESSAGES", "Volume", "wire_nbytes"]

MEANING = {
    "allreduce": "the array of one rank",
    "reduce": "the array of one rank",
    "bcast": "the array of one rank",
    "scan": "the array of one rank",
    "exscan": "the array of one rank",
    "reduce_scatter": "the array of one rank, before it is scattered",
    "reduce_scatterv": "the array of one rank, before it is scattered",
    "allgather": "the gathered array",
    "allgatherv": "the gathered array",
    "gather": "the gathered array",
    "gatherv": "the gathered array",
    "scatter": "the root's array",
    "scatterv": "the root's array",
    "alltoall": "what this rank sends, its own part included",
    "alltoallv": "what this rank sends, its own part included",
    "barrier": "0",
    "send": "the message",
    "recv": "the memory that it may fill",
    "sparse_allreduce": "indices and values that this rank has",
    "topk_allreduce": "the array of one rank",
    "redistribute": "the array of this rank",
    "halo_exchange": "what this rank sends to others",
    "halo_reduce": "what this rank sends to others",
    "neighbor_allgather": "what this rank sends to others",
    "neighbor_allgatherv": "what this rank sends to others",
    "neighbor_alltoall": "what this rank sends to others",
    "neighbor_alltoallv": "what this rank sends to others",
}
"""What an operation's bytes are those of."""

MESSAGES = ("send", "recv")
_ONE_PART_LESS = (
    "allgather",
    "allgatherv",
    "reduce_scatter",
    "reduce_scatterv",
    "alltoall",
    "alltoallv",
    "gather",
    "gatherv",
    "scatter",
    "scatterv",
)


@dataclass
class Volume:
    """What calls of one kind have moved."""

    calls: int = 0
    """How many there were."""
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
    if op in ("allreduce", "topk_allreduce", "sparse_allreduce"):
        return 2 * (size - 1) / size * nbytes
    if op in _ONE_PART_LESS:
        return (size - 1) / size * nbytes
    return float(nbytes)
