# SPDX-License-Identifier: Apache-2.0
"""One rank of a launch: times the job's items in random order, rank 0 prints lines.

``python -m commrt.tuning.worker JOB`` (a file). Every item is announced before it
starts, and whose turn it is stands in a file, so that the parent knows what hung; a
result is checked before times count. A size during which the links between the ranks
changed their class, or were not to be seen, or a candidate's times drifted, or other
programs took the ranks' cores, is measured once more.
"""

from __future__ import annotations

import ctypes
import math
import random
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from commrt.bench.timing_loop import Array, Call, Trial
from commrt.errors import CommError
from commrt.select.facts import Candidate
from commrt.tuning import check
from commrt.tuning.job import NOBODY, Item, Job, sizes
from commrt.tuning.samples import line
from commrt.tuning.table_writer import NATIVES
from commrt.tuning.turns import Outcome, ready, take_turns

if TYPE_CHECKING:
    from commrt.tuning.measure import Session

__all__ = ["main", "measure"]

_PR_SET_PDEATHSIG = 1
_RIGHT, _WRONG, _RAISED = 0.0, 1.0, 2.0
_TAKEN = 0.15
"""Share of the cores' time that went elsewhere, from which a size does not count."""
_SLOWER = 1.6
"""Time of a fixed piece of work over its least, from which a size does not count."""

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

    memory = "host" if job.device == "cpu" else "cuda"
    facts, software = asdict(session.facts), session.software()
    say("hello", facts=facts, software=software, device=memory)
    cells = deque(_cells(session, job, say))
    numbers = {
        item: n for n, item in enumerate(item for cell in cells for item in cell)
    }
    end_s = time.monotonic() + job.budget_s

    def left_s() -> float:
        return session.agree(end_s - time.monotonic())

    repeated: set[Item] = set()
    moved: list[list[Item]] = []
    busy: list[list[Item]] = []
    speed = _Speed(session)
    while cells and (now_left_s := left_s()) > 0:
        cell = cells.popleft()
        # Most cells need less than their share, so the others may have two.
        left = len(cell) + sum(map(len, cells))
        share_s = min(1.0, 2 * len(cell) / left) * now_left_s
        again = cell[0] in repeated
        outcome = _measure_cell(
            session, job, cell, numbers, share_s, left_s, again, say, speed
        )
        if outcome == "late":
            cells.append(cell)
            break
        if outcome in ("moved", "busy"):
            given_up = moved if outcome == "moved" else busy
            (given_up if cell[0] in repeated else cells).append(cell)
            repeated.add(cell[0])
    for why, missing in (("budget", cells), ("links", moved), ("busy", busy)):
        if missing:
            reached = [(cell[0].op, cell[0].nbytes) for cell in missing]
            say("unfinished", why=why, cells=sorted(reached))
    say("end")


def _measure_cell(
    session: Session,
    job: Job,
    cell: Sequence[Item],
    numbers: Mapping[Item, int],
    share_s: float,
    left_s: Callable[[], float],
    again: bool,
    say: Callable[..., None],
    speed: _Speed,
) -> Outcome:
    """Time the candidates of one operation and size.

    Whatever is not ``done`` leaves no times behind, as only whole cells can be
    compared.
    On a busy machine ranks are seldom alone on two cores, and times drift: then the
    second attempt (``again``) is taken for what it is, and its class for the job's.
    """
    session.turn_of(NOBODY)
    before = session.link_class()
    if before == "unknown" and not again:
        return "moved"
    lost = set(job.losers)
    cell = [item for item in cell if (item, before) not in lost]
    if not cell:
        return "done"
    speed.of(before)
    session.watch_cores()
    trial = session.buffers(cell[0].op, cell[0].nbytes, job.dtype)
    runners = []
    for item in cell:
        say("begin", **asdict(item), index=numbers[item], items=len(numbers))
        session.turn_of(numbers[item])
        call = _checked(session, trial, item)
        if isinstance(call, str):
            say("wrong", **asdict(item), reason=call)
        else:
            runners.append(ready(session, item, numbers[item], call))
        if (now_left_s := left_s()) <= 0:
            return "late"
    outcome = take_turns(session, job, runners, share_s, now_left_s)
    if outcome in ("late", "busy") or (outcome == "moved" and not again):
        return outcome
    session.turn_of(NOBODY)
    taken = session.others_share()
    after = session.link_class()
    if taken > _TAKEN or speed.of(after) > _SLOWER:
        return "busy"
    known = {before, after} - {"unknown"} if again else {before, after}
    if len(known) > 1:
        return "moved"
    links = known.pop() if known else session.facts.link_class
    for runner in runners:
        us = [round(us, 4) for us in runner.us]
        told = {"us": us, "link_class": links, "disturbed": runner.disturbed}
        say("sample", **asdict(runner.item), **told)
    return "done"


class _Speed:
    """How much slower the machine is than at its best, in the same class of links."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._least_us: dict[str, float] = {}

    def of(self, links: str) -> float:
        """Return the time of a fixed piece of work over its least; collective."""
        us = self._session.reference_us()
        least = self._least_us[links] = min(us, self._least_us.get(links, us))
        return us / least if least else 1.0


def _cells(session: Session, job: Job, say: Callable[..., None]) -> list[list[Item]]:
    """Return the items to time: candidates of operations and sizes, in random order.

    The order is equal on all ranks. A budget that ends leaves no size half measured.
    """
    excluded, skipped = set(job.excluded), set(job.skipped)
    chance = random.Random(job.seed)
    cells = []
    for op in job.ops:
        order: dict[Candidate, None] = {}
        for nbytes in sizes(op, session.size, job):
            session.turn_of(NOBODY)  # many ranks have long schedules
            candidates = session.candidates(op, nbytes, job.dtype)
            unasked = session.unasked(op, nbytes, job.dtype)
            say("unasked", op=op, nbytes=nbytes, candidate=str(unasked))
            order.update(dict.fromkeys(candidates))
            cell = [
                Item(op, nbytes, str(candidate))
                for candidate in _promising(session, job, op, nbytes, candidates)
                if (op, str(candidate)) not in excluded
            ]
            variants = [
                item for item in job.variants if (item.op, item.nbytes) == (op, nbytes)
            ]
            order.update((Candidate.parse(item.candidate), None) for item in variants)
            cell += variants
            cell = [item for item in cell if item not in skipped]
            if cell:
                cells.append(cell)
        say("order", op=op, candidates=[str(candidate) for candidate in order])
    chance.shuffle(cells)
    for cell in cells:
        chance.shuffle(cell)
    return cells


def _promising(
    session: Session, job: Job, op: str, nbytes: int, candidates: Sequence[Candidate]
) -> list[Candidate]:
    """Return the candidates that the model does not rule out; native always stays."""
    costs = {
        candidate: session.model_us(op, nbytes, job.dtype, candidate)
        for candidate in candidates
    }
    # Each backend by itself: the model says nothing of copies to the host, or of NCCL.
    least: dict[str, float] = {}
    for one, us in costs.items():
        least[one.backend] = min(us, least.get(one.backend, math.inf))
    return [
        one
        for one, us in costs.items()
        if us <= least[one.backend] * job.model_ratio or one.name in NATIVES
    ]


def _checked(session: Session, trial: Trial, item: Item) -> Call | str:
    """Return a call whose result was right on all ranks, or why it must not be used."""
    problem, kind, call = "", _RIGHT, None
    try:
        call = session.bind(trial, Candidate.parse(item.candidate))
        if not _is_right(session, trial, call):
            problem, kind = "wrong result", _WRONG
    except CommError as error:
        problem, kind = f"{type(error).__name__}: {error}", _RAISED
    worst = session.worst([kind])
    everywhere = session.agree(worst[0] if worst else _RIGHT)
    if everywhere == _RIGHT and call is not None:
        return call
    what = "an error" if everywhere == _RAISED else "wrong result"
    return problem or f"{what} on another rank"


def _is_right(session: Session, trial: Trial, call: Call) -> bool:
    """Run one call on known data; return whether this rank's result is right."""
    check.fill(trial.x, session.rank, trial.memory)
    trial.fill_out()  # or the last candidate's result would still be there
    call()
    if trial.spec["output_on"] == "none":
        return True
    if trial.spec["output_on"] == "root" and session.rank != trial.root:
        return True
    return check.is_right(
        trial.coll,
        _seen(trial),
        rank=session.rank,
        size=session.size,
        root=trial.root,
        num_x=trial.num_x,
    )


def _seen(trial: Trial) -> Array:
    """Return the result where the host can read it."""
    result = trial.x if trial.out is None else trial.out
    return trial.memory.read(result, 0, result.size)


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

    measure(Session(job.flags, job.turn, job.device), job, emit)


if __name__ == "__main__":
    main(sys.argv[1:])
