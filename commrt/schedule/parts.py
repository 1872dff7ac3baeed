# SPDX-License-Identifier: Apache-2.0
"""Parts of an operation's data in blocks: they give each block its own length.

A schedule knows blocks, never lengths. In an allgatherv, for example, blocks differ in
length. Then a block of ``in`` or ``out`` has the length of the part that the operation
puts there. A block of scratch has the length of the part that passes through it. A
schedule carries such parts if no block ever holds two of them: then sender and receiver
always agree on a length.

Parts are numbered as in ``goals``: part p belongs to *holder* p // share, which is a
rank, or for an alltoall the pair (source, destination) as source * ranks + destination.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from commrt.schedule.goals import Goal
from commrt.schedule.ir import Op, RankProgram, Schedule, Slice, Space
from commrt.schedule.lower import LOCAL, Lowered, lower
from commrt.vocabulary.operations import operation

__all__ = ["Parts", "parts_of"]

NOTHING = -1
"""The contents of a block that nothing passes through."""


@dataclass(frozen=True)
class Parts:
    """The contents of the blocks of all ranks' spaces."""

    coll: str
    size: int
    share: int
    """Blocks that one holder's data is cut into."""
    held: tuple[tuple[tuple[int, ...], ...], ...]
    """Parts that each block holds, per rank and space."""

    def holder(self, rank: int, where: Slice) -> int:
        """Return whose data the first block of a slice holds."""
        return self.held[rank][where.space][where.lo] // self.share

    def holder_of(self, lowered: Lowered, index: int) -> int:
        """Return whose data an instruction handles, if there is no more than one."""
        inputs, outputs = lowered.inputs_of(index), lowered.outputs_of(index)
        for kind, *where in (*inputs, *outputs):
            if kind == LOCAL:
                return self.holder(lowered.rank, Slice(*where))
        # It takes a message, and no more than that.
        return inputs[0][1] * self.size + lowered.rank

    def stays_in_pairs(self, schedule: Schedule) -> bool:
        """Return whether nothing passes through a rank that does not know its length.

        In an alltoall a rank knows only the parts that it sends and gets; elsewhere it
        knows all.
        """
        if not operation(self.coll).by_pair:
            return True
        return all(
            self._holders(rank, step.src) == {rank * self.size + step.peer}
            for rank, program in enumerate(schedule.programs())
            for step in program.steps
            if step.op is Op.SEND and step.src is not None
        )

    def _holders(self, rank: int, where: Slice) -> set[int]:
        parts = self.held[rank][where.space][where.lo : where.hi]
        return {part // self.share for part in parts}

    def one_pair_at_a_time(self, schedule: Schedule) -> bool:
        """Return whether no instruction handles blocks of two pairs of an alltoall.

        A pair has fragments of its own, and an instruction one number of them.
        """
        if not operation(self.coll).by_pair:
            return True
        return all(
            len(self._holders_of(lowered, index)) <= 1
            for rank in range(self.size)
            for can_fuse in (_always, _never)
            for lowered in (lower(schedule, rank, can_fuse),)
            for index in range(len(lowered))
        )

    def _holders_of(self, lowered: Lowered, index: int) -> set[int]:
        found: set[int] = set()
        for kind, *where in (*lowered.inputs_of(index), *lowered.outputs_of(index)):
            if kind == LOCAL:
                found |= self._holders(lowered.rank, Slice(*where))
        return found

    def bounds(
        self, rank: int, spaces: Sequence[Space], lengths: Mapping[int, int]
    ) -> list[list[int]]:
        """Return the block boundaries of each space of ``rank``, in elements.

        Args:
            rank: whose spaces.
            spaces: its spaces; scratch of scale 0 is not used and gets no length.
            lengths: elements of each holder.
        """
        found = []
        for space, parts in zip(spaces, self.held[rank], strict=True):
            edges = [0]
            for part in parts if space.scale[0] else (NOTHING,) * len(parts):
                edges.append(edges[-1] + self._length(part, lengths))
            found.append(edges)
        return found

    def _length(self, part: int, lengths: Mapping[int, int]) -> int:
        if part == NOTHING:
            return 0
        holder, block = divmod(part, self.share)
        return block_length(lengths[holder], block, self.share)


def _always(peer: int) -> bool:
    return True


def _never(peer: int) -> bool:
    return False


def block_length(length: int, block: int, share: int) -> int:
    """Return the elements of one of ``share`` even blocks of ``length`` elements."""
    return (block + 1) * length // share - block * length // share


def parts_of(schedule: Schedule) -> Parts | None:
    """Return the part that each block holds; None if some block would hold two."""
    try:
        return _Tracing(schedule).run()
    except _TwoPartsError:
        return None


class _TwoPartsError(Exception):
    pass


class _Tracing:
    """Joins blocks that meet in a step: what meets has one length."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.programs = schedule.programs()
        self.first: list[list[int]] = []
        following = 0
        for program in self.programs:
            self.first.append([])
            for space in program.spaces:
                self.first[-1].append(following)
                following += space.nblk
        self.joined = list(range(following))
        self.sent: dict[tuple[int, int], list[Slice]] = {}

    def run(self) -> Parts:
        for program in self.programs:
            for step in program.steps:
                if step.op is Op.SEND and step.src is not None:
                    self.sent.setdefault((program.rank, step.peer), []).append(step.src)
        for program in self.programs:
            self._join_steps(program)
        return self._name()

    def _join_steps(self, program: RankProgram) -> None:
        rank, taken = program.rank, dict.fromkeys(range(self.schedule.size), 0)
        for step in program.steps:
            if step.src is not None and step.dst is not None:
                self._join((rank, step.src), (rank, step.dst))
            if step.op in (Op.RECV, Op.RRED) and step.dst is not None:
                sent = self.sent[step.peer, rank][taken[step.peer]]
                taken[step.peer] += 1
                self._join((step.peer, sent), (rank, step.dst))

    def _join(self, one: tuple[int, Slice], other: tuple[int, Slice]) -> None:
        for a, b in zip(self._blocks(*one), self._blocks(*other), strict=True):
            self.joined[self._root(a)] = self._root(b)

    def _blocks(self, rank: int, where: Slice) -> range:
        first = self.first[rank][where.space]
        return range(first + where.lo, first + where.hi)

    def _root(self, block: int) -> int:
        while self.joined[block] != block:
            self.joined[block] = self.joined[self.joined[block]]
            block = self.joined[block]
        return block

    def _name(self) -> Parts:
        schedule, names = self.schedule, dict[int, int]()
        goal = Goal(schedule.coll, schedule.size, schedule.root)
        for program in self.programs:
            ends = [goal.initial, goal.final]
            for first, space, says in zip(
                self.first[program.rank], program.spaces, ends, strict=False
            ):
                contents = says(program.rank, space.nblk)
                for block, (part, _) in enumerate(contents, start=first):
                    if names.setdefault(self._root(block), part) != part:
                        raise _TwoPartsError
        held = tuple(
            tuple(
                tuple(
                    names.get(self._root(block), NOTHING)
                    for block in range(first, first + space.nblk)
                )
                for first, space in zip(
                    self.first[program.rank], program.spaces, strict=True
                )
            )
            for program in self.programs
        )
        return Parts(schedule.coll, schedule.size, self._share(), held)

    def _share(self) -> int:
        spec = operation(self.schedule.coll)
        inp, out = self.programs[self.schedule.root].spaces[:2]
        if spec.out_count == "times_size":
            return inp.nblk
        if spec.out_count == "div_size":
            return out.nblk
        return inp.nblk // self.schedule.size
