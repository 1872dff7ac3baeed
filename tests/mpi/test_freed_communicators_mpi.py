# SPDX-License-Identifier: Apache-2.0
"""Communicators of processes that were freed leave nothing behind."""

from __future__ import annotations

import pytest
from freed_communicators import FREED, ROUNDS, garbage_of, left_in_a_process
from mpi_ranks import MpiRun

EXACT = {"GLIBC_TUNABLES": "glibc.malloc.tcache_count=0"}
"""glibc counts what its threads keep for their next allocations as in use."""


@pytest.mark.full(sample=3)
@pytest.mark.parametrize("what", ROUNDS)
def test_communicators_that_were_freed_leave_nothing(mpirun: MpiRun, what: str) -> None:
    """Neither objects nor memory; the bootstrap keeps nothing of their exchanges."""
    left = mpirun(2, left_in_a_process, env=EXACT, kinds=[what], deadline_s=300)
    assert left == [{what: {}}] * 2


@pytest.mark.parametrize("nodes", ["", "1"])
def test_freed_communicators_need_no_collector(mpirun: MpiRun, nodes: str) -> None:
    env = {"COMMRT_NODES": nodes} if nodes else {}
    found = mpirun(2, garbage_of, env=env, kinds=FREED, deadline_s=300)
    assert found == [dict.fromkeys(FREED, 0)] * 2
