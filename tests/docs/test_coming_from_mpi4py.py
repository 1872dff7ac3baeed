# SPDX-License-Identifier: Apache-2.0
"""Both sides of the page for users of mpi4py print the same."""

from __future__ import annotations

from pathlib import Path

import pytest
from doc_blocks import blocks_of, printed_into, printing_into, sides_of
from page_programs import run_on_ranks

PAGE = "docs/how-to/coming-from-mpi4py.md"
SIDES = ("commrt", "mpi4py")
LINES_OF_A_RANK = 4
"""And one of rank 0, which receives."""


def test_each_example_stands_there_twice() -> None:
    programs = sides_of(PAGE)
    assert tuple(programs) == SIDES
    assert "mpi4py" not in programs["commrt"]
    assert "commrt" not in programs["mpi4py"]
    together = sorted("".join(programs.values()).split())
    assert sorted("".join(blocks_of(PAGE, "python")).split()) == together


@pytest.mark.parametrize("ranks", [2, 3])
def test_both_programs_print_the_same(ranks: int, tmp_path: Path) -> None:
    found = []
    for library in SIDES:
        folder = tmp_path / library
        folder.mkdir()
        program = folder / "program.py"
        program.write_text(printing_into(folder, sides_of(PAGE)[library]))
        done = run_on_ranks(ranks, program)
        assert done.ok, done.describe_failure()
        found.append(printed_into(folder))
    assert found[0] == found[1]
    assert len(found[0]) == LINES_OF_A_RANK * ranks + 1
