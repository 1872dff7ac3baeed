# SPDX-License-Identifier: Apache-2.0
"""The commands of README run as they are printed there, on less data."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from commrt.launch.mpiexec import Completed, child_environment, run_process

TEXT = (Path(__file__).parents[2] / "README.md").read_text()
SECTION = TEXT.split("\n## From the shell\n")[1].split("\n## ")[0]
COMMANDS = [
    line.split("#")[0].strip()
    for block in re.findall(r"^```sh\n(.*?)^```$", SECTION, re.S | re.M)
    for line in block.splitlines()
]
TUNE = "commrt-tune run"
# What is added to end soon, and what is then printed.
EXPECTED = {
    "python -m commrt info": ("", "Selection table\n  {folder}/commrt/tables/"),
    "python -m commrt.bench allreduce": ("-m 8:8", "OSU MPI Allreduce Latency Test"),
    "python -m commrt.bench compare": (
        "--sizes 8 --launches 1",
        "Median over 1 launches",  # a table only where both met the same links
    ),
    "python -m commrt verify ring --ranks 1..64": (
        "--ranks 1..8",
        "ring is right for allreduce, reduce, bcast, allgather, reduce_scatter on 1..8",
    ),
    "python -m commrt draw ring --ranks 8": ("", "allreduce-ring-8.svg: allreduce"),
    TUNE: (
        "--budget 5 --ops allreduce --max-bytes 4K",
        "Picked, by bytes of the call:",
    ),
    "commrt-tune show": ("", "allreduce (ranks=2, "),
    "commrt-tune report": ("", "Written to commrt-tune-report.html"),
    "commrt-tune explain allreduce 4096": ("", "allreduce(4096 B, float32, host"),
    "commrt-tune lint": ("", "found"),
}


def shell(command: str, folder: Path, extra: str = "") -> Completed:
    """Run a command in the environment of this interpreter, away from the sources."""
    words = command.split() + extra.split()
    words[0] = str(Path(sys.executable).with_name(words[0]))
    variables = {"XDG_CONFIG_HOME": str(folder), "PYTHONIOENCODING": "utf-8"}
    return run_process(
        words, {**child_environment(sys.executable), **variables}, timeout_s=100
    )


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Completed]:
    """Return a folder of tables with one for this machine, and how it was made."""
    folder = tmp_path_factory.mktemp("tuned")
    return folder, shell(TUNE, folder, EXPECTED[TUNE][0])


def test_every_command_of_the_readme_is_tried() -> None:
    assert sorted(COMMANDS) == sorted(EXPECTED)


@pytest.mark.parametrize("command", COMMANDS)
def test_it_runs_as_printed(
    command: str, tuned: tuple[Path, Completed], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, done = tuned
    monkeypatch.chdir(folder)
    extra, words = EXPECTED[command]
    if command != TUNE:
        done = shell(command, folder, extra)
    assert done.ok, done.describe_failure()
    assert words.format(folder=folder) in done.stdout
