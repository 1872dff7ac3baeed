# SPDX-License-Identifier: Apache-2.0
"""Drawn programs with one drawn fault, on ranks that are threads; what came of them.

After a fault each rank must have right results and errors of the kinds that the fault
allows. Those who live must then get a communicator on which more calls are right.
"""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from cases import Attempt
from random_steps import (
    Collective,
    Finish,
    Messages,
    Step,
    draw,
    draw_collective,
)

from commrt import local
from commrt.comm import Communicator
from commrt.errors import (
    BackendError,
    CommError,
    IntegrityError,
    MismatchError,
    NotFiniteError,
    PeerFailedError,
    RefusedError,
    RevokedError,
    TimeoutError_,
    UsageError,
)
from commrt.vocabulary.operations import operation

__all__ = ["KINDS", "Fault", "Plan", "complaints", "draw_plan"]

LATE_S = 0.5
"""The deadline of calls that are meant to miss it."""
OVER = "the campaign ends this communicator"
RIGHT = "right"
INJECTED = ("fail", "delay", "drop", "duplicate", "corrupt")
KINDS = (
    *INJECTED,
    "storm",
    "refused",
    "other call",
    "other call, checked",
    "late",
    "raises",
    "frees",
    "revokes",
    "not finite",
)
USABLE = ("delay", "refused", "other call, checked", "late", "not finite")
"""After these the communicator works on, and each other call is right."""
SHORT = ("drop", "storm", "other call", "frees")
"""These may leave ranks that wait until their deadline."""
_Errors = tuple[type[CommError], ...]
ENDED: _Errors = (RevokedError,)
ALLOWED: dict[str, _Errors] = {
    "fail": (*ENDED, BackendError),
    "drop": (*ENDED, TimeoutError_),
    "duplicate": (*ENDED, MismatchError),
    "corrupt": (*ENDED, IntegrityError),
    "storm": (*ENDED, BackendError, TimeoutError_, MismatchError, IntegrityError),
    "other call": (*ENDED, MismatchError, TimeoutError_, UsageError),
    "raises": (*ENDED, PeerFailedError),
    "frees": (*ENDED, PeerFailedError, TimeoutError_),
    "revokes": ENDED,
}
"""The errors of the kinds that end a communicator."""


class LeavesError(Exception):
    """A rank's program fails."""


@dataclass(frozen=True)
class Fault:
    """One thing that goes wrong in a program."""

    kind: str
    rank: int
    at: int
    """The step that it concerns, of those kinds that concern one."""
    chaos: str = ""
    """COMMRT_CHAOS."""
    seed: int = 0


@dataclass(frozen=True)
class Plan:
    """A program, its fault, and the calls after it."""

    size: int
    steps: tuple[Step, ...]
    waits: tuple[int, ...]
    """For each step how many later ones begin before it is waited for; 0: it blocks."""
    fault: Fault
    again: int
    """Seed of the calls afterwards."""


def draw_plan(seed: object, kind: str | None = None) -> Plan:
    """Return what a seed draws."""
    rng = random.Random(f"{seed}")
    kind = rng.choice(KINDS) if kind is None else kind
    size = rng.randint(2, 8)
    steps = draw(rng, size, rng.randint(3, 9))
    rank, at = rng.randrange(size), rng.randrange(len(steps))
    if kind == "refused":
        at = _place(rng, steps, lambda step: step.refusable, size)
    elif kind in ("other call", "other call, checked", "late"):
        at = _place(rng, steps, _is_plain, size)
    elif kind == "not finite":
        # Other arrays that are not finite would be refused, too.
        steps = [s for s in steps if not _has_nan(s)]
        at = _place(rng, steps, _can_be_nan, size)
        rank = rng.choice(steps[at].contributors())  # type: ignore[attr-defined]
    elif kind in (*INJECTED, "storm"):
        # A receive from anyone takes what a storm sends twice.
        steps = [s for s in steps if kind != "storm" or not _is_from_anyone(s)]
        at = _place(rng, steps, _is_plain, size)
    chaos = _chaos(rng, kind, rank, steps)
    fault = Fault(kind, rank, at, chaos, rng.randrange(1 << 30))
    waits = tuple(
        rng.choice((0, 0, 1, 3)) if step.may_wait and (kind, at) != ("late", n) else 0
        for n, step in enumerate(steps)
    )
    return Plan(size, tuple(steps), waits, fault, rng.randrange(1 << 30))


def _place(
    rng: random.Random, steps: list[Step], fits: Callable[[Step], bool], size: int
) -> int:
    """Return a step that the fault can concern; change one where there is none."""
    found = [number for number, step in enumerate(steps) if fits(step)]
    if found:
        return rng.choice(found)
    at = rng.randrange(len(steps)) if steps else 0
    made = draw_collective(rng, size, at)
    while not fits(made):
        made = draw_collective(rng, size, at)
    steps[at : at + 1] = [made]
    return at


def _is_plain(step: Step) -> bool:
    vector = isinstance(step, Collective) and operation(step.case.coll).vector_of
    return type(step) is Collective and not vector


def _is_from_anyone(step: Step) -> bool:
    return isinstance(step, Messages) and step.kind == "anyone"


def _has_nan(step: Step) -> bool:
    return isinstance(step, Collective) and step.case.op in ("min", "max")


def _can_be_nan(step: Step) -> bool:
    is_one = type(step) is Collective and step.is_float
    return is_one and bool(step.contributors())  # type: ignore[attr-defined]


def _chaos(rng: random.Random, kind: str, rank: int, steps: list[Step]) -> str:
    """Return what COMMRT_CHAOS says of a fault."""
    seed = rng.randrange(1 << 30)
    if kind == "storm":
        return (
            f"{seed}:fail@chance=0.05,most=1;delay=0.01@chance=0.2;"
            f"drop@chance=0.03,most=1;duplicate@chance=0.1,most=1;"
            f"corrupt@chance=0.1,most=1"
        )
    if kind not in INJECTED:
        return ""
    sums = [step.operation for step in steps if step.operation]
    from_anyone = any(map(_is_from_anyone, steps))
    # The next receive from anyone takes what was sent twice.
    if kind == "duplicate" and from_anyone:
        sums = [name for name in sums if name != "send"]
    name = rng.choice(sums)
    number = rng.randint(1, sums.count(name))
    what = "delay=0.03" if kind == "delay" else kind
    return f"{seed}:{what}@rank={rank},op={name},number={number}"


# -- one rank -------------------------------------------------------------------------


@dataclass
class Record:
    """The ends of one rank's calls."""

    of: dict[int, Any] = field(default_factory=dict)
    """By step: RIGHT, what is wrong, or the error."""
    afterwards: list[str] = field(default_factory=list)
    """Complaints about calls after the fault."""
    unfinished: list[Finish] = field(default_factory=list)
    """Calls in flight of a rank that fails."""
    left: bool = False
    """True if the rank has left as the fault wants it."""


class Run:
    """One run of a plan; each rank is a thread."""

    def __init__(self, plan: Plan, limit_s: float) -> None:
        self.plan, self.limit_s = plan, limit_s
        self.records = [Record() for _ in range(plan.size)]
        self._tried = threading.Barrier(plan.size, timeout=limit_s)
        """All ranks but a late one have met their deadline."""

    def main(self, comm: Communicator) -> None:
        """Run a rank's program, look at its end, and go on."""
        fault = self.plan.fault
        mine = self.records[comm.rank]
        comm.timeout_s = LATE_S if fault.kind in SHORT else self.limit_s
        comm.nan_check = fault.kind == "not finite"
        # Calls in flight keep their memory when a rank leaves, as ever.
        if not self._program(comm, mine):
            mine.left = True
            return
        comm.timeout_s = self.limit_s
        if fault.kind not in USABLE:
            comm.revoke(OVER)
            comm = self._replaced(comm)
        self._go_on(comm, mine)

    def _replaced(self, comm: Communicator) -> Communicator:
        """Return a communicator that works, of the ranks that live."""
        kind, gone = self.plan.fault.kind, self.plan.fault.rank
        gone = gone if kind in ("raises", "frees") else -1
        while True:
            made = comm.shrink()
            comm.free()
            members = [rank for rank in range(self.plan.size) if rank != gone]
            assert made.size == len(members), (made, members)
            comm = made
            if self.plan.fault.kind != "storm":
                return comm
            comm.timeout_s = LATE_S
            try:
                total = comm.allreduce(np.ones(3))
                works = True
                assert total.tolist() == [comm.size] * 3, total
            except CommError:
                works = False
            comm.timeout_s = self.limit_s
            try:
                if comm.agree(works):
                    return comm
            except CommError:
                pass
            comm.revoke(OVER)

    def _go_on(self, comm: Communicator, mine: Record) -> None:
        """Run more calls, which must be right."""
        if self.plan.fault.kind != "storm":  # which has more faults for them
            total = comm.allreduce(np.ones(3))
            if total.tolist() != [comm.size] * 3:
                mine.afterwards.append(f"the sum afterwards is {total}")
            rng = random.Random(self.plan.again)
            for step in draw(rng, comm.size, 2):
                if not _has_nan(step) and (wrong := step.start(comm)()):
                    mine.afterwards.append(f"{step}: {wrong}")
        if self.plan.fault.kind not in USABLE:
            comm.free()

    def _program(self, comm: Communicator, mine: Record) -> bool:
        """Run a rank's calls; return False where the rank leaves."""
        plan, usable = self.plan, self.plan.fault.kind in USABLE
        pending: list[tuple[int, int, Finish]] = []
        for number, step in enumerate(plan.steps):
            is_mine = (number, comm.rank) == (plan.fault.at, plan.fault.rank)
            if is_mine and plan.fault.kind == "raises":
                mine.unfinished = [finish for _, _, finish in pending]
                raise LeavesError("a rank leaves")
            if is_mine and plan.fault.kind == "frees":
                for each, _, finish in pending:
                    self._note(mine, each, finish)
                # Others begin the next step of a sparse call in their wait for it only.
                self._end_late_calls(comm, mine)
                comm.free()
                return False
            if is_mine and plan.fault.kind == "revokes":
                comm.revoke("a rank says so")
            nonblocking = plan.waits[number] > 0
            try:
                finish = self._start(comm, step, nonblocking)
            except CommError as error:
                mine.of[number] = error
                made = False
            else:
                pending.append((number, number + plan.waits[number], finish))
                made = True
            due = [entry for entry in pending if entry[1] <= number]
            pending = [entry for entry in pending if entry[1] > number]
            # The order in which requests are waited for is free.
            for each, _, finish in reversed(due):
                made = self._note(mine, each, finish) and made
            if not (made or usable):
                break
        if not usable and any(isinstance(e, CommError) for e in mine.of.values()):
            comm.revoke(OVER)
        for each, _, finish in pending:
            self._note(mine, each, finish)
        if not usable:
            self._end_late_calls(comm, mine)
        return True

    def _end_late_calls(self, comm: Communicator, mine: Record) -> None:
        """See that calls that missed their deadline end once they are revoked."""
        for request in _late_requests(mine):
            comm.revoke(OVER)
            try:
                request.wait(timeout_s=self.limit_s)
            except TimeoutError_:
                mine.afterwards.append(f"{request} goes on after a revoke")
            except CommError:
                pass

    def _note(self, mine: Record, number: int, run: Callable[[], Any]) -> bool:
        """Note how a call ends; return whether it is right."""
        try:
            wrong = run()
        except CommError as error:
            mine.of[number] = error
            return False
        mine.of[number] = RIGHT if wrong is None else wrong
        return wrong is None

    def _start(self, comm: Communicator, step: Step, nonblocking: bool) -> Finish:
        """Begin a call, as the fault has it."""
        fault = self.plan.fault
        if self.plan.steps[fault.at] is not step:
            return step.start(comm, nonblocking)
        if fault.kind == "late":
            assert isinstance(step, Collective)
            return self._late(comm, step)
        if comm.rank != fault.rank:
            return step.start(comm, nonblocking)
        if fault.kind == "refused":
            step.refuse(comm)
            raise AssertionError(f"{step} was not refused")
        if fault.kind == "not finite":
            assert isinstance(step, Collective)
            return step.with_nan(comm, nonblocking)
        if fault.kind.startswith("other call"):
            assert isinstance(step, Collective)
            changed = step.changed(random.Random(fault.seed))
            finish = changed.start(comm, nonblocking)
            # Its result may be whatever the two calls make of each other.
            return lambda: finish() and None
        return step.start(comm, nonblocking)

    def _late(self, comm: Communicator, step: Collective) -> Finish:
        """Make a call that one rank makes after the deadline of all others."""
        fault = self.plan.fault
        mine = Attempt(step.case, comm.rank)
        if comm.rank == fault.rank:
            self._tried.wait()
            return step.start(comm)
        waits: Any = None
        try:
            mine.start(comm, timeout_s=LATE_S / 5)
        except TimeoutError_ as error:
            if "not started it" not in str(error):
                raise AssertionError("the error does not name the rank") from error
            waits = error.request
        finally:
            self._tried.wait()

        def finish() -> str | None:
            if waits is not None:
                mine.result = waits.wait(timeout_s=self.limit_s)
            return mine.verdict()

        return finish


def _late_requests(record: Record) -> list[Any]:
    """Return the requests that missed their deadline, of errors and their contexts."""
    found = []
    for error in record.of.values():
        while isinstance(error, CommError):
            found += [error.request] if isinstance(error, TimeoutError_) else []
            error = error.__context__
    return [request for request in found if request is not None]


# -- all ranks ------------------------------------------------------------------------


@contextmanager
def _variables(fault: Fault) -> Iterator[None]:
    """Set what a fault needs, while ranks connect."""
    wanted = {}
    if fault.chaos:
        wanted["COMMRT_CHAOS"] = fault.chaos
    if fault.kind in ("corrupt", "storm"):
        wanted["COMMRT_CHECKSUM"] = "1"
    if fault.kind == "other call, checked":
        wanted["COMMRT_DEBUG"] = "check"
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def complaints(plan: Plan, limit_s: float = 240) -> list[str]:
    """Run a plan; return all that was wrong."""
    run = Run(plan, limit_s)
    found = []
    with _variables(plan.fault):
        try:
            local.run(plan.size, run.main, timeout_s=1.25 * limit_s)
        except LeavesError:
            run.records[plan.fault.rank].left = True
        except TimeoutError_ as error:
            found.append(f"hang: {error}")
    for rank, record in enumerate(run.records):
        for finish in record.unfinished:
            with suppress(CommError):
                finish()
        found += [f"rank {rank}: {text}" for text in record.afterwards]
        for number, outcome in record.of.items():
            text = _judged(plan, rank, number, outcome)
            if text is not None:
                what = f"{type(outcome).__name__}: {outcome}"
                found.append(f"rank {rank}, {plan.steps[number]}: {text} ({what})")
    return found


def _judged(plan: Plan, rank: int, number: int, outcome: Any) -> str | None:
    """Return what is wrong with a call's end."""
    fault = plan.fault
    here, mine = number == fault.at, rank == fault.rank
    if outcome == RIGHT:
        if here and mine and fault.kind in ("refused", "not finite"):
            return "it was not refused"
        if here and fault.kind == "other call, checked":
            return "the difference was not found"
        return None
    if not isinstance(outcome, CommError):
        return "a wrong result"
    if fault.kind in USABLE:
        return _judged_usable(fault, here, mine, outcome)
    if OVER in str(outcome):
        return None
    if not isinstance(outcome, ALLOWED[fault.kind]):
        return "this error does not fit the fault"
    if fault.kind != "storm" and not _names(fault, mine, outcome):
        return "the error does not name the rank"
    if isinstance(outcome, UsageError) and not (here and mine):
        return "this rank made no mistake"
    return None


def _judged_usable(
    fault: Fault, here: bool, mine: bool, error: CommError
) -> str | None:
    """Return what is wrong with an error after which all go on."""
    if not here or fault.kind in ("delay", "late"):
        return "no error was to come"
    if fault.kind == "other call, checked":
        right: type[CommError] = MismatchError
    elif fault.kind == "refused":
        right = UsageError if mine else RefusedError
    else:
        right = NotFiniteError if mine else RefusedError
    if not isinstance(error, right):
        return f"expected {right.__name__}"
    if right is RefusedError and f"rank {fault.rank} has refused" not in str(error):
        return "the error does not name the rank"
    return None


def _names(fault: Fault, mine: bool, error: CommError) -> bool:
    """Whether an error names the rank at fault, where it is promised."""
    if fault.kind in ("drop", "duplicate", "other call", "frees"):
        return True
    return mine or f"rank {fault.rank}" in str(error)
