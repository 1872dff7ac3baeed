# SPDX-License-Identifier: Apache-2.0
"""One rank's log: its operations in order, in memory and as a file.

A file is lines of JSON: a header; groups, kinds of calls and places in the program as
they are first needed; an array of five numbers per operation; and a last line that says
how many there were. One that ends early is read as far as it goes.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from commrt.errors import UsageError, shown, suggest
from commrt.files.write import write_file
from commrt.trace.recorder import END, KIND, SEQ, SITE, START, Group, Kind, Recorder
from commrt.trace.volumes import Volume, wire_nbytes
from commrt.vocabulary.operations import RECEIVED, SENT

__all__ = [
    "FORMAT",
    "KEYS",
    "KIND_FIELDS",
    "MOST_CALLS",
    "Log",
    "LoggedGroup",
    "Operation",
    "Place",
    "Span",
    "logs_of",
    "size_bin",
    "stream_name",
    "write_log",
]

FORMAT = "commrt-trace/1"
MOST_CALLS = 2_000_000
"""Most calls of a file."""


@dataclass(frozen=True)
class Place:
    """The place of a call in the program."""

    file: str
    """Path; empty where no Python called."""
    line: int
    """Line in it."""
    function: str
    """Name of the function."""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}" if self.file else "(no Python)"


@dataclass(frozen=True)
class LoggedGroup:
    """A communicator or process group."""

    key: str
    """The same on all of its ranks."""
    layer: str
    """``commrt`` or ``torch``."""
    name: str
    """Its name there."""
    desc: str
    """Torch's description of the group."""
    dimension: str
    """Parallel dimension, as in dp or tp; the name where none is known."""
    ranks: tuple[int, ...]
    """Its members, as ranks of the job."""
    rank: int
    """This rank's place among them."""

    @property
    def size(self) -> int:
        """Number of its ranks."""
        return len(self.ranks)


@dataclass(frozen=True, slots=True)
class Operation:
    """One call."""

    group: LoggedGroup
    """The group of the operation."""
    op: str
    """Operation, as commrt calls it."""
    nbytes: int
    """Bytes, as ``volumes.MEANING`` says."""
    out_nbytes: int
    """Bytes that this rank gets, where those differ by rank."""
    dtype: str
    """Element type."""
    itemsize: int
    """Its bytes."""
    backend: str
    """The backend that ran it."""
    algorithm: str
    """The backend's algorithm."""
    peer: int
    """The other rank of a message, as a rank of the group; -1: any, or no message."""
    tag: int
    """Tag of a message."""
    root: int
    """Rank of the group; -1: there is none."""
    stream: int | None
    """The CUDA stream that ordered it, 0 being the default one; None: on the host."""
    seq: int
    """Collectives of a group count together, messages by direction, peer and tag."""
    start_ns: int
    """Time of the call, by the host's monotonic clock."""
    end_ns: int | None
    """Time at which its end was seen; None if it was not seen."""
    failed: bool
    """True if the call raised an error, at its end."""
    site: Place
    """The place in the program."""

    @property
    def duration_ns(self) -> int:
        """Time from the call until its end was seen; 0 if it was not seen."""
        return 0 if self.end_ns is None else self.end_ns - self.start_ns

    @property
    def is_sent(self) -> bool:
        """True if it is a message's end that sends."""
        return self.op in SENT

    @property
    def is_received(self) -> bool:
        """True if it is a message's end that receives."""
        return self.op in RECEIVED

    @property
    def on_device(self) -> bool:
        """True if it was on device memory: its times are those of the host's calls."""
        return self.stream is not None

    @property
    def wire_nbytes(self) -> float:
        """The least that a rank sends for it, on average."""
        return wire_nbytes(self.op, self.nbytes, self.group.size)


def size_bin(nbytes: int) -> str:
    """Return the power of four that a message belongs to, as ``4 KiB - 16 KiB``."""
    if nbytes <= 0:
        return "0 B"
    low = 1 << (2 * ((nbytes.bit_length() - 1) // 2))
    return f"{_human(low)} - {_human(4 * low)}"


def _human(nbytes: int) -> str:
    for power, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if nbytes >= 1 << power:
            return f"{nbytes >> power} {unit}"
    return f"{nbytes} B"


def stream_name(stream: int | None) -> str:
    """Return the name of a stream's handle; "" if there is none."""
    if stream is None:
        return ""
    return _STREAMS.get(stream, f"stream {stream:#x}")


_STREAMS = {0: "default stream", 2: "default stream of its thread"}
"""Names that CUDA gives to streams; 1, the default one by another name, is told as
0."""
KEYS: dict[str, Callable[[Operation], str]] = {
    "op": lambda one: one.op,
    "dimension": lambda one: one.group.dimension,
    "group": lambda one: one.group.name,
    "dtype": lambda one: one.dtype,
    "backend": lambda one: one.backend,
    "algorithm": lambda one: "/".join(filter(None, (one.backend, one.algorithm))),
    "nbytes": lambda one: str(one.nbytes),
    "bin": lambda one: size_bin(one.nbytes),
    "site": lambda one: str(one.site),
    "stream": lambda one: stream_name(one.stream),
}
"""Keys by which operations can be counted."""


@dataclass
class Log:
    """The log of one rank."""

    job: str
    """Name of the job: the same on all of its ranks, and different from any other
    job's."""
    rank: int
    """Rank in the job."""
    size: int
    """Ranks of the job."""
    host: str
    """Name of the machine."""
    boot: str
    """Identity of the running kernel: ranks with the same one share a clock."""
    pid: int
    """Number of the process."""
    wall_offset_ns: int
    """Offset from the monotonic clock to the time since 1970."""
    num_dropped: int = 0
    """Older operations that did not fit into the ring."""
    is_complete: bool = True
    """True if the file has its end."""
    error: str = ""
    """Error with which a call had failed when this was written."""
    operations: list[Operation] = field(default_factory=list)
    """Operations in the order of their calls."""

    @property
    def groups(self) -> list[LoggedGroup]:
        """Groups that occur, in order of appearance."""
        return list(dict.fromkeys(one.group for one in self.operations))

    def volume(
        self, by: Sequence[str] = ("dimension", "op")
    ) -> dict[tuple[str, ...], Volume]:
        """Return calls and bytes of this rank, counted by some of ``KEYS``.

        Receives are left out: their bytes are those of somebody's send.
        """
        return count(self.operations, by)


def count(
    operations: Iterable[Operation], by: Sequence[str]
) -> dict[tuple[str, ...], Volume]:
    """Return calls and bytes of operations, but receives, by some of ``KEYS``."""
    wrong = [name for name in by if name not in KEYS]
    if wrong:
        raise UsageError(
            f"volume: unknown by={shown(wrong[0])}{suggest(wrong[0], KEYS)}"
        )
    keys = [KEYS[name] for name in by]
    found: dict[tuple[str, ...], Volume] = {}
    for one in operations:
        if not one.is_received:
            at = tuple(key(one) for key in keys)
            found.setdefault(at, Volume()).add(one.nbytes, one.wire_nbytes)
    return found


# -- from the recorder -----------------------------------------------------------


@dataclass
class Span:
    """Part of this process's records that belongs to one recording."""

    since_ns: int = 0
    """Time of its begin."""
    num_before: int = 0
    """Number of records made before. Lost ones of these are not lost from the
    recording."""
    until_ns: int | None = None
    """Time of its end; None while it runs."""
    num_until: int | None = None
    """Records that had been made by then."""

    def has(self, start_ns: int) -> bool:
        """Return whether a call that began then is a part of it."""
        is_late = self.until_ns is not None and start_ns > self.until_ns
        return start_ns >= self.since_ns and not is_late

    def num_lost(self, num_dropped: int) -> int:
        """Return the number of its own records that the ring has lost."""
        if self.num_until is not None:
            num_dropped = min(num_dropped, self.num_until)
        return max(0, num_dropped - self.num_before)


def logs_of(recorder: Recorder, span: Span | None = None) -> list[Log]:
    """Return logs of this process's ranks, mostly one: of all calls, or of a span."""
    span = span or Span()
    ring = recorder.ring
    records = [record for record in ring.snapshot() if span.has(record[START])]
    num_lost = span.num_lost(ring.num_dropped)
    groups: dict[int, LoggedGroup] = {}
    places: dict[int, Place] = {}
    logs: dict[int, Log] = {}
    largest = max(
        (record[KIND].group for record in records),
        key=lambda group: group.num_ranks,
        default=None,
    )
    for record in records:
        kind: Kind = record[KIND]
        rank = kind.group.ranks[kind.group.rank]
        if rank not in logs:
            assert largest is not None
            logs[rank] = _empty(largest, rank, num_lost)
        if id(kind.group) not in groups:
            groups[id(kind.group)] = _logged(kind.group)
        site = record[SITE]
        if id(site) not in places:
            places[id(site)] = Place(site.file, site.line, site.function)
        logs[rank].operations.append(
            _operation(record, groups[id(kind.group)], places[id(site)])
        )
    return [logs[rank] for rank in sorted(logs)]


def _empty(group: Group, rank: int, num_dropped: int) -> Log:
    return Log(
        job=group.job,
        rank=rank,
        size=max(group.num_ranks, rank + 1),
        host=socket.gethostname(),
        boot=_boot(),
        pid=os.getpid(),
        wall_offset_ns=time.time_ns() - time.monotonic_ns(),
        num_dropped=num_dropped,
    )


def _boot() -> str:
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return socket.gethostname()


def _logged(group: Group) -> LoggedGroup:
    name, desc, dimension = group.names
    return LoggedGroup(
        *(group.key, group.layer, name, desc, dimension, group.ranks, group.rank)
    )


def _operation(record: Sequence[Any], group: LoggedGroup, site: Place) -> Operation:
    kind: Kind = record[KIND]
    end = record[END]
    return Operation(
        *(group, kind.op, kind.nbytes, kind.out_nbytes, kind.dtype, kind.itemsize),
        *(kind.backend, kind.algorithm, kind.peer, kind.tag, kind.root),
        *(kind.stream, record[SEQ], record[START]),
        *(abs(end) or None, end < 0, site),
    )


# -- files -----------------------------------------------------------------------


def write_log(log: Log, path: Path) -> None:
    """Write a log; a reader finds the old file or the new one.

    Of more calls than a file may have it keeps the latest.
    """
    surplus = len(log.operations) - MOST_CALLS
    if surplus > 0:
        log = replace(
            log,
            operations=log.operations[surplus:],
            num_dropped=log.num_dropped + surplus,
        )
    write_file(path, "".join(f"{line}\n" for line in _lines(log)))


def _lines(log: Log) -> Iterator[str]:
    head = dict(vars(log))
    head.pop("operations")
    head.pop("is_complete")
    yield json.dumps({"format": FORMAT, **head})
    groups: dict[LoggedGroup, int] = {}
    kinds: dict[tuple[Any, ...], int] = {}
    sites: dict[Place, int] = {}
    for one in log.operations:
        if one.group not in groups:
            groups[one.group] = len(groups)
            yield json.dumps({"group": asdict(one.group)})
        kind = (groups[one.group], *(getattr(one, name) for name in KIND_FIELDS))
        if kind not in kinds:
            kinds[kind] = len(kinds)
            yield json.dumps({"kind": kind})
        if one.site not in sites:
            sites[one.site] = len(sites)
            yield json.dumps({"site": asdict(one.site)})
        end = one.end_ns or 0
        row = [kinds[kind], sites[one.site], one.seq, one.start_ns]
        yield json.dumps([*row, -end if one.failed else end])
    yield json.dumps({"end": len(log.operations)})


KIND_FIELDS = (
    *("op", "nbytes", "out_nbytes", "dtype", "itemsize", "backend", "algorithm"),
    *("peer", "tag", "root", "stream"),
)
