# SPDX-License-Identifier: Apache-2.0
"""A job's operations as a trace for https://ui.perfetto.dev.

Trace events in JSON, compressed: a process per rank, in it a track per group and CUDA
stream (one per group of what is on the host), a slice per operation with what was
waiting as a slice of its own, and an arrow from where the last rank called an operation
to where each other one's wait for it ended, and from each send to its receive.
Operations of one track that overlap, as those that are not waited for at once do, get
further tracks.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Sequence
from heapq import heappop, heappush
from pathlib import Path
from typing import Any

from commrt.files.write import write_file
from commrt.trace.job import Event, Job
from commrt.trace.log import stream_name

__all__ = ["events_of", "write_perfetto"]


def write_perfetto(job: Job, path: Path) -> int:
    """Write a trace, compressed where the name ends in .gz; return its events."""
    events = list(events_of(job))
    text = json.dumps({"traceEvents": events, "displayTimeUnit": "ns"})
    packed = path.suffix == ".gz"
    write_file(path, gzip.compress(text.encode(), mtime=0) if packed else text)
    return len(events)


def events_of(job: Job) -> Iterator[dict[str, Any]]:
    """Give the trace's events."""
    begin = min((event.start_ns for event in job.events), default=0)
    for log in job.logs:
        name = f"rank {log.rank} ({log.host}, process {log.pid})"
        yield _meta("process_name", log.rank, 0, {"name": name})
        yield _meta("process_sort_index", log.rank, 0, {"sort_index": log.rank})
    tracks, names = _tracks(job.events)
    for (rank, track), name in names.items():
        yield _meta("thread_name", rank, track, {"name": name})
        yield _meta("thread_sort_index", rank, track, {"sort_index": track})
    for event in job.events:
        yield from _slices(event, tracks[id(event)], begin)
    yield from _arrows(job.events, tracks, begin)


def _meta(name: str, pid: int, tid: int, args: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": pid, "tid": tid, "args": args}


class _Lanes:
    """Tracks of one group and stream on a rank: slices on each do not overlap."""

    def __init__(self) -> None:
        self.tracks: list[int] = []
        """Track of each lane."""
        self._busy: list[tuple[int, int]] = []
        """Ends of the last slices, and their lanes; a heap."""
        self._free: list[int] = []
        """Lanes whose slices have ended; a heap."""

    def take(self, start_ns: int, end_ns: int) -> int:
        """Return the first lane that is free for a slice; starts must ascend."""
        while self._busy and self._busy[0][0] <= start_ns:
            heappush(self._free, heappop(self._busy)[1])
        at = heappop(self._free) if self._free else len(self._busy)
        heappush(self._busy, (end_ns, at))
        return at


def _tracks(
    events: Sequence[Event],
) -> tuple[dict[int, int], dict[tuple[int, int], str]]:
    """Return each event's track, and the tracks' names."""
    found: dict[int, int] = {}
    names: dict[tuple[int, int], str] = {}
    lanes: dict[tuple[int, str, int | None], _Lanes] = {}
    count: dict[int, int] = {}
    for event in sorted(events, key=lambda one: (one.rank, one.start_ns)):
        group = event.call.group
        stream = event.call.stream
        mine = lanes.setdefault((event.rank, group.key, stream), _Lanes())
        # A slice has a length, so that those of one moment are not on one track.
        end_ns = max(event.end_ns or 0, event.start_ns + 1)
        at = mine.take(event.start_ns, end_ns)
        if at < len(mine.tracks):
            track = mine.tracks[at]
        else:
            track = count[event.rank] = count.get(event.rank, 0) + 1
            mine.tracks.append(track)
            same = group.name == group.dimension
            name = group.name if same else f"{group.dimension} ({group.name})"
            on = f", {stream_name(stream)}" if stream is not None else ""
            names[event.rank, track] = f"{name}{on}{f' +{at}' if at else ''}"
        found[id(event)] = track
    return found, names


def _us(at_ns: int, begin_ns: int) -> float:
    return (at_ns - begin_ns) / 1e3


def _slices(event: Event, track: int, begin: int) -> Iterator[dict[str, Any]]:
    call = event.call
    waiting = event.waiting_ns
    args: dict[str, Any] = {
        "bytes": call.nbytes,
        "type": call.dtype,
        "group": call.group.name,
        "dimension": call.group.dimension,
        "algorithm": "/".join(filter(None, (call.backend, call.algorithm))),
        "sequence": call.seq,
        "called from": str(call.site),
        "waiting us": None if waiting is None else waiting / 1e3,
    }
    if call.stream is not None:
        args["stream"] = stream_name(call.stream)
    if call.is_sent or call.is_received:
        args |= {"peer": call.peer, "tag": call.tag}
    if call.root >= 0:
        args["root"] = call.root
    ended = event.end_ns is not None
    if not ended or call.failed:
        args["state"] = "failed" if call.failed else "its end was not seen"
    at = {"pid": event.rank, "tid": track}
    start = _us(event.start_ns, begin)
    length = event.duration_ns / 1e3
    yield {
        **at,
        "ph": "X",
        "name": f"{call.op} {call.nbytes} B",
        "cat": call.op,
        "ts": start,
        "dur": length,
        "args": args,
    }
    if waiting:
        yield {
            **at,
            "ph": "X",
            "name": "waiting",
            "cat": "waiting",
            "ts": start,
            "dur": min(waiting / 1e3, length),
        }


def _arrows(
    events: Sequence[Event], tracks: dict[int, int], begin: int
) -> Iterator[dict[str, Any]]:
    """Give the arrows: from the last caller, or a sender, to those who need it."""
    number = 0
    for event in events:
        if event.call.is_received or not event.peers:
            continue
        last = max([event, *event.peers], key=lambda one: (one.start_ns, one.rank))
        if not event.call.is_sent and last is not event:
            continue
        for other in event.peers:
            number += 1
            name = {"name": event.call.op, "cat": "flow", "id": number}
            arrives = max(event.start_ns, other.start_ns)
            if other.end_ns is not None:  # an arrow ends in its slice
                arrives = min(arrives, other.end_ns)
            yield {
                **name,
                "ph": "s",
                "pid": event.rank,
                "tid": tracks[id(event)],
                "ts": _us(event.start_ns, begin),
            }
            yield {
                **name,
                "ph": "f",
                "bp": "e",
                "pid": other.rank,
                "tid": tracks[id(other)],
                "ts": _us(arrives, begin),
            }
