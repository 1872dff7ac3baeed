# SPDX-License-Identifier: Apache-2.0
"""Schedules and logs as execution traces of MLCommons Chakra.

S. Sridharan et al., "Chakra: Advancing Performance Benchmarking and Co-design using
Standardized Execution Traces", arXiv 2305.14516. ASTRA-sim and others read them: a file
for each rank, ``NAME.RANK.et``, with one message ``GlobalMetadata`` and then a ``Node``
for each task, each message behind its length (``et_def.proto``, schema 1.0.0).

All waits are ``data_deps``, for Chakra's feeder follows no others. Attributes of
messages have the names and types that it reads: ``comm_size`` in bytes, ``comm_src``,
``comm_dst``, ``comm_tag``. A duration is in whole microseconds, rounded up; the
attribute ``duration_ns`` has the exact one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from commrt.files.write import write_file
from commrt.sim.protobuf_wire import (
    bytes_field,
    delimited,
    int_field,
    ints_field,
    text_field,
)
from commrt.sim.tasks import Task

__all__ = ["chakra_trace", "write_chakra"]

_VERSION = "1.0.0"
_NS_PER_US = 1000
_COMP, _SEND, _RECV = 4, 5, 6
"""Types of nodes: COMP_NODE, COMM_SEND_NODE, COMM_RECV_NODE."""
_NODE_TYPES = {"calc": _COMP, "send": _SEND, "recv": _RECV}
_ID, _NAME, _TYPE, _DATA_DEPS, _DURATION, _ATTRIBUTE = 1, 2, 3, 5, 7, 10
"""Fields of Node."""
_INT32, _INT64, _BOOL = 7, 9, 27
"""Fields of AttributeProto that hold a value."""


def write_chakra(prefix: Path, ranks: Iterable[Sequence[Task]]) -> list[Path]:
    """Write a trace for each rank; return the files, ``PREFIX.RANK.et``."""
    paths = []
    for rank, tasks in enumerate(ranks):
        paths.append(prefix.with_name(f"{prefix.name}.{rank}.et"))
        write_file(paths[-1], chakra_trace(rank, tasks))
    return paths


def chakra_trace(rank: int, tasks: Sequence[Task]) -> bytes:
    """Return the trace of one rank."""
    messages = [text_field(1, _VERSION)]
    messages += [_node(rank, number, task) for number, task in enumerate(tasks)]
    return b"".join(map(delimited, messages))


def _node(rank: int, number: int, task: Task) -> bytes:
    duration_us = -(-task.duration_ns // _NS_PER_US)
    # Fields with value 0 are left out, as protocol buffers' own writers do.
    parts = [
        int_field(_ID, number) if number else b"",
        text_field(_NAME, task.name),
        int_field(_TYPE, _NODE_TYPES[task.kind]),
        ints_field(_DATA_DEPS, task.after),
        int_field(_DURATION, duration_us) if duration_us else b"",
        _attribute("is_cpu_op", _BOOL, 0),
    ]
    if task.kind == "calc":
        parts.append(_attribute("duration_ns", _INT64, task.duration_ns))
    else:
        ends = (rank, task.peer) if task.kind == "send" else (task.peer, rank)
        parts += [
            _attribute("comm_size", _INT64, task.nbytes),
            _attribute("comm_src", _INT32, ends[0]),
            _attribute("comm_dst", _INT32, ends[1]),
            _attribute("comm_tag", _INT32, task.tag),
        ]
    return b"".join(parts)


def _attribute(name: str, field: int, value: int) -> bytes:
    return bytes_field(_ATTRIBUTE, text_field(1, name) + int_field(field, value))
