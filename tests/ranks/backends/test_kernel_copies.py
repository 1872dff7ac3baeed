# SPDX-License-Identifier: Apache-2.0
"""Staged calls whose copies to pinned memory and back are done by kernels."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from cases import sample
from staged_ranks import Rank, SimRanks, forget_ranks, found_by, on_threads
from test_staged_order import BUGS, LAZY_DEVICE, OF_KERNELS, SMALL, one_case, sums

from commrt.errors import UsageError
from commrt.vocabulary.operations import OPERATIONS

BY_KERNEL = {"copies": "kernel"}
FULL_SEEDS = 100
SHORT = 4 << 10


@pytest.fixture(autouse=True, scope="module")
def no_ranks_left() -> Iterator[None]:
    yield
    forget_ranks()


def verdict(seed: int, queues: int, bug: str | None, **switches: Any) -> str:
    """What is found: "", or any of "race", "deadlock" and "wrong"."""
    if bug in LAZY_DEVICE:
        switches.setdefault("preempt", 0.05)
    switches["ends_early"] = bug is not None
    ranks = SimRanks(2, seed, queues, bug=bug, staging=SMALL, **switches)
    for rank in ranks.ranks:
        rank.device.load_kernels(b"")
    return found_by(ranks, partial(sums, **BY_KERNEL))


@pytest.mark.parametrize("flags", [True, False], ids=["flags", "events"])
@pytest.mark.parametrize("queues", [0, 1, 2, 8])
def test_the_order_is_right_whatever_happens_when(
    queues: int, flags: bool, full: bool, seed: int
) -> None:
    seeds = range(seed, seed + (FULL_SEEDS if full else 2))
    found = {each: verdict(each, queues, None, memory_flags=flags) for each in seeds}
    assert {each: what for each, what in found.items() if what} == {}


@pytest.mark.parametrize("queues", [2, 8])
@pytest.mark.parametrize("bug", OF_KERNELS)
def test_a_kernel_in_the_wrong_stream_is_caught_by_every_seed(
    bug: str, queues: int, full: bool, seed: int
) -> None:
    seeds = range(seed, seed + (FULL_SEEDS if full else 2))
    assert [each for each in seeds if not verdict(each, queues, bug)] == []


@pytest.mark.full(sample=4)
@pytest.mark.parametrize("queues", [1, 2, 8])
@pytest.mark.parametrize("bug", BUGS)
def test_planted_bugs_are_caught_as_with_copy_engines(
    bug: str, queues: int, full: bool, seed: int
) -> None:
    seeds = range(seed, seed + (FULL_SEEDS if full else 1))
    assert [each for each in seeds if not verdict(each, queues, bug)] == []


@pytest.mark.full(sample=4)
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize(
    "coll", [spec.name for spec in OPERATIONS if spec.x_count != "none"]
)
def test_every_operation_gives_what_numpy_gives(
    coll: str, size: int, seed: int, full: bool
) -> None:
    cases = [
        replace(case, params={**case.params, **BY_KERNEL}, count=case.count % 300)
        for case in sample(coll, size, seed, 40 if full else 4)
    ]
    ranks = SimRanks(size, seed, 8, staging={"first_nbytes": SHORT, "slots": 3})
    for rank in ranks.ranks:
        rank.device.load_kernels(b"")
    found = ranks.run(lambda rank: [one_case(rank, case) for case in cases])
    assert [wrong for each in found for wrong in each if wrong is not None] == []
    ranks.close()


@pytest.mark.parametrize("count", [0, 1, 7, 4096])
def test_ranks_may_differ_in_what_copies(count: int) -> None:
    def main(rank: Rank) -> Any:
        how = {"copies": "kernel" if rank.rank % 2 else "engine"}
        x = rank.array(np.arange(count, dtype="f4") + rank.rank)
        rank.comm.allreduce(x, params=how)
        value = rank.fetch(x)
        rank.stream.synchronize()
        return value().tolist()

    wanted = (3 * np.arange(count, dtype="f4") + 3).tolist()
    assert on_threads(3, main) == [wanted] * 3


def test_what_is_no_such_choice_is_refused() -> None:
    def main(rank: Rank) -> None:
        x = rank.array(np.ones(3, "f4"))
        with pytest.raises(UsageError, match=r"copies='dma' must be 'engine'.*'kernel"):
            rank.comm.allreduce(x, params={"copies": "dma"})
        rank.stream.synchronize()

    on_threads(1, main)
