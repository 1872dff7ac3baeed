# SPDX-License-Identifier: Apache-2.0
"""The logs of a job's ranks joined: who waited for whom, on one clock.

The logs of all ranks together tell two things that one rank cannot know:

- *Waiting.* From an operation's call on this rank until the last of the ranks that it
  needs has called it, at most until its end. An operation whose result depends on all
  ranks needs all of them. In a rooted one the others need the root, or the root needs
  them. A receive needs its sender, and a send its receiver. The rest of the duration is
  transfer. If the program does not wait at once, the duration lasts until the end was
  seen, with the computation in between. So does the rest.
- *Clocks.* Ranks of one machine share the monotonic clock. Those of two machines are
  set against each other by the operations that both have called: nobody leaves one of
  them before all have come, so each gives a bound for the offset of the clocks, in one
  direction or the other. The middle between the bounds is taken; half their distance
  is the error.
"""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from commrt.errors import UsageError
from commrt.trace.log import Log, Operation
from commrt.trace.log_reader import read_log
from commrt.trace.volumes import MESSAGES
from commrt.vocabulary.operations import OPERATIONS, OTHERS, operation

__all__ = ["Event", "Job", "find_files", "load"]

_WAITS_FOR = {
    **{spec.name: spec.waits_for for spec in OPERATIONS},
    **{row.name: "all" for row in OTHERS if row.reduces_to_all},
}
_FILE = re.compile(r"trace-(.+)-rank(\d+)\.jsonl")


@dataclass(slots=True)
class Event:
    """An operation on one rank, seen with those of the others."""

    rank: int
    """Rank of the job."""
    call: Operation
    """The operations in the rank's log."""
    start_ns: int
    """Its call, on the job's clock."""
    end_ns: int | None
    """Time at which its end was seen, on the same clock."""
    peers: list[Event] = field(default_factory=list)
    """The same operation on the other ranks, or a message's other end."""
    waiting_ns: int | None = None
    """See above; None where the others' logs are not there."""

    @property
    def duration_ns(self) -> int:
        """Time from the call until its end was seen; 0 if it was not seen."""
        return 0 if self.end_ns is None else self.end_ns - self.start_ns


@dataclass
class Job:
    """The logs of a job's ranks."""

    logs: list[Log]
    """Logs in the order of ranks."""
    events: list[Event]
    """All operations, by rank and in their order."""
    notes: list[str]
    """Problems: what is missing or does not fit."""
    clock_error_ns: dict[str, int]
    """Possible error of a host's clock, by host; only hosts that needed to be set."""

    @property
    def size(self) -> int:
        """Ranks of the job."""
        return max(log.size for log in self.logs)


def find_files(paths: Sequence[str | Path]) -> list[Path]:
    """Return the logs among files and folders; UsageError where there is none."""
    found: list[Path] = []
    for path in map(Path, paths):
        if path.is_dir():
            inside = sorted(path.glob("trace-*.jsonl"))
            if not inside:
                raise UsageError(
                    f"{path} has no trace-JOB-rankN.jsonl: run the program with "
                    f"COMMRT_TRACE={path}"
                )
            found += inside
        elif path.exists():
            found.append(path)
        else:
            raise UsageError(
                f"{path}: there is no such file or folder; name logs, or the folder "
                f"that COMMRT_TRACE named"
            )
    if not found:
        raise UsageError("no files: name logs, or the folder that COMMRT_TRACE named")
    return list(dict.fromkeys(found))


def load(paths: Sequence[str | Path], job: str | None = None) -> Job:
    """Return the logs of one job, joined.

    Args:
        paths: files, or folders that have some.
        job: which one, where there are several.

    Raises:
        UsageError: there are none, one is no log, or they are of different jobs.
    """
    logs = [read_log(path) for path in find_files(paths)]
    names = sorted({log.job for log in logs})
    if job is not None:
        logs = [log for log in logs if log.job == job]
        if not logs:
            raise UsageError(f"no log of job {job!r}; there are {', '.join(names)}")
    elif len(names) > 1:
        counts = ", ".join(
            f"{name} ({sum(log.job == name for log in logs)} ranks)" for name in names
        )
        raise UsageError(
            f"logs of {len(names)} jobs: {counts}; name one of them with --job, or its "
            f"files alone"
        )
    return join(logs)


def join(logs: Iterable[Log]) -> Job:
    """Join the logs of one job."""
    by_rank: dict[int, Log] = {}
    notes = []
    for log in logs:
        if log.rank in by_rank:
            raise UsageError(
                f"two logs of rank {log.rank} of job {log.job}: name one of them"
            )
        by_rank[log.rank] = log
    ordered = [by_rank[rank] for rank in sorted(by_rank)]
    notes += _notes_on(ordered)
    events = [
        Event(log.rank, call, call.start_ns, call.end_ns)
        for log in ordered
        for call in log.operations
    ]
    notes += _find_peers(events)
    errors = _set_clocks(ordered, events)
    for event in events:
        event.waiting_ns = _waiting_ns(event)
    return Job(ordered, events, notes, errors)


def _notes_on(logs: Sequence[Log]) -> list[str]:
    notes = []
    size = max(log.size for log in logs)
    there = {log.rank for log in logs}
    num_missing = size - sum(rank < size for rank in there)
    if num_missing:
        # A job may have said to have far more ranks than there are logs.
        missing = itertools.islice((r for r in range(size) if r not in there), 9)
        notes.append(
            f"{num_missing} of {size} ranks have no log ({_listed([*missing])}): what "
            f"was waited for in operations with them is not known"
        )
    for log in logs:
        if log.num_dropped:
            notes.append(
                f"rank {log.rank}: {log.num_dropped} older calls did not fit "
                f"(COMMRT_TRACE_RECORDS)"
            )
        if not log.is_complete:
            notes.append(
                f"rank {log.rank}: the file ends early; {len(log.operations)} calls "
                f"were read"
            )
        if log.error:
            notes.append(f"rank {log.rank} failed: {log.error}")
    return notes


def _listed(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return shown + (", ..." if len(ranks) > 8 else "")


# -- who belongs together --------------------------------------------------------


def _find_peers(events: Sequence[Event]) -> list[str]:
    """Join events of one operation; return what does not fit."""
    collectives: dict[tuple[str, int], list[Event]] = defaultdict(list)
    sends: dict[tuple[str, int, int, int, int], Event] = {}
    receives: dict[tuple[str, int, int, int, int], Event] = {}
    for event in events:
        call, group = event.call, event.call.group
        mine = group.rank
        if call.is_sent:
            sends[group.key, mine, call.peer, call.tag, call.seq] = event
        elif call.is_received:
            if call.peer >= 0:
                receives[group.key, call.peer, mine, call.tag, call.seq] = event
        else:
            collectives[group.key, call.seq].append(event)
    for at, event in sends.items():
        if at in receives:
            event.peers, receives[at].peers = [receives[at]], [event]
    wrong: dict[str, int] = {}
    for (_, seq), found in collectives.items():
        # Of a rank that says to have made one call twice only the first counts.
        same = [*{event.rank: event for event in reversed(found)}.values()][::-1]
        if len({event.call.op for event in same}) > 1:
            wrong.setdefault(same[0].call.group.name, seq)
            continue
        for event in same:
            event.peers = [other for other in same if other is not event]
    return [
        f"group {name}: ranks called different operations as number {seq}; from there "
        f"on they are not joined where they differ (did all ranks begin to record "
        f"between the same calls?)"
        for name, seq in wrong.items()
    ]


def _needed(event: Event) -> list[Event] | None:
    """Return those whose call this one waits for; None where one has no log."""
    call, group = event.call, event.call.group
    if call.op in MESSAGES:
        return event.peers or None
    whom = _WAITS_FOR.get(call.op)
    if whom is None:
        return None
    needed: Collection[int] = range(group.size)
    if whom == "root":
        needed = {call.root}
    elif whom == "root waits" and call.root != group.rank:
        needed = ()
    elif whom == "contributors":
        needed = operation(call.op).contributors(group.rank, group.size)
    if len(needed) > len(event.peers) + 1:
        return None  # at once: there may be very many
    wanted = {*needed} - {group.rank}
    there = [other for other in event.peers if other.call.group.rank in wanted]
    return there if len(there) == len(wanted) else None


def _waiting_ns(event: Event) -> int | None:
    needed = _needed(event)
    if needed is None or event.end_ns is None:
        return None
    last = max((other.start_ns for other in needed), default=event.start_ns)
    return max(0, min(last, event.end_ns) - event.start_ns)


# -- clocks ----------------------------------------------------------------------


def _set_clocks(logs: Sequence[Log], events: Sequence[Event]) -> dict[str, int]:
    """Put all times on the clock of the first log's machine; return the errors."""
    boots = {log.rank: log.boot for log in logs}
    hosts = {log.boot: log.host for log in logs}
    walls = {log.boot: log.wall_offset_ns for log in logs}
    if len(hosts) == 1:
        return {}
    bounds = _bounds(events, boots)
    offsets = {logs[0].boot: 0}
    errors: dict[str, int] = {}
    reached = [logs[0].boot]
    while reached:
        here = reached.pop(0)
        for there in hosts:
            if there in offsets:
                continue
            low, high = bounds.get((here, there), (None, None))
            if low is not None and high is not None:
                offsets[there] = offsets[here] + (low + high) // 2
                errors[hosts[there]] = max(0, (high - low + 1) // 2)
                reached.append(there)
    first = walls[logs[0].boot]
    for boot, host in hosts.items():
        if boot not in offsets:  # nothing in common: the time of day has to do
            offsets[boot] = walls[boot] - first
            errors[host] = -1
    for event in events:
        shift = offsets[boots[event.rank]]
        event.start_ns += shift
        if event.end_ns is not None:
            event.end_ns += shift
    return errors


Bounds = tuple[int | None, int | None]


def _bounds(
    events: Sequence[Event], boots: dict[int, str]
) -> dict[tuple[str, str], Bounds]:
    """Return between what the offset lies that one clock needs to be another's.

    An event ends after each that it needs has begun: end here >= begin there + offset,
    and the other way round.
    """
    found: dict[tuple[str, str], Bounds] = defaultdict(lambda: (None, None))
    for event in events:
        if event.end_ns is None or event.call.failed or event.call.is_sent:
            continue
        for other in _needed(event) or ():
            here, there = boots[event.rank], boots[other.rank]
            if here == there:
                continue
            most = event.end_ns - other.start_ns
            low, high = found[here, there]
            found[here, there] = low, most if high is None else min(high, most)
            low, high = found[there, here]
            found[there, here] = -most if low is None else max(low, -most), high
    return found
