# SPDX-License-Identifier: Apache-2.0
"""``bench sparse -d`` and ``bench compress -d``: on devices of threads."""

from __future__ import annotations

from typing import Any

import pytest

from commrt.bench import compression, sparse
from commrt.bench.cli import main
from commrt.local import run
from commrt.vocabulary.wire_formats import WIRE_FORMATS


@pytest.mark.parametrize("result", ["auto", "dense"])
def test_sparse_sums_on_a_device_are_measured_and_checked(result: str) -> None:
    job = {
        "elements": 3000,
        "densities": [0.01, 0.3],
        "algorithms": ["auto", "split_dense"] if result == "dense" else ["auto"],
        "iterations": 1,
        "result": result,
        "warm": False,
        "device": "thread",
    }
    found: Any = run(2, lambda comm: sparse.measure_on(comm, job))[0]
    assert len(found["rows"]) == 2 * len(job["algorithms"])
    assert all(row["valid"] for row in found["rows"])
    assert all(len(row["samples_us"]) == 1 for row in found["rows"])
    text = sparse._text(job, found)
    assert "on thread" in text
    assert "WRONG" not in text


@pytest.mark.parametrize("op", ["allreduce", "alltoall"])
def test_compression_on_a_device_is_measured_and_checked(op: str) -> None:
    job = {
        "op": op,
        "sizes": [4096],
        "iterations": 1,
        "residual": op == "allreduce",
        "device": "thread",
    }
    found: Any = run(2, lambda comm: compression.measure_on(comm, job))[0]
    assert [row["compress"] for row in found["rows"]] == [
        one.name for one in WIRE_FORMATS
    ]
    assert all(row["valid"] for row in found["rows"])
    assert "on thread" in compression.describe(job, found)


@pytest.mark.parametrize("benchmark", ["sparse", "compress"])
def test_progress_that_is_off_is_refused_before_any_rank_starts(
    benchmark: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("COMMRT_PROGRESS", "off")
    assert main([benchmark, "-d", "thread"]) == 2
    assert "COMMRT_PROGRESS=off" in capsys.readouterr().err
