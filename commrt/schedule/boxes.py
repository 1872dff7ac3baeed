# SPDX-License-Identifier: Apache-2.0
"""Programs that move boxes: strided n-dimensional parts of arrays, between ranks.

Halo exchange and redistribution are lists of *moves*: which
box of which array goes to whom, and where what comes belongs. ``compile_moves`` makes
one rank's program of them: long boxes are cut and short ones share a message, alike on
both sides, because that depends on shapes alone.

Where either side states a length by itself, as in collectives of neighbours, the two
may disagree. There every move has messages of its own, and no list of their lengths is
the beginning of another one: all but the last are as long as can be, and the last is
shorter, even empty. So sides that disagree meet a message of another length than
expected, and nothing is left over for a later operation.

Steps of one program depend on each other only where boxes overlap: what is sent may
have to arrive first, and values that are added up are added in one order.

Such programs do not deadlock, though a rank may have few messages unread and tries few
steps at once. A step's *key* is its phase and the number of its message among those
with the same peer; it is the same at both ends, and steps are in the order of keys. A
rank tries all steps of its least key that is not done, and has slots for all that it
sends under one key. Take those with the least key among all unfinished steps of all
ranks. A send among them waits only for values and slots of lesser keys, which are done.
So all sends run, then the steps that receive from them, in order.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt

__all__ = [
    "LIMIT_NBYTES",
    "Box",
    "BoxProgram",
    "Move",
    "StepKind",
    "compile_moves",
    "cut",
]

LIMIT_NBYTES = 262144
"""Most bytes of memory that a message's box touches on one side. A row of a few bytes
touches a cache line: what lies in short rows is cut into shorter messages, which leave
the lines of a face in the cache until its other values are packed or unpacked."""
_LINE_NBYTES = 64

Bounds = tuple[tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Box:
    """Elements ``start`` to ``stop`` (exclusive) of an array, in each dimension."""

    array: int
    """The array's number."""
    start: tuple[int, ...]
    stop: tuple[int, ...]
    axes: tuple[tuple[int, int], ...] | None = None
    """Dimension of the array, and elements per step there, for each of the box's
    dimensions. None: the box's dimensions are the array's."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Elements in each dimension."""
        return tuple(b - a for a, b in zip(self.start, self.stop, strict=True))

    @property
    def count(self) -> int:
        """Elements in all."""
        return math.prod(self.shape)

    def part(self, bounds: Bounds) -> Box:
        """Return the part within ``bounds``, which count from its start."""
        low, high = bounds
        return Box(
            self.array,
            tuple(a + b for a, b in zip(self.start, low, strict=True)),
            tuple(a + b for a, b in zip(self.start, high, strict=True)),
            self.axes,
        )


@dataclass(frozen=True, slots=True)
class Move:
    """One box that moves, as one rank sees it."""

    phase: int
    """Phases are in order; within one, moves are independent."""
    number: int
    """Says which move of the peer this one meets: both ranks give it the same."""
    peer: int | None
    """The other rank; None where source and target are both here."""
    source: Box | None
    """The box that leaves this rank."""
    target: Box | None
    """The box that receives it here."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the moved box."""
        box = self.source or self.target
        assert box is not None
        return box.shape


class StepKind(IntEnum):
    """The kinds of steps; each value is the engine's code."""

    SEND = 0
    RECEIVE = 1
    RECEIVE_REDUCE = 2
    COPY = 3
    REDUCE = 4


@dataclass(frozen=True)
class BoxProgram:
    """One rank's steps, as the engine takes them."""

    boxes: tuple[Box, ...]
    steps: npt.NDArray[np.int32]
    """(steps, 6): kind, first and last box, peer, message number, first box read."""
    deps: npt.NDArray[np.int32]
    dep_ptr: npt.NDArray[np.int32]
    peers: tuple[tuple[int, int, int], ...]
    """Tuples of a rank, the messages to it and the messages from it."""
    longest_nbytes: int
    """Bytes of the longest message."""
    ahead: int
    """Number of steps that the engine tries at once: those of two keys."""
    fewest_slots: int
    """Most messages sent under one key."""


def cut(shape: Sequence[int], itemsize: int, limit: int) -> list[Bounds]:
    """Return the parts, in order, of a box that touch about ``limit`` bytes at most.

    Its slowest dimensions are cut first, evenly.
    """
    return list(_cut([0] * len(shape), list(shape), itemsize, limit, 0))


def _touched(shape: Sequence[int], itemsize: int) -> int:
    if not shape:
        return itemsize
    row = shape[-1] * itemsize
    return math.prod(shape[:-1]) * max(row, _LINE_NBYTES)


def _cut(
    start: list[int], shape: list[int], itemsize: int, limit: int, dim: int
) -> Iterator[Bounds]:
    if dim == len(shape) or _touched(shape, itemsize) <= limit:
        stop = [a + n for a, n in zip(start, shape, strict=True)]
        yield tuple(start), tuple(stop)
        return
    extent = shape[dim]
    one = [*shape[:dim], 1, *shape[dim + 1 :]]
    last = dim == len(shape) - 1
    slab = itemsize if last else _touched(one, itemsize)
    parts = -(-extent // max(1, limit // slab))
    for part in range(parts):
        low, high = extent * part // parts, extent * (part + 1) // parts
        begin = [*start[:dim], start[dim] + low, *start[dim + 1 :]]
        yield from _cut(
            begin,
            [*shape[:dim], high - low, *shape[dim + 1 :]],
            itemsize,
            limit,
            dim + 1,
        )


@dataclass
class _Message:
    """The boxes of one step: several short ones, or a part of a long one."""

    kind: StepKind
    phase: int
    peer: int | None
    index: int
    """Among those with the same peer in the same phase and direction."""
    sources: list[Box]
    targets: list[Box]

    def order(self, rank: int, size: int) -> tuple[int, int, int, int]:
        """Return where the step stands: every rank begins with another peer."""
        sends = self.kind is StepKind.SEND
        local = self.peer is None
        way = 0 if sends else 1 if local else 2
        away = 0 if self.peer is None else (self.peer - rank) % size
        return self.phase, self.index, way, away if sends else -away


def compile_moves(
    moves: Sequence[Move],
    itemsizes: Sequence[int],
    *,
    rank: int,
    size: int,
    reduces: bool = False,
    stated: bool = False,
    limit: int = LIMIT_NBYTES,
) -> BoxProgram:
    """Return one rank's program.

    Args:
        moves: the rank's own, in any order; those without elements are left out,
            unless their lengths are stated.
        itemsizes: bytes per element of each array.
        rank: this rank.
        size: ranks of the communicator.
        reduces: what arrives is combined with what a target holds.
        stated: each side states the lengths of what moves, of one dimension, by itself.
        limit: most bytes that one message touches; equal on all ranks.
    """
    messages: list[_Message] = []
    groups: dict[tuple[int, int | None, bool], list[Move]] = {}
    for move in moves:
        if math.prod(move.shape) > 0 or (stated and move.peer is not None):
            key = (move.phase, move.peer, move.source is not None)
            groups.setdefault(key, []).append(move)
    for group in groups.values():
        if stated and group[0].peer is not None:
            messages += _stated_messages(group, itemsizes, limit)
        else:
            messages += _messages(group, itemsizes, reduces, limit)
    messages.sort(key=lambda message: message.order(rank, size))
    return _assemble(messages, itemsizes)


def _messages(
    moves: list[Move], itemsizes: Sequence[int], reduces: bool, limit: int
) -> list[_Message]:
    """Return the messages of moves in one phase, with one peer and direction."""
    first = moves[0]
    if first.source is not None and first.target is not None:
        kind = StepKind.REDUCE if reduces else StepKind.COPY
    elif first.source is not None:
        kind = StepKind.SEND
    else:
        kind = StepKind.RECEIVE_REDUCE if reduces else StepKind.RECEIVE
    messages: list[_Message] = []
    held = 0
    for unit in _units(moves, itemsizes, limit):
        cost = sum(piece.touched_nbytes for piece in unit)
        if not messages or held + cost > limit:
            messages.append(
                _Message(kind, first.phase, first.peer, len(messages), [], [])
            )
            held = 0
        held += cost
        for piece in unit:
            if piece.move.source is not None:
                messages[-1].sources.append(piece.move.source.part(piece.bounds))
            if piece.move.target is not None:
                messages[-1].targets.append(piece.move.target.part(piece.bounds))
    return messages


@dataclass(frozen=True, slots=True)
class _Piece:
    """A part of a move."""

    index: int
    """Among the move's."""
    array: int
    move: Move
    bounds: Bounds
    touched_nbytes: int
    has_twin: bool
    """True if another move has the same shape, in short rows."""


def _units(
    moves: list[Move], itemsizes: Sequence[int], limit: int
) -> list[list[_Piece]]:
    """Return the content of each message, in order: a piece, or two twins.

    Opposite faces of a block across its fastest dimension share cache lines: the engine
    moves both in one pass (native/kernels/box_twins.cpp).
    """
    ends = [(move, move.source or move.target) for move in moves]
    alike = Counter((box.array, move.shape) for move, box in ends if box is not None)
    pieces = []
    for move, box in ends:
        assert box is not None
        itemsize = itemsizes[box.array]
        has_twin = alike[box.array, move.shape] > 1
        has_twin &= math.prod(move.shape[-1:]) * itemsize < _LINE_NBYTES
        most = limit // 2 if has_twin else limit
        for index, bounds in enumerate(cut(move.shape, itemsize, most)):
            extents = [b - a for a, b in zip(*bounds, strict=True)]
            touched = _touched(extents, itemsize)
            pieces.append(_Piece(index, box.array, move, bounds, touched, has_twin))
    # Parts of all boxes take turns: lines that they share are still in the cache then.
    pieces.sort(key=lambda piece: (piece.index, piece.array, piece.move.number))
    units: list[list[_Piece]] = []
    for piece in pieces:
        before = units[-1] if units else []
        if (
            len(before) == 1
            and before[0].has_twin
            and (before[0].index, before[0].array) == (piece.index, piece.array)
            and before[0].move.shape == piece.move.shape
        ):
            before.append(piece)
        else:
            units.append([piece])
    return units


def _stated_messages(
    moves: list[Move], itemsizes: Sequence[int], limit: int
) -> list[_Message]:
    """Return the messages of moves whose lengths each side states by itself."""
    messages: list[_Message] = []
    for move in sorted(moves, key=lambda one: one.number):
        box = move.source or move.target
        assert box is not None
        kind = StepKind.RECEIVE if move.source is None else StepKind.SEND
        most = limit // itemsizes[box.array]
        for low in range(0, box.count + 1, most):
            high = min(low + most, box.count)
            part = [box.part(((low,), (high,)))] if high > low else []
            ends = ([], part) if kind is StepKind.RECEIVE else (part, [])
            messages.append(_Message(kind, move.phase, move.peer, len(messages), *ends))
    return messages


def _assemble(messages: list[_Message], itemsizes: Sequence[int]) -> BoxProgram:
    boxes: list[Box] = []
    rows = []
    sent: Counter[int] = Counter()
    received: Counter[int] = Counter()
    longest = 0
    for message in messages:
        own = message.targets or message.sources
        low = len(boxes)
        boxes += own
        row = [int(message.kind), low, len(boxes), -1, 0, -1]
        if message.peer is None:
            row[5] = len(boxes)
            boxes += message.sources
        else:
            counter = sent if message.kind is StepKind.SEND else received
            row[3:5] = [message.peer, counter[message.peer]]
            counter[message.peer] += 1
        rows.append(row)
        nbytes = sum(box.count * itemsizes[box.array] for box in own)
        longest = max(longest, nbytes)
    deps, dep_ptr = _dependencies(messages)
    steps = Counter((one.phase, one.index) for one in messages)
    sends = Counter(
        (one.phase, one.index) for one in messages if one.kind is StepKind.SEND
    )
    return BoxProgram(
        tuple(boxes),
        np.array(rows, np.int32).reshape(-1, 6),
        deps,
        dep_ptr,
        tuple(
            (peer, sent[peer], received[peer]) for peer in sorted({*sent, *received})
        ),
        longest,
        2 * max(steps.values(), default=1),
        max(sends.values(), default=1),
    )


def _dependencies(
    messages: list[_Message],
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """Return, for each step, the earlier ones that write what it reads or writes."""
    found: list[list[int]] = [[] for _ in messages]
    several = len({message.phase for message in messages}) > 1
    if several or any(message.kind.name.endswith("REDUCE") for message in messages):
        written = _Written(messages)
        for index, message in enumerate(messages):
            used = message.sources + message.targets
            found[index] = sorted({at for box in used for at in written.by(box, index)})
    dep_ptr = np.cumsum([0, *map(len, found)], dtype=np.int32)
    return np.array([at for each in found for at in each], np.int32), dep_ptr


class _Written:
    """Writes of all steps, by box; each box counts with the most dimensions of any."""

    def __init__(self, messages: list[_Message]) -> None:
        boxes = [(i, box) for i, one in enumerate(messages) for box in one.targets]
        self._ndim = max((len(box.start) for _, box in boxes), default=0)
        self._step = np.array([index for index, _ in boxes], np.int64)
        self._array = np.array([box.array for _, box in boxes], np.int64)
        self._start = np.array([self._padded(box.start, 0) for _, box in boxes])
        self._stop = np.array([self._padded(box.stop, 1) for _, box in boxes])

    def _padded(self, numbers: tuple[int, ...], rest: int) -> tuple[int, ...]:
        return numbers + (rest,) * (self._ndim - len(numbers))

    def by(self, box: Box, before: int) -> list[int]:
        """Return the steps before ``before`` that write some of ``box``."""
        if not len(self._step) or len(box.start) > self._ndim:
            return []
        hit = (self._step < before) & (self._array == box.array)
        hit &= (self._start < np.array(self._padded(box.stop, 1))).all(1)
        hit &= (self._stop > np.array(self._padded(box.start, 0))).all(1)
        return [int(step) for step in np.unique(self._step[hit])]
