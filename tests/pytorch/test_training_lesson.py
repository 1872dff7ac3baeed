# SPDX-License-Identifier: Apache-2.0
"""The tutorial of training shows functions as they are, and what its commands print."""

from __future__ import annotations

import re
import sys
from itertools import zip_longest
from pathlib import Path

import pytest
from lesson_pages import changed_lines, function_lines, printed_by_commands

from commrt.examples.field import rungs
from commrt.launch.mpiexec import child_environment, run_process

PAGE = Path(__file__).parents[2] / "docs" / "tutorial-training.md"
PRINTED = printed_by_commands(PAGE)
DEADLINE_S = 300.0
PAIRS = [
    ("serial", "data"),
    ("data", "buckets"),
    ("data", "samples"),
    ("data", "bfloat16"),
    ("data", "scaled"),
    ("data", "zero"),
    ("serial", "tensor"),
    ("serial", "pipeline"),
    ("tensor", "data_tensor"),
    ("pipeline", "data_pipeline"),
]
NUMBER = re.compile(r"-?\d[\d,]*\.?\d*(?:e[+-]\d+)?")


def blocks(kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```$", PAGE.read_text(), re.S | re.M)


def test_the_lesson_shows_what_changes_from_rung_to_rung() -> None:
    shown = blocks("diff")
    right = [
        changed_lines(getattr(rungs, before), getattr(rungs, after))
        for before, after in PAIRS
    ]
    assert shown == right


def test_the_lesson_begins_with_one_process() -> None:
    assert blocks("python3") == ["\n".join([*function_lines(rungs.serial), ""])]


def test_the_lesson_has_an_output_for_each_rung() -> None:
    assert [command.split()[-1] for command in PRINTED] == [
        *("serial", "data", "buckets", "samples", "bfloat16", "scaling", "zero"),
        *("tensor", "pipeline", "data-tensor", "data-pipeline"),
    ]


@pytest.mark.full(sample=1)
@pytest.mark.parametrize("command", PRINTED)
def test_a_command_of_the_lesson_prints_what_stands_there(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # in the checkout -m finds a commrt without engine
    words = command.split()
    assert words[0] == "python"
    done = run_process(
        [sys.executable, *words[1:]],
        {**child_environment(sys.executable), "OMP_NUM_THREADS": "1"},
        timeout_s=DEADLINE_S,
    )
    assert done.ok, done.describe_failure()
    # Processors may round otherwise, which five epochs make larger.
    within = 2e-2 if words[-1] in ("bfloat16", "scaling") else 1e-6
    shown = PRINTED[command].splitlines()
    for right, line in zip_longest(shown, done.stdout.splitlines()):
        assert NUMBER.sub("#", line) == NUMBER.sub("#", right)
        for a, b in zip(NUMBER.findall(line), NUMBER.findall(right), strict=True):
            if "." in b and "," not in b:
                assert float(a) == pytest.approx(float(b), abs=within)
            elif "e" in b:  # off by
                assert float(a) <= max(within, 1e-12)
            else:
                assert a == b
