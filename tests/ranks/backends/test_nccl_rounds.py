# SPDX-License-Identifier: Apache-2.0
"""Schedules on NCCL, called through communicators: results, order and failures."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from cases import OWN_BLOCK, Case, legal_pairs
from nccl_ranks import NcclSimRanks, nccl_here, on_nccl_threads
from program_cases import draw
from staged_cases import run_on_device
from staged_ranks import Rank, forget_ranks

from commrt.comm import Communicator, core_of
from commrt.errors import BackendError, DeviceFailedError, RevokedError, TimeoutError_
from commrt.vocabulary.operations import OPERATIONS

COLLS = [spec.name for spec in OPERATIONS if spec.x_count != "none"]
DRAWN = 4
TYPES = sorted({dtype for dtype, _ in legal_pairs()})


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


@pytest.mark.parametrize("dtype", TYPES)
def test_every_type_and_reduction(dtype: str) -> None:
    cases = [
        case
        for of, op in legal_pairs()
        if of == dtype
        for case in (
            Case("allreduce", 3, "nccl/direct", {}, dtype, op, count=37),
            Case("reduce_scatter", 3, "nccl/ring", {}, dtype, op, count=5),
            Case(
                *("allreduce", 3, "nccl/recursive_doubling", {}, dtype, op, 0, 9),
                in_place=True,
            ),
        )
    ]

    def main(rank: Rank) -> list[str]:
        return run_on_device(rank.comm, rank.device, rank.stream.handle, cases, None)

    with nccl_here():
        wrong = on_nccl_threads(3, main)
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


def by_ring(rank: Rank, comm: Communicator, **arguments: Any) -> Callable[[], Any]:
    """Give the rounds of a ring; the result is a copy of what comes."""
    x = rank.array(np.full(64, 1.0 + rank.rank, "f4"))
    comm.allreduce(x, algorithm="nccl/ring", **arguments)
    return rank.fetch(x)


def test_work_comes_between_groups_that_are_in_progress(seed: int) -> None:
    """NCCL says later that a group is in the stream; kernels wait for that."""

    def main(rank: Rank) -> None:
        by_ring(rank, rank.comm)
        core_of(rank.comm).world.bootstrap.exchange([0, 1], "made", b"", 20)
        nccl.set("in_progress", 3)
        found = [by_ring(rank, rank.comm) for _ in range(3)]
        rank.stream.synchronize()
        assert [value().tolist() for value in found] == [[3.0] * 64] * 3
        core_of(rank.comm).world.bootstrap.exchange([0, 1], "done", b"", 20)
        nccl.set("in_progress", 0)

    with nccl_here() as nccl:
        on_nccl_threads(2, main, seed=seed, max_delay_us=30)


def test_a_round_is_one_group() -> None:
    def main(rank: Rank) -> None:
        meet = core_of(rank.comm).world.bootstrap.exchange
        by_ring(rank, rank.comm)
        meet([0, 1], "first", b"", 20)
        before = nccl.counter("groups")
        meet([0, 1], "seen", b"", 20)
        by_ring(rank, rank.comm)
        meet([0, 1], "second", b"", 20)
        # Of two ranks: to each the other's half, and then the sums.
        assert nccl.counter("groups") == before + 2 * 2

    with nccl_here() as nccl:
        on_nccl_threads(2, main)


@pytest.mark.parametrize("begun", [0, 1], ids=["first group", "between groups"])
def test_a_deadline_half_way_loses_the_communicator_only(begun: int) -> None:
    """Streams go on, the peer does not wait, and others still work."""

    def main(rank: Rank) -> None:
        lost = rank.comm.dup()
        by_ring(rank, lost)
        by_ring(rank, rank.comm)
        meet = core_of(rank.comm).world.bootstrap.exchange
        meet([0, 1], "made", b"", 20)
        if rank.rank == 0:
            # Its next group, or the one behind that, stays in progress.
            nccl.set("hang_after", begun)
            nccl.set("hang_group", 1)
            said = r"allreduce #3 on .*, rank 0: NCCL had not taken it up after 0\.2 s"
            with pytest.raises(TimeoutError_, match=said):
                by_ring(rank, lost, timeout_s=0.2)
            nccl.set("hang_group", 0)
        else:
            x = rank.array(np.full(64, 2.0, "f4"))
            request = lost.allreduce(x, algorithm="nccl/ring", nonblocking=True)
            with pytest.raises(RevokedError, match="rank 0 gave up at operation #3"):
                request.synchronize()
        meet([0, 1], "hung", b"", 20)
        with pytest.raises(RevokedError):
            by_ring(rank, lost)
        value = by_ring(rank, rank.comm)
        rank.stream.synchronize()
        assert value().tolist() == [3.0] * 64

    with nccl_here(is_clean=False) as nccl:
        on_nccl_threads(2, main)
        assert nccl.counter("aborted") == 2


def test_a_device_that_fails_between_rounds_is_told_by_name() -> None:
    def main(rank: Rank) -> None:
        by_ring(rank, rank.comm)
        x = rank.array(np.ones(64, "f4"))
        rank.stream.synchronize()
        core_of(rank.comm).world.bootstrap.exchange([0, 1], "ready", b"", 20)
        # Behind the first of both groups.
        rank.device.fail_after(4)
        with pytest.raises((DeviceFailedError, RevokedError)) as caught:
            rank.comm.allreduce(x, algorithm="nccl/ring", nonblocking=True).synchronize(
                timeout_s=300
            )
        if isinstance(caught.value, DeviceFailedError):
            assert "failed earlier" in str(caught.value)
        rank.arrays.clear()
        rank.pinned.clear()
        rank.stream.synchronize = lambda: None  # type: ignore[method-assign]

    with nccl_here(is_clean=False):
        on_nccl_threads(2, main, survives=False)
