# SPDX-License-Identifier: Apache-2.0
"""Schedules on NCCL, called through communicators: results, and their order."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from cases import OWN_BLOCK, Case
from nccl_ranks import NcclSimRanks, nccl_here, on_nccl_threads
from program_cases import draw
from staged_cases import run_on_device
from staged_ranks import Rank, forget_ranks

from commrt.errors import BackendError
from commrt.operations import OPERATIONS

COLLS = [spec.name for spec in OPERATIONS if spec.x_count != "none"]
DRAWN = 4


@pytest.fixture(autouse=True, scope="module")
def no_ranks_left() -> Iterator[None]:
    yield
    forget_ranks()


def on_nccl(case: Case, rng: random.Random) -> Case:
    """Return the case by a schedule on NCCL; one array may be a block of the other."""
    own_block = case.coll in OWN_BLOCK and rng.random() < 0.5
    return replace(
        case,
        algorithm=f"nccl/{case.algorithm}",
        in_place=case.in_place or own_block,
    )


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("coll", COLLS)
def test_sample_agrees_with_numpy(coll: str, size: int, seed: int) -> None:
    rng = random.Random(f"{coll} {size} {seed}")
    cases = [on_nccl(draw(coll, size, rng), rng) for _ in range(DRAWN)]

    def main(rank: Rank) -> list[str]:
        return run_on_device(rank.comm, rank.device, rank.stream.handle, cases, None)

    with nccl_here():
        wrong = on_nccl_threads(size, main, seed=seed)
    assert [line for lines in wrong for line in lines] == []


@pytest.mark.parametrize("queues", [0, 1, 2, 8])
def test_rounds_are_ordered_on_simulated_devices(queues: int, seed: int) -> None:
    """Three schedules one behind the other, and NCCL's own between; none waited for."""

    def main(rank: Rank) -> None:
        size, found = rank.comm.size, []
        for number, name in enumerate(("ring", "direct", "native", "ring")):
            x = rank.array(np.full(40, 1.0 + rank.rank + number, "f4"))
            request = rank.comm.allreduce(
                x, algorithm=f"nccl/{name}", nonblocking=number % 2 == 1
            )
            if number % 2:
                request.wait()
            wanted = sum(1.0 + each + number for each in range(size))
            found.append((rank.fetch(x), wanted))
        rank.stream.synchronize()
        for value, wanted in found:
            assert (value() == wanted).all()

    with nccl_here():
        ranks = NcclSimRanks(2, seed, queues)
        ranks.run(main)
        ranks.close()


def test_schedules_run_where_they_are_named() -> None:
    def main(rank: Rank) -> None:
        told = rank.comm.explain("allreduce", 64, device="cuda")
        x = rank.array(np.ones(16, "f4"))
        rank.comm.allreduce(x)
        assert str(told.choice.candidate) == "nccl/native"
        x = rank.array(np.array([3, 5], "i2"))
        rank.comm.allreduce(x, op="bxor", algorithm="nccl/ring")
        value = rank.fetch(x)
        rank.stream.synchronize()
        assert (value() == 0).all()
        with pytest.raises(BackendError):
            rank.comm.allreduce(x, op="bxor", algorithm="nccl/native")

    with nccl_here():
        on_nccl_threads(2, main)
