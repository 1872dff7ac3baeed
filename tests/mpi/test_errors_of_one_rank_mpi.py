# SPDX-License-Identifier: Apache-2.0
"""An error on one rank of several processes: all of them may call again."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import commrt
from commrt.errors import CommError, MismatchError, RevokedError, TimeoutError_

LIMIT_S = 300.0


def nodes(text: str) -> dict[str, str]:
    return {"COMMRT_NODES": text} if text else {}


def call_again() -> list[Any]:
    """Rank 1 calls wrongly at first, and the others wait in vain."""
    comm = commrt.init()
    cart = comm.cart((comm.size,), periodic=True)
    size, rank = comm.size, comm.rank
    source = commrt.Layout((2 * size, size), (size,), (commrt.Block(0), None))
    target = commrt.Layout((2 * size, size), (size,), (None, commrt.Cyclic(0)))
    found: list[Any] = []

    def halo(wrong: bool) -> None:
        field = np.full(3, float(rank))
        cart.plan.halo_exchange(field, 2 if wrong else 1)()
        found.append(field.tolist() == [(rank - 1) % size, rank, (rank + 1) % size])

    def redistribute(wrong: bool) -> None:
        x = np.full((2 + wrong, size), float(rank))
        out = cart.plan.redistribute(x, source, target)()
        found.append(out.ravel().tolist() == [at // 2 for at in range(2 * size)])

    def dup(wrong: bool) -> None:
        other = cart.dup(deterministic=9 if wrong else None)
        found.append(float(other.allreduce(np.ones(3))[0]) == size)

    def sparse(wrong: bool) -> None:
        indices = np.array([3, 1] if wrong else [1, 3])
        total = cart.sparse_allreduce((indices, np.ones(2), 9), result="dense")
        found.append(total.tolist() == [0, size, 0, size, 0, 0, 0, 0, 0])

    for call in (halo, redistribute, dup, sparse):
        cart.timeout_s = 0.1
        comm.barrier()
        with pytest.raises(ValueError if rank == 1 else TimeoutError_):
            call(rank == 1)
        comm.barrier()
        cart.timeout_s = LIMIT_S
        call(False)
    return found


@pytest.mark.parametrize(("size", "where"), [(2, ""), (3, "2,1")])
def test_all_ranks_may_call_again(mpirun: Any, size: int, where: str) -> None:
    assert mpirun(size, call_again, env=nodes(where)) == [[True] * 4] * size


def expect_nothing() -> list[str]:
    """Rank 0 sends what rank 1 does not expect; then both go on."""
    comm = commrt.init()
    graph = comm.graph([], [1]) if comm.rank == 0 else comm.graph([0], [])
    graph.timeout_s = 2
    found = []
    for turn in range(3):
        try:
            if turn:
                graph.allreduce(np.ones(4))
            elif comm.rank == 0:
                graph.neighbor_alltoallv(np.ones(4), send_counts=[4], recv_counts=[])
            else:
                graph.neighbor_alltoallv(np.ones(0), send_counts=[], recv_counts=[0])
            found.append("")
        except CommError as error:
            found.append(type(error).__name__)
    return found


@pytest.mark.parametrize("where", ["", "1,1"])
def test_what_one_side_does_not_expect_is_not_taken_by_later_calls(
    mpirun: Any, where: str
) -> None:
    first, second = mpirun(2, expect_nothing, env=nodes(where))
    assert second == [
        MismatchError.__name__,
        RevokedError.__name__,
        RevokedError.__name__,
    ]
    assert "" not in first[1:]
