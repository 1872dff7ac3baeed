# SPDX-License-Identifier: Apache-2.0
"""One rank of a launch: times the job's items in random order, rank 0 prints lines.

``python -m commrt.tuning.worker JOB`` (a file). Every item is announced before it
starts, so that the parent knows what hung; its result is checked before times count.
"""

from __future__ import annotations

import ctypes
import math
import random
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from commrt.bench.timing_loop import Trial, median_interval
from commrt.errors import CommError
from commrt.select.facts import Candidate
from commrt.tuning import check
from commrt.tuning.job import Item, Job, sizes
from commrt.tuning.samples import line
from commrt.tuning.table_writer import NATIVE

if TYPE_CHECKING:
    from commrt.tuning.measure import Session

__all__ = ["main", "measure"]

_FLOOR_US = 20.0
"""A repetition lasts at least this long; below it the clock would be measured."""
_MIN_REPETITIONS = 3
_BATCH_S = 0.02
"""Time between two agreements: few repetitions of a long call, to keep the budget."""
_LARGEST_BATCH = 10
_PR_SET_PDEATHSIG = 1

Emit = Callable[[str], None]


def measure(session: Session, job: Job, emit: Emit) -> None:
    """Do the job; every rank calls this with the same job.

    Args:
        session: the ranks.
        job: what to measure.
        emit: takes a line; called on rank 0 only.
    """

    def say(kind: str, **content: object) -> None:
        if session.rank == 0:
            emit(line(kind, **content))

    say("hello", facts=asdict(session.facts), software=session.software())
    items = _items(session, job, say)
    start_s = time.monotonic()
    best: dict[tuple[str, int], float] = {}
    for index, item in enumerate(items):
        left_s = session.agree(job.budget_s - (time.monotonic() - start_s))
        if left_s <= 0:
            say("unfinished", left=len(items) - index)
            break
        say("begin", **asdict(item), index=index, items=len(items))
        # Most items need less than their share, so the others may have two.
        share_s = 2 * left_s / (len(items) - index)
        key = (item.op, item.nbytes)
        times = _time(session, job, item, share_s, best.get(key, math.inf))
        if isinstance(times, str):
            say("wrong", **asdict(item), reason=times)
        elif times:
            best[key] = min(best.get(key, math.inf), median(times))
            say("sample", **asdict(item), us=[round(us, 4) for us in times])
    say("end")


def _items(session: Session, job: Job, say: Callable[..., None]) -> list[Item]:
    """Return what to time, in an order that is random and equal on all ranks.

    The candidates of one operation and size follow each other in random order, so that
    a drift of the machine meets all of them, and a budget that ends leaves no size
    half measured.
    """
    excluded, skipped = set(job.excluded), set(job.skipped)
    chance = random.Random(job.seed)
    cells = []
    for op in job.ops:
        order: dict[Candidate, None] = {}
        for nbytes in sizes(op, session.size, job):
            candidates = session.candidates(op, nbytes, job.dtype)
            order.update(dict.fromkeys(candidates))
            cell = [
                Item(op, nbytes, str(candidate))
                for candidate in _promising(session, job, op, nbytes, candidates)
                if (op, str(candidate)) not in excluded
            ]
            cells.append([item for item in cell if item not in skipped])
        say("order", op=op, candidates=[str(candidate) for candidate in order])
    chance.shuffle(cells)
    for cell in cells:
        chance.shuffle(cell)
    return [item for cell in cells for item in cell]


def _promising(
    session: Session, job: Job, op: str, nbytes: int, candidates: Sequence[Candidate]
) -> list[Candidate]:
    """Return the candidates that the model does not rule out; native always stays."""
    costs = {
        candidate: session.model_us(op, nbytes, job.dtype, candidate)
        for candidate in candidates
    }
    limit = min(costs.values(), default=0.0) * job.model_ratio
    return [one for one, us in costs.items() if us <= limit or one.name == NATIVE]


def _time(
    session: Session, job: Job, item: Item, share_s: float, best_us: float
) -> list[float] | str:
    """Return rank 0's repetitions, or why the candidate must not be used."""
    candidate = Candidate.parse(item.candidate)
    problem = ""
    trial = None
    try:
        trial = session.trial(item.op, item.nbytes, job.dtype, candidate)
        if not _is_right(session, trial):
            problem = "wrong result"
    except CommError as error:
        problem = f"{type(error).__name__}: {error}"
    worst = session.worst([1.0 if problem else 0.0])
    if session.agree(worst[0] if worst else 0.0) or trial is None:
        return problem or "wrong result on another rank"
    return _repeat(session, job, trial, share_s, best_us)


def _is_right(session: Session, trial: Trial) -> bool:
    """Run one call on known data; return whether this rank's result is right."""
    check.fill(trial.x, session.rank)
    trial.call()
    if trial.spec["output_on"] == "none":
        return True
    if trial.spec["output_on"] == "root" and session.rank != trial.root:
        return True
    return check.is_right(
        trial.coll,
        trial.x if trial.out is None else trial.out,
        rank=session.rank,
        size=session.size,
        root=trial.root,
        num_x=trial.num_x,
    )


def _repeat(
    session: Session, job: Job, trial: Trial, share_s: float, best_us: float
) -> list[float]:
    """Return rank 0's repetitions: enough for the interval, or what the share pays."""
    start_s = time.monotonic()
    calls = 1
    # A short call's first estimates still hold cold caches and ask for too few calls.
    for _ in range(3):
        slowest = session.worst([_repetition(session, trial, calls)])
        call_us = max(session.agree(slowest[0] if slowest else 0.0), 0.01)
        calls = max(1, math.ceil(_FLOOR_US / call_us))
        if call_us > 10 * _FLOOR_US:
            break
    batch = max(1, min(_LARGEST_BATCH, int(_BATCH_S * 1e6 / (call_us * calls))))
    times: list[float] = []
    while True:
        mine = [_repetition(session, trial, calls) for _ in range(batch)]
        times += session.worst(mine)
        spent_s = time.monotonic() - start_s
        stop = session.rank == 0 and _enough(times, job, best_us, spent_s >= share_s)
        if session.agree(float(stop)):
            return times


def _repetition(session: Session, trial: Trial, calls: int) -> float:
    """Return this rank's microseconds per call, after a barrier."""
    clock, call = time.perf_counter_ns, trial.call
    session.barrier()
    start = clock()
    for _ in range(calls):
        call()
    return (clock() - start) / calls / 1000.0


def _enough(times: list[float], job: Job, best_us: float, late: bool) -> bool:
    if len(times) < _MIN_REPETITIONS:
        return False
    if late or len(times) >= job.max_repetitions:
        return True
    if min(times) > job.loss_ratio * best_us:
        return True
    middle, low, high = median_interval(times)
    return len(times) >= 6 and (high - low) / 2 <= job.relative_ci * middle


def _die_with_the_launcher() -> None:
    """Ask the kernel to end this rank when its launcher is killed; Linux only."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def main(argv: list[str]) -> None:
    """Run one rank of a launch."""
    from commrt.tuning.measure import Session

    _die_with_the_launcher()
    job = Job.from_json(Path(argv[0]).read_text())

    def emit(text: str) -> None:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()

    measure(Session(job.flags), job, emit)


if __name__ == "__main__":
    main(sys.argv[1:])
