# SPDX-License-Identifier: Apache-2.0
"""An error on one rank of several processes: all of them may call again."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import commrt
from commrt.errors import (
    CommError,
    MismatchError,
    RefusedError,
    RevokedError,
)

LIMIT_S = 300.0


def nodes(text: str) -> dict[str, str]:
    return {"COMMRT_NODES": text} if text else {}


def call_again() -> list[Any]:
    """Rank 1 calls wrongly at first, and the others hear of it."""
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
        for _ in range(2):
            with pytest.raises(ValueError if rank == 1 else RefusedError):
                call(rank == 1)
        call(False)
    return found


@pytest.mark.parametrize("size", [2, 3])
def test_all_ranks_hear_of_it_and_call_again(mpirun: Any, size: int) -> None:
    assert mpirun(size, call_again) == [[True] * 4] * size


def end_together() -> list[str]:
    """Rank 1 calls wrongly, with ranks on other nodes: the communicator ends."""
    comm = commrt.init()
    found = []
    for turn in range(3):
        other = comm.dup()
        out = np.ones(3 if comm.rank == 1 else 2)
        with pytest.raises(CommError, match="out has 3 elements") as raised:
            other.allreduce(np.ones(2), out=out)
        found.append(type(raised.value).__name__)
        with pytest.raises(RevokedError):  # a rank that was refused hears of it here
            other.allreduce(np.ones(2))
        assert comm.allreduce(np.ones(1))[0] == comm.size, turn
    return found


@pytest.mark.parametrize(("size", "where"), [(2, "1,1"), (3, "2,1"), (3, "1,2")])
def test_between_nodes_all_ranks_raise_at_once(
    mpirun: Any, size: int, where: str
) -> None:
    found = mpirun(size, end_together, env=nodes(where))
    assert found[1] == ["UsageError"] * 3
    assert found[0] == found[-1 if size == 3 else 0] == ["RevokedError"] * 3


def call_dup_again() -> list[Any]:
    """What only meets, and runs no operation, is taken back between nodes, too."""
    comm = commrt.init()
    for _ in range(3):
        with pytest.raises(ValueError if comm.rank == 1 else RefusedError):
            comm.dup(deterministic=9 if comm.rank == 1 else None)
    return [float(comm.dup().allreduce(np.ones(1))[0]), comm.allreduce(np.ones(1))[0]]


@pytest.mark.parametrize("where", ["", "2,1"])
def test_a_wrong_dup_is_heard_of(mpirun: Any, where: str) -> None:
    assert mpirun(3, call_dup_again, env=nodes(where)) == [[3.0, 3.0]] * 3


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
