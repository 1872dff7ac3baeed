# SPDX-License-Identifier: Apache-2.0
"""``bench gpu-report``: goes on after failures, keeps what was said, and judges."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from commrt.bench import cli
from commrt.bench.gpu_goals import GOALS, Outcome, goals_table
from commrt.bench.gpu_report import Part, parts, run_parts

ROOT = Path(__file__).parents[3]
GOOD: dict[str, list[dict[str, Any]]] = {
    "submit": [
        {"engine": "staged", "rows": [{"median_us": 9.5}]},
        {"engine": "nccl", "rows": [{"median_us": 6.0}]},
        {"engine": "NCCL itself", "rows": [{"median_us": 4.0}]},
    ],
    "parts": [
        {
            "rows": [{"valid": True}],
            "nbytes": 1000,
            "of_slower_copy": 0.9,
            "of_parts": 1.2,
            "long": {
                "to_host_us": 9.0,
                "to_device_us": 8.0,
                "call_us": 10.0,
                "on_device_us": 30.0,
            },
            "short": {"call_us": 20.0},
        }
    ],
    "peers": [{"rows": [{"valid": True, "median_us": 90.0, "nbytes": 1000}]}],
    "peers under MPS": [],
    "overlap": [{"rows": [{"valid": True, "overlap_percent": 93.0, "nbytes": 1}]}],
    "overlap of two ranks under MPS": [],
    "leaks": [{"rows": [{"valid": True, "number": 1000000}]}],
}


def found(**other: Any) -> dict[str, Outcome]:
    """Return what parts said, some of it other than good."""
    said = {**GOOD, **other}
    return {
        name: rows
        if isinstance(rows, Outcome)
        else Outcome("words\n" + "\n".join(map(json.dumps, rows)))
        for name, rows in said.items()
    }


def verdicts(given: dict[str, Outcome], no_use: str = "") -> list[str]:
    rows = goals_table(given, no_use).splitlines()[2:-1]
    assert len(rows) == len(GOALS)
    return [row.split("|")[3].strip() for row in rows]


def test_what_is_reached_is_told() -> None:
    assert verdicts(found()) == ["reached"] * len(GOALS)


def changed(part: str, row: int, **other: Any) -> dict[str, Any]:
    rows = json.loads(json.dumps(GOOD[part]))
    for name, value in other.items():
        (rows[row] if name in rows[row] else rows[row]["rows"][0])[name] = value
    return {part: rows}


@pytest.mark.parametrize(
    ("number", "other"),
    [
        (0, changed("submit", 1, rows=[{"median_us": 7.1}])),
        (1, changed("submit", 0, rows=[{"median_us": 10.1}])),
        (2, changed("parts", 0, of_slower_copy=0.84)),
        (3, changed("parts", 0, of_parts=1.51)),
        (4, changed("peers", 0, median_us=101.0)),
        (5, changed("overlap", 0, overlap_percent=89.0)),
        (6, changed("leaks", 0, valid=False)),
    ],
)
def test_what_is_missed_is_told(number: int, other: dict[str, Any]) -> None:
    wanted = ["reached"] * len(GOALS)
    wanted[number] = "missed"
    assert verdicts(found(**other)) == wanted


def test_the_better_of_two_ways_counts() -> None:
    slow = changed("peers", 0, median_us=900.0)
    slow["peers under MPS"] = GOOD["peers"]
    assert verdicts(found(**slow))[4] == "reached"
    assert "by peers under MPS" in goals_table(found(**slow))


@pytest.mark.parametrize(
    ("numbers", "other", "why"),
    [
        ([0, 1], {"submit": Outcome(why_not="no time")}, "no time"),
        ([0, 1], {"submit": Outcome("{cut")}, "no figure by"),
        (
            [0],
            {"submit": Outcome('# not measured by nccl: x|y\n{"engine": "staged"')},
            "x/y",
        ),
        ([2, 3, 4], {"parts": []}, "parts: no figures"),
        ([4], {"peers": Outcome(why_not="no peers")}, "no peers"),
        ([5], changed("overlap", 0, valid=False), "a result was wrong"),
        ([6], {"leaks": Outcome("nothing of use")}, "leaks: no figures"),
    ],
)
def test_what_is_not_there_is_told_with_the_reason(
    numbers: list[int], other: dict[str, Any], why: str
) -> None:
    said = verdicts(found(**other))
    for number in numbers:
        assert said[number].startswith("not run: ")
        assert why in said[number]


def test_figures_that_mean_nothing_are_not_judged() -> None:
    assert verdicts(found(), "no GPU") == ["not run: no GPU"] * len(GOALS)


# --- parts ----------------------------------------------------------------------------


def plain(name: str, code: str, **other: Any) -> Part:
    return Part(name, ("-c", code), **other)


def others() -> list[Part]:
    """What the goals need, and nobody runs."""
    return [plain(name, "", why_not="left out") for name in GOOD]


def test_a_part_that_fails_or_hangs_stops_no_other(tmp_path: Path) -> None:
    hangs = (
        "import os, subprocess, sys, time; print('begun', flush=True); "
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']); "
        "time.sleep(600)"
    )
    chosen = [
        plain("breaks", "import sys; print('words'); sys.exit('its last words')"),
        plain("hangs", hangs),
        plain("writes", "open('raw.json', 'w')"),
        plain("is left out", "", why_not="it has no use here"),
        *others(),
    ]
    failed = run_parts(chosen, tmp_path, timeout_s=2)
    assert failed == ["breaks", "hangs"]
    report = (tmp_path / "report.md").read_text()
    assert "it ended with 1" in report
    assert "its last words" in report
    assert "it was ended after 2 s" in report
    assert "Not run: it has no use here." in report
    assert "words\n" in (tmp_path / "01-breaks.txt").read_text()
    assert (tmp_path / "02-hangs.txt").read_text() == "begun\n"
    assert (tmp_path / "raw.json").exists()
    assert report.rstrip().splitlines()[-1].startswith("| ten million")


def control(folder: Path, code: str) -> None:
    """Put a program in the place of MPS's."""
    made = folder / "nvidia-cuda-mps-control"
    made.write_text(f"#!/bin/sh\n{code}\n")
    made.chmod(0o755)


def test_mps_is_started_for_a_part_and_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    log = tmp_path / "log"
    words = f'echo "$# $CUDA_MPS_PIPE_DIRECTORY" >> {log}; cat >> {log}'
    control(tmp_path, words)
    shows = "import os; print(os.environ['CUDA_MPS_PIPE_DIRECTORY'])"
    chosen = [plain("served", shows, under_mps=True), *others()]
    assert run_parts(chosen, tmp_path) == []
    place = (tmp_path / "01-served.txt").read_text().strip()
    assert log.read_text().split() == ["1", place, "0", place, "quit"]
    assert not Path(place).exists()

    control(tmp_path, "echo no card >&2; exit 3")
    assert run_parts(chosen, tmp_path) == ["served"]
    assert "MPS does not start: no card" in (tmp_path / "report.md").read_text()


def test_the_commands_are_those_that_the_documents_name() -> None:
    page = (ROOT / "docs" / "gpu.md").read_text()
    section = page.partition("## What to run on a GPU first")[2].partition("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("|")]
    named = re.findall(r"`(python[^`]+ -d cuda[^`]*)`", "".join(rows))
    assert len(named) >= 6
    made = {frozenset(each.command) for each in parts("cuda")}
    for text in named:
        words = frozenset(shlex.split(text)[1:])
        forms = {"--format", "nccl", "json"}
        assert any(words - forms == each - forms for each in made), text


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--only", "partss"], "no such part"),
        (["--out", "/dev/null/x"], "--out /dev/null/x"),
    ],
)
def test_what_is_asked_for_is_checked(
    words: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["gpu-report", "-d", "thread", *words]) == 2
    assert why in capsys.readouterr().err


def bench(*words: str, where: Path) -> Any:
    return subprocess.run(
        [sys.executable, "-m", "commrt.bench", "gpu-report", *words],
        cwd=where,
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.parametrize("only", [["parts"], pytest.param([], marks=pytest.mark.full)])
def test_it_runs_on_a_device_of_threads(only: list[str], tmp_path: Path) -> None:
    words = [word for name in only for word in ("--only", name)]
    done = bench("-d", "thread", "--quick", "--out", "found", *words, where=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "figures of a device of threads mean nothing" in done.stdout
    report = (tmp_path / "found" / "report.md").read_text()
    assert "## What was wanted" in report
    assert "it ended with" not in report
    kept = {each.name for each in (tmp_path / "found").iterdir()}
    assert "05-parts.txt" in kept
    if not only:
        assert {"raw.json", "table.yaml", "13-leaks.txt"} <= kept
