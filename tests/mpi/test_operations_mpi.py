# SPDX-License-Identifier: Apache-2.0
"""Every operation between real ranks, on one node and across pretended nodes."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from cases import Attempt, sample

import commrt
from commrt.vocabulary.operations import COLLECTIVES


def nodes(text: str) -> dict[str, str]:
    """Return the environment that pretends these nodes."""
    return {"COMMRT_NODES": text, "COMMRT_TIMEOUT_S": "300"} if text else {}


def run_nonblocking(seed: int) -> list[str]:
    comm = commrt.init()
    cases = [case for coll in COLLECTIVES for case in sample(coll, comm.size, seed, 6)]
    random.Random(seed).shuffle(cases)
    attempts = [Attempt(case, comm.rank) for case in cases]
    requests = [attempt.start(comm, nonblocking=True) for attempt in attempts]
    # Each rank waits in an order of its own.
    for index in random.Random(seed + comm.rank).sample(range(len(cases)), len(cases)):
        attempts[index].result = requests[index].wait()
    return [f"{verdict} {a.case}" for a in attempts if (verdict := a.verdict())]


@pytest.mark.parametrize(("size", "where"), [(2, ""), (3, "2,1"), (4, "2,2")])
@pytest.mark.parametrize("progress", ["on", "off"])
def test_many_in_flight(
    mpirun: Any, size: int, where: str, progress: str, seed: int
) -> None:
    env = {**nodes(where), "COMMRT_PROGRESS": progress}
    assert mpirun(size, run_nonblocking, env=env, seed=seed) == [[]] * size


def long_messages() -> list[bool]:
    comm = commrt.init()
    n = 3_000_001  # 24 MB: many fragments, far above every eager limit
    right = []
    for name in sorted({c.algorithm for c in comm.candidates("allreduce", 8 * n)}):
        x = np.arange(n, dtype=np.float64) * (comm.rank + 1)
        total = comm.allreduce(x, algorithm=name)
        factor = comm.size * (comm.size + 1) / 2
        right.append(np.array_equal(total, np.arange(n) * factor))
    x = np.arange(comm.size * 500_000.0) + comm.rank
    for name in sorted({c.algorithm for c in comm.candidates("alltoall", 4_000_000)}):
        got = comm.alltoall(x, out=np.empty_like(x), algorithm=name)
        mine = np.arange(500_000.0) + comm.rank * 500_000
        want = np.concatenate([mine + rank for rank in range(comm.size)])
        right.append(np.array_equal(got, want))
    return [bool(each) for each in right]


@pytest.mark.parametrize(("size", "where"), [(2, ""), (2, "1,1"), (3, "2,1")])
def test_long_messages(mpirun: Any, size: int, where: str) -> None:
    got = mpirun(size, long_messages, env=nodes(where), deadline_s=300)
    assert all(all(each) for each in got)


def point_to_point() -> list[Any]:
    comm = commrt.init()
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    seen = []
    for n in (0, 1, 1000, 40_000, 400_000):
        out = np.full(n, -1.0)
        comm.sendrecv(np.full(n, float(comm.rank)), dest=right, out=out, source=left)
        seen.append(bool((out == left).all()))
    # Around in both directions at once, each a request that waits for two messages.
    ins = [np.full(90_000, -1.0), np.full(3, -1.0)]
    both = [
        comm.sendrecv(np.full(out.size, float(comm.rank)), dest=to, out=out,
                      source=source, sendtag=tag, recvtag=tag, nonblocking=True)
        for tag, (out, to, source) in enumerate(
            zip(ins, (right, left), (left, right), strict=True)
        )
    ]  # fmt: skip
    commrt.wait_all(both)
    seen.append(bool((ins[0] == left).all() and (ins[1] == right).all()))
    # Everybody to everybody, long before short, tags in reverse.
    outs = {
        (r, t): np.zeros(90_000 if t else 3) for r in range(comm.size) for t in (0, 1)
    }
    recvs = [
        comm.recv(out, source=rank, tag=tag, nonblocking=True)
        for (rank, tag), out in reversed(outs.items())
    ]
    sends = [
        comm.send(np.full(90_000 if t else 3, 1.0 + comm.rank), dest=r, tag=t,
                  nonblocking=True)
        for t in (1, 0) for r in range(comm.size)
    ]  # fmt: skip
    commrt.wait_all([*sends, *recvs])
    seen.append(all((out == 1.0 + rank).all() for (rank, _), out in outs.items()))
    return seen


def lists_of_messages() -> list[bool]:
    """Everybody to everybody, itself included, in every form and any order."""
    comm = commrt.init()
    rng = np.random.default_rng(comm.rank)
    ends = [(rank, tag) for rank in range(comm.size) for tag in range(4)]
    lengths = (3, 40_000, 0, 2_100)
    seen = []
    for form in range(4):
        outs = {end: np.full(lengths[end[1]], -1.0) for end in ends}
        sends = [
            (np.full(lengths[tag], 10.0 * comm.rank + tag), rank, tag)
            for rank, tag in rng.permutation(ends).tolist()
        ]
        recvs = [
            (outs[rank, tag], rank, tag) for rank, tag in rng.permutation(ends).tolist()
        ]
        lists: Any = {"sends": sends, "recvs": recvs}
        if form == 0:
            got = comm.multi_sendrecv(**lists)
        elif form == 1:
            got = comm.multi_sendrecv(**lists, nonblocking=True).wait()
        else:
            planned = comm.plan.multi_sendrecv(**lists)
            got = planned() if form == 2 else planned.start().wait()
        seen.append(all(a is b for a, (b, *_) in zip(got, recvs, strict=True)))
        seen += [bool((outs[r, t] == 10.0 * r + t).all()) for r, t in ends]
    # In place, around in both directions at once.
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    for n in lengths:
        x, y = np.full(n, float(comm.rank)), np.full(n, -float(comm.rank))
        comm.multi_sendrecv(
            sends=[(x, right, 1), (y, left, 2)],
            recvs=[(y, right, 2), (x, left, 1)],
            in_place=True,
        )
        seen.append(bool((x == left).all() and (y == -right).all()))
    return seen


@pytest.mark.parametrize(("size", "where"), [(1, ""), (2, ""), (3, "1,2"), (4, "2,2")])
def test_lists_of_messages(mpirun: Any, size: int, where: str) -> None:
    got = mpirun(size, lists_of_messages, env=nodes(where))
    assert got == [[True] * (4 * (1 + 4 * size) + 4)] * size


@pytest.mark.parametrize(("size", "where"), [(2, ""), (2, "1,1"), (4, "2,2")])
def test_point_to_point(mpirun: Any, size: int, where: str) -> None:
    got = mpirun(size, point_to_point, env=nodes(where))
    assert got == [[True] * 7] * size


def one_way() -> float:
    """Rank 0 sends much and leaves; rank 1 receives late."""
    comm = commrt.init()
    if comm.rank == 0:
        for tag in range(20):
            comm.send(np.full(2000, float(tag)), dest=1, tag=tag)
        comm.barrier()
        return 0.0
    comm.barrier()
    out = np.zeros(2000)
    return float(
        sum(comm.recv(out, source=0, tag=tag)[-1] for tag in reversed(range(20)))
    )


@pytest.mark.parametrize("where", ["", "1,1"])
def test_messages_that_were_sent_are_there_later(mpirun: Any, where: str) -> None:
    assert mpirun(2, one_way, env=nodes(where)) == [0.0, 190.0]


def lengths_differ() -> list[str]:
    comm = commrt.init()
    said = []
    for call in (
        lambda: comm.allreduce(
            np.ones(100 + comm.rank), algorithm="recursive_doubling"
        ),
        lambda: comm.barrier(),
    ):
        try:
            call()
        except commrt.errors.CommError as error:
            said.append(f"{type(error).__name__}: {error}")
    return said


@pytest.mark.parametrize("where", ["", "1,1"])
def test_lengths_that_differ_are_found(mpirun: Any, where: str) -> None:
    for mismatch, later in mpirun(2, lengths_differ, env=nodes(where)):
        assert mismatch.startswith("MismatchError: allreduce #0 on world")
        assert "another length" in mismatch
        assert later == mismatch


def check_mode() -> list[Any]:
    comm = commrt.init()
    x = np.ones(4)
    with_op = "max" if comm.rank == 1 else "sum"
    texts = []
    for arguments in ({"op": with_op}, {"name": f"layer {comm.rank // 2}"}):
        try:
            comm.allreduce(x, **arguments)
        except commrt.errors.MismatchError as error:
            texts.append(str(error))
    return [*texts, comm.allreduce(x).tolist()]


@pytest.mark.parametrize(("size", "where"), [(3, ""), (3, "2,1")])
def test_check_mode_tells_all_ranks_the_same(
    mpirun: Any, size: int, where: str
) -> None:
    env = {**nodes(where), "COMMRT_DEBUG": "check"}
    got = mpirun(size, check_mode, env=env)
    assert got == [got[0]] * size
    op, name, total = got[0]
    assert "allreduce #0 on world: the ranks disagree on op; nothing was sent" in op
    assert "rank 1: op=max (at test_operations_mpi.py:" in op
    assert "ranks 0, 2: op=sum" in op
    assert "ranks 0, 1: name=layer 0" in name
    assert total == [3.0] * 4
