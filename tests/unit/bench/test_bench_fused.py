# SPDX-License-Identifier: Apache-2.0
"""The fusion benchmark: what it measures is checked, its arguments too."""

from __future__ import annotations

from typing import Any

import pytest

from commrt.bench import cli, fused, fused_worker
from commrt.local import run

JOB: dict[str, Any] = {
    "number": 20,
    "elements": 64,
    "dtype": "float32",
    "nbytes": None,
    "time_limit_s": None,
    "fresh": True,
    "iterations": 2,
    "pin": False,
    "device": "cpu",
}


@pytest.mark.parametrize("device", ["cpu", "thread"])
@pytest.mark.parametrize("limits", [{}, {"nbytes": 1000, "time_limit_s": 0.5}])
def test_every_way_is_checked_and_timed(limits: dict[str, Any], device: str) -> None:
    job = {**JOB, **limits, "device": device}
    results = run(2, lambda comm: fused_worker.measure(comm, job))
    assert [result["valid"] for result in results] == [True, True]
    assert set(results[0]["samples_us"]) == set(fused.WAYS)
    assert all(len(times) == 2 for times in results[0]["samples_us"].values())
    assert results[0]["nbytes"] == limits.get("nbytes", 4 << 20)


def test_the_text_has_a_line_per_way() -> None:
    result = {
        "version": "1",
        "ranks": 2,
        "link_class": "near",
        "nbytes": 1000,
        "valid": True,
        "samples_us": {
            "one": [4.0, 2.0, 3.0],
            "fused": [4.5],
            "nonblocking": [9.0],
            "blocking": [6.0],
        },
    }
    assert "between calls, on thread" in fused.text({**JOB, "device": "thread"}, result)
    lines = fused.text(JOB, result).splitlines()
    assert "2 ranks, links near, arrays rewritten" in lines[0]
    assert "20 allreduces of 256 bytes, float32" in lines[1]
    assert "buckets of 1000 bytes, no time limit" in lines[1]
    assert lines[3].split()[-2:] == ["3.0", "2.0"]
    assert [line.split()[-1] for line in lines[4:]] == ["1.50", "3.00", "2.00"]
    limited = fused.text({**JOB, "time_limit_s": 0.5}, {**result, "valid": False})
    assert "time limit 0.5 s" in limited
    assert "WRONG" in limited


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["-m", "10"], "-m 10: is not a multiple of the 4 bytes of float32"),
        (["-n", "0"], "not a whole number from 1"),
        (["--time-limit-s", "-1"], "--time-limit-s"),
        (["-d", "cuda"], "CUDA"),
    ],
)
def test_wrong_arguments_are_one_line(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["fused", *argv]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1
