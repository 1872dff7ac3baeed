# SPDX-License-Identifier: Apache-2.0
"""The Python blocks of README and docs run: what is written there is true."""

from __future__ import annotations

from pathlib import Path

import pytest
from doc_blocks import blocks_of, pages_with
from page_programs import run_on_ranks, run_plainly

PAGES = pages_with("python")


def _program(page: str, folder: Path) -> Path:
    """Write all blocks of a page, in order, as one program."""
    program = folder / "program.py"
    program.write_text("\n\n".join(blocks_of(page, "python")))
    return program


def _first_block(folder: Path) -> Path:
    program = folder / "average.py"
    program.write_text(blocks_of("README.md", "python")[0])
    return program


@pytest.mark.parametrize("page", PAGES)
def test_blocks_of_a_page_run_in_plain_python(page: str, tmp_path: Path) -> None:
    done = run_plainly(_program(page, tmp_path))
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", PAGES)
def test_blocks_of_a_page_run_on_mpi_ranks(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # where a program may write files
    done = run_on_ranks(3, _program(page, tmp_path))
    assert done.ok, done.describe_failure()


def test_readme_prints_once_for_four_mpi_ranks(tmp_path: Path) -> None:
    done = run_on_ranks(4, _first_block(tmp_path))
    assert done.ok, done.describe_failure()
    assert done.stdout == "average over 4 ranks: 1.5\n"
