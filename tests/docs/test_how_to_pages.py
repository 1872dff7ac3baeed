# SPDX-License-Identifier: Apache-2.0
"""Each how-to begins with a short program that runs by itself, and ends with links."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from doc_blocks import ROOT, first_block_of, how_tos
from page_programs import run_on_ranks, run_plainly

PAGES = how_tos()
IN_PYTHON = [page for page in PAGES if first_block_of(page)[1] == "python"]
SENTENCE_END = re.compile(r"[.!?:](?=\s)")
MOST_LINES = 25


@pytest.mark.parametrize("page", PAGES)
def test_it_begins_with_a_short_program(page: str) -> None:
    before, language, program = first_block_of(page)
    title, _, prose = before.partition("\n")
    assert title.startswith("# ")
    assert len(SENTENCE_END.findall(prose)) <= 2
    # py: a program over torch, which tests/pytorch runs.
    assert language in ("python", "py")
    assert program.count("\n") <= MOST_LINES


@pytest.mark.parametrize("page", PAGES)
def test_it_ends_with_where_to_go_next(page: str) -> None:
    last = (ROOT / page).read_text().rpartition("\n## ")[2]
    assert last.startswith("Where to go next\n")
    assert "](" in last


@pytest.mark.parametrize("page", IN_PYTHON)
def test_the_program_runs_by_itself_in_plain_python(page: str, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(first_block_of(page)[2])
    done = run_plainly(program)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("page", IN_PYTHON)
def test_the_program_runs_by_itself_on_mpi_ranks(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # where a program may write files
    program = tmp_path / "program.py"
    program.write_text(first_block_of(page)[2])
    done = run_on_ranks(3, program)
    assert done.ok, done.describe_failure()
