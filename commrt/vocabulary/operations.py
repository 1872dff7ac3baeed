# SPDX-License-Identifier: Apache-2.0
"""The one table of operations.

The public methods, the native dispatcher, the tuner, the benchmarks, the tests and
the reference page are all driven from ``OPERATIONS``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from commrt.errors import UsageError, suggest

__all__ = [
    "COLLECTIVES",
    "ELSEWHERE",
    "OPERATIONS",
    "SCHEDULED",
    "OpSpec",
    "operation",
    "rule_nbytes",
]

Count = Literal["none", "same", "times_size", "div_size"]
RuleBytes = Literal["whole", "block", "pair", "any", "none"]
Prefix = Literal["none", "inclusive", "exclusive"]


@dataclass(frozen=True)
class OpSpec:
    """What one operation takes and returns, independent of how it is run."""

    name: str
    """Public method name and ``coll`` name in schedules and tables."""
    code: int
    """The engine's code."""
    title: str
    """Name in benchmark headers, as OSU spells it."""
    x_count: Count
    """Elements of the send buffer relative to the operation's count."""
    out_count: Count
    """Elements of ``out`` relative to those of ``x``."""
    has_root: bool
    """Whether the operation takes ``root=``."""
    reduces: bool
    """Whether the operation takes ``op=``."""
    in_place: bool
    """Whether a call without ``out`` works in place and returns ``x``."""
    output_on: Literal["all", "root", "all but rank 0", "none"]
    """Which ranks have an output."""
    rule_bytes: RuleBytes
    """Which bytes select a rule: the whole buffer, a per-rank block, or one pair's;
    ``any`` where no rank knows all lengths: one rule serves all."""
    doc: str
    """One imperative line for the docstring and the reference page."""
    prefix: Prefix = "none"
    """Whether a rank's result combines only the ranks up to itself, or below it."""
    vector_of: str | None = None
    """The operation that this one is with blocks of different lengths: its schedules
    run."""
    count_arguments: tuple[str, ...] = ()
    """Arguments with a number of elements per rank."""
    compresses: bool = False
    """Whether the operation takes ``compress=`` and ``residual=``."""

    def num_contributors(self, rank: int, size: int) -> int:
        """Return how many ranks' arrays a reduction combines on ``rank``."""
        return {"none": size, "inclusive": rank + 1, "exclusive": rank}[self.prefix]


# fmt: off
OPERATIONS: tuple[OpSpec, ...] = (
    OpSpec("allreduce", 0, "Allreduce", "same", "same", False, True, True, "all",
           "whole", "Reduce elementwise over all ranks; every rank gets the result.",
           compresses=True),
    OpSpec("reduce", 1, "Reduce", "same", "same", True, True, True, "root",
           "whole", "Reduce elementwise over all ranks; the root gets the result."),
    OpSpec("bcast", 2, "Broadcast", "same", "same", True, False, True, "all",
           "whole", "Copy the root's array to every rank."),
    OpSpec("allgather", 3, "Allgather", "same", "times_size", False, False, False,
           "all", "block",
           "Concatenate every rank's array, in rank order, on every rank."),
    OpSpec("reduce_scatter", 4, "Reduce_scatter", "same", "div_size", False, True,
           False, "all", "whole",
           "Reduce elementwise over all ranks; rank i gets the i-th of size equal "
           "blocks."),
    OpSpec("alltoall", 5, "All-to-All Personalized Exchange", "same", "same", False,
           False, True, "all", "pair",
           "Send the j-th block to rank j; receive rank i's block as the i-th.",
           compresses=True),
    OpSpec("gather", 6, "Gather", "same", "times_size", True, False, False, "root",
           "block", "Concatenate every rank's array, in rank order, on the root."),
    OpSpec("scatter", 7, "Scatter", "same", "div_size", True, False, False, "all",
           "block", "Give rank i the i-th of size equal blocks of the root's array."),
    OpSpec("barrier", 8, "Barrier", "none", "none", False, False, False, "none",
           "none", "Return once every rank has called it."),
    OpSpec("scan", 9, "Scan", "same", "same", False, True, True, "all", "whole",
           "Reduce elementwise over the ranks up to this one, its own array included.",
           "inclusive"),
    OpSpec("exscan", 10, "Exscan", "same", "same", False, True, True, "all but rank 0",
           "whole",
           "Reduce elementwise over the ranks below this one; rank 0's output is left "
           "untouched.", "exclusive"),
    OpSpec("allgatherv", 11, "Allgatherv", "same", "times_size", False, False, False,
           "all", "block",
           "Concatenate arrays of counts[rank] elements, by rank, on every rank.",
           "none", "allgather", ("counts",)),
    OpSpec("alltoallv", 12, "All-to-Allv Personalized Exchange", "same", "same", False,
           False, False, "all", "any",
           "Send send_counts[j] elements to rank j; receive recv_counts[i] from i.",
           "none", "alltoall", ("send_counts", "recv_counts"), True),
    OpSpec("gatherv", 13, "Gatherv", "same", "times_size", True, False, False, "root",
           "block",
           "Concatenate arrays of counts[rank] elements, by rank, on the root.",
           "none", "gather", ("counts",)),
    OpSpec("scatterv", 14, "Scatterv", "same", "div_size", True, False, False, "all",
           "block", "Give rank i the i-th block, counts[i] elements, of the root's x.",
           "none", "scatter", ("counts",)),
    OpSpec("reduce_scatterv", 15, "Reduce_scatterv", "same", "div_size", False, True,
           False, "all", "whole",
           "Reduce elementwise over all ranks; rank i gets the i-th block, counts[i] "
           "elements.", "none", "reduce_scatter", ("counts",)),
)
# fmt: on
"""The collectives. Point-to-point (send, recv, sendrecv, multi_sendrecv) lives beside
them in point_to_point.py: it has peers and tags instead of a schedule."""

ELSEWHERE = {
    "broadcast": "bcast",
    "all_gather": "allgather",
    "all_to_all": "alltoall",
    "all_to_all_single": "alltoall",
    "all_gather_into_tensor": "allgather",
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_block": "reduce_scatter",
    "all_gather_v": "allgatherv",
    "all_to_all_v": "alltoallv",
}
"""What torch and MPI call them."""
COLLECTIVES = tuple(spec.name for spec in OPERATIONS)
SCHEDULED = tuple(spec.name for spec in OPERATIONS if spec.vector_of is None)
"""Those that schedules are written for; the others run them, too."""
_BY_NAME = {spec.name: spec for spec in OPERATIONS}


def operation(name: str) -> OpSpec:
    """Return the operation called ``name``, or raise UsageError with a suggestion."""
    try:
        return _BY_NAME[name]
    except (KeyError, TypeError):
        raise UsageError(
            f"unknown operation {name!r}{suggest(name, _BY_NAME, ELSEWHERE)}"
        ) from None


def rule_nbytes(coll: str, nbytes: int, size: int) -> int:
    """Return the bytes that select a rule, as OSU prints them.

    Args:
        coll: the operation.
        nbytes: bytes of the *full* vector of the operation: of ``x`` for allreduce,
            reduce, bcast, reduce_scatter, alltoall, scan and exscan; of the gathered
            vector for allgather and gather; of the root's ``x`` for scatter. The
            vector operations are like those that they are named after.
        size: ranks in the communicator.

    The whole buffer for allreduce, reduce, bcast, reduce_scatter, scan and exscan;
    the per-rank block for allgather, gather and scatter, the average one where blocks
    differ; the block of one pair for alltoall; 0 for alltoallv.
    """
    kind = operation(coll).rule_bytes
    if kind == "whole":
        return nbytes
    if kind in ("none", "any"):
        return 0
    return nbytes // size
