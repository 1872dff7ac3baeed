# SPDX-License-Identifier: Apache-2.0
"""What a schedule costs in the alpha-beta-gamma model; the tuner's prior.

time = alpha (steps + share * further messages) + beta sent bytes + gamma reduced bytes

*Steps* are the messages on the longest chain; *sent* and *reduced* belong to the
busiest rank (a rank that receives more than it sends counts by what it receives).
*Further messages* are those of the busiest rank that are not on the chain: they
overlap, but each costs its sender a part of alpha.

The counts do not depend on the message length and are kept per schedule.
"""

from __future__ import annotations

from dataclasses import dataclass
from weakref import WeakKeyDictionary

from commrt.schedule.execute import Execution, match
from commrt.schedule.ir import Op, RankProgram, Schedule, Slice

__all__ = ["Counts", "cost", "counts"]

MESSAGE_SHARE = 0.25
"""Part of alpha that a message costs its sender even when others overlap it."""


@dataclass(frozen=True)
class Counts:
    """What the model multiplies; bytes as parts of the operation's full vector."""

    steps: int
    """Messages on the longest chain."""
    messages: int
    """Messages sent, or received, by the busiest rank."""
    moved: float
    """Bytes sent, or received, by the busiest rank."""
    reduced: float
    """Bytes of operands that the busiest rank adds to others."""


_COUNTS: WeakKeyDictionary[Schedule, Counts] = WeakKeyDictionary()


def counts(schedule: Schedule) -> Counts:
    """Return the counts of ``schedule``; the first call runs it symbolically."""
    if schedule not in _COUNTS:
        programs = schedule.programs()
        execution = Execution(programs, match(programs))
        for _ in execution:
            pass
        ranks = [_rank_counts(program) for program in programs]
        _COUNTS[schedule] = Counts(
            execution.num_steps,
            max(messages for messages, _, _ in ranks),
            max(moved for _, moved, _ in ranks),
            max(reduced for _, _, reduced in ranks),
        )
    return _COUNTS[schedule]


def _rank_counts(program: RankProgram) -> tuple[int, float, float]:
    widths = [
        space.scale[0] / space.scale[1] / max(space.nblk, 1) for space in program.spaces
    ]

    def part(where: Slice | None) -> float:
        return (where.hi - where.lo) * widths[where.space] if where else 0.0

    num_out = num_in = 0
    sent = received = reduced = 0.0
    for op, src, dst, *_ in program.steps:
        if op is Op.SEND:
            num_out += 1
            sent += part(src)
        elif op in (Op.RECV, Op.RRED):
            num_in += 1
            received += part(dst)
        if op in (Op.RRED, Op.RED):
            reduced += part(dst)
    return max(num_out, num_in), max(sent, received), reduced


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
    further = max(0, found.messages - found.steps)
    return (
        alpha_us * (found.steps + MESSAGE_SHARE * further)
        + beta_us_per_byte * found.moved * nbytes
        + gamma_us_per_byte * found.reduced * nbytes
    )
