# SPDX-License-Identifier: Apache-2.0
"""Programs of a rank's stream over exchange memory that peers opened (CUDA IPC).

The rounds are those of ``stream_programs``. A rank puts its messages into its own
exchange memory, and flags tell the peers. Their kernels read a message there, once,
straight into its destination. With the schedule ``direct`` these are the one-shot and
the two-shot allreduce. A part of a program publishes in one half of the memory while
peers may still read the other; operations that publish more go in several parts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from commrt.errors import BackendError
from commrt.planning.scratch import Area
from commrt.planning.spec import PlanSpec
from commrt.planning.stream_programs import (
    FIRST_PEER,
    SCRATCH,
    Command,
    ProgramCall,
    StreamPlan,
    StreamStep,
    Where,
    by_block,
    like,
)
from commrt.schedule.ir import Slice
from commrt.schedule.nodes import Nodes
from commrt.schedule.rounds import Message, Place, Slot

__all__ = ["peer_program"]

_LINE_NBYTES = 64


def peer_program(
    spec: PlanSpec, rank: int, size: int, nodes: Nodes, half_nbytes: int
) -> StreamPlan:
    """Return the program of ``rank`` over exchange memory with halves of so many bytes.

    Raises BackendError where what a rank publishes does not fit, or nobody knows where
    others put it (alltoallv).
    """
    if spec.op.rule_bytes == "any":
        raise BackendError(
            f"{spec.op.name} between processes by IPC: no rank knows the counts of the "
            f"others, and so not where they publish; use the staged backend"
        )
    work = ProgramCall(spec, rank, nodes)
    fragments = _fragments(work, half_nbytes)
    layouts = [
        [_Published(work, peer, fragment, fragments) for peer in range(size)]
        for fragment in range(fragments)
    ]
    most = max(one.nbytes for each in layouts for one in each)
    if most > half_nbytes:
        raise BackendError(
            f"{spec.candidate} of {spec.op.name} would publish {most} bytes of a rank "
            f"at once, and there is exchange memory for {half_nbytes}: use another "
            f"algorithm, or more exchange memory (half_nbytes=)"
        )
    commands = list(work.before())
    sent, received = [0] * size, [0] * size
    for fragment, layout in enumerate(layouts):
        commands += _part(work, layout, fragment, fragments, sent, received)
    commands += work.behind()
    return work.plan(commands, most, fragments, 0)


def _fragments(call: ProgramCall, half_nbytes: int) -> int:
    """Return the number of parts: the messages published in one must fit."""
    number = call.fragments()
    while call.can_be_cut and _published(call, number) > half_nbytes:
        if number > call.longest_nbytes // _LINE_NBYTES:
            break
        number += max(1, number // 8)
    return number


def _published(call: ProgramCall, fragments: int) -> int:
    """Return the most that any rank publishes in any part."""
    return max(
        _Published(call, peer, fragment, fragments).nbytes
        for peer in range(call.size)
        for fragment in {0, fragments - 1}
    )


class _Published:
    """The place in a rank's exchange memory of what it sends in one fragment.

    Messages of one value in one round share a place. Every rank knows every rank's.
    """

    def __init__(
        self, call: ProgramCall, rank: int, fragment: int, fragments: int
    ) -> None:
        self.offsets: dict[tuple[int, int], int] = {}
        """Place of message k to a peer, by peer and k."""
        self.first: dict[tuple[int, Slice], int] = {}
        """Place of a slice's value in a round, by round and slice: it is copied there
        once."""
        self.nbytes = 0
        for number, ends in enumerate(call.rounds[rank].sends):
            for message in ends:
                value = number, like(message.place)
                if value not in self.first:
                    length = call.nbytes(rank, message.place, fragment, fragments)
                    self.first[value] = self.nbytes
                    self.nbytes += -(-length // _LINE_NBYTES) * _LINE_NBYTES
                self.offsets[message.peer, message.k] = self.first[value]


def _part(
    call: ProgramCall,
    layout: Sequence[_Published],
    fragment: int,
    fragments: int,
    sent: list[int],
    received: list[int],
) -> Iterator[Command]:
    """Yield one fragment: its rounds one behind the other, in one half of the memory.

    Messages to one peer are numbered in the order in which they are published, which
    the peer knows, too: by round, then by number.
    """
    rank, own = call.rank, call.rounds[call.rank]
    yield (StreamStep.BEGIN, 0, 0, 0, 0, 0, 0, 0)
    # A slot is no memory here: it is where the peer has published.
    slots: dict[int, Where] = {}
    temporary: dict[int, Area] = {}
    numbers = dict(_numbers_from(call, fragment, fragments, received))
    sources: set[int] = set()

    def place(which: Place) -> Where:
        if isinstance(which, Slot):
            return slots[which.number]
        return call.place(which, fragment, fragments)

    def pull(message: Message) -> Where:
        base = FIRST_PEER + message.peer
        return base, layout[message.peer].offsets[rank, message.k]

    for number in range(-1, own.num_rounds):
        if number >= 0:
            yield from _publish(call, layout[rank], number, fragment, fragments, sent)
            straight: list[Command] = []
            for message in own.recvs[number]:
                nbytes = call.nbytes(rank, message.place, fragment, fragments)
                if not nbytes:
                    continue
                sources.add(message.peer)
                at = numbers[message.peer, message.k]
                yield (StreamStep.AWAIT, 0, 0, 0, 0, 0, message.peer, at)
                if isinstance(message.place, Slot):
                    slots[message.place.number] = pull(message)
                else:
                    target = place(message.place)
                    straight += call.work("copy", target, pull(message), nbytes)
            yield from straight
        for work in (
            piece
            for each in own.work[number + 1]
            for piece in by_block(each, fragments)
        ):
            nbytes = call.nbytes(rank, work.dst, fragment, fragments)
            if not nbytes:
                continue
            if isinstance(work.dst, Slot):
                yield from _own_slot(
                    call, work.dst.number, nbytes, fragment, slots, temporary
                )
            yield from call.work(work.kind, place(work.dst), place(work.src), nbytes)
    for peer in sorted(sources):
        yield (StreamStep.RELEASE, 0, 0, 0, 0, 0, peer, 0)


def _own_slot(
    call: ProgramCall,
    number: int,
    nbytes: int,
    fragment: int,
    slots: dict[int, Where],
    temporary: dict[int, Area],
) -> Iterator[Command]:
    """Yield the copy of what a peer published, before it is reduced into.

    Peers read it, too, and it is theirs.
    """
    if number in temporary:
        return
    area = temporary[number] = call.scratch.take(nbytes, fragment, fragment)
    where = SCRATCH, area.offset
    if number in slots:
        yield from call.work("copy", where, slots[number], nbytes)
    slots[number] = where


def _publish(
    call: ProgramCall,
    mine: _Published,
    number: int,
    fragment: int,
    fragments: int,
    sent: list[int],
) -> Iterator[Command]:
    copied: set[Slice] = set()
    tell: list[Command] = []
    for message in call.rounds[call.rank].sends[number]:
        nbytes = call.nbytes(call.rank, message.place, fragment, fragments)
        if not nbytes:
            continue
        where = like(message.place)
        if where not in copied:
            copied.add(where)
            target = FIRST_PEER + call.rank, mine.first[number, where]
            source = call.place(message.place, fragment, fragments)
            yield from call.work("copy", target, source, nbytes)
        sent[message.peer] += 1
        peer = message.peer
        tell.append((StreamStep.PUBLISH, 0, 0, 0, 0, 0, peer, sent[peer]))
    yield from tell


def _numbers_from(
    call: ProgramCall, fragment: int, fragments: int, received: list[int]
) -> Iterator[tuple[tuple[int, int], int]]:
    """Yield the number of each of a peer's messages, and count them."""
    for ends in call.rounds[call.rank].recvs:
        for message in ends:
            if not call.nbytes(call.rank, message.place, fragment, fragments):
                continue
            received[message.peer] += 1
            yield (message.peer, message.k), received[message.peer]
