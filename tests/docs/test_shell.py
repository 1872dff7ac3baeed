# SPDX-License-Identifier: Apache-2.0
"""The commands of README and of two how-tos run as they are printed, on less data."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from busy_machine import was_too_busy_to_tune
from doc_blocks import ROOT, blocks_of
from tuning_recordings import record

from commrt.launch.mpiexec import Completed, child_environment, run_process
from commrt.tuning.run import finish
from commrt.tuning.tuner import Options

TEXT = (ROOT / "README.md").read_text()
SECTION = TEXT.split("\n## From the shell\n")[1].split("\n## ")[0]
BLOCKS = [
    *re.findall(r"^```sh\n(.*?)^```$", SECTION, re.S | re.M),
    *(blocks_of(f"docs/how-to/{page}.md", "sh")[0] for page in ("benchmark", "tune")),
]
COMMANDS = {line.split("#")[0].strip() for text in BLOCKS for line in text.splitlines()}
TUNE = "commrt-tune run"
SHORT = "-m 8:8 -i 5"
LATENCY = "OSU MPI {} Latency Test"
# What is added to end soon, and what is then printed.
EXPECTED = {
    "python -m commrt info": ("", "Selection table\n  {folder}/commrt/tables/"),
    "python -m commrt.bench allreduce": (SHORT, LATENCY.format("Allreduce")),
    "python -m commrt.bench allreduce --ranks 2,4 --fresh": (
        SHORT,
        LATENCY.format("Allreduce"),
    ),
    "python -m commrt.bench bcast --nonblocking -t 4": (
        SHORT,
        "OSU MPI Non-blocking Broadcast Latency Test",
    ),
    "python -m commrt.bench latency": (SHORT, "OSU MPI Latency Test"),
    "python -m commrt.bench import": ("", "import commrt"),
    "python -m commrt.bench varying": (
        "--op allreduce --calls 2 -i 2",
        "medians of 2 turns of 2 calls",
    ),
    "python -m commrt.bench compare": (
        "--sizes 8 --launches 1",
        "### allreduce, 2 ranks",  # with figures only where the links kept their state
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
    "commrt-tune explain allreduce 64K --ranks 2": (
        "",
        "allreduce(65536 B, float32, host",
    ),
    "commrt-tune lint": ("", "found"),
}


def shell(command: str, folder: Path, extra: str = "") -> Completed:
    """Run a command in the environment of this interpreter, away from the sources."""
    words = command.split() + extra.split()
    words[0] = str(Path(sys.executable).with_name(words[0]))
    variables = {"XDG_CONFIG_HOME": str(folder), "PYTHONIOENCODING": "utf-8"}
    return run_process(
        words, {**child_environment(sys.executable), **variables}, timeout_s=300
    )


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Completed]:
    """Return a folder of tables with one for this machine, and how it was made."""
    folder = tmp_path_factory.mktemp("tuned")
    done = shell(TUNE, folder, EXPECTED[TUNE][0])
    if was_too_busy_to_tune(done.ok, done.stderr):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("XDG_CONFIG_HOME", str(folder))
            finish(record(seed=1), Options(ranks=(2,), ops=("allreduce",)), out=None)
    return folder, done


def test_every_command_is_tried() -> None:
    assert {*EXPECTED} == COMMANDS


@pytest.mark.parametrize("command", EXPECTED)
def test_it_runs_as_printed(
    command: str, tuned: tuple[Path, Completed], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, done = tuned
    monkeypatch.chdir(folder)
    extra, words = EXPECTED[command]
    if command != TUNE:
        done = shell(command, folder, extra)
    elif was_too_busy_to_tune(done.ok, done.stderr):
        return
    assert done.ok, done.describe_failure()
    assert words.format(folder=folder) in done.stdout
