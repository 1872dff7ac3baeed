# SPDX-License-Identifier: Apache-2.0
"""Tasks of a real run: what its logs say that ranks sent, in the order of each rank.

A message of the program is a send and a receive. A collective is the messages of the
schedule that ran it, which the log names with its parameters. Libraries do not say what
their own collectives send, so the reader of the log names a schedule to take instead.

A rank's program is a chain of work: each call comes behind the one before, and behind
all calls whose ends the program had seen by then. Nonblocking calls overlap with what
comes before their ends. The work between is the time from the last of these to the
call; a log does not tell when a wait began, so the time before an end is none.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from commrt import algorithms
from commrt.commands.verify import collectives_of
from commrt.errors import CommError, UsageError
from commrt.schedule.ir import Schedule
from commrt.select.facts import Candidate
from commrt.sim.costs import Costs
from commrt.sim.tasks import Task, program_tasks
from commrt.trace.job import Event, Job
from commrt.trace.log import Operation
from commrt.vocabulary.operations import SCHEDULED, operation

__all__ = ["LoggedTasks", "log_tasks"]

_MOST_RANKS = 65_536
_MOST_TASKS = 20_000_000
_MOST_SHOWN = 5
Call = tuple[object, ...]
"""Key of one call, equal on all of its ranks."""


class _UnknownError(Exception):
    """The messages of a call are not known; says why."""


@dataclass
class LoggedTasks:
    """The tasks of a job's ranks."""

    ranks: list[list[Task]]
    """By rank; a rank without a log has none."""
    left_out: Counter[str] = field(default_factory=Counter)
    """Calls whose messages are not known, by what is in the way."""


def log_tasks(
    job: Job,
    *,
    costs: Costs | None = None,
    native_as: Sequence[str] = (),
    leave_out: bool = False,
) -> LoggedTasks:
    """Return the tasks of a job.

    Args:
        job: the logs, joined.
        costs: work of reductions and copies inside collectives; none, if left out.
        native_as: algorithms that stand for collectives of libraries: for each the
            first one that its operation has.
        leave_out: leave out calls whose messages are not known, and count them.

    Raises:
        UsageError: the messages of some calls are not known: the log does not say what
            ran them, an end is in no log, or a call failed. Or ``native_as`` has a name
            that is no operation's algorithm.
    """
    for name in native_as:
        collectives_of(name, None)
    if job.size > _MOST_RANKS:
        raise UsageError(
            f"the job has {job.size:,} ranks; expected {_MOST_RANKS:,} at most"
        )
    made = LoggedTasks([[] for _ in range(job.size)])
    messages = _Messages(job, costs or Costs(), native_as)
    by_rank: dict[int, list[Event]] = {}
    for event in job.events:
        by_rank.setdefault(event.rank, []).append(event)
    num_tasks = 0
    for rank, events in sorted(by_rank.items()):
        program = _Program(made.ranks[rank])
        for event in sorted(events, key=lambda one: one.start_ns):
            try:
                inner = messages.of(event)
            except _UnknownError as error:
                made.left_out[str(error)] += 1
                inner = []
            program.call(event, inner)
        num_tasks += len(made.ranks[rank])
        if num_tasks > _MOST_TASKS:
            raise UsageError(f"the logs have more than {_MOST_TASKS:,} tasks")
    if made.left_out and not leave_out:
        told = [
            f"{count} calls: {why}"
            for why, count in made.left_out.most_common(_MOST_SHOWN)
        ]
        raise UsageError(
            f"not all messages are known ({'; '.join(told)}). Name a schedule for "
            f"libraries' collectives (--native-as), or leave such calls out "
            f"(--leave-out)"
        )
    return made


class _Program:
    """The tasks of one rank, as its program goes on."""

    def __init__(self, tasks: list[Task]) -> None:
        self._tasks = tasks
        self._last = -1
        """The task of the program's last call."""
        self._last_ns: int | None = None
        self._running: list[tuple[int, int, tuple[int, ...]]] = []
        """Calls under way: end, number, last tasks."""

    def call(self, event: Event, inner: list[Task]) -> None:
        """Add a call with its own tasks, which name each other by place."""
        after = {self._last} - {-1}
        known_ns = event.start_ns if self._last_ns is None else self._last_ns
        while self._running and self._running[0][0] <= event.start_ns:
            end_ns, _, ended = heapq.heappop(self._running)
            known_ns = max(known_ns, end_ns)
            after.update(ended)
        work_ns = max(0, event.start_ns - known_ns)
        before = tuple(sorted(after))
        name = f"work before {event.call.op}"
        self._tasks.append(Task("calc", before, name, duration_ns=work_ns))
        self._last, self._last_ns = len(self._tasks) - 1, event.start_ns
        base, ends = len(self._tasks), set(range(len(inner)))
        for task in inner:
            ends.difference_update(task.after)
            shifted = tuple(base + one for one in task.after)
            self._tasks.append(replace(task, after=shifted or (self._last,)))
        if event.end_ns is not None:
            last = tuple(sorted(base + one for one in ends))
            heapq.heappush(self._running, (event.end_ns, base, last))


class _Messages:
    """The messages of calls, with tags that are equal at both ends."""

    def __init__(self, job: Job, costs: Costs, native_as: Sequence[str]) -> None:
        self._costs = costs
        self._native_as = native_as
        hosts = {log.boot: place for place, log in enumerate(job.logs)}
        self._nodes = {log.rank: hosts[log.boot] for log in job.logs}
        self._tags: dict[tuple[int, int], dict[Call, int]] = {}

    def of(self, event: Event) -> list[Task]:
        """Return the tasks of a call, or raise _UnknownError."""
        call = event.call
        if any(one.call.failed for one in (event, *event.peers)):
            raise _UnknownError(f"{call.op} failed")
        if call.is_sent or call.is_received:
            return [self._message(event)]
        if call.group.size == 1:
            return []
        if len(event.peers) + 1 < call.group.size:
            raise _UnknownError(f"{call.op} is not in the logs of all its ranks")
        return self._collective(event)

    def _message(self, event: Event) -> Task:
        call = event.call
        if not event.peers:
            raise _UnknownError(f"{call.op} whose other end is in no log")
        other = event.peers[0].call
        sent = call if call.is_sent else other
        peer = call.group.ranks[call.peer]
        ends = (event.rank, peer) if call.is_sent else (peer, event.rank)
        key = ("message", call.group.key, *ends, sent.tag, sent.seq)
        tag = self._tag(ends, key)
        name = f"{call.op} at {call.site}"
        kind: Literal["send", "recv"] = "send" if call.is_sent else "recv"
        return Task(kind, (), name, sent.nbytes, peer, tag)

    def _collective(self, event: Event) -> list[Task]:
        call = event.call
        # One rank says it for all: where ranks chose apart, the lowest one's counts.
        first = min([event, *event.peers], key=lambda one: one.call.group.rank).call
        schedule = self._schedule(first)
        num_elements = first.nbytes // max(first.itemsize, 1)
        if num_elements % schedule.length_unit:
            raise _UnknownError(f"{call.op} of unequal blocks")
        program = schedule.program(call.group.rank)
        tasks = program_tasks(program, num_elements, first.itemsize, self._costs)
        return [self._renamed(event, task) for task in tasks]

    def _renamed(self, event: Event, task: Task) -> Task:
        """Return a schedule's task with the job's ranks and a tag of its own."""
        call = event.call
        name = f"{call.op} {call.seq} of {call.group.name}: {task.name}"
        if task.kind == "calc":
            return replace(task, name=name)
        peer = call.group.ranks[task.peer]
        ends = (event.rank, peer) if task.kind == "send" else (peer, event.rank)
        tag = self._tag(ends, (call.group.key, call.seq, task.tag))
        return replace(task, name=name, peer=peer, tag=tag)

    def _tag(self, ends: tuple[int, int], key: Call) -> int:
        known = self._tags.setdefault(ends, {})
        return known.setdefault(key, len(known))

    def _schedule(self, call: Operation) -> Schedule:
        """Return the schedule that ran a collective, or the one that stands for it."""
        label = f"{call.backend}/{call.algorithm}"
        if call.op not in SCHEDULED:
            raise _UnknownError(f"{call.op}, whose messages a log does not have")
        nodes = tuple(self._nodes.get(rank, 0) for rank in call.group.ranks)
        root = call.root if operation(call.op).has_root else 0
        try:
            one = Candidate.parse(label)
        except UsageError:
            one = Candidate(call.backend, call.algorithm)
        name, params = one.algorithm, dict(one.params)
        if not algorithms.exists(call.op, name) or "compress" in params:
            having = [
                each for each in self._native_as if algorithms.exists(call.op, each)
            ]
            if not having:
                raise _UnknownError(f"{call.op} by {label}")
            name, params = having[0], {}
        choices = algorithms.param_choices(call.op, name, call.group.size)
        own = {key: value for key, value in params.items() if key in choices}
        return self._made(
            lambda: algorithms.schedule(
                call.op, name, call.group.size, root, own, nodes
            ),
            f"{call.op} by {label}",
        )

    def _made(self, make: Callable[[], Schedule], what: str) -> Schedule:
        try:
            return make()
        except CommError as error:
            raise _UnknownError(f"{what}: {error}") from error
