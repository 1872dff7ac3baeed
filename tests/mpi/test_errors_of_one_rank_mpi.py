# SPDX-License-Identifier: Apache-2.0
"""An error on one rank of several processes: all of them may call again."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import numpy as np
import pytest

import commrt
from commrt.errors import CommError, MismatchError, RefusedError

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


def refuse_and_go_on(number: int) -> list[str]:
    """One rank after the other calls wrongly, with others in flight."""
    comm = commrt.init()
    found = []
    for turn in range(4 * comm.size):
        wrong = turn % comm.size
        x = np.full(number, 1.0)
        before = comm.allgather(x.copy(), algorithm="direct", nonblocking=True)
        out = np.empty(number + (comm.rank == wrong))
        with pytest.raises(CommError, match="out has") as raised:
            comm.allreduce(x, out=out, algorithm="ring")
        found.append(type(raised.value).__name__)
        x.fill(-1e9)  # nobody takes that for a value
        root = np.full(number, float(turn))
        comm.bcast(root, root=wrong, algorithm="binomial")
        assert (root == turn).all()
        assert (before.wait(timeout_s=LIMIT_S) == 1.0).all()
        total = comm.allreduce(np.ones(number), algorithm="ring")
        assert (total == comm.size).all()
    return found


@pytest.mark.parametrize(("size", "where"), [(2, "1,1"), (3, "2,1"), (3, "1,1,1")])
@pytest.mark.parametrize("number", [1, 3000, 400_000])
def test_between_nodes_all_ranks_stay_in_step(
    mpirun: Any, size: int, where: str, number: int
) -> None:
    found = mpirun(size, refuse_and_go_on, env=nodes(where), number=number)
    for rank, own in enumerate(found):
        assert own == [
            "UsageError" if turn % size == rank else "RefusedError"
            for turn in range(4 * size)
        ]


def refuse_and_leave() -> str:
    """Rank 1 refuses its last call, and makes no progress until others have raised."""
    from mpi4py import MPI

    comm = commrt.init()
    x, out = np.ones(2_000_000), np.empty((comm.size, 2_000_000))
    try:
        comm.allgather(x, out=out[comm.rank == 1 :], algorithm="direct")
    except CommError as error:
        kind = type(error).__name__
    x.fill(0)
    MPI.COMM_WORLD.Barrier()
    return kind


@pytest.mark.parametrize(("size", "where"), [(2, "1,1"), (3, "2,1"), (3, "1,1,1")])
def test_nobody_waits_for_the_rank_that_refused(
    mpirun: Any, size: int, where: str
) -> None:
    found = mpirun(size, refuse_and_leave, env=nodes(where))
    assert found == ["RefusedError", "UsageError", "RefusedError"][:size]


def messages_and_refusals(number: int) -> list[str]:
    """Each rank in turn refuses what it sends to the next, or receives from there."""
    comm = commrt.init()
    rank, size = comm.rank, comm.size
    wrong, found = np.ones((4, 4))[:, ::2], []
    for turn in range(4 * size):
        sender, refuses_send = turn % size, turn // size % 2 == 0
        receiver = (sender + 1) % size
        x, out = np.full(number, float(turn)), np.empty(number)
        calls = {
            sender: lambda x=x, to=receiver: comm.send(x, to),
            receiver: lambda out=out, of=sender: comm.recv(out, of),
        }
        if rank in calls:
            if rank == (sender if refuses_send else receiver):
                call = comm.send if refuses_send else comm.recv
                with pytest.raises(CommError, match="not C-contiguous") as raised:
                    call(wrong, receiver if refuses_send else sender)
                found.append(type(raised.value).__name__)
            elif refuses_send or number > 10_000:
                with pytest.raises(RefusedError, match="has refused its"):
                    calls[rank]()
            else:
                with suppress(RefusedError):  # a short message was away before
                    calls[rank]()
            calls[rank]()
            if rank == receiver:
                assert (out == turn).all()
    assert comm.allreduce(np.ones(1))[0] == size
    return found


@pytest.mark.parametrize(("size", "where"), [(2, ""), (2, "1,1"), (3, "2,1")])
@pytest.mark.parametrize("number", [1, 400_000])
def test_a_refused_message_is_heard_of(
    mpirun: Any, size: int, where: str, number: int
) -> None:
    found = mpirun(size, messages_and_refusals, env=nodes(where), number=number)
    assert found == [["BufferError_"] * 4] * size


def call_the_library_again() -> list[str]:
    """Rank 1 calls wrongly where the MPI library runs the collective."""
    comm = commrt.init()
    found = []
    for turn in range(3):
        out = np.ones(3 if comm.rank == 1 else 2)
        with pytest.raises(CommError, match="out has 3 elements") as raised:
            comm.allreduce(np.ones(2), out=out, algorithm="native")
        found.append(type(raised.value).__name__)
        total = comm.allreduce(np.full(2, float(turn)), algorithm="native")
        assert (total == turn * comm.size).all()
    return found


@pytest.mark.parametrize(
    ("size", "where"), [(2, ""), (2, "1,1"), (3, "2,1"), (3, "1,2")]
)
def test_after_a_collective_of_the_library_all_call_again(
    mpirun: Any, size: int, where: str
) -> None:
    found = mpirun(size, call_the_library_again, env=nodes(where))
    others = [["RefusedError"] * 3] * (size - 2)
    assert found == [["RefusedError"] * 3, ["UsageError"] * 3, *others]


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


def call_create_group_again(size: int) -> list[Any]:
    """Rank 1 cannot say whose call it was that it refused, or says it."""
    comm = commrt.init()
    ranks, odd = [*range(1, size), 0], comm.rank == 1
    found = []
    for wrong in ({"ranks": [0, 99]}, {"ranks": 1}, {"name": 1}, {"deterministic": 2}):
        for _ in range(2):
            with pytest.raises(ValueError if odd else RefusedError):
                comm.create_group(**{"ranks": ranks} | (wrong if odd else {}))
        if comm.rank < 2:
            found.append(float(comm.create_group([0, 1]).allreduce(np.ones(1))[0]))
    found.append(float(comm.create_group(ranks).allreduce(np.ones(1))[0]))
    return [*found, comm.allreduce(np.ones(1))[0]]


@pytest.mark.parametrize("where", ["", "2,1"])
def test_a_wrong_create_group_is_heard_of(mpirun: Any, where: str) -> None:
    of_two, of_all = [2.0] * 4, [3.0, 3.0]
    found = mpirun(3, call_create_group_again, env=nodes(where), size=3)
    assert found == [of_two + of_all, of_two + of_all, of_all]


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
    assert second == [MismatchError.__name__] * 3
    assert "" not in first[1:]
