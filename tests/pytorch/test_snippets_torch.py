# SPDX-License-Identifier: Apache-2.0
"""The blocks of the docs that need torch run: what is written there is true.

Blocks marked ``python`` run without torch, in ``tests/docs``; those marked ``py`` here.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from doc_blocks import blocks_of, pages_with

from commrt.launch.mpiexec import child_environment, run_process
from commrt.torch.backend import can_be_made

PAGES = pages_with("py")
TORCH_PAGES = {
    "docs/how-to/use-pytorch.md",
    "docs/how-to/train-data-parallel.md",
    "docs/reference/logs.md",
}
LAUNCHERS = {
    "torchrun": ("torch.distributed.run", "--standalone", "--nproc-per-node"),
    "commrt.run": ("commrt.run", "-n"),
}
"""As the docs have them, before the number of ranks; torchrun is its module's name."""
DEADLINE_S = 300.0


def _runs(block: str) -> bool:
    """Return whether this torch can run a block."""
    return can_be_made() or "reconfigure" not in block


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("page", PAGES)
def test_blocks_of_a_page_run_on_ranks(
    page: str, launcher: str, tmp_path: Path
) -> None:
    program = tmp_path / "program.py"
    program.write_text("\n\n".join(filter(_runs, blocks_of(page, "py"))))
    done = run_process(
        [sys.executable, "-m", *LAUNCHERS[launcher], "2", str(program)],
        {**child_environment(sys.executable), "OMP_NUM_THREADS": "1"},
        timeout_s=DEADLINE_S,
    )
    assert done.ok, done.describe_failure()


@pytest.mark.parametrize("ranks", [1, 4])
def test_the_photo_is_cut_over_as_many_ranks_as_there_are(
    ranks: int, tmp_path: Path
) -> None:
    program = tmp_path / "photo.py"
    program.write_text("\n\n".join(blocks_of("docs/tutorial-photo.md", "py")))
    done = run_process(
        [sys.executable, "-m", "commrt.run", "-n", str(ranks), str(program)],
        {**child_environment(sys.executable), "OMP_NUM_THREADS": "1"},
        timeout_s=DEADLINE_S,
    )
    assert done.ok, done.describe_failure()
    assert done.stdout.count("of (427, 640)") == ranks


def test_the_pages_are_those_that_have_such_blocks() -> None:
    assert {*PAGES} >= TORCH_PAGES
