# SPDX-License-Identifier: Apache-2.0
"""Tuning of arrays on devices: what is measured there, and the rules that follow.

Ranks are threads with a device of threads each; NCCL is the pretended one.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from nccl_ranks import nccl_here

from commrt.bench.device_memory import DeviceMemory
from commrt.devices import ThreadDevice
from commrt.errors import UsageError
from commrt.local import run
from commrt.select.facts import Candidate, Query
from commrt.select.table import load_file
from commrt.tuning import cli, worker
from commrt.tuning.job import Item, Job
from commrt.tuning.measure import Session, catalog
from commrt.tuning.recording_reader import parse_recording
from commrt.tuning.run import check_outputs, finish, other_memory, table_at
from commrt.tuning.samples import Recording
from commrt.tuning.tuner import Options

JOB = Job(
    ("allreduce", "alltoall", "barrier"),
    "float32",
    1 << 10,
    False,
    1,
    1e9,
    max_repetitions=3,
    device="thread",
)


class AloneSession(Session):
    """The ranks of a launch, who see nothing of what else runs on the machine."""

    def others_share(self) -> float:
        """Return 0: no size is left out, however busy the machine is."""
        return 0.0


def measured(
    size: int, job: Job = JOB, recording: Recording | None = None
) -> Recording:
    """Return what a launch measures, beside what a recording has."""
    lines: list[str] = []

    def main(comm: Any) -> None:
        with ThreadDevice(seed=comm.rank) as device:
            memory = DeviceMemory(device, "events")
            session = AloneSession(None, device=job.device, comm=comm, memory=memory)
            worker.measure(session, job, lines.append)
            comm.free()
            memory.close()

    run(size, main, timeout_s=300)
    found = Recording() if recording is None else recording
    launch = len(found.launches)
    for text in lines:
        found.add(launch, job.held_out, json.loads(text))
    return found


def steady(recording: Recording) -> Recording:
    """Return it with times that decide, whatever ran beside the measurement."""
    kinds = sorted({str(one.candidate) for one in recording.samples})
    recording.samples = [
        replace(
            one,
            us=(10.0 + kinds.index(str(one.candidate)) + 1e-3 * one.nbytes,) * 5,
            disturbed=0,
        )
        for one in recording.samples
    ]
    recording.unfinished.clear()
    return recording


def names(recording: Recording, op: str) -> set[str]:
    return {one.candidate.name for one in recording.samples if one.op == op}


def test_only_what_runs_on_devices_is_measured_and_right() -> None:
    found = measured(3)
    assert found.failures == []
    assert {one.device for one in found.launches.values()} == {"cuda"}
    assert {"staged/direct", "staged/ring"} <= names(found, "allreduce")
    for op in JOB.ops:
        assert {name.partition("/")[0] for name in names(found, op)} == {"staged"}
    assert found.software["cuda"] == "none: a device of threads"


def test_nccl_and_its_schedules_stand_beside_staged_calls() -> None:
    with nccl_here():
        found = measured(3, replace(JOB, ops=("allreduce",), max_nbytes=64))
    assert found.failures == []
    wanted = {"nccl/native", "nccl/ring", "staged/direct"}
    assert wanted <= names(found, "allreduce")
    assert found.software["nccl"] == "2.28.9"


def test_the_table_has_rules_for_devices_that_calls_there_follow(
    tmp_path: Path,
) -> None:
    job = replace(JOB, ops=("allreduce",), max_nbytes=512)
    piece = Item("allreduce", 512, "staged/ring{piece=128}")
    found = measured(3, replace(job, variants=(piece,)))
    assert Candidate.parse(piece.candidate) in {one.candidate for one in found.samples}
    measured(3, replace(job, held_out=True, seed=2), found)
    options = Options((3,), ("allreduce",), device="thread")
    out = tmp_path / "table.yaml"
    summary = finish(steady(found), options, out=out, date="2026-11-23")
    assert "cuda arrays" in summary
    assert "Checked by a further launch" in summary
    table = load_file(out, catalog())
    assert {rule.match.device for rule in table.rules} == {"cuda"}
    facts = found.launches[0].facts
    on_device = table.lookup(facts, Query("allreduce", 512, device="cuda", op="sum"))
    assert on_device is not None
    assert on_device.rule.use.backend == "staged"
    assert table.lookup(facts, Query("allreduce", 512, op="sum")) is None
    copy = parse_recording(found.to_json())
    assert {one.group.device for one in copy.launches.values()} == {"cuda"}


def test_rules_for_other_memory_stay_in_the_users_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    on_device = measured(2, replace(JOB, ops=("allreduce",), max_nbytes=64))
    finish(steady(on_device), Options((2,), ("allreduce",), device="cuda"), out=None)
    (path,) = tmp_path.rglob("*.yaml")
    first = load_file(path, catalog())
    assert other_memory(first, "cuda") == []
    on_host = measured(2, replace(JOB, ops=("alltoall",), device="cpu", max_nbytes=64))
    said = finish(steady(on_host), Options((2,), ("alltoall",)), out=None)
    assert f"{len(first.rules)} rules for arrays elsewhere are kept" in said
    both = load_file(path, catalog()).rules
    assert {(rule.op, rule.match.device) for rule in both} == {
        ("alltoall", "host"),
        ("allreduce", "cuda"),
    }
    path.write_text("not a table")
    assert table_at(path) is None
    assert table_at(tmp_path / "nowhere") is None


def test_rules_that_a_run_did_not_measure_stay_in_the_users_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    host = replace(JOB, device="cpu", max_nbytes=64)
    for ranks, op in ((2, "allreduce"), (3, "allreduce"), (2, "alltoall")):
        run = steady(measured(ranks, replace(host, ops=(op,))))
        said = finish(run, Options((ranks,), (op,)), out=None)
    (path,) = tmp_path.rglob("*.yaml")
    table = load_file(path, catalog())
    assert {(rule.op, rule.match.ranks) for rule in table.rules} == {
        ("allreduce", 2),
        ("allreduce", 3),
        ("alltoall", 2),
    }
    assert "rules for other operations or placements of ranks are kept" in said
    # A run replaces its own rules, and no others.
    again = steady(measured(3, replace(host, ops=("allreduce",))))
    finish(again, Options((3,), ("allreduce",)), out=None)
    once_more = load_file(path, catalog()).rules
    assert sorted(r.op for r in once_more) == sorted(r.op for r in table.rules)


def test_a_device_of_threads_writes_no_table_that_programs_find(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UsageError, match="taken for a GPU's"):
        check_outputs(None, None, "thread")
    check_outputs(tmp_path / "table.yaml", None, "thread")
    assert cli.main(["run", "-d", "thread"]) == 2
    assert "--out" in capsys.readouterr().err
