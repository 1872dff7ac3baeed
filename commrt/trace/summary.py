# SPDX-License-Identifier: Apache-2.0
"""Tables of a job's communication, in the form of the paper that gave the questions.

"Demystifying the Communication Characteristics for Distributed Transformer Models"
asks of each training scheme: which operations, of which sizes, how often, in which
parallel dimension, with how much volume and time, and how much of it are small messages
between two ranks. Figures are those of one rank, the mean over all that have a log.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from commrt.trace.job import Event, Job
from commrt.trace.log import KEYS, Operation
from commrt.trace.volumes import MESSAGES

__all__ = [
    "Row",
    "readable_nbytes",
    "readable_s",
    "rows_by",
    "small_messages",
    "summary_text",
]

SMALL_NBYTES = 64 * 1024
"""Messages below it are small."""


@dataclass
class Row:
    """Operations that have something in common; per rank."""

    key: tuple[str, ...]
    """The fields that these calls share."""
    calls: float
    """Number of calls."""
    nbytes: float
    """Bytes, as ``volumes.MEANING`` says; of messages those of the sends."""
    wire_nbytes: float
    """The least that a rank sends for them."""
    seconds: float
    """Time from the calls until their ends were seen."""
    waiting_s: float
    """The part that was waiting for other ranks, where that is known."""
    unknown: float
    """Calls of which it is not."""

    @property
    def transfer_s(self) -> float:
        """The part that was not waiting."""
        return self.seconds - self.waiting_s


def rows_by(job: Job, by: Sequence[str]) -> list[Row]:
    """Return rows by some of ``log.KEYS``, the largest volume first."""
    keys: list[Callable[[Operation], str]] = [KEYS[name] for name in by]
    groups: dict[tuple[str, ...], list[Event]] = {}
    for event in job.events:
        groups.setdefault(tuple(key(event.call) for key in keys), []).append(event)
    rows = [_row(key, events, len(job.logs)) for key, events in groups.items()]
    return sorted(rows, key=lambda row: (-row.nbytes, -row.seconds, row.key))


def _row(key: tuple[str, ...], events: Sequence[Event], ranks: int) -> Row:
    # A message's bytes count once, where it is sent; time passes at both ends.
    sent = [event.call for event in events if not event.call.is_received]
    return Row(
        key,
        calls=len(events) / ranks,
        nbytes=sum(call.nbytes for call in sent) / ranks,
        wire_nbytes=sum(call.wire_nbytes for call in sent) / ranks,
        seconds=sum(event.duration_ns for event in events) / 1e9 / ranks,
        waiting_s=sum(event.waiting_ns or 0 for event in events) / 1e9 / ranks,
        unknown=sum(event.waiting_ns is None for event in events) / ranks,
    )


@dataclass
class SmallMessages:
    """Messages between two ranks, and how many of them are small."""

    messages: int
    """Messages that were sent."""
    small: int
    """Messages below SMALL_NBYTES."""
    median_nbytes: int
    """Half of the messages are no longer."""
    share_of_operations: float
    """Messages among all that was called, receives left out."""
    share_of_nbytes: float
    """Their part of all bytes."""


def small_messages(job: Job) -> SmallMessages:
    """Return the share of messages, and of small ones, in a job."""
    called = [event.call for event in job.events if not event.call.is_received]
    sizes = [call.nbytes for call in called if call.op in MESSAGES]
    total = sum(call.nbytes for call in called)
    return SmallMessages(
        messages=len(sizes),
        small=sum(nbytes < SMALL_NBYTES for nbytes in sizes),
        median_nbytes=int(statistics.median_low(sizes)) if sizes else 0,
        share_of_operations=len(sizes) / len(called) if called else 0.0,
        share_of_nbytes=sum(sizes) / total if total else 0.0,
    )


# -- text ------------------------------------------------------------------------

_TITLES = {
    "op": "operation",
    "dimension": "dimension",
    "bin": "bytes of a call",
    "nbytes": "bytes of a call",
    "algorithm": "backend/algorithm",
    "site": "called from",
    "stream": "stream",
    "group": "group",
    "dtype": "type",
    "backend": "backend",
}


def summary_text(job: Job, by: Sequence[str] = ()) -> str:
    """Return all tables; with ``by`` one, by these."""
    tables = [tuple(by)] if by else [("dimension", "op"), ("op", "bin"), ("site", "op")]
    parts = [_head(job), *(f"note: {note}" for note in job.notes), *_clock_notes(job)]
    parts += ["", *(_table(rows_by(job, each), each) for each in tables)]
    parts.append(_messages_text(job))
    return "\n".join(parts) + "\n"


def _head(job: Job) -> str:
    calls = sum(not event.call.is_received for event in job.events)
    span_ns = _span_ns(job.events)
    return (
        f"job {job.logs[0].job}: {len(job.logs)} of {job.size} ranks, {calls} "
        f"operations in {span_ns / 1e9:.3f} s; figures per rank"
    )


def _span_ns(events: Sequence[Event]) -> int:
    if not events:
        return 0
    begin = min(event.start_ns for event in events)
    return max(event.end_ns or event.start_ns for event in events) - begin


def _clock_notes(job: Job) -> list[str]:
    notes = []
    for host, error_ns in job.clock_error_ns.items():
        if error_ns < 0:
            notes.append(
                f"note: the clock of {host} is set by its time of day: no operation "
                f"joins it to the others"
            )
        else:
            notes.append(
                f"note: the clock of {host} is set by common operations, to "
                f"{error_ns / 1e3:.0f} us"
            )
    return notes


def _table(rows: Sequence[Row], by: Sequence[str]) -> str:
    if not rows:
        return "nothing was called\n"
    whole = sum(row.nbytes for row in rows) or 1
    header = [
        *(_TITLES[name] for name in by),
        *("calls", "volume", "share", "wire", "time", "waiting", "transfer"),
    ]
    lines = [header] + [
        [
            *row.key,
            _number(row.calls),
            readable_nbytes(row.nbytes),
            f"{100 * row.nbytes / whole:.1f}%",
            readable_nbytes(row.wire_nbytes),
            *map(readable_s, (row.seconds, row.waiting_s, row.transfer_s)),
        ]
        for row in rows
    ]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "".join(_line(cells, widths, len(by)) for cells in lines)


def _line(cells: Sequence[str], widths: Sequence[int], num_left: int) -> str:
    padded = [
        cell.ljust(width) if at < num_left else cell.rjust(width)
        for at, (cell, width) in enumerate(zip(cells, widths, strict=True))
    ]
    return "  ".join(padded).rstrip() + "\n"


def _messages_text(job: Job) -> str:
    found = small_messages(job)
    if not found.messages:
        return "messages between two ranks: none"
    return (
        f"messages between two ranks: {found.messages}, "
        f"{100 * found.share_of_operations:.1f}% of the operations and "
        f"{100 * found.share_of_nbytes:.1f}% of the bytes; "
        f"{100 * found.small / found.messages:.1f}% of them below "
        f"{readable_nbytes(SMALL_NBYTES)}, median "
        f"{readable_nbytes(found.median_nbytes)}"
    )


def _number(value: float) -> str:
    return f"{value:.0f}" if value == int(value) else f"{value:.1f}"


def readable_nbytes(nbytes: float) -> str:
    """Return bytes for people."""
    for power, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if nbytes >= 1 << power:
            return f"{nbytes / (1 << power):.4g} {unit}"
    return f"{nbytes:.4g} B"


def readable_s(seconds: float) -> str:
    """Return a time for people."""
    for factor, unit in ((1.0, "s"), (1e3, "ms")):
        if abs(seconds) * factor >= 1:
            return f"{seconds * factor:.4g} {unit}"
    return f"{seconds * 1e6:.4g} us"
