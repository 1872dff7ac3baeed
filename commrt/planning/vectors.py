# SPDX-License-Identifier: Apache-2.0
"""Plans of operations whose blocks differ in length: what follows from the counts.

All ranks know all counts, but of an alltoallv. There a rank knows what it sends and
what it gets, so that only a pair can agree on the number of its fragments: each pair
has its own, and a rank's plan leaves out a pair whose fragments are over.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

from commrt import algorithms
from commrt.errors import UsageError
from commrt.planning.footprint import LANE_NBYTES, Footprint, Own
from commrt.planning.spec import PlanSpec
from commrt.schedule.ir import ParamValue, Schedule, Space
from commrt.schedule.parts import Parts, block_length, parts_of

__all__ = [
    "CountedFootprint",
    "Lengths",
    "counted_lengths",
    "even_lengths",
    "parts_for",
]


@dataclass(frozen=True)
class CountedFootprint(Footprint):
    """Bounds of messages whose blocks have lengths of their own."""

    lengths: tuple[int, ...] = ()
    """Elements of each block of the operation's data, the longest first."""

    def largest_nbytes(self, num_elements: int, itemsize: int, fragments: int) -> int:
        """Return an upper bound of any message of any fragment."""
        most = max((width for width, _, _ in self.slices), default=0)
        return self._rounded(
            sum(
                self._piece_nbytes(length, itemsize, fragments)
                for length in self.lengths[:most]
            )
        )


class HasSpaces(Protocol):
    """A rank's program, in whatever form."""

    @property
    def spaces(self) -> tuple[Space, ...]:
        """The buffers that it addresses."""
        ...


@dataclass(frozen=True)
class Lengths(ABC):
    """Lengths of blocks and numbers of fragments, on one rank."""

    fragments: int
    """Number of fragments of the plan."""
    longest_nbytes: int
    """No message of a fragment is longer."""

    @abstractmethod
    def bounds(self, rank: int, lowered: HasSpaces) -> list[list[int]]:
        """Return the block boundaries of each space of ``rank``."""


@dataclass(frozen=True)
class _Even(Lengths):
    num_elements: int

    def bounds(self, rank: int, lowered: HasSpaces) -> list[list[int]]:
        return [space.bounds(self.num_elements) for space in lowered.spaces]


@dataclass(frozen=True)
class _Counted(Lengths):
    parts: Parts
    lengths: Mapping[int, int]
    """Elements of each holder's data that this rank knows of."""

    def bounds(self, rank: int, lowered: HasSpaces) -> list[list[int]]:
        return self.parts.bounds(rank, lowered.spaces, self.lengths)


@lru_cache(maxsize=256)
def _parts(coll: str, name: str, size: int, root: int, params: Own) -> Parts | None:
    schedule: Schedule = algorithms.schedule(coll, name, size, root, dict(params))
    found = parts_of(schedule)
    if found is None or not found.stays_in_pairs(schedule):
        return None
    # Tests show it of the package's own; of many ranks it takes long to see.
    sure = algorithms.get(coll, name).built_in
    return found if sure or found.one_pair_at_a_time(schedule) else None


def parts_for(size: int, spec: PlanSpec, own: Mapping[str, ParamValue]) -> Parts | None:
    """Return the data that each block holds, for calls with counts; else None.

    Raises UsageError where the schedule cannot run blocks of different lengths.
    """
    if not spec.op.count_arguments:
        return None
    found = _parts(
        *(spec.op.name, spec.candidate.algorithm, size, spec.root),
        tuple(sorted(own.items())),
    )
    if found is None:
        raise UsageError(
            f"{spec.candidate} cannot run {spec.op.name} on {size} ranks: a block of "
            f"its schedule holds data of several ranks, whose lengths differ; choose "
            f"another algorithm"
        )
    return found


def even_lengths(spec: PlanSpec, bound: Footprint, chunk_nbytes: int) -> Lengths:
    """Return what follows from the length of the full vector."""
    total, item = spec.num_elements, spec.dtype.itemsize
    number = bound.fragments(total, item, chunk_nbytes, LANE_NBYTES)
    return _Even(number, bound.largest_nbytes(total, item, number), total)


def counted_lengths(
    rank: int,
    size: int,
    spec: PlanSpec,
    own: dict[str, ParamValue],
    bound: Footprint,
    chunk_nbytes: int,
) -> Lengths:
    """Return what follows from the counts of one call."""
    parts = parts_for(size, spec, own)
    assert parts is not None

    def cut(counts: Sequence[int]) -> tuple[int, int]:
        counted = _counted(bound, counts, parts.share)
        item, total = spec.dtype.itemsize, sum(counts)
        number = counted.fragments(total, item, chunk_nbytes, LANE_NBYTES)
        return number, counted.largest_nbytes(total, item, number)

    if len(spec.counts) == 1:
        counts = spec.counts[0]
        return _Counted(*cut(counts), parts, dict(enumerate(counts)))
    sent, received = spec.counts
    lengths, most, longest = dict[int, int](), 1, 0
    for peer in range(size):
        lengths[rank * size + peer] = sent[peer]
        lengths[peer * size + rank] = received[peer]
    for pair, count in lengths.items():
        if divmod(pair, size) == (rank, rank):
            continue
        number, nbytes = cut([count])
        most, longest = max(most, number), max(longest, nbytes)
    return _Counted(most, longest, parts, lengths)


def _counted(bound: Footprint, counts: Sequence[int], share: int) -> CountedFootprint:
    if share == 1:
        lengths = sorted(counts, reverse=True)
    else:
        lengths = sorted(
            (block_length(c, i, share) for c in counts for i in range(share)),
            reverse=True,
        )
    return CountedFootprint(
        bound.publishes, bound.slices, bound.messages, bound.exchanges, tuple(lengths)
    )
