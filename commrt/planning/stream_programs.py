# SPDX-License-Identifier: Apache-2.0
"""Programs that a rank's stream runs, made of a schedule's rounds and element counts.

A program is a list of commands, made once and given to a stream as often as wanted
(``stream_program.hpp``). With ``nccl_program`` each round is one group of NCCL's sends
and receives, then kernels; ``peer_programs`` has the other form of rounds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from itertools import pairwise

import numpy as np

from commrt import _native, algorithms
from commrt.errors import BackendError
from commrt.nccl.config import GroupShape
from commrt.planning import vectors
from commrt.planning.footprint import Footprint, Own, footprint
from commrt.planning.host_plans import check_params, scaling, split_params
from commrt.planning.scratch import Area, Scratch
from commrt.planning.spec import PlanSpec
from commrt.schedule.ir import Slice
from commrt.schedule.nodes import Nodes
from commrt.schedule.rounds import (
    Group,
    Place,
    RankRounds,
    Slot,
    Step,
    Work,
    lower_to_rounds,
    sequence,
)
from commrt.vocabulary.dtypes import DType, ReduceOp, dtype_by_name

__all__ = [
    "CHUNK_NBYTES",
    "FIRST_PEER",
    "SCRATCH",
    "Command",
    "ProgramCall",
    "StreamPlan",
    "StreamStep",
    "Where",
    "by_block",
    "like",
    "nccl_program",
]

CHUNK_NBYTES = 4 << 20
"""Wanted bytes per message where data flows one way; not measured on a GPU yet."""
_MOST_FRAGMENTS = 64
_LINE_NBYTES = 64
_LOGICAL = (ReduceOp.LAND, ReduceOp.LOR, ReduceOp.LXOR)
_TOKENS = dtype_by_name("uint8")


class StreamStep(IntEnum):
    """Commands, as device_calls/stream_program.hpp has them."""

    COPY = 0
    REDUCE = 1
    SCALE = 2
    DIVIDE = 3
    SEND = 4
    RECV = 5
    END_GROUP = 6
    BEGIN = 7
    PUBLISH = 8
    AWAIT = 9
    RELEASE = 10


IN, OUT, SCRATCH, FIRST_PEER = range(4)
"""Bases of addresses; what rank r publishes has the base FIRST_PEER + r."""

Where = tuple[int, int]
"""Base, and bytes from there."""
Command = tuple[int, int, int, int, int, int, int, int]
"""Step, target and source (base, offset each), bytes, peer or reduction, number."""


@dataclass(frozen=True)
class StreamPlan:
    """A rank's program, and the memory that it needs."""

    program: _native.StreamProgram
    scratch_nbytes: int
    """Bytes of the base SCRATCH."""
    published_nbytes: int
    """The most that any rank publishes in a part; equal on all ranks."""
    fragments: int
    num_groups: int


def nccl_program(
    spec: PlanSpec, rank: int, size: int, nodes: Nodes, shape: GroupShape | None = None
) -> StreamPlan:
    """Return what ``rank`` runs with NCCL; every rank's has the same rounds."""
    work = ProgramCall(spec, rank, nodes)
    shape = shape or GroupShape.of(size)
    fragments = work.fragments()
    steps = sequence(work.rounds[rank], size, fragments=fragments, shape=shape)
    commands = [*work.before(), *_grouped(work, steps, fragments), *work.behind()]
    groups = sum(one[0] == StreamStep.END_GROUP for one in commands)
    return work.plan(commands, 0, fragments, groups)


@lru_cache(maxsize=256)
def _rounds(
    coll: str, algorithm: str, root: int, params: Own, nodes: Nodes
) -> tuple[RankRounds, ...]:
    schedule = algorithms.schedule(
        coll, algorithm, len(nodes), root, dict(params), nodes
    )
    return tuple(lower_to_rounds(schedule))


def _whole_blocks(rounds: Sequence[RankRounds]) -> bool:
    """Return whether every message is one block: then a fragment is one piece."""
    return all(
        like(place).hi - like(place).lo == 1
        for own in rounds
        for place in (*_message_places(own), *_slots(own))
    )


def _message_places(own: RankRounds) -> Iterator[Place]:
    for ends in (*own.sends, *own.recvs):
        yield from (message.place for message in ends)


def _slots(own: RankRounds) -> Iterator[Slot]:
    for each in own.work:
        for work in each:
            yield from (p for p in (work.dst, work.src) if isinstance(p, Slot))


def by_block(work: Work, fragments: int) -> list[Work]:
    """Return work whose fragments are one piece each."""
    if fragments == 1 or isinstance(work.dst, Slot) or isinstance(work.src, Slot):
        return [work]
    (to, lo, hi), (source, first, _) = work.dst, work.src
    return [
        Work(
            work.kind,
            Slice(to, block, block + 1),
            Slice(source, first + block - lo, first + block - lo + 1),
        )
        for block in range(lo, hi)
    ]


def _places(own: RankRounds) -> Iterator[Place]:
    yield from _message_places(own)
    for each in own.work:
        for work in each:
            yield from (work.dst, work.src)


def like(place: Place) -> Slice:
    """Return the slice that a place is as long as."""
    return place.like if isinstance(place, Slot) else place


class ProgramCall:
    """One rank's operation: where its blocks are, and what surrounds the rounds."""

    def __init__(self, spec: PlanSpec, rank: int, nodes: Nodes) -> None:
        coll, name, size = spec.op.name, spec.candidate.algorithm, len(nodes)
        if spec.user is not None:
            raise BackendError(
                f"{coll}: your own reductions run on the host: use the staged backend"
            )
        check_params(coll, name, size, spec.candidate.params)
        own, transport = split_params(spec.candidate.params)
        params = tuple(sorted(own.items()))
        self.spec, self.rank, self.size = spec, rank, size
        self.chunk = transport.chunk
        self.rounds = _rounds(coll, name, spec.root, params, nodes)
        self.bound: Footprint = footprint(coll, name, size, spec.root, params, nodes)
        self.is_barrier = spec.op.x_count == "none"
        self.dtype: DType = _TOKENS if self.is_barrier else spec.dtype
        self.reduction = ReduceOp.SUM if self.is_barrier else spec.reduction
        self.item = self.dtype.itemsize
        self._lengths: vectors.Lengths = (
            vectors.counted_lengths(rank, size, spec, own, self.bound, CHUNK_NBYTES)
            if spec.counts
            else vectors.even_lengths(spec, self.bound, CHUNK_NBYTES)
        )
        self._bounds: dict[int, list[list[int]]] = {}
        self.factor, self.integer, self.divisor = scaling(spec, size)
        self.scratch = Scratch()
        self._spaces = self._place_spaces()
        self.slots: dict[tuple[int, int], Area] = {}

    # Lengths

    def bounds(self, rank: int) -> list[list[int]]:
        """Return the block boundaries of each space of ``rank``."""
        if rank not in self._bounds:
            own = self.rounds[rank]
            self._bounds[rank] = (
                # A barrier's messages are a byte each.
                [[*range(space.nblk + 1)] for space in own.spaces]
                if self.is_barrier
                else self._lengths.bounds(rank, own)
            )
        return self._bounds[rank]

    def fragments(self) -> int:
        """Return into how many fragments the operation is cut, equal on all ranks."""
        if not self.can_be_cut:
            return 1
        one_way = not self.bound.exchanges
        wanted = self.chunk if isinstance(self.chunk, int) else CHUNK_NBYTES * one_way
        number = -(-self.longest_nbytes // wanted) if wanted else 1
        return max(1, min(number, _MOST_FRAGMENTS))

    @property
    def can_be_cut(self) -> bool:
        """True if there are fragments: not where only pairs know lengths."""
        alone = self.is_barrier or self.spec.op.rule_bytes == "any"
        return not alone and _whole_blocks(self.rounds)

    @property
    def longest_nbytes(self) -> int:
        """The longest message of all ranks."""
        return max(
            (
                self._longest(rank, place)
                for rank, own in enumerate(self.rounds)
                for ends in own.sends
                for _, _, place in ends
            ),
            default=0,
        )

    def _longest(self, rank: int, place: Place) -> int:
        where = like(place)
        edges = self.bounds(rank)[where.space]
        return (edges[where.hi] - edges[where.lo]) * self.item

    def piece(
        self, rank: int, where: Slice, fragment: int, fragments: int
    ) -> tuple[int, int]:
        """Return the first and the last element of a fragment of a slice."""
        edges = self.bounds(rank)[where.space]
        lo, hi = edges[where.lo], edges[where.hi]
        if fragments == 1:
            return lo, hi
        return lo + self._cut(hi - lo, fragment, fragments), lo + self._cut(
            hi - lo, fragment + 1, fragments
        )

    def _cut(self, length: int, fragment: int, fragments: int) -> int:
        if fragment == fragments:
            return length
        line = max(1, _LINE_NBYTES // self.item)
        return length * fragment // fragments // line * line

    def nbytes(self, rank: int, place: Place, fragment: int, fragments: int) -> int:
        """Return the length of a fragment of ``place``."""
        lo, hi = self.piece(rank, like(place), fragment, fragments)
        return (hi - lo) * self.item

    # Places

    def _place_spaces(self) -> list[tuple[int, list[int]]]:
        """Return each space's base, and where its blocks begin there, in bytes."""
        own, edges = self.rounds[self.rank], self.bounds(self.rank)
        used: list[set[int]] = [set() for _ in own.spaces]
        for place in _places(own):
            if isinstance(place, Slice):
                used[place.space].update(range(place.lo, place.hi))
        placed: list[tuple[int, list[int]]] = []
        for number, space in enumerate(own.spaces):
            starts = [edge * self.item for edge in edges[number]]
            base = {"in": IN, "out": OUT}.get(space.kind, SCRATCH)
            if self.is_barrier or (base == IN and self.is_scaled):
                base = SCRATCH
            if base == SCRATCH and starts:
                if space.kind == "tmp":
                    # Untouched blocks take no memory.
                    lengths = [
                        (hi - lo) * (block in used[number])
                        for block, (lo, hi) in enumerate(pairwise(starts))
                    ]
                    starts = [0, *np.cumsum(lengths, dtype=np.int64).tolist()]
                area = self.scratch.keep(starts[-1])
                starts = [area + start for start in starts]
            placed.append((base, starts))
        return placed

    def place(self, place: Place, fragment: int, fragments: int) -> Where:
        """Return where a fragment of a place of this rank is."""
        if isinstance(place, Slot):
            return SCRATCH, self.slots[fragment, place.number].offset
        base, starts = self._spaces[place.space]
        edges = self.bounds(self.rank)[place.space]
        lo, _ = self.piece(self.rank, place, fragment, fragments)
        return base, starts[place.lo] + (lo - edges[place.lo]) * self.item

    # Commands before and after the rounds

    @property
    def is_scaled(self) -> bool:
        """True if this rank's input is multiplied: then it is a copy."""
        return (self.factor, self.integer) != (1.0, 1)

    def before(self) -> Iterator[Command]:
        """Yield what comes before the rounds: a factor's product."""
        nbytes = self.spec.in_elements * self.item
        if self.is_scaled and nbytes and not self.is_barrier:
            _, starts = self._spaces[0]
            yield (StreamStep.SCALE, SCRATCH, starts[0], IN, 0, nbytes, 0, 0)

    def behind(self) -> Iterator[Command]:
        """Yield what makes sums averages, and one rank's numbers truth values."""
        spec, nbytes = self.spec, self.spec.out_elements * self.item
        if not spec.op.reduces or not nbytes:
            return
        alone = spec.op.num_contributors(self.rank, self.size) == 1
        if alone and spec.reduction in _LOGICAL:
            yield (StreamStep.REDUCE, OUT, 0, OUT, 0, nbytes, ReduceOp.LOR, 0)
        if self.divisor != 1:
            yield (StreamStep.DIVIDE, OUT, 0, OUT, 0, nbytes, 0, 0)

    def plan(
        self, commands: Sequence[Command], published: int, fragments: int, groups: int
    ) -> StreamPlan:
        """Return the plan of these commands."""
        program = _native.make_stream_program(
            np.array(commands, np.int64).reshape(-1, 8),
            size=self.size,
            dtype=self.dtype.code,
            itemsize=self.item,
            real=self.factor,
            integer=self.integer,
            divisor=self.divisor,
        )
        return StreamPlan(program, self.scratch.nbytes, published, fragments, groups)

    def work(self, kind: str, dst: Where, src: Where, nbytes: int) -> Iterator[Command]:
        """Yield a copy or a reduction, unless there is nothing to do."""
        if not nbytes or (kind == "copy" and dst == src):
            return
        reduces = kind == "reduce"
        step = StreamStep.REDUCE if reduces else StreamStep.COPY
        yield (step, *dst, *src, nbytes, int(self.reduction) if reduces else 0, 0)


def _grouped(
    call: ProgramCall, steps: Sequence[Step], fragments: int
) -> Iterator[Command]:
    """Yield rounds as groups of messages, with slots where they are free."""
    rank = call.rank
    _take_slots(call, steps, fragments)
    for step in steps:
        if not isinstance(step, Group):
            fragment, whole = step
            for work in by_block(whole, fragments):
                yield from call.work(
                    work.kind,
                    call.place(work.dst, fragment, fragments),
                    call.place(work.src, fragment, fragments),
                    call.nbytes(rank, work.dst, fragment, fragments),
                )
            continue
        moved = False
        for is_send, ends in ((True, step.sends), (False, step.recvs)):
            for fragment, message in ends:
                nbytes = call.nbytes(rank, message.place, fragment, fragments)
                if not nbytes:
                    continue  # at neither end
                moved = True
                where = call.place(message.place, fragment, fragments)
                if is_send:
                    yield (StreamStep.SEND, 0, 0, *where, nbytes, message.peer, 0)
                else:
                    yield (StreamStep.RECV, *where, 0, 0, nbytes, message.peer, 0)
        if moved:
            yield (StreamStep.END_GROUP, 0, 0, 0, 0, 0, 0, 0)


def _take_slots(call: ProgramCall, steps: Sequence[Step], fragments: int) -> None:
    """Give each slot memory from the step that writes it to the last that reads it."""
    spans: dict[tuple[int, int], list[int]] = {}
    likes: dict[tuple[int, int], Place] = {}
    for number, step in enumerate(steps):
        places = (
            [(f, m.place) for f, m in (*step.sends, *step.recvs)]
            if isinstance(step, Group)
            else [(step[0], step[1].dst), (step[0], step[1].src)]
        )
        for fragment, place in places:
            if isinstance(place, Slot):
                key = fragment, place.number
                spans.setdefault(key, [number, number])[1] = number
                likes[key] = place
    for key, (first, last) in sorted(spans.items(), key=lambda item: item[1]):
        nbytes = call.nbytes(call.rank, likes[key], key[0], fragments)
        call.slots[key] = call.scratch.take(nbytes, first, last)
