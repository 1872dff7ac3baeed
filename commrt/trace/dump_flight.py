# SPDX-License-Identifier: Apache-2.0
"""Dumps for torch's own analyser of its flight recorder, which reads pickles only."""

from __future__ import annotations

from pathlib import Path

from commrt.trace.dump_reader import UNNAMED, Dump, Entry
from commrt.trace.flight_recorder import write_flight
from commrt.trace.log import Log, LoggedGroup, Operation, Place
from commrt.vocabulary.dtypes import dtype_by_name
from commrt.vocabulary.operations import OPERATIONS

__all__ = ["write_for_torch"]

_NOWHERE = Place("", 0, "")
_NS_PER_MS = 1e6
_DIVIDED = {spec.name for spec in OPERATIONS if spec.out_count == "div_size"}


def write_for_torch(dump: Dump, folder: Path) -> Path:
    """Write a rank's file for torch's analyser; return its path."""
    groups = {
        key: LoggedGroup(
            *(f"commrt/{dump.job}/{key}", "commrt", one.name, "", one.name),
            *(one.ranks, one.rank),
        )
        for key, one in dump.groups.items()
    }
    log = Log(
        *(dump.job, dump.rank, dump.size, dump.host, "", dump.pid, 0),
        operations=[
            _operation(groups[entry.group.key], entry)
            for entry in dump.entries
            if entry.op != UNNAMED
        ],
    )
    return write_flight(log, folder)


def _operation(group: LoggedGroup, entry: Entry) -> Operation:
    itemsize = dtype_by_name(entry.dtype).itemsize
    nbytes = entry.count * itemsize
    end_ns = None
    if entry.state != "started":
        end_ns = entry.created_ns + int((entry.took_ms or 0) * _NS_PER_MS)
    return Operation(
        group=group,
        op=entry.op,
        nbytes=nbytes,
        out_nbytes=nbytes // group.size if entry.op in _DIVIDED else nbytes,
        dtype=entry.dtype,
        itemsize=itemsize,
        backend="",
        algorithm="",
        peer=entry.peer,
        tag=entry.tag,
        root=entry.root,
        stream=None,
        seq=entry.seq,
        start_ns=entry.created_ns,
        end_ns=end_ns,
        failed=entry.state == "failed",
        site=_NOWHERE,
    )
