# SPDX-License-Identifier: Apache-2.0
"""Run the steps of all ranks in an order that a rendezvous transport allows.

A step is *posted* when its dependencies are done. A message is done, at both ends, when
both ends are posted; a local step when it is posted. That is the strictest transport: a
schedule that ends here ends on every other one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from commrt import _native
from commrt.errors import ScheduleError
from commrt.schedule.columns import step_programs
from commrt.schedule.ir import RankProgram, Step

__all__ = ["Event", "Execution", "Place", "explained", "followers_of", "match"]

Place = tuple[int, int]
"""rank, step."""
Event = tuple[Place, Place | None]
"""A receive and its send, or a local step and None."""


def match(programs: Sequence[RankProgram]) -> dict[Place, Place]:
    """Return the other end of each message: the k-th send meets the k-th receive."""
    places = _places(programs)
    partners = _partners(programs, step_programs(programs))
    return {
        place: places[other]
        for place, other in zip(places, partners, strict=True)
        if other >= 0
    }


def _places(programs: Sequence[RankProgram]) -> list[Place]:
    return [
        (rank, index)
        for rank, program in enumerate(programs)
        for index in range(len(program.steps))
    ]


def _partners(
    programs: Sequence[RankProgram], native: _native.StepPrograms
) -> list[int]:
    with explained(programs):
        found: list[int] = native.partners().tolist()
    return found


@contextmanager
def explained(programs: Sequence[RankProgram]) -> Iterator[None]:
    """Raise ScheduleError for messages that do not match, and for deadlocks."""
    try:
        yield
    except _native.ScheduleFaultError as fault:
        kind, numbers, _ = fault.args
        if kind not in ("unmatched", "deadlock"):
            raise
        said = _unmatched if kind == "unmatched" else _deadlock
        raise said(programs, numbers) from None


def _unmatched(
    programs: Sequence[RankProgram], numbers: Sequence[int]
) -> ScheduleError:
    src, dst, num_sent, num_received, rank, extra = numbers
    return ScheduleError(
        f"rank {src} sends {num_sent} messages to rank {dst}, which receives "
        f"{num_received}: {programs[rank].describe_step(extra)} has no partner; every "
        f"send needs one receive",
        [(rank, extra)],
    )


def _deadlock(programs: Sequence[RankProgram], numbers: Sequence[int]) -> ScheduleError:
    circle = [*zip(numbers[::2], numbers[1::2], strict=True)]
    chain = ", which waits for ".join(
        programs[rank].describe_step(index) for rank, index in (*circle, circle[0])
    )
    return ScheduleError(
        f"deadlock when sends wait for their receives: {chain}; break this circle, for "
        f"example receive into scratch, or let one rank receive first",
        circle,
    )


@dataclass
class Execution:
    """One complete run. Iterate to get its events in order; raises on deadlock.

    Attributes:
        num_steps: messages on the longest path, once the run has ended.
    """

    programs: Sequence[RankProgram]
    num_steps: int = 0

    def __iter__(self) -> Iterator[Event]:
        places = _places(self.programs)
        with explained(self.programs):
            done, sent_by, longest = step_programs(self.programs).events()
        for place, sender in zip(done.tolist(), sent_by.tolist(), strict=True):
            yield places[place], places[sender] if sender >= 0 else None
        self.num_steps = longest


def followers_of(steps: Sequence[Step]) -> list[list[int]]:
    """Return the steps that wait for each step."""
    followers: list[list[int]] = [[] for _ in steps]
    for index, step in enumerate(steps):
        for dep in step.deps:
            followers[dep].append(index)
    return followers
