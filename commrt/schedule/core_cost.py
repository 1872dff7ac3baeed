# SPDX-License-Identifier: Apache-2.0
"""Cost of a schedule on one node, where the ranks' own cores move the data.

time = alpha crowd rounds + work N + beta fill min(N, a fragment)

A message is a copy by its sender's core and another one by its receiver's, so what a
rank sends and what it receives add up to its *work*; a receive that reduces also costs
gamma per byte. Where memory is shared, a value that goes to several ranks is copied
once.

Ranks that share a core take turns. *Crowd* is how many do: the work of all ranks then
counts, divided by the cores, if that is more than what the busiest rank does; and a
message waits until its receiver has its turn.

*Rounds* and *fill* are as in `cost`, for ranks that do their steps in program order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple
from weakref import WeakKeyDictionary

from commrt.schedule.cost import (
    CHUNK_NBYTES,
    MESSAGE_SHARE,
    READER_SHARE,
    ROUNDING,
    counts,
    widths,
)
from commrt.schedule.ir import Op, RankProgram, Schedule, Slice

__all__ = ["READER_SHARE", "CoreCounts", "core_cost", "core_counts", "core_floor"]

_REDUCING = 0.5
"""gamma over beta, as far as *fill* is concerned."""
_END = MESSAGE_SHARE / 2
"""Part of a message's alpha that keeps the core of either end busy."""


class Load(NamedTuple):
    """Work of one rank's core, as parts of the operation's full vector."""

    sent: float
    """Copied for others."""
    again: float
    """Sent once more, to another rank."""
    received: float
    """Copied or reduced from others."""
    reduced: float
    """Operands of reductions."""

    def work(self, beta: float, gamma: float, shares: bool) -> float:
        """Return the time per byte of N."""
        again = READER_SHARE * self.again if shares else self.again
        return beta * (self.sent + again + self.received) + gamma * self.reduced


@dataclass(frozen=True)
class CoreCounts:
    """The amounts that the model multiplies by its constants."""

    rounds: float
    """Time of the messages, were they empty, in times of one message."""
    loads: tuple[Load, ...]
    """Loads of all ranks; equal ones stand once."""
    mean: Load
    """The work of all ranks, divided by their number."""
    fill: float
    """Time of the bytes beyond the busiest rank's work, in times of N bytes."""
    largest: float
    """Bytes of the largest message."""


class _Message(NamedTuple):
    """One end of a message."""

    peer: int
    sends: bool
    part: float
    """Time of its bytes, in times of N bytes."""


_COUNTS: WeakKeyDictionary[Schedule, CoreCounts] = WeakKeyDictionary()


def core_counts(schedule: Schedule) -> CoreCounts:
    """Return the counts of ``schedule``; the first call plays it through."""
    if schedule not in _COUNTS:
        read = [_read(program) for program in schedule.programs()]
        ends = [one.ends for one in read]
        sums = map(sum, zip(*(one.load for one in read), strict=True))
        played = _play(ends)
        if played is None:
            # Some ranks receive first what is sent last: their order is not the text's.
            ports = counts(schedule)
            rounds, fill = ports.rounds, ports.fill
        else:
            rounds, last = played
            fill = last - max(sum(end.part for end in own) for own in ends)
        _COUNTS[schedule] = CoreCounts(
            rounds,
            tuple({one.load: None for one in read}),
            Load(*(each / len(read) for each in sums)),
            fill if fill > ROUNDING else 0.0,
            max(one.largest for one in read),
        )
    return _COUNTS[schedule]


class _Read(NamedTuple):
    ends: list[_Message]
    load: Load
    largest: float


def _read(program: RankProgram) -> _Read:
    """Return the work of one rank's core for its messages, in program order."""
    width = widths(program)
    ends: list[_Message] = []
    sent = again = received = reduced = largest = 0.0
    sent_before: Slice | None = None
    for op, src, dst, peer, *_ in program.steps:
        where = src if op is Op.SEND else dst
        assert where is not None
        part = (where.hi - where.lo) * width[where.space]
        if op is Op.SEND:
            largest = max(largest, part)
            if src == sent_before:
                again += part
                ends.append(_Message(peer, True, part * READER_SHARE))
            else:
                sent += part
                ends.append(_Message(peer, True, part))
            sent_before = src
            continue
        sent_before = None
        if op is Op.RECV:
            received += part
            ends.append(_Message(peer, False, part))
        elif op is Op.RRED:
            reduced += part
            received += part
            ends.append(_Message(peer, False, part * (1 + _REDUCING)))
        elif op is Op.RED:
            reduced += part
    return _Read(ends, Load(sent, again, received, reduced), largest)


def _play(ends: Sequence[Sequence[_Message]]) -> tuple[float, float] | None:
    """Return the end of all messages: of empty ones, and of ones that are all bytes.

    Sends wait for nobody. None if ranks that wait for messages in program order would
    wait for each other, or if a message is never received.
    """
    place = [0] * len(ends)
    messages, data = [0.0] * len(ends), [0.0] * len(ends)
    under_way: dict[tuple[int, int], deque[tuple[float, float]]] = {}
    waiting: set[tuple[int, int]] = set()
    able = list(range(len(ends)))
    while able:
        rank = able.pop()
        own, at = ends[rank], place[rank]
        time, byte_time = messages[rank], data[rank]
        while at < len(own):
            peer, sends, part = own[at]
            if sends:
                byte_time += part
                pair = rank, peer
                under_way.setdefault(pair, deque()).append((time + 1 - _END, byte_time))
                time += _END
                if pair in waiting:
                    waiting.remove(pair)
                    able.append(peer)
            else:
                pair = peer, rank
                if not under_way.get(pair):
                    waiting.add(pair)
                    break
                arrival, byte_arrival = under_way[pair].popleft()
                time = max(time, arrival) + _END
                byte_time = max(byte_time, byte_arrival) + part
            at += 1
        place[rank], messages[rank], data[rank] = at, time, byte_time
    lost = waiting or any(under_way.values())
    return None if lost else (max(messages), max(data))


def core_cost(
    schedule: Schedule,
    nbytes: int,
    alpha_us: float,
    beta_us_per_byte: float,
    gamma_us_per_byte: float,
    *,
    shares: bool = True,
    crowd: float = 1.0,
) -> float:
    """Return the modelled time in microseconds.

    Args:
        schedule: what to cost.
        nbytes: bytes of the operation's *full vector*; docs/internals/schedules.md.
        alpha_us: time of an empty message.
        beta_us_per_byte: time per byte copied.
        gamma_us_per_byte: time per byte reduced.
        shares: whether ranks share memory, or each message is a copy of its own.
        crowd: ranks per core.
    """
    found = core_counts(schedule)
    prices = beta_us_per_byte, gamma_us_per_byte, shares
    busiest = max(load.work(*prices) for load in found.loads)
    work = max(busiest, crowd * found.mean.work(*prices))
    fragment = CHUNK_NBYTES / found.largest if found.largest else nbytes
    return (
        alpha_us * crowd * found.rounds
        + work * nbytes
        + beta_us_per_byte * found.fill * min(nbytes, fragment)
    )


def core_floor(
    schedule: Schedule,
    ranks: Iterable[int],
    nbytes: int,
    alpha_us: float,
    beta_us_per_byte: float,
    gamma_us_per_byte: float,
    *,
    shares: bool = True,
    crowd: float = 1.0,
) -> float:
    """Return a lower bound of ``core_cost``, from the programs of some ranks alone."""
    read = [_read(schedule.program(rank)) for rank in ranks]
    rounds = max(max(_END * len(one.ends), min(len(one.ends), 1)) for one in read)
    prices = beta_us_per_byte, gamma_us_per_byte, shares
    work = max(one.load.work(*prices) for one in read)
    return alpha_us * crowd * rounds + work * nbytes
