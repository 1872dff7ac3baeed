# SPDX-License-Identifier: Apache-2.0
"""One rank"s part of an operation, from which a backend makes a plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from commrt.select.facts import Candidate, CommFacts
from commrt.vocabulary.dtypes import DType, ReduceOp
from commrt.vocabulary.operations import OpSpec
from commrt.vocabulary.reductions import BoundReduction

__all__ = ["PlanSpec", "Ranks"]


class Ranks(Protocol):
    """A group of ranks, as far as planning knows it."""

    @property
    def rank(self) -> int:
        """This rank."""
        ...

    @property
    def size(self) -> int:
        """Number of ranks."""
        ...

    @property
    def facts(self) -> CommFacts:
        """Facts that are equal on all ranks."""
        ...

    @property
    def nodes(self) -> list[list[int]]:
        """Ranks on each node."""
        ...

    @property
    def deterministic(self) -> bool:
        """True if results are bitwise the same whatever algorithm runs."""
        ...

    @property
    def is_relayed(self) -> bool:
        """True if a relay carries messages to ranks on other nodes: no MPI does."""
        ...

    @property
    def is_staged(self) -> bool:
        """True if its relay copies messages on both sides, as gloo's does."""
        ...

    @property
    def has_heap(self) -> bool:
        """True if there is symmetric memory; the same on all ranks of a node."""
        ...


@dataclass(frozen=True)
class PlanSpec:
    """One rank's part of an operation, before an algorithm is bound to it."""

    op: OpSpec
    """The operation."""
    num_elements: int
    """Length of the full vector (see ``Space.scale``)."""
    dtype: DType
    """Element type."""
    reduction: ReduceOp
    """The reduction; SUM where there is none."""
    root: int
    """The root; 0 where there is none."""
    candidate: Candidate
    """The candidate to run, with all its parameters."""
    in_elements: int
    """Elements of this rank's send buffer, 0 where it has none."""
    out_elements: int
    """Elements of this rank's output, 0 where it has none."""
    has_output: bool
    """True if the call returns an array on this rank."""
    counts: tuple[tuple[int, ...], ...] = ()
    """Elements per rank of a vector operation, one tuple for each of the operation's
    ``count_arguments``."""
    factor: int | float | None = None
    """Factor of this rank's input in premul_sum; may differ between ranks."""
    user: BoundReduction | None = None
    """The user's own reduction, instead of ``reduction``."""
    device: str = "host"
    """Kind of memory that the arrays are in: host, cuda."""
