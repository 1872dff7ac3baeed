# SPDX-License-Identifier: Apache-2.0
"""Communicators of processes that were freed leave nothing behind."""

from __future__ import annotations

import pytest
from freed_communicators import ROUNDS, left_in_a_process
from mpi_ranks import MpiRun

EXACT = {"GLIBC_TUNABLES": "glibc.malloc.tcache_count=0"}
"""glibc counts what its threads keep for their next allocations as in use."""


@pytest.mark.full(sample=3)
@pytest.mark.parametrize("what", ROUNDS)
def test_communicators_that_were_freed_leave_nothing(mpirun: MpiRun, what: str) -> None:
    """Neither objects nor memory; the bootstrap keeps nothing of their exchanges."""
    left = mpirun(2, left_in_a_process, env=EXACT, kinds=[what], deadline_s=300)
    assert left == [{what: {}}] * 2
