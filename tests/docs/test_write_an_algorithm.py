# SPDX-License-Identifier: Apache-2.0
"""The how-to, typed as a newcomer types it: files and commands, and what they print."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from doc_blocks import ROOT

from commrt.launch.mpiexec import child_environment, run_ranks

PAGE = (ROOT / "docs" / "how-to" / "write-an-algorithm.md").read_text()
PYTHON = re.compile(r"^```python\n(.*?)^```$", re.S | re.M)
CONSOLE = re.compile(r"^```console\n\$ (.*?)\n(.*?)^```$", re.S | re.M)
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.S | re.M)
DEADLINE_S = 300.0


@pytest.fixture
def my_ring(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the page's first program: the algorithm, and a call that runs it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    blocks = PYTHON.findall(PAGE)
    assert [block for block in blocks if "__main__" in block] == blocks[:1]
    file = tmp_path / "my_ring.py"
    file.write_text(blocks[0])
    return file


def printed(command: str) -> list[str]:
    """Return what the page says that a command prints."""
    found = [text for said, text in CONSOLE.findall(PAGE) if said == command]
    assert len(found) == 1, command
    return found[0].splitlines()


@pytest.mark.usefixtures("my_ring")
def test_the_verifier_prints_what_the_page_shows() -> None:
    command = "python -m commrt verify my_ring.py:my_ring --ranks 1..16"
    first, second, dots, verdict = printed(command)
    done = subprocess.run(
        [sys.executable, *command.split()[1:]],
        env=child_environment(sys.executable),
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    lines = done.stdout.splitlines()
    assert (lines[:2], dots, lines[-1]) == ([first, second], "...", verdict)
    assert len(lines) == 17


@pytest.mark.usefixtures("my_ring")
def test_the_picture_is_drawn_as_the_page_says() -> None:
    command = "python -m commrt draw my_ring.py:my_ring --ranks 4 --out my_ring.svg"
    done = subprocess.run(
        [sys.executable, *command.split()[1:]],
        env=child_environment(sys.executable),
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.stdout.splitlines() == printed(command), done.stderr
    assert "allreduce my_ring on 4 ranks" in Path("my_ring.svg").read_text()


def test_the_file_runs_on_four_ranks(my_ring: Path) -> None:
    (line,) = printed("mpiexec -n 4 python my_ring.py")
    for env in ({}, {"COMMRT_NODES": "2,2"}):
        done = run_ranks(sys.executable, 4, [my_ring.name], timeout_s=300, env=env)
        assert done.ok, done.describe_failure()
        assert done.stdout.splitlines() == [line]


@pytest.mark.usefixtures("my_ring")
def test_it_can_be_timed_and_chosen(tmp_path: Path) -> None:
    plain = [text for language, text in BLOCK.findall(PAGE) if not language]
    (program,) = [text for text in plain if "import my_ring" in text]
    (tmp_path / "bench.py").write_text(program)
    limits = ["-m", "8:64", "-i", "5", "--budget-s", "0.1"]
    for name in ("shm/my_ring", "mpi/native"):
        command = f"mpiexec -n 2 python bench.py allreduce --algorithm {name}"
        assert command in PAGE
        done = run_ranks(
            sys.executable, 2, [*command.split()[4:], *limits], timeout_s=DEADLINE_S
        )
        assert done.ok, done.describe_failure()
        assert "# OSU MPI Allreduce Latency Test" in done.stdout
    env = {"COMMRT_ALGORITHM": "allreduce:shm/my_ring"}
    why = "import my_ring, commrt; print(commrt.init().explain('allreduce', 8))"
    done = run_ranks(sys.executable, 2, ["-c", why], timeout_s=DEADLINE_S, env=env)
    assert done.ok, done.describe_failure()
    assert done.stdout.count(": shm/my_ring\n") == 2
