# SPDX-License-Identifier: Apache-2.0
"""Reads GOAL and plays it, for tests: it knows the language, and nothing of commrt."""

from __future__ import annotations

import re
from collections import Counter, deque
from dataclasses import dataclass, field

__all__ = ["Task", "play", "read"]

LINE = re.compile(
    r"(?P<label>\w+): (?P<kind>send|recv|calc) (?P<number>\d+)"
    r"(b (to|from) (?P<peer>\d+) tag (?P<tag>\d+))?"
    r"|(?P<later>\w+) requires (?P<earlier>\w+)"
)


@dataclass
class Task:
    """A line of a rank."""

    kind: str
    number: int
    peer: int = -1
    tag: int = -1
    requires: list[str] = field(default_factory=list)


def read(text: str) -> list[dict[str, Task]]:
    """Return the tasks of each rank; a line that is no GOAL fails."""
    head, *parts = re.split(r"rank (\d+) \{\n", text)
    found: list[dict[str, Task]] = []
    for number, body in zip(parts[::2], parts[1::2], strict=True):
        assert int(number) == len(found)
        tasks: dict[str, Task] = {}
        inside, end, _ = body.partition("}\n")
        assert end
        for line in inside.splitlines():
            seen = LINE.fullmatch(line)
            assert seen is not None, line
            if seen["later"] is not None:
                assert seen["earlier"] in tasks
                tasks[seen["later"]].requires.append(seen["earlier"])
                continue
            assert seen["label"] not in tasks
            assert (seen["peer"] is None) == (seen["kind"] == "calc")
            where = int(seen["peer"] or -1), int(seen["tag"] or -1)
            tasks[seen["label"]] = Task(seen["kind"], int(seen["number"]), *where)
        found.append(tasks)
    assert head.strip() == f"num_ranks {len(found)}"
    return found


def play(ranks: list[dict[str, Task]]) -> int:
    """Run all tasks as their waits and messages let them; return how many ended.

    A message that nobody receives fails.
    """
    done: set[tuple[int, str]] = set()
    here: Counter[tuple[int, int, int, int]] = Counter()
    waiting = deque(
        (rank, label) for rank, tasks in enumerate(ranks) for label in tasks
    )
    idle = 0
    while waiting and idle <= len(waiting):
        rank, label = waiting.popleft()
        task = ranks[rank][label]
        message = rank, task.peer, task.tag, task.number
        can = all((rank, one) in done for one in task.requires)
        if task.kind == "recv":
            message = task.peer, rank, task.tag, task.number
            can = can and here[message] > 0
        if not can:
            waiting.append((rank, label))
            idle += 1
            continue
        here[message] += {"send": 1, "recv": -1, "calc": 0}[task.kind]
        done.add((rank, label))
        idle = 0
    assert not any(here.values())
    return len(done)
