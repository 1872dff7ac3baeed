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
from typing import Any, Protocol

from commrt import algorithms
from commrt.errors import UsageError
from commrt.planning.footprint import LANE_NBYTES, Footprint, Own
from commrt.planning.spec import PlanSpec
from commrt.schedule.ir import ParamValue, Schedule, Slice, Space
from commrt.schedule.lower import LOCAL, Lowered
from commrt.schedule.parts import Parts, block_length, parts_of

__all__ = ["CountedFootprint", "Lengths", "counted_lengths", "even_lengths"]


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

    def ragged(
        self, lowered: Lowered, peers: Sequence[tuple[int, int, int]]
    ) -> dict[str, Any]:
        """Return what the engine is told where pairs have fragments of their own."""
        return {}


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
    per_holder: dict[int, int]
    """Fragments of each pair's messages; empty where all have as many."""

    def bounds(self, rank: int, lowered: HasSpaces) -> list[list[int]]:
        return self.parts.bounds(rank, lowered.spaces, self.lengths)

    def ragged(
        self, lowered: Lowered, peers: Sequence[tuple[int, int, int]]
    ) -> dict[str, Any]:
        if not self.per_holder:
            return {}
        rank, size, of = lowered.rank, self.parts.size, self.per_holder
        return {
            "instr_fragments": [
                of.get(self._pair(lowered, index), self.fragments)
                for index in range(len(lowered))
            ],
            "peer_fragments": [
                (of[rank * size + peer], of[peer * size + rank]) for peer, _, _ in peers
            ],
        }

    def _pair(self, lowered: Lowered, index: int) -> int:
        """Return whose data an instruction handles: there is no more than one pair."""
        rank, size = lowered.rank, self.parts.size
        inputs, outputs = lowered.inputs_of(index), lowered.outputs_of(index)
        for kind, *where in (*inputs, *outputs):
            if kind == LOCAL:
                return self.parts.holder(rank, Slice(*where))
        # It takes a message, and no more than that.
        return inputs[0][1] * size + rank


@lru_cache(maxsize=256)
def _parts(coll: str, name: str, size: int, root: int, params: Own) -> Parts | None:
    schedule: Schedule = algorithms.schedule(coll, name, size, root, dict(params))
    found = parts_of(schedule)
    if found is None or not found.stays_in_pairs(schedule):
        return None
    # Tests show it of the package's own; of many ranks it takes long to see.
    sure = algorithms.get(coll, name).built_in
    return found if sure or found.one_pair_at_a_time(schedule) else None


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
    name = spec.candidate.algorithm
    params = tuple(sorted(own.items()))
    parts = _parts(spec.op.name, name, size, spec.root, params)
    if parts is None:
        raise UsageError(
            f"{spec.candidate} cannot run {spec.op.name} on {size} ranks: a block of "
            f"its schedule holds data of several ranks, whose lengths differ; choose "
            f"another algorithm"
        )

    def cut(counts: Sequence[int]) -> tuple[int, int]:
        counted = _counted(bound, counts, parts.share)
        item, total = spec.dtype.itemsize, sum(counts)
        number = counted.fragments(total, item, chunk_nbytes, LANE_NBYTES)
        return number, counted.largest_nbytes(total, item, number)

    if len(spec.counts) == 1:
        counts = spec.counts[0]
        return _Counted(*cut(counts), parts, dict(enumerate(counts)), {})
    sent, received = spec.counts
    lengths, per_pair, longest = dict[int, int](), dict[int, int](), 0
    for peer in range(size):
        lengths[rank * size + peer] = sent[peer]
        lengths[peer * size + rank] = received[peer]
    for pair, count in lengths.items():
        if divmod(pair, size) == (rank, rank):
            continue
        per_pair[pair], nbytes = cut([count])
        longest = max(longest, nbytes)
    most = max(per_pair.values(), default=1)
    same = all(number == most for number in per_pair.values())
    return _Counted(most, longest, parts, lengths, {} if same else per_pair)


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
