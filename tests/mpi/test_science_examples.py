# SPDX-License-Identifier: Apache-2.0
"""The programs of science run on ranks of all launchers, and agree with one process."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from commrt.launch.mpiexec import child_environment, run_process, run_ranks

DEADLINE_S = 300.0
PROGRAMS = {
    "gaussian_process": ["--points", "300", "--steps", "4", "--check"],
    "graph_nmf": ["--steps", "5", "--seeds", "1", "--check"],
}


@pytest.mark.mpi
@pytest.mark.parametrize("program", PROGRAMS)
def test_the_programs_of_science_on_mpi_ranks(
    program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # the checkout's commrt has no engine
    arguments = ["-m", f"commrt.examples.{program}", *PROGRAMS[program]]
    done = run_ranks(sys.executable, 3, arguments, timeout_s=DEADLINE_S)
    assert done.ok, done.describe_failure()
    assert "on 3 ranks" in done.stdout
    assert "within the tolerance of 1e-10" in done.stdout
    assert "beyond" not in done.stdout


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("launcher", [[], ["-m", "commrt.run", "-n", "2"]])
def test_the_programs_of_science_without_mpi(
    program: str,
    launcher: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    module = f"commrt.examples.{program}"
    words = [sys.executable, *launcher, "-m", module, *PROGRAMS[program]]
    environment = child_environment(sys.executable)
    done = run_process(words, environment, timeout_s=DEADLINE_S)
    assert done.ok, done.describe_failure()
    assert f"on {2 if launcher else 1} ranks" in done.stdout
    assert done.stdout.count("within the tolerance") == (
        1 if program == "gaussian_process" else 5
    )
