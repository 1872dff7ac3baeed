# SPDX-License-Identifier: Apache-2.0
"""The benchmark of new lengths, with torch's groups and mpi4py in one launch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from commrt.bench import cli, varying
from commrt.bench.varying_calls import WAYS
from commrt.bench.varying_forms import FORMS

DEADLINE_S = 300.0
"""gloo's messages are slow where other programs have the cores."""
OF_TORCH = {
    *("allgather of a list", "alltoall of a list", "reduce_scatter of a list"),
    *("allgather at once", "reduce_scatter at once"),
}
LACKING = {
    "commrt": OF_TORCH,
    "mpi4py": OF_TORCH
    | {"allreduce at once", "sparse_allreduce", "halo_exchange", "redistribute"},
    "torch": {
        *("scan", "exscan", "gatherv", "scatterv"),
        *("multi_sendrecv", "sparse_allreduce", "halo_exchange"),
        *("neighbor_allgather", "redistribute"),
    },
}
LACKING["gloo"] = LACKING["torch"] | {"allgatherv", "alltoall of a list"}


def expected_ways(name: str) -> list[str]:
    """Return the libraries that have a form of a call."""
    return sorted(way for way, lacking in LACKING.items() if name not in lacking)


def measured() -> list[Any]:
    job = {
        "operations": [*FORMS],
        "elements": (100, 140),
        "calls": 2,
        "blocks": 2,
        "ways": [*WAYS],
    }
    found = varying.measure(job)
    if found is None:
        return []
    rows = [
        [row["op"], row["valid"], sorted(row["samples_us"])] for row in found["rows"]
    ]
    times = [
        each
        for row in found["rows"]
        for ways in row["samples_us"].values()
        for each in ways.values()
    ]
    positive = all(len(each) == 2 and min(each) > 0 for each in times)
    num_lines = len(varying.text(job, found).splitlines())
    return [rows, positive, num_lines, sorted(found["versions"])]


def test_every_library_has_its_turn_in_one_launch(mpirun: Any) -> None:
    rows = [[name, True, expected_ways(name)] for name in FORMS]
    num_lines = 3 + sum(len(ways) for _, _, ways in rows)
    names = ["commrt", "mpi4py", "numpy", "torch"]
    got = mpirun(2, measured, deadline_s=DEADLINE_S)
    assert got == [[rows, True, num_lines, names], []]


def test_the_command_keeps_all_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)  # the ranks import what is installed
    few = ["--op", "alltoallv", "-m", "40:400", "--calls", "3", "-i", "4"]
    assert cli.main(["varying", *few, "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["schema"], found["ranks"]) == ("commrt-bench/1", 2)
    assert found["machine"]["cpu"]
    (row,) = found["rows"]
    assert row["valid"]
    assert {*row["samples_us"]} == {*WAYS}
    for times in row["samples_us"].values():
        assert [len(times[which]) for which in ("new", "seen")] == [4, 4]
