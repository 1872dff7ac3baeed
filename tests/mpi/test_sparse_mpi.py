# SPDX-License-Identifier: Apache-2.0
"""Sparse operations between real ranks, on one node and across pretended nodes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import commrt
from commrt.errors import UsageError
from commrt.sparse.cost import ALGORITHMS


def nodes(text: str) -> dict[str, str]:
    """Return the environment that pretends these nodes."""
    return {"COMMRT_NODES": text, "COMMRT_TIMEOUT_S": "300"} if text else {}


def run_sums(seed: int) -> list[Any]:
    comm = commrt.init()
    wrong = []
    even = len({len(node) for node in comm.nodes}) == 1
    for length in (7, 50_000):
        for fill in (0.01, 0.3, 1.0):
            parts = []
            for rank in range(comm.size):
                rng = np.random.default_rng((seed, rank, length))
                uneven = fill * rank / max(1, comm.size - 1)
                indices = np.flatnonzero(rng.random(length) < uneven)
                parts.append((indices, rng.integers(-5, 5, len(indices)).astype("f4")))
            want = np.zeros(length, np.float32)
            for indices, values in parts:
                want[indices] += values
            for algorithm in (None, *ALGORITHMS):
                x = (*parts[comm.rank], length)
                if algorithm == "two_level_ring" and not even:
                    with pytest.raises(UsageError, match="equally many on each"):
                        comm.sparse_allreduce(x, algorithm=algorithm)
                    continue
                got = comm.sparse_allreduce(x, algorithm=algorithm, result="dense")
                if not np.array_equal(got, want):
                    wrong.append([length, fill, algorithm])
    residual = np.zeros(1000, np.int64)
    mine = np.arange(1000) * (comm.rank + 1)
    top = comm.topk_allreduce(mine, 10, residual=residual)
    total = top.to_dense() + comm.allreduce(residual.copy())
    if not np.array_equal(total, comm.allreduce(mine.copy())):
        wrong.append("topk")
    wide = (np.array([[comm.rank, 99], [2**34 - 1, 1]]), np.ones(2), (2**33, 2**34))
    columns = [*([rank, 2**34 - 1] for rank in range(comm.size)), [99, 1]]
    for algorithm in (None, *ALGORITHMS):
        if algorithm == "split_dense" or (algorithm == "two_level_ring" and not even):
            continue
        got = comm.sparse_allreduce(wide, algorithm=algorithm)
        sums = [1.0] * comm.size + [float(comm.size)]
        if got.indices.T.tolist() != columns or got.values.tolist() != sums:
            wrong.append(["wide", algorithm])
    return wrong


@pytest.mark.parametrize(
    ("size", "where"),
    [(2, ""), (2, "1,1"), (3, "2,1"), (4, ""), (4, "2,2"), (4, "1,1,1,1")],
)
def test_sparse_sums_are_exact(mpirun: Any, size: int, where: str, seed: int) -> None:
    assert mpirun(size, run_sums, env=nodes(where), seed=seed) == [[]] * size


def wait_in_other_orders() -> list[Any]:
    """First calls on three communicators, in another order on each rank."""
    comm = commrt.init()
    made = [comm.dup() for _ in range(3)]
    order = [(i + comm.rank) % 3 for i in range(3)]
    x = np.array([comm.rank, 7]), np.ones(2, np.float32), 9
    sums = {
        i: made[i].sparse_allreduce(x, result="dense", nonblocking=True) for i in order
    }
    found = [float(sums[i].wait().sum()) for i in order]
    halves = {
        i: made[i].allreduce(np.ones(9, "f"), compress="float16", nonblocking=True)
        for i in order
    }
    if comm.rank == 0:
        comm.barrier()
    found += [float(halves[i].wait().sum()) for i in order]
    if comm.rank:
        comm.barrier()
    return found


@pytest.mark.parametrize(
    ("size", "where"), [(2, ""), (2, "1,1"), (3, "2,1"), (4, "2,2")]
)
def test_ranks_may_wait_in_any_order(mpirun: Any, size: int, where: str) -> None:
    want = [2.0 * size] * 3 + [9.0 * size] * 3
    assert mpirun(size, wait_in_other_orders, env=nodes(where)) == [want] * size
