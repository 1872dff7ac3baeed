# SPDX-License-Identifier: Apache-2.0
"""Vector operations between real ranks, on one node and across pretended nodes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import commrt


def nodes(text: str) -> dict[str, str]:
    return {"COMMRT_NODES": text, "COMMRT_TIMEOUT_S": "300"} if text else {}


def exchange_rows() -> list[bool]:
    """Send a random number of rows to each rank, as a mixture of experts does."""
    comm = commrt.init()
    rng = np.random.default_rng(comm.rank)
    right = []
    for most in (0, 3, 2000):
        numbers = rng.integers(0, most + 1, comm.size)
        rows = np.repeat(np.arange(comm.size) + 100 * comm.rank, numbers)
        x = np.repeat(rows[:, None], 4, axis=1).astype(np.float32)
        got = comm.alltoallv(x, send_counts=numbers * 4)
        sources, first = np.unique(got[:, 0] // 100, return_index=True)
        right += [
            got.shape[1] == 4,
            bool((got % 100 == comm.rank).all()),
            bool((np.diff(first) > 0).all()) and sources.tolist() == sorted(sources),
        ]
        totals = comm.allreduce(np.array([len(x), -len(got)]))
        right.append(int(totals.sum()) == 0)
    return right


@pytest.mark.parametrize(("size", "where"), [(2, ""), (4, "2,2")])
def test_counts_that_only_senders_know(mpirun: Any, size: int, where: str) -> None:
    got = mpirun(size, exchange_rows, env=nodes(where))
    assert got == [[True] * 12] * size


def wrong_pair() -> str:
    comm = commrt.init()
    expected = [2, 2 + (comm.rank == 0)]
    try:
        comm.alltoallv(np.ones(4), send_counts=[2, 2], recv_counts=expected)
    except commrt.errors.CommError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def test_check_mode_names_the_pair(mpirun: Any) -> None:
    first, second = mpirun(2, wrong_pair, env={"COMMRT_DEBUG": "check"})
    assert first == second
    assert "MismatchError" in first
    assert (
        "rank 1 sends 2 elements to rank 0 (send_counts[0]), which expects 3" in first
    )


def empty_blocks_of_other_arrays() -> list[bool]:
    """By the library's own collectives: an empty array may begin where another does."""
    comm: Any = commrt.init()
    size, rank = comm.size, comm.rank
    counts = [0] * size
    counts[1] = 5
    way = {"algorithm": "mpi/native"}
    x = np.arange(5.0)
    mine = x[:0] if rank != 1 else x
    comm.reduce_scatterv(x, out=mine, counts=counts, **way)
    summed = rank != 1 or bool((x == size * np.arange(5.0)).all())
    whole = np.full(5, float(rank))
    mine = whole[:0] if rank != 1 else whole
    comm.allgatherv(mine, out=whole, counts=counts, **way)
    gathered = bool((whole == 1.0).all())
    sent, received = [0] * size, [0] * size
    if rank == 1:
        sent[0] = 5
    if rank == 0:
        received[1] = 5
    target = np.zeros(5)
    comm.alltoallv(
        np.ones(5) if rank == 1 else target[:0],
        out=target if rank == 0 else target[:0],
        send_counts=sent,
        recv_counts=received,
        **way,
    )
    moved = bool((target == (1.0 if rank == 0 else 0.0)).all())
    return [summed, gathered, moved]


def test_an_empty_array_may_begin_where_another_does(mpirun: Any) -> None:
    found = mpirun(3, empty_blocks_of_other_arrays)
    assert found == [[True] * 3] * 3
