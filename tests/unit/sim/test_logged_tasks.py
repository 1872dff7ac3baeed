# SPDX-License-Identifier: Apache-2.0
"""Tasks of logged runs: messages, ranks of groups, overlap, and what is not known."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from chakra_reader import read_trace, tasks_of
from goal_reader import play, read
from trace_cases import call, group_of, log_of

from commrt.algorithms import schedule
from commrt.errors import UsageError
from commrt.schedule.ir import Op
from commrt.sim.cli import main
from commrt.sim.goal import goal_of_tasks
from commrt.sim.log_tasks import LoggedTasks, log_tasks
from commrt.sim.tasks import Task
from commrt.trace.job import Job, join
from commrt.trace.log import LoggedGroup, Operation, write_log


def job_of(calls: list[list[Operation]], size: int | None = None) -> Job:
    """Return the job in which each rank made such calls."""
    size = size or len(calls)
    return join([log_of(rank, size, each) for rank, each in enumerate(calls)])


def played(made: LoggedTasks) -> list[list[Task]]:
    """Return the tasks, once they have been written, read and played to the end."""
    ranks = read(goal_of_tasks(len(made.ranks), made.ranks))
    assert play(ranks) == sum(map(len, made.ranks))
    return made.ranks


def kinds(tasks: list[Task]) -> list[tuple[str, int]]:
    return [(one.kind, one.nbytes or one.duration_ns) for one in tasks]


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_a_collective_is_the_messages_of_the_schedule_that_ran_it(size: int) -> None:
    nbytes = 4 * 10 * size
    made = log_tasks(
        job_of(
            [
                [call(group_of(rank, size), "allreduce", nbytes, 0, 100, 900)]
                for rank in range(size)
            ]
        )
    )
    ring = schedule("allreduce", "ring", size)
    for rank, tasks in enumerate(played(made)):
        sends = [one for one in tasks if one.kind == "send"]
        assert [one.nbytes for one in sends] == [40] * (2 * (size - 1))
        assert {one.peer for one in sends} <= {(rank + 1) % size}
        assert all(one.name.startswith("allreduce 0 of dp: send") for one in sends)
        # Work comes before the call, and the program's one call is all.
        assert len(tasks) > (len(ring.program(rank).steps) if size > 1 else 0)


def test_messages_have_the_senders_bytes_and_meet_by_tag_and_order() -> None:
    groups = [group_of(rank, 3) for rank in range(3)]

    def message(
        rank: int, op: str, nbytes: int, seq: int, at: int, peer: int
    ) -> object:
        return call(groups[rank], op, nbytes, seq, at, at + 5, peer=peer)

    calls = [
        [message(0, "send", 8, 0, 10, 2), message(0, "send", 16, 1, 20, 2)],
        [message(1, "send", 24, 0, 10, 2)],
        # The first message is taken last, and memory is longer than the message.
        [
            message(2, "recv", 99, 0, 10, 1),
            message(2, "recv", 99, 0, 20, 0),
            message(2, "recv", 99, 1, 30, 0),
        ],
    ]
    first, second, third = played(log_tasks(job_of(calls)))  # type: ignore[arg-type]
    assert kinds(first) == [("calc", 0), ("send", 8), ("calc", 5), ("send", 16)]
    assert kinds(second) == [("calc", 0), ("send", 24)]
    assert [one.nbytes for one in third if one.kind == "recv"] == [24, 8, 16]
    tags = [(one.peer, one.tag) for one in third if one.kind == "recv"]
    assert tags == [(1, 0), (0, 0), (0, 1)]
    assert first[1].name == "send at /home/me/train.py:12"


def test_calls_that_overlap_wait_only_for_ends_that_were_seen() -> None:
    groups = [group_of(rank, 2) for rank in range(2)]
    calls = [
        [
            # Two calls under way at once, the second one seen to end first.
            call(group, "bcast", 40, 0, 100, 1000, root=0),
            call(group, "bcast", 80, 1, 150, 400, root=0),
            call(group, "bcast", 120, 2, 700, None, root=0),
            call(group, "bcast", 160, 3, 1500, 1600, root=0),
        ]
        for group in groups
    ]
    tasks = played(log_tasks(job_of(calls)))[0]
    works = [at for at, one in enumerate(tasks) if one.name.startswith("work before")]
    assert [tasks[at].duration_ns for at in works] == [0, 50, 300, 500]
    ends = [
        {at for at in range(lo + 1, hi)}
        for lo, hi in zip(works, [*works[1:], len(tasks)], strict=True)
    ]
    second, third, fourth = (tasks[at] for at in works[1:])
    assert second.after == (works[0],)
    assert {*third.after} & ends[0] == set()
    assert {*third.after} & ends[1]
    assert {*fourth.after} & ends[0]
    assert {*fourth.after} & (ends[1] | ends[2]) == set()


def test_ranks_of_groups_are_those_of_the_job() -> None:
    size, members = 4, (1, 3)

    def group(rank: int) -> LoggedGroup:
        place = members.index(rank)
        return replace(group_of(place, 2, "tp"), ranks=members, rank=place)

    calls: list[list[Operation]] = [[] for _ in range(size)]
    for rank in members:
        calls[rank] = [call(group(rank), "allgather", 80, 0, 1, 2)]
    ranks = played(log_tasks(job_of(calls)))
    assert [len(one) for one in (ranks[0], ranks[2])] == [0, 0]
    assert {one.peer for one in ranks[1] if one.kind != "calc"} == {3}
    assert {one.peer for one in ranks[3] if one.kind != "calc"} == {1}


def test_calls_of_two_groups_in_another_order_keep_their_messages_apart() -> None:
    def calls(rank: int, order: tuple[str, str]) -> list[Operation]:
        return [
            call(group_of(rank, 2, name), "allreduce", 8 if name == "a" else 16, 0,
                 10 * at, 50)
            for at, name in enumerate(order)
        ]  # fmt: skip

    played(log_tasks(job_of([calls(0, ("a", "b")), calls(1, ("b", "a"))])))


UNKNOWN = [
    ("native", {}, "1 calls: allreduce by mpi/native"),
    ("ring", {"failed": True}, "allreduce failed"),
    ("unheard_of", {}, "allreduce by shm/unheard_of"),
    ("direct{compress=bfloat16}", {}, "allreduce by shm/direct{compress=bfloat16}"),
]


@pytest.mark.parametrize(("algorithm", "more", "message"), UNKNOWN)
def test_messages_that_are_not_known_are_refused_or_left_out(
    algorithm: str, more: dict[str, bool], message: str
) -> None:
    backend = "mpi" if algorithm == "native" else "shm"
    calls = [
        [
            replace(
                call(group_of(rank, 2), "allreduce", 8, 0, 10, 20, **more),
                backend=backend,
                algorithm=algorithm,
            ),
            call(group_of(rank, 2), "bcast", 8, 1, 30, 40, root=1),
        ]
        for rank in range(2)
    ]
    job = job_of(calls)
    with pytest.raises(UsageError, match="not all messages are known") as caught:
        log_tasks(job)
    assert message.replace("1 calls", "2 calls") in str(caught.value)
    made = log_tasks(job, leave_out=True)
    assert sum(made.left_out.values()) == 2
    ranks = played(made)
    bcast = schedule("bcast", "ring", 2, 1).program(1)
    assert len([one for one in ranks[1] if one.kind == "send"]) == sum(
        step.op is Op.SEND for step in bcast.steps
    )
    # The time within the call that is left out is no work of the program's.
    assert [one.duration_ns for one in ranks[0] if one.kind == "calc"][:2] == [0, 10]


def test_a_named_schedule_stands_for_those_of_libraries() -> None:
    calls = [
        [
            replace(
                call(group_of(rank, 3), "allreduce", 12, 0, 10, 20),
                backend="nccl",
                algorithm="native",
            )
        ]
        for rank in range(3)
    ]
    ranks = played(log_tasks(job_of(calls), native_as=["pairwise", "ring"]))
    assert [one.kind for one in ranks[0]].count("send") == 4
    job = job_of(calls)
    with pytest.raises(UsageError, match=r"unknown algorithm 'rign'; did you mean"):
        log_tasks(job, native_as=["ring", "rign"])
    with pytest.raises(UsageError, match="3 calls: allreduce by nccl/native"):
        log_tasks(job, native_as=["pairwise"])


def test_ends_in_no_log_and_calls_without_messages_are_named() -> None:
    group = group_of(0, 3)
    calls = [
        [
            call(group, "send", 8, 0, 1, 2, peer=2),
            call(group, "allreduce", 8, 1, 3, 4),
            call(group, "halo_exchange", 8, 2, 5, 6),
        ]
    ]
    job = job_of(calls, 3)
    with pytest.raises(UsageError) as caught:
        log_tasks(job)
    said = str(caught.value)
    assert "send whose other end is in no log" in said
    assert "allreduce is not in the logs of all its ranks" in said
    assert "halo_exchange is not in the logs of all its ranks" in said
    assert [len(one) for one in log_tasks(job, leave_out=True).ranks] == [3, 0, 0]


def test_the_shell_writes_logs_as_goal_and_as_chakra(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank in range(2):
        one = call(group_of(rank, 2), "allreduce", 64, 0, 10, 90)
        unknown = call(group_of(rank, 2), "alltoallv", 64, 1, 100, 190)
        log = log_of(rank, 2, [one, unknown])
        write_log(log, tmp_path / f"trace-job1-rank{rank}.jsonl")
    words = [str(tmp_path), "--out", str(tmp_path / "run")]
    assert main(["goal", *words]) == 2
    assert "alltoallv, whose messages a log does not have" in capsys.readouterr().err
    more = ["--leave-out", "--reduce-us-per-byte", "0.5"]
    assert main(["goal", *words, *more]) == 0
    said = capsys.readouterr()
    assert "run: written, 2 ranks" in said.out
    assert said.err == (
        "note: 2 calls left out: alltoallv, whose messages a log does not have\n"
    )
    as_goal = read((tmp_path / "run").read_text())
    assert max(task.number for task in as_goal[0].values()) == 32 * 500
    assert main(["chakra", *words, *more]) == 0
    for rank in range(2):
        _, nodes = read_trace(tmp_path / f"run.{rank}.et")
        tasks = tasks_of(rank, nodes)
        assert [*map(str, range(len(as_goal[rank])))] == [*tasks]
        numbers = [task.number for task in tasks.values()]
        assert numbers == [task.number for task in as_goal[rank].values()]
    assert main(["goal", str(tmp_path / "none"), "--out", "x"]) == 2
    assert "there is no such file or folder" in capsys.readouterr().err
