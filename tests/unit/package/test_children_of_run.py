# SPDX-License-Identifier: Apache-2.0
"""Processes that ranks of ``commrt.run`` start are no ranks; the job goes on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import child_ranks
import pytest
from child_ranks import ALONE

from commrt.launch.mpiexec import child_environment

FAMILY = """
import json, sys
from child_ranks import family
if __name__ == "__main__":
    first, after, parents = json.loads(sys.argv[1])
    said = family(first, after, False, parents)
    sys.stdout.write(json.dumps(said) + "\\n")
"""
TWO = """
import json, os, subprocess, sys
import commrt
child = None
if os.environ["RANK"] == "0":
    words = [sys.executable, "-c", "import commrt; commrt.init(); input()"]
    child = subprocess.Popen(words, stdin=subprocess.PIPE)
    folder = os.environ["COMMRT_MEETING"]
    while not any(name.endswith("claims%2F0%2F1") for name in os.listdir(folder)):
        os.sched_yield()
try:
    commrt.init()
finally:
    if child is not None:
        child.communicate(b"\\n")
"""
AFTER_ANOTHER = """
import subprocess, sys
for turn in range(2):
    assert subprocess.call([sys.executable, sys.argv[1]]) == 0
"""


def run(folder: Path, program: str, *arguments: str) -> Any:
    """Run two ranks of a program."""
    (folder / "program.py").write_text(program)
    support = str(Path(child_ranks.__file__).parent)
    command = [
        sys.executable,
        "-m",
        "commrt.run",
        "-n",
        "2",
        str(folder / "program.py"),
    ]
    return subprocess.run(
        [*command, *arguments],
        env={
            **child_environment(sys.executable),
            "PYTHONPATH": support,
            "COMMRT_TIMEOUT_S": "240",
        },
        cwd=os.sep,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.parametrize("how", ["program", "spawn", "forkserver", "shell"])
def test_a_child_after_init_is_a_world_of_one(tmp_path: Path, how: str) -> None:
    done = run(tmp_path, FAMILY, json.dumps(["", how, [0, 1]]))
    assert done.returncode == 0, done.stderr
    for line in done.stdout.splitlines():
        (said,), sums = json.loads(line)
        assert said[:3] == ALONE
        assert "of python -m commrt.run started it: process" in said[3]
        assert sums == [2.0, 2.0]


def test_a_child_before_init_is_told_to_say_what_it_is(tmp_path: Path) -> None:
    done = run(tmp_path, FAMILY, json.dumps(["program", "program", [0]]))
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    ((text,), after), sums = max(found)
    assert "COMMRT_LAUNCH=single for this process" in text
    assert after[:3] == ALONE
    assert sums == [2.0, 2.0]


def test_a_worker_before_init_is_a_world_of_one(tmp_path: Path) -> None:
    done = run(tmp_path, FAMILY, json.dumps(["spawn", "", [0]]))
    assert done.returncode == 0, done.stderr
    ((said,), _), _ = sorted(map(json.loads, done.stdout.splitlines()))[::-1]
    assert said[:3] == ALONE


def test_a_rank_whose_child_came_first_is_told_which(tmp_path: Path) -> None:
    done = run(tmp_path, TWO)
    assert done.returncode == 1
    assert "which this process has started, is rank 0 of" in done.stderr
    assert "COMMRT_LAUNCH=single for that one" in done.stderr


def test_programs_that_follow_each_other_are_all_ranks(tmp_path: Path) -> None:
    done = run(tmp_path, AFTER_ANOTHER, child_ranks.__file__)
    assert done.returncode == 0, done.stderr
    found = sorted(done.stdout.replace("][", "]\n[").splitlines())
    assert found == ["[0, 2, 2.0]"] * 2 + ["[1, 2, 2.0]"] * 2
