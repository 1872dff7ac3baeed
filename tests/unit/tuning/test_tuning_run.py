# SPDX-License-Identifier: Apache-2.0
"""A tuning run without ranks: launches that hang or lie, the table, the words."""

from __future__ import annotations

import io
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tuning_recordings import DIRECT, NATIVE, NEAR, RING, TRUTH, Truth, record

from commrt.bench.timing_loop import element_counts, numpy_dtype
from commrt.errors import BackendError, TableError, UsageError
from commrt.select.facts import Candidate
from commrt.select.fingerprint import this_machine
from commrt.select.schema import Catalog
from commrt.select.table import load_file
from commrt.tuning import check, launch
from commrt.tuning.job import NOBODY, Item, Job, Turn, size_pairs, sizes
from commrt.tuning.launch import Ended, Message
from commrt.tuning.lint import lint
from commrt.tuning.progress import Progress
from commrt.tuning.recording_reader import parse_recording
from commrt.tuning.run import finish, terminated_like_interrupted
from commrt.tuning.samples import Recording
from commrt.tuning.table_writer import write_table
from commrt.tuning.tuner import Options, losers, run_launches
from commrt.vocabulary.operations import COLLECTIVES, operation

KNOWN = Catalog(
    {"mpi": ("native",), "shm": ("direct", "recursive_doubling", "ring", "loop")}
)
LOOP = Candidate("shm", "loop")
OPTIONS = Options(
    ranks=(2,), ops=("allreduce",), budget_s=60, max_nbytes=1 << 16, most_launches=3
)
JOB = Job(("allreduce",), "float32", 1 << 16, False, 1, 1e9)


# -- jobs ------------------------------------------------------------------------------


def test_a_job_reads_back_equal() -> None:
    item = Item("bcast", 8, "a/b")
    job = replace(JOB, excluded=(("bcast", "a/b"),), skipped=(item,))
    job = replace(job, losers=((item, "far"),), variants=(item,))
    assert Job.from_json(job.to_json()) == job


@pytest.mark.parametrize("op", COLLECTIVES)
@pytest.mark.parametrize("ranks", [2, 3, 16])
@pytest.mark.parametrize("dtype", ["float32", "complex128"])
def test_sizes_hold_whole_elements_and_held_out_ones_lie_off_the_grid(
    op: str, ranks: int, dtype: str
) -> None:
    job = replace(JOB, dtype=dtype, max_nbytes=1 << 20)
    grid, off = sizes(op, ranks, job), sizes(op, ranks, replace(job, held_out=True))
    itemsize = np.dtype(dtype).itemsize
    spec = operation(op).__dict__
    assert grid
    for nbytes in {*grid, *off} if op != "barrier" else ():
        x, out = element_counts(spec, nbytes, itemsize, ranks)
        assert max(x, out) * itemsize <= 1 << 20
        assert min(x, out) >= 1
    pairs = size_pairs(op, ranks, dtype, 1 << 20)
    assert {pair[0] for pair in pairs} >= set(grid)
    large = {nbytes for nbytes in off if nbytes > 4096}
    assert not large & set(grid)


# -- checking results ------------------------------------------------------------------


def _reference(coll: str, inputs: list[np.ndarray[Any, Any]], rank: int) -> Any:
    coll = operation(coll).vector_of or coll
    size, total = len(inputs), np.sum(inputs, axis=0)
    results = {
        "allreduce": total,
        "reduce": total,
        "bcast": inputs[0],
        "allgather": np.concatenate(inputs),
        "gather": np.concatenate(inputs),
        "reduce_scatter": total.reshape(size, -1)[rank]
        if total.size % size == 0
        else 0,
        "scatter": inputs[0].reshape(size, -1)[rank] if total.size % size == 0 else 0,
        "alltoall": np.concatenate([np.split(x, size)[rank] for x in inputs])
        if total.size % size == 0
        else 0,
    }
    if operation(coll).combines_some:
        return sum(inputs[one] for one in operation(coll).contributors(rank, size))
    return results[coll]


@pytest.mark.parametrize("coll", [name for name in COLLECTIVES if name != "barrier"])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_check_accepts_the_right_result_and_no_other(coll: str, size: int) -> None:
    count = 60_000 * size
    inputs = [np.empty(count, np.float32) for _ in range(size)]
    for rank, x in enumerate(inputs):
        check.fill(x, rank)
    having = [r for r in range(size) if operation(coll).contributors(r, size)]
    for rank in having:
        result = np.array(_reference(coll, inputs, rank))
        where = {"rank": rank, "size": size, "root": 0, "num_x": count}
        assert check.is_right(coll, result, **where)
        for position in (0, result.size // 2, result.size - 1):
            wrong = result.copy()
            wrong[position] += 1
            assert not check.is_right(coll, wrong, **where)


@pytest.mark.parametrize("name", ["float16", "bfloat16", "int8"])
@pytest.mark.parametrize("size", [2, 32, 128])
def test_rounding_in_short_types_is_not_a_wrong_result(name: str, size: int) -> None:
    dtype = numpy_dtype(name)
    total: Any = np.zeros(700, dtype)
    for rank in range(size):
        x = np.empty(700, dtype)
        check.fill(x, rank)
        total = (total + x).astype(dtype)
    where = {"rank": 0, "size": size, "root": 0, "num_x": 700}
    assert check.is_right("allreduce", total, **where)
    zero = total.copy()
    zero[350] = 0
    assert not check.is_right("allreduce", zero, **where)
    if name != "int8":
        zero[350] = np.nan
        assert not check.is_right("allreduce", zero, **where)


# -- the run ---------------------------------------------------------------------------


def _played(
    hangs: str = "", crashes_at_start: bool = False
) -> tuple[list[Job], Callable[..., Ended]]:
    """Return a way to start ranks that plays invented curves, and the jobs it saw."""
    jobs: list[Job] = []

    def start(job: Job, ranks: int, on_message: Callable[[Message], None]) -> Ended:
        jobs.append(job)
        if crashes_at_start:
            return Ended(False, "the ranks ended with status 1: no MPI")
        on_message(
            {"tune": "hello", "facts": NEAR.__dict__, "software": {"commrt": "0"}}
        )
        names = [str(candidate) for candidate in (*TRUTH, LOOP)]
        on_message({"tune": "order", "op": "allreduce", "candidates": names})
        for nbytes in sizes("allreduce", ranks, job):
            for index, name in enumerate(names):
                item = Item("allreduce", nbytes, name)
                if ("allreduce", name) in job.excluded or item in job.skipped:
                    continue
                if (item, NEAR.link_class) in job.losers:
                    continue
                on_message(
                    {"tune": "begin", **item.__dict__, "index": index, "items": 9}
                )
                if name == hangs:
                    return Ended(False, "nothing was heard for 10 s:\nstack")
                us = TRUTH.get(Candidate.parse(name), lambda n: 1e6)(nbytes)
                on_message({"tune": "sample", **item.__dict__, "us": [us] * 7})
        on_message({"tune": "end"})
        return Ended(True, "")

    return jobs, start


def _progress() -> Progress:
    return Progress(60, io.StringIO(), lambda: 0.0)


def test_a_hang_costs_only_the_candidate() -> None:
    jobs, start = _played(hangs=str(LOOP))
    recording = run_launches(OPTIONS, _progress(), start)
    assert [(one.candidate, one.op) for one in recording.failures] == [
        (LOOP, "allreduce")
    ]
    assert len(jobs) == 5
    assert ("allreduce", "shm/loop") in jobs[1].excluded
    assert jobs[1].skipped, "what was measured before the hang is not repeated"
    assert len(recording.launches) == 4
    assert {sample.candidate for sample in recording.samples} == set(TRUTH)


def test_what_is_left_of_the_budget_goes_into_further_launches() -> None:
    jobs, start = _played()
    clock = [0.0]

    def slow_start(*args: Any) -> Ended:
        clock[0] += 7.0
        return start(*args)

    progress = Progress(60, io.StringIO(), lambda: clock[0])
    options = replace(OPTIONS, ranks=(2, 4), most_launches=12)
    recording = run_launches(options, progress, slow_start)
    # Rounds of 14 s: three were asked for, one more would leave none for the judge.
    assert len(jobs) == 8
    assert [one.held_out for one in recording.launches.values()] == [
        *[False] * 6,
        *[True] * 2,
    ]
    jobs.clear()
    run_launches(
        replace(options, launches=1), Progress(60, io.StringIO(), lambda: 0.0), start
    )
    # With time enough, one launch judges for three that shape.
    assert sum(one.held_out for one in jobs) == 2 * 4
    assert len(jobs) == 2 * (12 + 4)


def test_machines_that_change_are_judged_by_as_many_launches_of_each_state() -> None:
    jobs, start = _played()

    def changing(job: Job, ranks: int, on_message: Callable[..., None]) -> Ended:
        links = ("near", "far")[len(jobs) % 2]

        def take(message: dict[str, Any]) -> None:
            on_message({**message, "link_class": links})

        return start(job, ranks, take)

    options = replace(OPTIONS, ranks=(2,), launches=1, most_launches=12)
    run_launches(options, Progress(60, io.StringIO(), lambda: 0.0), changing)
    assert sum(one.held_out for one in jobs) == 6


def _starting_in(
    seconds: float, clock: list[float], start: Callable[..., Ended]
) -> Callable[..., Ended]:
    def slow_start(job: Job, *args: Any) -> Ended:
        clock[0] += seconds
        ended = start(job, *args)
        clock[0] += 0.1
        return ended

    return slow_start


@pytest.mark.parametrize(
    ("budget_s", "shaping", "judging"), [(4, 1, 0), (6, 2, 0), (20, 3, 1)]
)
def test_a_budget_too_short_for_all_launches_gets_fewer(
    budget_s: float, shaping: int, judging: int
) -> None:
    _, start = _played()
    clock, stream = [0.0], io.StringIO()
    progress = Progress(budget_s, stream, lambda: clock[0])
    options = replace(OPTIONS, budget_s=budget_s)
    recording = run_launches(options, progress, _starting_in(2.0, clock, start))
    held_out = [one.held_out for one in recording.launches.values()]
    assert held_out == [False] * shaping + [True] * judging
    short = judging == 0
    assert ("launches per rank count and one to judge" in stream.getvalue()) is short
    notes = " ".join(recording.notes)
    assert (f"allowed {shaping} launch" in notes) is short


def test_a_hang_is_blamed_on_whose_turn_it_was(tmp_path: Path) -> None:
    _, start = _played(hangs=str(LOOP))
    first = str(next(iter(TRUTH)))

    def start_with_turn(*args: Any) -> Ended:
        ended = start(*args)
        return ended if ended.ok else replace(ended, turn=0)

    recording = run_launches(OPTIONS, _progress(), start_with_turn)
    assert str(recording.failures[0].candidate) == first
    path = str(tmp_path / "turn")
    Turn.create(path)
    assert Turn.read(path) == (NOBODY, 0)
    turn = Turn(path)
    turn.set(12)
    turn.set(12)
    assert Turn.read(path) == (12, 2)


def test_ranks_that_cannot_start_end_the_run_with_the_reason() -> None:
    _, start = _played(crashes_at_start=True)
    with pytest.raises(BackendError, match=r"2 ranks could not be measured.*no MPI"):
        run_launches(OPTIONS, _progress(), start)


def test_a_later_launch_that_cannot_start_costs_only_itself() -> None:
    jobs, start = _played()

    def start_but_once(*args: Any) -> Ended:
        if len(jobs) == 1:
            jobs.append(args[0])
            return Ended(False, "the ranks ended with status 1")
        return start(*args)

    recording = run_launches(OPTIONS, _progress(), start_but_once)
    assert set(recording.launches) == {0, 2, 3}


def test_clear_losers_are_not_repeated_but_native_is() -> None:
    jobs, start = _played()
    recording = run_launches(OPTIONS, _progress(), start)
    lost = {item.candidate for item, _ in losers(recording, 2)}
    assert str(LOOP) in lost
    assert str(NATIVE) not in lost
    assert jobs[0].losers == ()
    assert jobs[1].losers == (), "one launch may have met another state"
    assert (Item("allreduce", 8, str(LOOP)), "near") in jobs[2].losers
    assert jobs[3].held_out
    held = {item.nbytes for item, _ in jobs[3].losers}
    assert held <= set(sizes("allreduce", 2, jobs[3]))


def test_who_lost_between_near_cores_is_tried_between_far_ones() -> None:
    slow: Truth = {**TRUTH, LOOP: lambda n: 1e6}
    recording = record(seed=4, truth=slow, launches=2, held_out=0)
    away = replace(NEAR, link_class="far")
    far = record(seed=5, truth=slow, launches=1, held_out=0, facts=away)
    launch = replace(far.launches[0], index=2)
    recording.launches[2] = launch
    recording.samples += [replace(sample, launch=2) for sample in far.samples]
    lost = {
        links for item, links in losers(recording, 2) if item.candidate == str(LOOP)
    }
    assert lost == {"near"}


def test_the_table_of_a_run_reads_back_and_the_summary_says_what_matters(
    tmp_path: Path,
) -> None:
    recording = record(seed=4)
    recording.fail(2, {"op": "allreduce", "nbytes": 8, "candidate": str(LOOP)}, "hung")
    path, raw = tmp_path / "sub" / "t.yaml", tmp_path / "raw.json"
    summary = finish(recording, OPTIONS, out=path, raw=raw, date="2026-11-20")
    table = load_file(path, KNOWN)
    assert table.machine == this_machine()
    assert table.rules[-1].use == RING
    assert list(path.parent.iterdir()) == [path]
    assert parse_recording(raw.read_text()).samples == recording.samples
    points = [point for rule in table.rules for point in rule.evidence.points]  # type: ignore[union-attr]
    assert all(point.launches == 3 and point.native_us for point in points)
    for part in (
        str(path),
        "2 ranks, near links (3 launches)",
        "above        shm/ring{store=stream}",
        "the model goes on choosing: reduce, bcast",
        "Left out: shm/loop for allreduce with 2 ranks: hung",
        "of the best candidate's time",
        "of the time of the MPI library's own collective",
        "where COMMRT_TABLE names it",
    ):
        assert part in summary
    assert lint(table) == []


def test_a_run_keeps_that_engines_were_tested_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As long as what it ran with was: the user's table is written anew."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    pair = (("mpi", "nccl"),)
    recording, path = record(seed=4), None
    by_hand: dict[str, object] = {"mpi": "A", "nccl": "2.28.9"}
    finish(recording, OPTIONS, out=path)
    (written,) = tmp_path.rglob("*.yaml")
    table = replace(load_file(written, KNOWN), software=by_hand, tested_together=pair)
    write_table(table, written)
    recording.software = {"commrt": "1", "mpi": "A"}
    said = finish(recording, OPTIONS, out=path)
    kept = load_file(written, KNOWN)
    assert kept.tested_together == pair
    assert kept.software == {**by_hand, "commrt": "1"}
    assert "kept apart" not in said
    recording.software = {"commrt": "1", "mpi": "B"}
    said = finish(recording, OPTIONS, out=path)
    assert load_file(written, KNOWN).tested_together == ()
    assert "mpi and nccl are kept apart on devices from here on" in said
    assert "this run was measured with mpi B" in said


def test_a_run_without_any_measurement_writes_no_table(tmp_path: Path) -> None:
    recording, path = Recording(), tmp_path / "t.yaml"
    with pytest.raises(TableError, match="no size of these operations fits"):
        finish(recording, OPTIONS, out=path)
    recording.add(0, False, {"tune": "hello", "facts": NEAR.__dict__, "software": {}})
    for why, words in (("budget", "raise --budget"), ("links", "links .* changed")):
        cells = [["bcast", 8]] if why == "budget" else [["bcast", 32]]
        recording.add(0, False, {"tune": "unfinished", "why": why, "cells": cells})
        with pytest.raises(TableError, match=words):
            finish(recording, OPTIONS, out=path)
    assert not path.exists()


def test_a_candidate_that_failed_at_one_size_is_said_to_have_failed(
    tmp_path: Path,
) -> None:
    """It was measured elsewhere, so the budget is not to blame."""
    recording, path = record(seed=4, truth={DIRECT: TRUTH[DIRECT]}), tmp_path / "t.yaml"
    item = {"op": "allreduce", "nbytes": 32, "candidate": str(DIRECT)}
    recording.fail(2, item, "wrong result:\nstack")
    with pytest.raises(TableError) as raised:
        finish(recording, OPTIONS, out=path)
    assert str(raised.value) == (
        "no table was written: every candidate that was tried failed somewhere, 1 in "
        "all; the first was shm/direct for allreduce with 2 ranks: wrong result at 32"
    )


def test_the_summary_names_what_was_not_reached(tmp_path: Path) -> None:
    recording = record(seed=4)
    cells = [
        ["allreduce", 8],
        ["bcast", 8],
        ["bcast", 32],
        *([["bcast", n] for n in (128, 4096)]),
    ]
    message = {"tune": "unfinished", "why": "budget", "cells": cells}
    recording.add(0, False, message)
    recording.fail(2, {"op": "gather", "nbytes": 8, "candidate": str(LOOP)}, "hung")
    summary = finish(recording, OPTIONS, out=tmp_path / "t.yaml")
    assert (
        "Not reached within the budget, 2 ranks: bcast 8, 32, 128 and 1 more\n"
        in summary
    )
    assert "stays with the model" in summary
    assert "failed, so the model goes on choosing: gather\n" in summary
    assert "choosing: reduce, bcast, allgather, reduce_scatter" in summary


def test_a_recording_is_replaced_as_a_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "raw.json"
    path.write_text("old")

    write = os.write

    def half(to: int, raw: bytes) -> int:
        if len(raw) < 100_000:
            raise OSError(28, "No space left on device")
        return write(to, raw[:50_000])

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", half)
        with pytest.raises(TableError, match="No space left"):
            record(seed=1).save(path)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


# -- real processes, no MPI ------------------------------------------------------------


def _listen(script: str, hang_s: float = 30.0) -> tuple[Ended, list[Message]]:
    messages: list[Message] = []
    argv = [sys.executable, "-c", script]
    return launch.listen(argv, {}, messages.append, hang_s), messages


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_tuner_that_is_terminated_leaves_no_rank_behind(number: int) -> None:
    script = """if True:
        import json, os, signal
        print(json.dumps({"tune": "begin", "pid": os.getpid()}), flush=True)
        signal.pause()"""
    pids: list[int] = []

    def terminated(message: Message) -> None:
        pids.append(message["pid"])
        signal.raise_signal(number)

    before = signal.getsignal(number)
    argv = [sys.executable, "-c", script]
    with pytest.raises(KeyboardInterrupt), terminated_like_interrupted():
        launch.listen(argv, {}, terminated, 30.0)
    with pytest.raises(ProcessLookupError):
        os.kill(pids[0], 0)
    assert signal.getsignal(number) == before


def test_messages_are_taken_and_noise_is_not() -> None:
    ended, messages = _listen(
        'print(\'warning\'); print(\'{"tune": "x"}\'); print(\'{"tune": "end"}\')'
    )
    assert ended == Ended(True, "")
    assert [message["tune"] for message in messages] == ["x", "end"]


def test_a_crash_is_told_from_the_end() -> None:
    ended, _ = _listen("import sys; sys.exit(3)")
    assert (ended.ok, ended.reason) == (False, "the ranks ended with status 3")


def test_a_silent_launch_is_killed() -> None:
    script = 'import signal\nprint(\'{"tune": "begin"}\', flush=True)\nsignal.pause()'
    ended, messages = _listen(script, hang_s=0.05)
    assert not ended.ok
    assert "no call ended within 0.05 s (raise --hang" in ended.reason
    assert len(messages) == 1


def test_a_launch_whose_turns_go_on_is_not_silent() -> None:
    """Here it lives until it was asked often enough; only then it is silent."""
    script = 'import signal\nprint(\'{"tune": "begin"}\', flush=True)\nsignal.pause()'
    turns = iter(range(30))
    seen: list[int] = []

    def alive() -> int:
        seen.append(next(turns, 30))
        return seen[-1]

    argv = [sys.executable, "-c", script]
    ended = launch.listen(argv, {}, lambda _: None, 0.05, alive)
    assert not ended.ok
    assert seen[:31] == list(range(31))


def test_a_launcher_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises((UsageError, BackendError), match="mpiexec"):
        launch.choose_launcher(str(tmp_path / "mpiexec"))
