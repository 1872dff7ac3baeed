# SPDX-License-Identifier: Apache-2.0
"""Schedules in GOAL: a reader that knows only the language finds the whole schedule."""

from __future__ import annotations

import re
from collections import Counter, deque
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from commrt.algorithms import schedule
from commrt.schedule.ir import Op, full_multiple
from commrt.sim.cli import main
from commrt.sim.costs import Costs
from commrt.sim.goal import goal_text

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
    """Run all tasks as their waits and messages let them; return how many ended."""
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


CASES = [
    ("allreduce", "ring", 5),
    ("allreduce", "halving_doubling", 6),
    ("allreduce", "recursive_doubling", 7),
    ("alltoall", "pairwise", 4),
    ("bcast", "binomial", 9),
    ("reduce_scatter", "ring", 1),
    ("allgather", "ring", 2),
    ("scan", "direct", 3),
]


@pytest.mark.parametrize(("coll", "name", "size"), CASES)
@pytest.mark.parametrize("num", [0, 1, 97])
def test_a_reader_of_the_language_finds_the_schedule(
    coll: str, name: str, size: int, num: int
) -> None:
    made = schedule(coll, name, size)
    elements = num * full_multiple(coll, size)
    ranks = read(goal_text(made, elements, 4, Costs(reduce_us_per_byte=0.5)))
    assert play(ranks) == sum(map(len, ranks))
    for program, tasks in zip(made.programs(), ranks, strict=True):
        ops = Counter(step.op for step in program.steps)
        kinds = Counter(task.kind for task in tasks.values())
        reducing = ops[Op.RRED]
        assert kinds["send"] == ops[Op.SEND]
        assert kinds["recv"] == ops[Op.RECV] + reducing
        assert kinds["calc"] == reducing + ops[Op.RED] + ops[Op.COPY]
        waits = sum(len(step.deps) for step in program.steps)
        assert sum(len(task.requires) for task in tasks.values()) == waits + reducing


def test_bytes_and_work_are_those_of_the_blocks() -> None:
    made = schedule("allreduce", "ring", 4)
    costs = Costs(reduce_us_per_byte=0.25, copy_us_per_byte=1.0)
    ranks = read(goal_text(made, 400, 8, costs))
    for tasks in ranks:
        sends = [task.number for task in tasks.values() if task.kind == "send"]
        assert sends == [800] * 6
        work = [task.number for task in tasks.values() if task.kind == "calc"]
        assert work.count(200_000) == 3  # 800 bytes at 0.25 us, in ns


def test_the_shell_writes_goal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "ring.goal"
    words = ["run", "ring", "--topology", "star:hosts=4", "--ranks", "4"]
    assert main([*words, "--bytes", "1KiB", "--goal", str(out)]) == 0
    assert out.read_text() == goal_text(schedule("allreduce", "ring", 4), 256, 4)
    assert main([*words, "--bytes", "1KiB,2KiB", "--goal", str(out)]) == 2
    assert "--goal: 1 algorithms and 2 lengths" in capsys.readouterr().err
