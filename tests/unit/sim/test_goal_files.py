# SPDX-License-Identifier: Apache-2.0
"""Schedules in GOAL: a reader that knows only the language finds the whole schedule."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from goal_reader import play, read

from commrt.algorithms import schedule
from commrt.schedule.ir import Op, full_multiple
from commrt.sim.cli import main
from commrt.sim.costs import Costs
from commrt.sim.goal import goal_text

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
