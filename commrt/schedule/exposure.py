# SPDX-License-Identifier: Apache-2.0
"""Reads and writes of a rank's shared buffers that peers may make.

A schedule's messages carry copies: a send is over at once, and what is received is
written when it is received. Two shortcuts save the copies, and change when memory is
read and written:

- *exposing*: the receiver reads the sender's buffer itself, later than the send. That
  is right if whatever overwrites the buffer comes after the receiver has read it.
- *delivering*: the sender writes into the receiver's ``out``, earlier than the receive.
  That is right if whatever touches that memory before has come before the sender's
  instruction, or is that very instruction, reading the same elements that it writes.

Both follow from the order that dependencies and messages impose, whatever the timing.
They depend on how a rank's send and receive buffer lie to each other, which is its own
affair: the answers are sets of cases (``Sharing``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntFlag

import numpy as np
import numpy.typing as npt

from commrt.schedule.ir import Slice, Space
from commrt.schedule.lower import LOCAL, MESSAGE, Entry, Lowered

__all__ = ["Reach", "Sharing", "reaches"]


class Sharing(IntFlag):
    """Relation of a rank's ``in`` and ``out`` in memory; as in engine/layout.hpp."""

    APART = 1
    """They have nothing in common."""
    IN_PLACE = 2
    """They are the same memory."""
    OWN_BLOCK = 4
    """The shorter one is this rank's block of the longer."""


@dataclass(frozen=True)
class Reach:
    """The exposures of one rank's program, as sets of cases."""

    exposable: npt.NDArray[np.uint8]
    """Cases, per instruction, in which peers may read here the part of its result that
    it sends out."""
    operand_exposable: npt.NDArray[np.uint8]
    """The same for its only operand, where it sends that as it is."""
    deliverable: npt.NDArray[np.uint8]
    """Cases, per output, in which a message may be written to the peer's ``out``; a
    case is that of the peer's buffers."""
    landings: tuple[tuple[int, Slice] | None, ...]
    """Peer, per output, and the slice of its spaces where the message goes."""


@dataclass(frozen=True)
class _Touch:
    """An access of one instruction to local memory."""

    index: int
    lo: int
    hi: int
    writes: bool


def reaches(
    programs: Sequence[Lowered], share_memory: Callable[[int, int], bool]
) -> list[Reach]:
    """Return the reach of each rank's program, given the programs of all ranks.

    ``share_memory(rank, peer)`` tells which ranks map each other's memory.
    """
    return _Analysis(programs, share_memory).run()


Node = tuple[int, int]
"""rank, instruction."""


class _Analysis:
    def __init__(
        self,
        programs: Sequence[Lowered],
        share_memory: Callable[[int, int], bool],
    ) -> None:
        self.programs = programs
        self.share_memory = share_memory
        self.inputs = [[p.inputs_of(i) for i in range(len(p))] for p in programs]
        self.outputs = [[p.outputs_of(i) for i in range(len(p))] for p in programs]
        self.first = [0]
        for program in programs:
            self.first.append(self.first[-1] + len(program))
        # (sender, receiver, k) -> the instruction that sends, or takes, the message.
        self.sender = {
            (rank, peer, k): index for rank, index, peer, k in _messages(self.outputs)
        }
        self.receiver = {
            (peer, rank, k): index for rank, index, peer, k in _messages(self.inputs)
        }
        self.before = self._order()

    def run(self) -> list[Reach]:
        exposable = [np.zeros((2, len(p)), np.uint8) for p in self.programs]
        deliverable = [np.zeros(len(p.outputs), np.uint8) for p in self.programs]
        landings: list[list[tuple[int, Slice] | None]] = [
            [None] * len(p.outputs) for p in self.programs
        ]
        if self.before is not None:
            self._fill(exposable, deliverable, landings)
        return [
            Reach(
                exposable[rank][0],
                exposable[rank][1],
                deliverable[rank],
                tuple(landings[rank]),
            )
            for rank in range(len(self.programs))
        ]

    def _fill(
        self,
        exposable: list[npt.NDArray[np.uint8]],
        deliverable: list[npt.NDArray[np.uint8]],
        landings: list[list[tuple[int, Slice] | None]],
    ) -> None:
        """Collect the cases, of each rank's buffers in turn."""
        for sharing in Sharing:
            for rank, program in enumerate(self.programs):
                memory = _Memory.of(program, sharing, len(self.programs))
                if memory is None:
                    continue
                touches = self._touches(rank, memory)
                exposed = self._exposed(rank, memory, touches)
                for index, source in exposed:
                    of_operand = source not in self._results(rank, index)
                    exposable[rank][int(of_operand), index] |= sharing
                for node, row, landing in self._arrivals(rank):
                    if self._may_deliver(rank, memory, touches, exposed, node, landing):
                        deliverable[node[0]][row] |= sharing
                        landings[node[0]][row] = (rank, landing)

    # Order.

    def _bit(self, node: Node) -> int:
        return 1 << (self.first[node[0]] + node[1])

    def _comes_before(self, one: Node, other: Node) -> bool:
        assert self.before is not None
        return bool(self.before[other[0]][other[1]] & self._bit(one))

    def _order(self) -> list[list[int]] | None:
        """Return the instructions before each instruction, as a set; None if cyclic."""
        waits: dict[Node, int] = {}
        follows: dict[Node, list[Node]] = {}
        for rank, program in enumerate(self.programs):
            for index in range(len(program)):
                before = [(rank, dep) for dep in program.deps_of(index)]
                before += self._senders(rank, index)
                waits[rank, index] = len(before)
                for node in before:
                    follows.setdefault(node, []).append((rank, index))
        sets = [[0] * len(program) for program in self.programs]
        ready = [node for node, count in waits.items() if count == 0]
        settled = 0
        while ready:
            node = ready.pop()
            settled += 1
            reached = sets[node[0]][node[1]] | self._bit(node)
            for rank, index in follows.get(node, ()):
                sets[rank][index] |= reached
                waits[rank, index] -= 1
                if waits[rank, index] == 0:
                    ready.append((rank, index))
        return sets if settled == len(waits) else None

    def _senders(self, rank: int, index: int) -> list[Node]:
        return [
            (peer, self.sender[peer, rank, k])
            for kind, peer, k, _ in self.inputs[rank][index]
            if kind == MESSAGE
        ]

    # Memory.

    def _touches(self, rank: int, memory: _Memory) -> list[_Touch]:
        found = []
        for index in range(len(self.programs[rank])):
            for entries, writes in (
                (self.inputs[rank][index], False),
                (self.outputs[rank][index], True),
            ):
                for entry in entries:
                    if entry[0] == LOCAL:
                        lo, hi = memory.where(Slice(*entry[1:]))
                        found.append(_Touch(index, lo, hi, writes))
        return found

    def _results(self, rank: int, index: int) -> list[Slice]:
        return _slices(self.outputs[rank][index])[:1]

    def _sources(self, rank: int, index: int) -> list[Slice]:
        """Return the places in buffers of the value that an instruction sends."""
        found = self._results(rank, index)
        if len(self.inputs[rank][index]) == 1:
            found = found + _slices(self.inputs[rank][index])
        spaces = self.programs[rank].spaces
        return [part for part in found if spaces[part.space].kind != "tmp"]

    def _takers(self, rank: int, index: int) -> list[Node]:
        """Return the receivers of an instruction's messages on this node."""
        return [
            (peer, self.receiver[rank, peer, k])
            for kind, peer, k, _ in self.outputs[rank][index]
            if kind == MESSAGE and self.share_memory(rank, peer)
        ]

    def _exposed(
        self, rank: int, memory: _Memory, touches: list[_Touch]
    ) -> list[tuple[int, Slice]]:
        """Return the instructions whose payload may stay where it is, and where."""
        found = []
        for index in range(len(self.programs[rank])):
            takers = self._takers(rank, index)
            for source in self._sources(rank, index) if takers else ():
                lo, hi = memory.where(source)
                # The instruction itself may write there only what is there.
                later = [
                    (rank, touch.index)
                    for touch in touches
                    if touch.writes
                    and touch.lo < hi
                    and lo < touch.hi
                    and (touch.index, touch.lo, touch.hi) != (index, lo, hi)
                    and not self._comes_before((rank, touch.index), (rank, index))
                ]
                if all(
                    self._same_blocks((rank, source), taker)
                    and all(self._comes_before(taker, writer) for writer in later)
                    for taker in takers
                ):
                    found.append((index, source))
        return found

    def _same_blocks(self, one: tuple[int, Slice], taker: Node) -> bool:
        """Return whether a fragment of the slice has the same pieces at the taker."""
        shape = self._shape(taker)
        return shape is None or _congruent(
            self.programs[one[0]].spaces,
            one[1],
            self.programs[taker[0]].spaces,
            shape,
        )

    def _shape(self, node: Node) -> Slice | None:
        """Return the slice whose blocks say how the engine cuts a value."""
        outs = _slices(self.outputs[node[0]][node[1]])
        local = outs or _slices(self.inputs[node[0]][node[1]])
        return local[-1] if local else None

    # Deliveries.

    def _arrivals(self, rank: int) -> list[tuple[Node, int, Slice]]:
        """Return messages that this rank only stores: sender, output's row, landing."""
        found = []
        for index, entries in enumerate(self.inputs[rank]):
            outs = _slices(self.outputs[rank][index])
            if len(entries) != 1 or entries[0][0] != MESSAGE or not outs:
                continue
            _, peer, k, _ = entries[0]
            landing = outs[0]
            if self.programs[rank].spaces[landing.space].kind != "out":
                continue
            node = (peer, self.sender[peer, rank, k])
            if not self.share_memory(peer, rank):
                continue
            if not self._same_blocks((rank, landing), node):
                continue
            row = int(self.programs[peer].output_ptr[node[1]])
            row += self.outputs[peer][node[1]].index((MESSAGE, rank, k, 0))
            found.append((node, row, landing))
        return found

    def _may_deliver(
        self,
        rank: int,
        memory: _Memory,
        touches: list[_Touch],
        exposed: list[tuple[int, Slice]],
        sender: Node,
        landing: Slice,
    ) -> bool:
        lo, hi = memory.where(landing)
        storing = self._storing(rank, sender, landing)
        for touch in touches:
            node = (rank, touch.index)
            if touch.hi <= lo or hi <= touch.lo or touch.index == storing:
                continue
            if self._comes_before((rank, storing), node):
                continue
            if not self._comes_before(node, sender):
                return False
        for index, source in exposed:
            start, end = memory.where(source)
            if end <= lo or hi <= start or index == storing:
                continue
            if self._comes_before((rank, storing), (rank, index)):
                continue
            for taker in self._takers(rank, index):
                if taker == sender and (start, end) == (lo, hi):
                    continue  # it reads each element before it writes it
                if not self._comes_before(taker, sender):
                    return False
        return True

    def _storing(self, rank: int, sender: Node, landing: Slice) -> int:
        for kind, peer, k, _ in self.outputs[sender[0]][sender[1]]:
            if kind == MESSAGE and peer == rank:
                index = self.receiver[sender[0], rank, k]
                if _slices(self.outputs[rank][index])[:1] == [landing]:
                    return index
        raise AssertionError("a landing without its message")


@dataclass(frozen=True)
class _Memory:
    """Places of a rank's slices, in units that all block boundaries fall on."""

    starts: tuple[int, ...]
    """Unit at which the first block begins, per space."""
    units: tuple[int, ...]
    """Units of one block, per space."""

    @classmethod
    def of(cls, program: Lowered, sharing: Sharing, size: int) -> _Memory | None:
        """Return None where the buffers of this program cannot lie so."""
        spaces = program.spaces
        if any(space.split != "even" for space in spaces):
            return None
        full = size * math.lcm(*(max(space.nblk, 1) for space in spaces))
        full *= math.lcm(*(space.scale[1] for space in spaces))
        lengths = [full * space.scale[0] // space.scale[1] for space in spaces]
        starts = [0]
        for length in lengths:
            starts.append(starts[-1] + length)
        units = [
            length // max(space.nblk, 1)
            for space, length in zip(spaces, lengths, strict=True)
        ]
        if sharing is not Sharing.APART:
            places = {s.kind: i for i, s in enumerate(spaces) if s.kind != "tmp"}
            if "in" not in places or "out" not in places:
                return None
            short, long = sorted(
                (places["in"], places["out"]), key=lambda i: lengths[i]
            )
            if sharing is Sharing.IN_PLACE:
                if lengths[short] != lengths[long]:
                    return None
                starts[short] = starts[long]
            else:
                if lengths[short] * size != lengths[long] or size == 1:
                    return None
                starts[short] = starts[long] + program.rank * lengths[short]
        return cls(tuple(starts[:-1]), tuple(units))

    def where(self, part: Slice) -> tuple[int, int]:
        start, unit = self.starts[part.space], self.units[part.space]
        return start + part.lo * unit, start + part.hi * unit


def _slices(entries: Sequence[Entry]) -> list[Slice]:
    return [Slice(*entry[1:]) for entry in entries if entry[0] == LOCAL]


def _congruent(
    spaces: Sequence[Space], part: Slice, others: Sequence[Space], other: Slice
) -> bool:
    if part.hi - part.lo == other.hi - other.lo == 1:
        return True
    one, two = spaces[part.space], others[other.space]
    return (one.nblk, one.scale, part.lo, part.hi) == (
        two.nblk,
        two.scale,
        other.lo,
        other.hi,
    )


def _messages(
    entries: Sequence[Sequence[Sequence[Entry]]],
) -> Iterator[tuple[int, int, int, int]]:
    """Yield rank, instruction, peer and number of every message."""
    for rank, instructions in enumerate(entries):
        for index, row in enumerate(instructions):
            for kind, peer, k, _ in row:
                if kind == MESSAGE:
                    yield rank, index, peer, k
