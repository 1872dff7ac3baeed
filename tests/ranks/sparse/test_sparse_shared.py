# SPDX-License-Identifier: Apache-2.0
"""Sparse sums by memory that the ranks share, and when they go by messages instead."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from commrt.calls.channel import Channel
from commrt.comm import core_of
from commrt.errors import BackendError
from commrt.local import run
from commrt.request import wait_all
from commrt.sparse import allreduce, shared

LENGTH = 20_000


def entries(rank: int, call: int, density: float) -> tuple[Any, Any]:
    """Return a rank's entries of a call: small integers, whose sums are exact."""
    rng = np.random.default_rng((rank, call))
    indices = np.flatnonzero(rng.random(LENGTH) < density).astype(np.int32)
    return indices, rng.integers(-4, 5, len(indices)).astype(np.float32)


def total(size: int, call: int, density: float) -> Any:
    want = np.zeros(LENGTH, np.float32)
    for rank in range(size):
        indices, values = entries(rank, call, density)
        want[indices] += values
    return want


def dense_of(result: Any) -> Any:
    return result.to_dense() if hasattr(result, "to_dense") else result


@pytest.mark.parametrize("size", [2, 3, 4, 7])
@pytest.mark.parametrize("form", ["auto", "sparse", "dense"])
def test_calls_one_after_the_other_share(size: int, form: str) -> None:
    def rank_main(comm: Any) -> list[bool]:
        right, kept = [], []
        for call in range(7):  # each half several times
            mine = entries(comm.rank, call, 0.02)
            result = comm.sparse_allreduce(
                (*mine, LENGTH), algorithm="split", result=form
            )
            right.append(bool(comm.sparse_report.shared))
            right.append(np.array_equal(dense_of(result), total(size, call, 0.02)))
            kept.append(result)  # later calls must not write into earlier results
        right += [
            np.array_equal(dense_of(result), total(size, call, 0.02))
            for call, result in enumerate(kept)
        ]
        return right

    assert run(size, rank_main, timeout_s=300) == [[True] * 21] * size


@pytest.mark.parametrize("size", [3, 4, 7])
def test_few_entries_are_merged_in_pairs(size: int) -> None:
    """Too few in a range to be marked, and more than two lists of them."""

    def rank_main(comm: Any) -> list[bool]:
        right = []
        for call in range(3):
            mine = entries(comm.rank, call, 0.0015)
            result = comm.sparse_allreduce((*mine, LENGTH), algorithm="split")
            right.append(bool(comm.sparse_report.shared))
            right.append(np.array_equal(dense_of(result), total(size, call, 0.0015)))
        return right

    assert run(size, rank_main, timeout_s=300) == [[True] * 6] * size


def test_several_in_flight_share_what_is_known_to_be_free(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first two have a half each; the third does not know that one is free."""
    size, calls = 3, 9
    monkeypatch.setenv("COMMRT_PROGRESS", "off")  # each ends in its own test()

    def rank_main(comm: Any) -> list[Any]:
        rng = random.Random(f"{seed} {comm.rank}")
        mine = [entries(comm.rank, call, 0.02) for call in range(calls)]
        requests = [
            comm.sparse_allreduce(
                (*each, LENGTH), algorithm="split", result="sparse", nonblocking=True
            )
            for each in mine
        ]
        order = list(range(calls))
        rng.shuffle(order)
        reports = {}
        while order:
            for call in list(order):
                if requests[call].test():
                    reports[call] = comm.sparse_report
                    order.remove(call)
        right = [
            np.array_equal(dense_of(request.wait()), total(size, call, 0.02))
            for call, request in enumerate(requests)
        ]
        return [right, [reports[call].shared for call in (0, 1, 2)]]

    for right, sharing in run(size, rank_main, timeout_s=300):
        assert right == [True] * calls
        assert sharing == [True, True, False]


@pytest.mark.parametrize("density", [0.0, 0.2, 0.6, 1.0])
def test_what_becomes_dense_goes_by_messages(density: float) -> None:
    def rank_main(comm: Any) -> list[bool]:
        right = []
        for call in range(3):
            mine = entries(comm.rank, call, density)
            result = comm.sparse_allreduce((*mine, LENGTH), algorithm="split")
            same = np.array_equal(dense_of(result), total(4, call, density))
            right += [same, comm.sparse_report.shared == (density == 0)]
        return right

    assert run(4, rank_main, timeout_s=300) == [[True] * 6] * 4


def test_what_has_no_room_goes_by_messages_on_all_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One rank alone has more entries than a section holds, or is to sum more."""
    monkeypatch.setattr(shared, "_SECTION_NBYTES", 1 << 16)
    most = (1 << 16) // 8 - 8

    def rank_main(comm: Any) -> list[Any]:
        found: list[Any] = []
        # Entries of rank 0, of the others, and where they begin.
        for first, others, begin, shares in (
            (10, 10, 0, True),
            (most + 1, 10, 0, False),
            (most - 1000, most - 1000, 0, False),
            (10, 10, 0, True),
        ):
            length = 1 << 22
            count = first if comm.rank == 0 else others
            indices = begin + np.arange(count, dtype=np.int64) * 8 + comm.rank
            ones = np.ones(count, np.float32)
            result = comm.sparse_allreduce(
                (indices.astype(np.int32), ones, length), algorithm="split"
            )
            found.append(comm.sparse_report.shared == shares)
            found.append(result.nnz == first + 2 * others)
        return found

    assert run(3, rank_main, timeout_s=300) == [[True] * 8] * 3


def test_no_room_at_all_where_memory_is_scarce(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shared, "memory_limit_nbytes", lambda: 1 << 20)

    def rank_main(comm: Any) -> list[bool]:
        mine = entries(comm.rank, 0, 0.02)
        result = comm.sparse_allreduce((*mine, LENGTH), algorithm="split")
        same = np.array_equal(dense_of(result), total(3, 0, 0.02))
        return [same, not comm.sparse_report.shared]

    assert run(3, rank_main, timeout_s=300) == [[True, True]] * 3


def test_memory_that_one_rank_cannot_have_is_used_by_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    map_part = Channel.room

    def maps(channel: Channel) -> Any:
        if channel.rank == 1:
            raise BackendError("none left")
        return map_part(channel)

    monkeypatch.setattr(Channel, "room", maps)

    def rank_main(comm: Any) -> list[bool]:
        right = []
        for call in range(3):
            mine = entries(comm.rank, call, 0.02)
            result = comm.sparse_allreduce((*mine, LENGTH), algorithm="split")
            same = np.array_equal(dense_of(result), total(3, call, 0.02))
            right.append(same and not comm.sparse_report.shared)
        return right

    assert run(3, rank_main, timeout_s=300) == [[True] * 3] * 3


def test_ranks_with_other_limits_share_what_fits_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The second operation has more entries than the last rank has room for."""
    scarce_nbytes = 3 * 8 * 4 * (64 << 10)  # 64 KiB a section
    limits = iter([1 << 30, 1 << 30, scarce_nbytes])
    monkeypatch.setattr(shared, "memory_limit_nbytes", lambda: next(limits))

    def rank_main(comm: Any) -> list[bool]:
        found = []
        for count in (400, 9000):
            indices = np.arange(count, dtype=np.int32) * 1000
            values = np.full(count, comm.rank + 1.0, np.float32)
            result = comm.sparse_allreduce(
                (indices, values, 10_000_000), algorithm="split"
            )
            assert np.array_equal(result.indices, indices)
            assert np.array_equal(result.values, np.full(count, 6.0, np.float32))
            found.append(comm.sparse_report.shared)
        return found

    assert run(3, rank_main, timeout_s=300) == [[True, False]] * 3


def test_the_choice_knows_that_nothing_is_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of one call, by whether its entries lie in shared memory."""
    asked: list[bool] = []
    plain = allreduce.question

    def noted(talk: Any, output: Any, shares: bool) -> Any:
        asked.append(shares)
        return plain(talk, output, shares)

    monkeypatch.setattr(allreduce, "question", noted)

    def rank_main(comm: Any) -> list[bool]:
        # Few entries; so many that ranges may become dense; and by messages.
        for density, form in ((0.02, "auto"), (0.3, "auto")):
            mine = entries(comm.rank, 0, density)
            comm.sparse_allreduce((*mine, LENGTH), result=form)
        return [comm.sparse_report.shared]

    assert run(2, rank_main, timeout_s=300) == [[False]] * 2
    assert sorted(asked) == [False, False, True, True]


def test_other_sparse_operations_between_them() -> None:
    def rank_main(comm: Any) -> list[bool]:
        right = []
        x = np.arange(LENGTH, dtype=np.float32) * (comm.rank + 1)
        for call in range(6):
            pending = [comm.topk_allreduce(x, 5, nonblocking=True)] if call % 2 else []
            mine = entries(comm.rank, call, 0.02)
            algorithm = ("split", "ring", None)[call % 3]
            result = comm.sparse_allreduce((*mine, LENGTH), algorithm=algorithm)
            same = np.array_equal(dense_of(result), total(3, call, 0.02))
            largest = [top.indices.tolist() for top in wait_all(pending)]
            right.append(same and largest in ([], [list(range(LENGTH - 5, LENGTH))]))
        return right

    assert run(3, rank_main, timeout_s=300) == [[True] * 6] * 3


def test_memory_is_given_back_with_the_communicator() -> None:
    def rank_main(comm: Any) -> list[bool]:
        mine = entries(comm.rank, 0, 0.02)
        with comm.split(0) as other:
            other.sparse_allreduce((*mine, LENGTH))
            arena = core_of(other).sparse.open().room._arena
            was_mapped = arena.address != 0
        comm.barrier()
        return [was_mapped, arena.address == 0]

    assert run(2, rank_main, timeout_s=300) == [[True, True]] * 2
