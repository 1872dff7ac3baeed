# SPDX-License-Identifier: Apache-2.0
"""Reads execution traces of Chakra, for tests: by the format alone, not by a writer.

It knows ``et_def.proto`` as a table of fields, and refuses what is not in it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from goal_reader import Task

__all__ = ["Node", "read_trace", "tasks_of"]

COMP, SEND, RECV = 4, 5, 6
_KINDS = {COMP: "calc", SEND: "send", RECV: "recv"}
_TYPED = {"is_cpu_op": 27, "comm_size": 9, "comm_src": 7, "comm_dst": 7,
          "comm_tag": 7, "duration_ns": 9}  # fmt: skip
"""The field of AttributeProto in which Chakra's feeder looks for each attribute."""


@dataclass
class Node:
    """A node, as ``et_def.proto`` has it."""

    id: int = 0
    name: str = ""
    type: int = 0
    data_deps: list[int] = field(default_factory=list)
    duration_micros: int = 0
    attributes: dict[str, int] = field(default_factory=dict)


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            assert shift <= 70
            return value, at


def _fields(data: bytes) -> list[tuple[int, int | bytes]]:
    """Return numbers and values of a message's fields, in their order."""
    found: list[tuple[int, int | bytes]] = []
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        value, at = _varint(data, at)
        if tag & 7 == 0:
            found.append((tag >> 3, value))
            continue
        assert tag & 7 == 2, "only varints and what has a length occur"
        assert at + value <= len(data)
        found.append((tag >> 3, data[at : at + value]))
        at += value
    return found


def _attribute(data: bytes) -> tuple[str, int]:
    (one, name), (two, value) = _fields(data)
    assert one == 1
    assert isinstance(name, bytes)
    assert isinstance(value, int)
    assert two == _TYPED[name.decode()]
    return name.decode(), value


def _node(data: bytes) -> Node:
    node = Node()
    for number, value in _fields(data):
        if isinstance(value, int):
            key = {1: "id", 3: "type", 7: "duration_micros"}[number]
            setattr(node, key, value)
        elif number == 2:
            node.name = value.decode()
        elif number == 5:
            at = 0
            while at < len(value):
                dep, at = _varint(value, at)
                node.data_deps.append(dep)
        else:
            assert number == 10
            key, held = _attribute(value)
            assert key not in node.attributes
            node.attributes[key] = held
    return node


def read_trace(path: Path) -> tuple[str, list[Node]]:
    """Return the version and the nodes of a trace."""
    data, at, messages = path.read_bytes(), 0, []
    while at < len(data):
        length, at = _varint(data, at)
        assert at + length <= len(data)
        messages.append(data[at : at + length])
        at += length
    ((number, version),) = _fields(messages[0])
    assert number == 1
    assert isinstance(version, bytes)
    return version.decode(), [_node(one) for one in messages[1:]]


def tasks_of(rank: int, nodes: list[Node]) -> dict[str, Task]:
    """Return the nodes of a rank as tasks that can be played."""
    found: dict[str, Task] = {}
    for node in nodes:
        kind, has = _KINDS[node.type], node.attributes
        requires = [str(dep) for dep in node.data_deps]
        assert str(node.id) not in found
        assert {*requires} <= {*found}
        assert has.pop("is_cpu_op") == 0
        if kind == "calc":
            task = Task(kind, has.pop("duration_ns"))
            assert node.duration_micros == -(-task.number // 1000)
        else:
            ends = {"send": ("comm_src", "comm_dst"), "recv": ("comm_dst", "comm_src")}
            own, other = ends[kind]
            assert has.pop(own) == rank
            nbytes = has.pop("comm_size")
            task = Task(kind, nbytes, has.pop(other), has.pop("comm_tag"))
        assert not has
        task.requires = requires
        found[str(node.id)] = task
    return found
