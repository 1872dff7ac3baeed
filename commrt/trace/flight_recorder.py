# SPDX-License-Identifier: Apache-2.0
"""Logs as torch's flight recorder has them, for torch's own analyser.

    python -m torch.distributed.flight_recorder.fr_trace FOLDER/flight-JOB

It finds the first collective that not all ranks of a group have called, and the ranks
that are missing, and where types or lengths differ. A file is a pickle of plain
dictionaries, one per rank, named by a prefix and the rank.

The analyser expects every member of a group at each of its entries. A message has two
ranks, so messages are put into groups of their own: one for each direction and tag,
where the k-th send meets the k-th receive. It knows libraries by a few names only, and
commrt's is none of them: entries are called ``gloo:``.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

from commrt.files.write import write_file
from commrt.trace.log import Log, Operation
from commrt.trace.volumes import MESSAGES
from commrt.vocabulary.operations import OPERATIONS, ROWS, operation

__all__ = ["VERSION", "entries_of", "write_flight"]

VERSION = "2.10"
"""Version of the format that torch 2.13 writes."""
MOST_ENTRIES = 2000
"""Most entries, the same number that torch keeps."""
_PREFIX = "rank_"
_NAMES = {row.name: row.flight for row in ROWS if row.flight}
"""The analyser's names; it stops at a name that it does not know."""
_UNEVEN = {
    spec.vector_of: spec.flight
    for spec in OPERATIONS
    if spec.vector_of and spec.flight not in ("", operation(spec.vector_of).flight)
}
"""The analyser's other names of calls whose blocks differ in length."""
_EVEN = [spec for spec in OPERATIONS if spec.vector_of is None]
_GATHERS = {spec.name for spec in _EVEN if spec.out_count == "times_size"}
_SCATTERS = {spec.name for spec in _EVEN if spec.out_count == "div_size"}
_NS_PER_MS = 1e6


def write_flight(log: Log, folder: Path) -> Path:
    """Write a rank's file into a folder, which is made; return its path."""
    folder.mkdir(exist_ok=True)
    path = folder / f"{_PREFIX}{log.rank}"
    write_file(path, pickle.dumps(entries_of(log), protocol=2))
    return path


def entries_of(log: Log) -> dict[str, Any]:
    """Return a log's latest operations in the format's words."""
    config: dict[str, Any] = {}
    entries = []
    known = [one for one in log.operations if _is_known(one)]
    first = len(known) - min(len(known), MOST_ENTRIES)
    for number, one in enumerate(known[first:], first):
        name, desc, ranks = _group_of(one)
        config[name] = {"name": name, "desc": desc, "ranks": str(list(ranks))}
        entries.append(_entry(log, number, one, name, desc))
    return {
        "version": VERSION,
        "pg_config": config,
        "pg_status": {},
        "entries": entries,
    }


def _is_known(one: Operation) -> bool:
    return _is_message(one) if one.op in MESSAGES else one.op in _NAMES


def _is_message(one: Operation) -> bool:
    return one.op in MESSAGES and one.peer >= 0


def _group_of(one: Operation) -> tuple[str, str, tuple[int, ...]]:
    """Return name, description and ranks of the group that an entry belongs to."""
    group = one.group
    desc = group.desc or group.dimension
    if not _is_message(one):
        return group.name, desc, group.ranks
    source, dest = _ends(one)
    name = f"{group.name} {source}->{dest}, tag {one.tag}"
    ranks = (group.ranks[source], group.ranks[dest])
    return name, desc, tuple(sorted({*ranks}))


def _ends(one: Operation) -> tuple[int, int]:
    mine = one.group.rank
    return (mine, one.peer) if one.is_sent else (one.peer, mine)


def _title(one: Operation) -> str:
    """Return the analyser's name of an operation."""
    if not _is_message(one):
        return f"gloo:{(_UNEVEN if _is_uneven(one) else _NAMES)[one.op]}"
    source, dest = _ends(one)
    pair = sorted({one.group.ranks[source], one.group.ranks[dest]})
    at, to = (pair.index(one.group.ranks[rank]) for rank in (source, dest))
    ends = f"{at}->{to}" if one.is_sent else f"{to}<-{at}"
    return f"gloo:{_NAMES[one.op]} {ends}"


def _is_uneven(one: Operation) -> bool:
    """Return whether ranks have blocks of different lengths."""
    return one.op in _UNEVEN and _count(one) % one.group.size != 0


def _count(one: Operation) -> int:
    return one.nbytes // max(1, one.itemsize)


def _sizes(one: Operation) -> tuple[list[list[int]], list[list[int]]]:
    """Return input and output lengths, in elements."""
    whole, size = _count(one), one.group.size
    block = whole // size
    if one.op in _GATHERS and not _is_uneven(one):
        return [[block]], [[whole]]
    if one.op in _SCATTERS and not _is_uneven(one):
        return [[whole]], [[block]]
    return [[whole]], [[one.out_nbytes // max(1, one.itemsize)]]


def _entry(
    log: Log, number: int, one: Operation, name: str, desc: str
) -> dict[str, Any]:
    sizes, out_sizes = _sizes(one)
    ended = one.end_ns is not None and not one.failed
    begin = one.start_ns + log.wall_offset_ns
    frame = {
        "name": one.site.function or "?",
        "filename": one.site.file or "?",
        "line": one.site.line,
    }
    return {
        "record_id": number,
        "pg_id": 0,
        "process_group": (name, desc),
        "collective_seq_id": one.seq + 1,
        "p2p_seq_id": one.seq + 1 if _is_message(one) else 0,
        "op_id": number + 1,
        "profiling_name": _title(one),
        "time_created_ns": begin,
        "input_sizes": sizes,
        "input_dtypes": [one.dtype],
        "output_sizes": out_sizes,
        "output_dtypes": [one.dtype],
        "state": "completed" if ended else "started",
        "time_discovered_started_ns": begin,
        "time_discovered_completed_ns": begin + one.duration_ns if ended else None,
        "duration_ms": one.duration_ns / _NS_PER_MS,
        "retired": ended,
        "timeout_ms": 0,
        "is_p2p": _is_message(one),
        "frames": [frame],
    }
