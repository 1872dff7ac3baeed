# SPDX-License-Identifier: Apache-2.0
"""NCCL's communicators whose calls may block: what sticks, and how to have others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from fake_nccl import FakeNccl
from nccl_ranks import nccl_here, on_nccl_threads
from staged_ranks import Rank

from commrt.errors import RevokedError, TimeoutError_


@pytest.fixture
def nccl() -> Iterator[FakeNccl]:
    with nccl_here(is_clean=False) as fake:
        yield fake
        assert fake.violations() == []


def ones(rank: Rank) -> Any:
    return rank.array(np.full(8, rank.rank + 1.0, "f4"))


def sums_to_three(rank: Rank, comm: Any) -> None:
    x = ones(rank)
    comm.allreduce(x)
    value = rank.fetch(x)
    rank.stream.synchronize()
    assert value().tolist() == [3.0] * 8


def test_a_call_that_sticks_in_nccl_is_given_up_at_its_limit(nccl: FakeNccl) -> None:
    """As where it first connects, and a peer does not come: the watch aborts it."""

    def main(rank: Rank) -> None:
        lost = rank.comm.dup()
        sums_to_three(rank, lost)
        rank.stream.synchronize()
        rank.comm.barrier()
        if rank.rank == 0:
            nccl.set("sticks", 1)
            with pytest.raises(
                TimeoutError_, match=r"NCCL had not taken it up after 0\.2 s"
            ):
                lost.allreduce(ones(rank), timeout_s=0.2)
            nccl.set("sticks", 0)
            with pytest.raises(RevokedError):
                lost.allreduce(ones(rank))
        rank.comm.barrier()
        sums_to_three(rank, rank.comm)
        rank.stream.synchronize()

    on_nccl_threads(2, main)
    assert nccl.counter("aborted") >= 1


def test_calls_that_never_wait_are_had_by_a_variable(
    nccl: FakeNccl, monkeypatch: pytest.MonkeyPatch
) -> None:
    nccl.set("log", 1)
    for value, blocking in (("1", 1), ("0", 0)):
        monkeypatch.setenv("COMMRT_NCCL_BLOCKING", value)
        before = len(nccl.log())
        on_nccl_threads(2, lambda rank: sums_to_three(rank, rank.comm))
        made = [line for line in nccl.log()[before:] if "CommInitRankConfig" in line]
        assert len(made) == 2
        assert all(line.endswith(f"blocking={blocking}") for line in made), made
