# SPDX-License-Identifier: Apache-2.0
"""The example of training that goes on says what happens, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest
from run_ranks import RunRanks


@pytest.mark.parametrize("parallel", ["hsdp", "tensor"])
@pytest.mark.full(sample=1)
def test_a_rank_that_is_not_needed_ends_without_a_traceback(
    tmp_path: Path, parallel: str
) -> None:
    ranks = RunRanks(tmp_path, ("--restarts", "2"))
    words = ["-m", "commrt.examples.elastic_gpt", "--parallel", parallel]
    done = ranks.program(4, [*words, "--steps", "6", "--kill", "2"])
    assert done.ok, done.describe_failure()
    assert "this rank ends, and may come again: rank " in done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    assert "aborting the job" not in done.stderr, done.stderr
    assert "the loss went from" in done.stdout
