# SPDX-License-Identifier: Apache-2.0
"""What docs/gpu.md says to run on a GPU first exists, and runs without one."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from busy_machine import was_too_busy_to_tune

ROOT = Path(__file__).parents[2]
SECTION = "## What to run on a GPU first"
SMALLER = {
    "submit": ["--iterations", "5"],
    "parts": ["-m", "65536", "-i", "2"],
    "allreduce": ["--budget-s", "0.02", "-i", "3"],
    "leaks": ["-n", "400"],
    "compare": ["--sizes", "64", "--launches", "1", "--budget-s", "0.02"],
}


def commands() -> list[str]:
    page = (ROOT / "docs" / "gpu.md").read_text()
    section = page.partition(SECTION)[2].partition("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("|")]
    found = [
        text for row in rows for text in re.findall(r"`([^`]+ -d cuda[^`]*)`", row)
    ]
    assert len(found) == 8
    return found


@pytest.mark.full(sample=3)
@pytest.mark.parametrize("command", commands())
def test_the_command_runs_without_a_gpu(command: str, tmp_path: Path) -> None:
    words = shlex.split(command.replace("-d cuda", "-d thread"))
    words = [re.sub(r"^\d{7,}:\d{7,}$", "65536:65536", word) for word in words]
    if "ipc/direct" in words:  # processes share no device of threads
        at = words.index("ipc/direct")
        del words[at - 1 : at + 1]
    if words[0] == "commrt-tune":
        words[:1] = [sys.executable, "-m", "commrt.tuning.cli"]
        words[words.index("--budget") + 1] = "4"
        words += ["--out", "table.yaml", "--ranks", "2", "--max-bytes", "64"]
        words += ["--ops", "allreduce"]
    else:
        assert words[:3] == ["python", "-m", "commrt.bench"]
        words[0] = sys.executable
        words += SMALLER[words[3]]
    done = subprocess.run(
        words, cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    if was_too_busy_to_tune(done.returncode == 0, done.stderr):
        return
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.strip()
