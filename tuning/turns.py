# SPDX-License-Identifier: Apache-2.0
"""Times the candidates of one operation and size, in turns.

Machines change while they are measured: clocks move, a virtual machine's cores come to
sit farther apart. Candidates that take turns of a few milliseconds, in a new random
order each round, all meet the same changes, so that their medians can be compared.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from statistics import median
from typing import TYPE_CHECKING, Literal

from commrt.bench.timing_loop import Call, median_interval

if TYPE_CHECKING:
    from commrt.tuning.job import Item, Job
    from commrt.tuning.measure import Session

__all__ = ["Runner", "ready", "take_turns"]

_FLOOR_US = 20.0
"""A repetition lasts at least this long; below it the clock would be measured."""
_TURN_S = 0.003
_SETTLED_CALLS = 24
"""Calls after which a plan that learns by itself how to write has tried all kinds
(native/engine/store_choice.hpp): what it takes from then on is what users will see."""
_SETTLED_S = 0.02
"""Calls that take long are not repeated for that."""
_LARGEST_TURN = 5
"""Repetitions: ten rounds or more make up the usual hundred."""
_MIN_REPETITIONS = 3
_LOST_AFTER_TURNS = 2
"""One turn may have met a moment in which the machine did something else."""
_DRIFT = 2.0
"""A candidate that at the end takes so many times what it took at the beginning, or as
much less, has seen the machine change."""

_LOST = 0.02
"""Share of a repetition for which something else ran on a rank's core, from which it
does not count."""
_WARM_UPS = 3
_WARM_UP_S = 0.05
_BUSY_AFTER = 4
"""Times as many repetitions as are needed, from which a size is given up where too few
of them count."""

Outcome = Literal["done", "late", "moved", "busy"]
"""``late``: time ran out first; ``moved``: the machine changed meanwhile; ``busy``:
something else ran on the ranks' cores, in all repetitions but a few."""


class _Verdict(IntEnum):
    GOES_ON = 0
    ENOUGH = 1
    LOST = 2


class _Ending(IntEnum):
    NOT_YET = 0
    LATE = 1
    DONE = 2
    BUSY = 3


@dataclass
class Runner:
    """A candidate whose result was right, and what it took so far."""

    item: Item
    """The timed call."""
    index: int
    """Its number in the job."""
    call: Call
    """One call."""
    calls: int
    """Back-to-back calls of a repetition."""
    repetitions: int
    """Repetitions of a turn."""
    us: list[float] = field(default_factory=list)
    """Microseconds per call of each repetition, slowest rank; on rank 0 only."""
    disturbed: int = 0
    """Repetitions that did not count; on rank 0 only."""

    @property
    def tried(self) -> int:
        """Repetitions in all."""
        return len(self.us) + self.disturbed

    def take(self, mine: Sequence[tuple[float, float]], session: Session) -> None:
        """Keep these repetitions of all ranks, as far as they count."""
        seen = session.worst([us for us, _ in mine] + [lost for _, lost in mine])
        for us, lost in zip(seen[: len(mine)], seen[len(mine) :], strict=True):
            if lost <= _LOST:
                self.us.append(us)
            elif seen:
                self.disturbed += 1


def ready(session: Session, item: Item, index: int, call: Call) -> Runner:
    """Warm up, and return how to time the call."""
    calls, call_us = 1, math.inf
    # A short call's first estimates still hold cold caches and ask for too few calls.
    good, spent_us = 0, 0.0
    while good < _WARM_UPS and spent_us < _WARM_UP_S * 1e6:
        session.turn_of(index)
        slowest = session.worst([*_repetition(session, call, calls)])
        took_us = max(session.agree(slowest[0] if slowest else 0.0), 0.01)
        spent_us += took_us * calls
        if session.agree(slowest[1] if slowest else 0.0) > _LOST:
            call_us = min(call_us, took_us)
            continue
        good, call_us = good + 1, took_us
        calls = max(1, math.ceil(_FLOOR_US / call_us))
        if call_us > 10 * _FLOOR_US:
            break
    settling = min(_SETTLED_CALLS, math.ceil(_SETTLED_S * 1e6 / call_us))
    if calls < settling:
        session.worst([*_repetition(session, call, settling)])
    turn = int(_TURN_S * 1e6 / (call_us * calls))
    return Runner(item, index, call, calls, max(1, min(_LARGEST_TURN, turn)))


def take_turns(
    session: Session,
    job: Job,
    runners: Sequence[Runner],
    share_s: float,
    left_s: float,
) -> Outcome:
    """Fill every runner's times; the same sequence of turns on all ranks.

    Args:
        session: the ranks.
        job: when repetitions are enough.
        runners: who takes turns; one that has clearly lost is left out soon.
        share_s: seconds after which three repetitions of each are enough.
        left_s: seconds after which nothing is worth waiting for.
    """
    start_s = time.monotonic()
    chance = random.Random(f"{job.seed} {runners[0].item}" if runners else "")
    live = list(runners)
    while live:
        chance.shuffle(live)
        best_us = min((median(one.us) for one in live if one.us), default=math.inf)
        verdicts = []
        for runner in live:
            _turn(session, runner)
            verdicts.append(int(session.agree(_verdict(runner, job, best_us))))
        if _Verdict.GOES_ON not in verdicts:
            return _ended(session, runners, live)
        took_s = time.monotonic() - start_s
        enough = min(len(one.us) for one in live) >= _MIN_REPETITIONS
        hopeless = min(one.tried for one in live) >= _BUSY_AFTER * _MIN_REPETITIONS
        ends = took_s >= (share_s if enough or hopeless else left_s)
        # Rank 0 knows; the others have no times.
        why = _Ending.DONE if enough else _Ending.BUSY if hopeless else _Ending.LATE
        said = session.agree(float(why if ends else _Ending.NOT_YET))
        if said == _Ending.DONE:
            return _ended(session, runners, live)
        if said:
            return "busy" if said == _Ending.BUSY else "late"
        live = [
            runner
            for runner, verdict in zip(live, verdicts, strict=True)
            if verdict != _Verdict.LOST
        ]
    return "done"


def _turn(session: Session, runner: Runner) -> None:
    session.turn_of(runner.index)
    mine = [
        _repetition(session, runner.call, runner.calls)
        for _ in range(runner.repetitions)
    ]
    runner.take(mine, session)


def _ended(
    session: Session, runners: Sequence[Runner], live: Sequence[Runner]
) -> Outcome:
    """Return whether all met one state of the machine.

    A candidate that was left out early has met only the beginning; one more turn shows
    it the end.
    """
    drifts = []
    for runner in runners:
        is_live = runner in live
        if not is_live:
            _turn(session, runner)
        us = runner.us
        if len(us) >= (2 * _MIN_REPETITIONS if is_live else _MIN_REPETITIONS + 1):
            third = len(us) // 3
            drifts.append(median(us[:third]) / median(us[-third:]))
    drift = max((max(one, 1 / one) for one in drifts), default=1.0)
    return "done" if session.agree(drift) <= _DRIFT else "moved"


def _verdict(runner: Runner, job: Job, best_us: float) -> float:
    """Return rank 0's verdict; the others have no times and are told."""
    us = runner.us
    if len(us) < _MIN_REPETITIONS:
        return _Verdict.GOES_ON
    if min(us) > job.loss_ratio * best_us:
        seen_enough = len(us) >= _LOST_AFTER_TURNS * runner.repetitions
        return _Verdict.LOST if seen_enough else _Verdict.GOES_ON
    if len(us) >= job.max_repetitions:
        return _Verdict.ENOUGH
    middle, low, high = median_interval(us)
    narrow = len(us) >= 6 and (high - low) / 2 <= job.relative_ci * middle
    return _Verdict.ENOUGH if narrow else _Verdict.GOES_ON


def _repetition(session: Session, call: Call, calls: int) -> tuple[float, float]:
    """Return this rank's microseconds per call, after a barrier.

    And the share of them for which something else ran on its core. A second barrier
    makes the ranks begin together: after the first one some may have waited long.
    """
    session.barrier()
    before_us = session.lost_us()
    session.barrier()
    us = session.memory.timed(call, calls)
    lost_us = session.lost_us() - before_us
    return us / calls, lost_us / max(us, 1e-3)
