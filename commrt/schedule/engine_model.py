# SPDX-License-Identifier: Apache-2.0
"""The engine's rules, in Python: in which order lowered programs may run.

An instruction of a fragment runs when

- it lies in the window: less than twice the program's length beyond the first
  unfinished one, counted over all fragments in order;
- its dependencies are done and its messages have arrived;
- its messages' lines are free: message ``i`` of a pair has line ``i mod L``, free once
  message ``i - L`` is acknowledged (ids count over fragments);
- its payload slot is free: publish ``p`` needs publish ``p - Q`` acknowledged by all
  its receivers, ``Q`` being the publishes of one fragment.

A message is acknowledged when the instruction that takes it is done. Running one
instruction never disables another, so one maximal run decides for all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from commrt import _native
from commrt.errors import ScheduleError
from commrt.schedule.columns import lowered_programs
from commrt.schedule.lower import Lowered

__all__ = ["LINES", "EngineModel", "run_engine"]

LINES = 64
"""Message lines per ordered pair of ranks."""
_ACKED, _DONE, _SENT = range(3)
"""Kinds of facts, as engine_run.cpp has them."""


class EngineModel:
    """One run of all ranks. Iterate over (rank, fragment, instruction) as they run.

    Args:
        lowered: the programs of all ranks.
        fragments: how many fragments they run.
        lines: message lines per ordered pair of ranks.
        has_lines: whether a rank's messages to a peer use lines and slots, as they do
            in shared memory; others are buffered without a bound.
    """

    def __init__(
        self,
        lowered: Sequence[Lowered],
        fragments: int,
        lines: int = LINES,
        has_lines: Callable[[int, int], bool] | None = None,
    ) -> None:
        self.lowered = lowered
        self.fragments = fragments
        self.lines = lines
        self.has_lines = has_lines

    def __iter__(self) -> Iterator[tuple[int, int, int]]:
        order = run_engine(
            lowered_programs(self.lowered), self.fragments, self.lines, self.has_lines
        )
        yield from map(tuple, order.rows().tolist())


def run_engine(
    programs: _native.LoweredPrograms,
    fragments: int,
    lines: int = LINES,
    has_lines: Callable[[int, int], bool] | None = None,
) -> _native.EngineOrder:
    """Return an order in which all of it runs, or raise ScheduleError."""
    try:
        return programs.run(fragments, lines, has_lines)
    except _native.ScheduleFaultError as fault:
        kind, numbers, _ = fault.args
        if kind == "uses":
            raise ScheduleError(
                f"rank {numbers[0]} sends a message that it does not count; expected "
                f"the tables that lower() returns"
            ) from None
        raise ScheduleError(_stuck(numbers)) from None


def _stuck(numbers: Sequence[int]) -> str:
    rank, fragment, index, num_missing, *facts = numbers
    named = [_describe(*facts[i : i + 4]) for i in range(0, len(facts), 4)]
    more = num_missing - len(named)
    return (
        f"lowered program deadlocks: rank {rank} fragment {fragment} instruction "
        f"{index} waits for {', '.join(named)}"
        f"{f' and {more} more' if more > 0 else ''}, which never come"
    )


def _describe(kind: int, a: int, b: int, message: int) -> str:
    if kind == _DONE:
        return f"its own instruction at position {b}"
    if kind == _SENT:
        return f"message {message} from rank {a}"
    return f"rank {b} to acknowledge message {message}"
