# SPDX-License-Identifier: Apache-2.0
"""What a schedule costs between ranks with one port each: between nodes.

time = alpha rounds + beta (moved N + fill min(N, a fragment)) + gamma reduced N

*Rounds* is how long the messages take, each one round from start to end, if a port can
start another one after a quarter of a round. *Moved* and *reduced* are bytes of the
busiest rank (what it sends or what it receives, whichever is more). Further bytes lie
on the path where nothing overlaps them, as on the way down a tree: *fill*. Long vectors
run in fragments that follow one another: of those bytes only one fragment's count.

The counts do not depend on the message length and are kept per schedule. On one node
there are no ports, and cores move the data: `core_cost`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple
from weakref import WeakKeyDictionary

from commrt.schedule.execute import Execution, match
from commrt.schedule.ir import Op, RankProgram, Schedule, Slice, Step
from commrt.schedule.makespan import play

__all__ = ["Counts", "cost", "counts", "floor", "widths"]

MESSAGE_SHARE = 0.25
"""Part of alpha that a message costs its ranks even when others overlap it."""
CHUNK_NBYTES = 131072
"""Bytes of a fragment's largest message; the default of the transport's ``chunk``."""
ROUNDING = 1e-9
"""What sums of parts differ by in floating point."""


@dataclass(frozen=True)
class Counts:
    """What the model multiplies; bytes as parts of the operation's full vector."""

    steps: int
    """Messages on the longest chain."""
    moved: float
    """Bytes sent, or received, by the busiest rank."""
    reduced: float
    """Bytes of operands that the busiest rank adds to others."""
    rounds: float
    """Time of the messages, were they empty, in times of one message."""
    fill: float
    """Time of the bytes beyond ``moved``, were messages free, in times of N bytes."""
    largest: float
    """Bytes of the largest message."""


_COUNTS: WeakKeyDictionary[Schedule, Counts] = WeakKeyDictionary()


def counts(schedule: Schedule) -> Counts:
    """Return the counts of ``schedule``; the first call runs it symbolically."""
    if schedule not in _COUNTS:
        programs = schedule.programs()
        partners = match(programs)
        steps = [list(program.steps) for program in programs]
        width = [widths(program) for program in programs]
        ranks = list(map(_rank_counts, steps, width))
        moved = max(one.moved for one in ranks)
        ends = play(steps, partners, width, MESSAGE_SHARE)
        if not ends.complete:
            for _ in Execution(programs, partners):
                pass  # says who waits for whom
        fill = ends.data - moved
        _COUNTS[schedule] = Counts(
            ends.steps,
            moved,
            max(one.reduced for one in ranks),
            ends.rounds,
            fill if fill > ROUNDING else 0.0,
            max(one.largest for one in ranks),
        )
    return _COUNTS[schedule]


def widths(program: RankProgram) -> list[float]:
    """Return the part of the full vector in a block of each space."""
    return [
        space.scale[0] / space.scale[1] / max(space.nblk, 1) for space in program.spaces
    ]


class _RankCounts(NamedTuple):
    messages: int
    moved: float
    reduced: float
    largest: float


def _rank_counts(steps: Iterable[Step], width: Sequence[float]) -> _RankCounts:
    def part(where: Slice | None) -> float:
        return (where.hi - where.lo) * width[where.space] if where else 0.0

    sends = receives = 0
    sent = received = reduced = largest = 0.0
    for op, src, dst, *_ in steps:
        if op is Op.SEND:
            sends += 1
            sent += part(src)
            largest = max(largest, part(src))
        elif op in (Op.RECV, Op.RRED):
            receives += 1
            received += part(dst)
        if op in (Op.RRED, Op.RED):
            reduced += part(dst)
    return _RankCounts(max(sends, receives), max(sent, received), reduced, largest)


def cost(
    schedule: Schedule,
    nbytes: int,
    alpha_us: float,
    beta_us_per_byte: float,
    gamma_us_per_byte: float,
) -> float:
    """Return the modelled time in microseconds.

    Args:
        schedule: what to cost.
        nbytes: bytes of the operation's *full vector* (see docs/design.md).
        alpha_us: time of an empty message.
        beta_us_per_byte: time per byte moved.
        gamma_us_per_byte: time per byte reduced.
    """
    found = counts(schedule)
    fragment = CHUNK_NBYTES / found.largest if found.largest else nbytes
    filling = found.fill * min(nbytes, fragment)
    return (
        alpha_us * found.rounds
        + beta_us_per_byte * (found.moved * nbytes + filling)
        + gamma_us_per_byte * found.reduced * nbytes
    )


def floor(
    schedule: Schedule,
    ranks: Iterable[int],
    nbytes: int,
    alpha_us: float,
    beta_us_per_byte: float,
    gamma_us_per_byte: float,
) -> float:
    """Return what ``cost`` is at least, from the programs of some ranks alone."""
    programs = [schedule.program(rank) for rank in ranks]
    found = [_rank_counts(one.steps, widths(one)) for one in programs]
    messages = max(one.messages for one in found)
    return (
        alpha_us * max(MESSAGE_SHARE * messages, min(messages, 1))
        + beta_us_per_byte * max(one.moved for one in found) * nbytes
        + gamma_us_per_byte * max(one.reduced for one in found) * nbytes
    )
