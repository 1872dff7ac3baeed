# SPDX-License-Identifier: Apache-2.0
"""Execution traces of Chakra: a reader that knows only the format finds the tasks."""

from __future__ import annotations

from pathlib import Path

import pytest
from chakra_reader import read_trace, tasks_of
from goal_reader import play, read

from commrt.algorithms import schedule
from commrt.schedule.ir import full_multiple
from commrt.sim.chakra import chakra_trace, write_chakra
from commrt.sim.cli import main
from commrt.sim.costs import Costs
from commrt.sim.goal import goal_text
from commrt.sim.protobuf_wire import delimited, int_field, ints_field, varint
from commrt.sim.tasks import Task, schedule_tasks

CASES = [
    ("allreduce", "ring", 5),
    ("allreduce", "recursive_doubling", 7),
    ("alltoall", "pairwise", 4),
    ("bcast", "binomial", 9),
    ("reduce_scatter", "ring", 1),
    ("allgather", "ring", 2),
]
SENT = Task("send", (0, 1, 299), "send out[3]", 1 << 40, 7, 128)
SENT_BYTES = bytes.fromhex(
    "08ac02120b73656e64206f75745b335d18052a040001ab02520e0a0969735f6370755f6f70d80100"
    "52120a09636f6d6d5f73697a6548808080808020520c0a08636f6d6d5f7372633800520c0a08636f"
    "6d6d5f6473743807520d0a08636f6d6d5f746167388001"
)
WORKED_BYTES = bytes.fromhex(
    "1202c3a918043802520e0a0969735f6370755f6f70d8010052100a0b6475726174696f6e5f6e7348"
    "e907"
)


@pytest.mark.parametrize(("coll", "name", "size"), CASES)
@pytest.mark.parametrize("num", [0, 1, 97])
def test_a_trace_has_the_tasks_of_the_schedule_and_can_be_played(
    coll: str, name: str, size: int, num: int, tmp_path: Path
) -> None:
    made, costs = schedule(coll, name, size), Costs(reduce_us_per_byte=0.3)
    elements = num * full_multiple(coll, size)
    paths = write_chakra(tmp_path / "run", schedule_tasks(made, elements, 4, costs))
    assert [path.name for path in paths] == [f"run.{rank}.et" for rank in range(size)]
    ranks = []
    for rank, path in enumerate(paths):
        version, nodes = read_trace(path)
        assert version == "1.0.0"
        assert [node.id for node in nodes] == [*range(len(nodes))]
        ranks.append(tasks_of(rank, nodes))
    assert play(ranks) == sum(map(len, ranks))
    named = [
        {f"l{label}": (task.kind, task.number, task.peer, task.tag,
                       [f"l{one}" for one in task.requires])
         for label, task in tasks.items()}
        for tasks in ranks
    ]  # fmt: skip
    as_goal = [
        {label: (task.kind, task.number, task.peer, task.tag, task.requires)
         for label, task in tasks.items()}
        for tasks in read(goal_text(made, elements, 4, costs))
    ]  # fmt: skip
    assert named == as_goal


def test_bytes_are_those_of_the_official_writer() -> None:
    """Google's protobuf 7.36 made the two nodes from Chakra's ``et_def.proto``."""
    work = Task("calc", (), "é", duration_ns=1001)
    others = [Task("calc", (), "")] * 299
    head = delimited(b"\x0a\x051.0.0")
    assert chakra_trace(0, [work]) == head + delimited(WORKED_BYTES)
    assert chakra_trace(0, [*others, work, SENT]).endswith(delimited(SENT_BYTES))


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "00"), (1, "01"), (127, "7f"), (128, "8001"), (300, "ac02"),
     (2**32, "8080808010"), (2**64 - 1, "ffffffffffffffffff01")],
)  # fmt: skip
def test_numbers_are_base_128_varints(value: int, text: str) -> None:
    assert varint(value).hex() == text
    assert int_field(2, value).hex() == f"10{text}"
    assert ints_field(4, [value]).hex() == f"22{len(text) // 2:02x}{text}"
    assert ints_field(4, []) == b""


def test_the_shell_writes_a_trace_for_each_rank(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "ring"
    words = ["run", "ring", "--topology", "star:hosts=3", "--ranks", "3"]
    assert main([*words, "--bytes", "1KiB", "--chakra", str(out)]) == 0
    assert f"{out}.0.et and on: written, 3 ranks" in capsys.readouterr().out
    tasks = [*schedule_tasks(schedule("allreduce", "ring", 3), 256, 4)]
    for rank in range(3):
        found = (tmp_path / f"ring.{rank}.et").read_bytes()
        assert found == chakra_trace(rank, tasks[rank])
    assert main([*words, "--bytes", "1KiB,2KiB", "--chakra", str(out)]) == 2
    assert "--chakra: 1 algorithms and 2 lengths" in capsys.readouterr().err
