# SPDX-License-Identifier: Apache-2.0
"""Both sides of the page for users of torch.distributed print the same."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from doc_blocks import blocks_of, printed_into, printing_into, sides_of

from commrt.launch.mpiexec import child_environment, run_process

PAGE = "docs/how-to/coming-from-torch-distributed.md"
SIDES = ("commrt", "torch")
LAUNCHERS = {
    "commrt": ("commrt.run", "-n"),
    "torch": ("torch.distributed.run", "--standalone", "--nproc-per-node"),
}
LINES = {2: 11, 3: 15}
DEADLINE_S = 300.0


def printed(folder: Path, library: str, ranks: int) -> list[str]:
    """Return what the ranks of one side print, sorted."""
    folder.mkdir()
    program = folder / "program.py"
    program.write_text(printing_into(folder, sides_of(PAGE)[library]))
    done = run_process(
        [sys.executable, "-m", *LAUNCHERS[library], str(ranks), str(program)],
        {**child_environment(sys.executable), "OMP_NUM_THREADS": "1"},
        timeout_s=DEADLINE_S,
    )
    assert done.ok, done.describe_failure()
    return printed_into(folder)


def test_each_example_stands_there_twice() -> None:
    programs = sides_of(PAGE)
    assert tuple(programs) == SIDES
    assert "commrt" not in programs["torch"]
    assert "torch.distributed" not in programs["commrt"]
    together = sorted("".join(programs.values()).split())
    assert sorted("".join(blocks_of(PAGE, "py")).split()) == together


@pytest.mark.parametrize("ranks", [2, 3])
def test_both_programs_print_the_same(ranks: int, tmp_path: Path) -> None:
    ours, theirs = (printed(tmp_path / side, side, ranks) for side in SIDES)
    assert ours == theirs
    assert len(ours) == LINES[ranks]
