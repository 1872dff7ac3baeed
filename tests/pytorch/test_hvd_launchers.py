# SPDX-License-Identifier: Apache-2.0
"""A script for Horovod runs under torchrun, mpiexec and commrt.run."""

from __future__ import annotations

import contextlib
import io
import subprocess
import sys
from typing import Any

import pytest

from commrt.examples import horovod_digits

DEADLINE_S = 300.0


def digits(arguments: list[str]) -> list[Any]:
    """Return the status of the example, twice in one process, and what it prints."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        status = [horovod_digits.main(arguments) for _ in range(2)]
    return [status, said.getvalue()]


def check(results: list[list[Any]]) -> None:
    assert [status for status, _ in results] == [[0, 0]] * len(results)
    assert "against one process: off by at most" in results[0][1]
    assert f"5 steps on {len(results)} ranks" in results[0][1]
    assert [said for _, said in results[1:]] == [""] * (len(results) - 1)


def test_the_digits_on_ranks_of_torchrun(torchrun: Any) -> None:
    arguments = ["--steps", "5", "--check"]
    check(torchrun(2, digits, arguments=arguments, deadline_s=DEADLINE_S))


def test_the_digits_on_ranks_of_mpiexec(mpirun: Any) -> None:
    arguments = ["--steps", "5", "--check"]
    check(mpirun(2, digits, arguments=arguments, deadline_s=DEADLINE_S))


def test_the_digits_on_ranks_of_commrt_run() -> None:
    arguments = ["--steps", "5", "--check"]
    module = "commrt.examples.horovod_digits"
    done = subprocess.run(
        [sys.executable, "-m", "commrt.run", "-n", "3", "-m", module, *arguments],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        cwd="/",
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "5 steps on 3 ranks" in done.stdout


def test_the_digits_in_one_process(capsys: pytest.CaptureFixture[str]) -> None:
    assert horovod_digits.main(["--steps", "5", "--check"]) == 0
    assert "5 steps on 1 ranks" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        horovod_digits.main(["--steps", "0"])
