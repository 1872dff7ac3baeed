# SPDX-License-Identifier: Apache-2.0
"""What crosses pretended nodes, over an MPI library that the test controls."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from fake_mpi import ERR_TRUNCATE, FakeMpi, settle

from commrt import _native, algorithms
from commrt.algorithms import _registry
from commrt.comm import core_of
from commrt.errors import BackendError, MismatchError, RevokedError
from commrt.schedule.builder import Builder
from commrt.schedule.verify import verify
from commrt.schedule.verify_lowered import verify_lowered

PAIR = [[0], [1]]
SAID = r"pretended error 16 in two lines \(error code 16\)"
CURE = "; messages may be lost: make a new communicator or end the job"


# -- what works ---------------------------------------------------------------------


@pytest.mark.parametrize("nodes", [PAIR, [[0, 1], [2]], [[0], [1, 2], [3]]])
@pytest.mark.parametrize("number", [0, 1, 5000])
def test_collectives_and_messages_cross_nodes(
    nodes: list[list[int]], number: int
) -> None:
    with FakeMpi().ranks(nodes) as ranks:
        size = len(ranks.comms)
        for name in ("direct", "ring", "recursive_doubling", "halving_doubling"):
            params = {"chunk": 4096, "depth": 3}
            xs = [np.arange(number) * (1.0 + rank) for rank in range(size)]
            requests = [
                comm.allreduce(x, algorithm=name, params=params, nonblocking=True)
                for comm, x in zip(ranks.comms, xs, strict=True)
            ]
            settle(ranks)
            for request in requests:
                want = np.arange(number) * (size * (size + 1) / 2)
                assert np.array_equal(request.wait(), want), name
        outs = [np.full(number, -1.0) for _ in range(size)]
        requests = []
        for rank, comm in enumerate(ranks.comms):
            right, left = (rank + 1) % size, (rank - 1) % size
            x = np.full(number, float(rank))
            requests.append(comm.recv(outs[rank], source=left, nonblocking=True))
            requests.append(comm.send(x, dest=right, nonblocking=True))
        settle(ranks)
        for request in requests:
            request.wait()
        assert all((out == (r - 1) % size).all() for r, out in enumerate(outs))
        assert ranks.mpi.on_the_way() == 0


def test_a_long_message_takes_many_passes() -> None:
    with FakeMpi().ranks(PAIR) as ranks:
        x, out = np.ones(1 << 20), np.zeros(1 << 20)
        first, second = ranks.comms
        requests = [
            first.send(x, dest=1, nonblocking=True),
            second.recv(out, source=0, nonblocking=True),
        ]
        most = 0
        while not all(request.done for request in requests):
            before = ranks.mpi.calls.count("MPI_Isend"), np.count_nonzero(out) * 8
            ranks.step(0)
            ranks.step(1)
            most = max(most, ranks.mpi.calls.count("MPI_Isend") - before[0])
            assert np.count_nonzero(out) * 8 - before[1] <= 1 << 20
        assert most <= 2, "one packet of data, and one answer"
        for request in requests:
            request.wait()
        assert out.all()


def relayed(b: Builder) -> None:
    """The rank after the root passes on what the next one contributes."""
    b.blocks(1)
    me = (b.rank - b.root) % 3
    far = b.tmp(1)
    if me == 2:
        b.send(b.inp[0], b.root + 1)
    elif me == 1:
        b.recv(far[0], b.root + 2)
        b.send(b.inp[0], b.root)
        b.send(far[0], b.root)
    else:
        b.rred(b.out[0], b.root + 1, src=b.inp[0])
        b.rred(b.out[0], b.root + 1)


def interleaved(b: Builder) -> None:
    """As above in two halves; the root's receives of both take turns."""
    b.blocks(2)
    far = b.tmp(2)
    if b.rank == 2:
        b.send(b.inp[:], 1)
        b.recv(b.out[:], 1)
    elif b.rank == 1:
        b.recv(far[:], 2)
        for source in (b.inp, far):
            for half in range(2):
                b.send(source[half], 0)
        b.recv(b.out[:], 0)
        b.send(b.out[:], 2)
    else:
        b.copy(b.out[:], b.inp[:])
        for _ in range(2):
            for half in range(2):
                b.rred(b.out[half], 1)
        b.send(b.out[:], 1)


@pytest.mark.parametrize("nodes", [[[0], [1], [2]], [[0], [1, 2]], [[0, 1], [2]]])
@pytest.mark.parametrize("number", [0, 3, 3000])
@pytest.mark.parametrize(
    ("coll", "author"), [("reduce", relayed), ("allreduce", interleaved)]
)
def test_one_instruction_takes_two_messages_of_one_rank(
    monkeypatch: pytest.MonkeyPatch,
    nodes: list[list[int]],
    number: int,
    coll: str,
    author: Callable[[Builder], None],
) -> None:
    monkeypatch.setattr(_registry, "_ALGORITHMS", dict(_registry._ALGORITHMS))
    name = author.__name__
    algorithms.algorithm(coll, name, supports=lambda size: size == 3)(author)
    schedule = algorithms.schedule(coll, name, 3)
    verify(schedule)
    verify_lowered(schedule, can_fuse=lambda rank, peer: False)
    with FakeMpi().ranks(nodes) as ranks:
        xs = [np.full(number, 10.0**rank) for rank in range(3)]
        params = {"chunk": 4096}
        requests = [
            getattr(comm, coll)(x, algorithm=name, params=params, nonblocking=True)
            for comm, x in zip(ranks.comms, xs, strict=True)
        ]
        settle(ranks)
        for request in requests:
            request.wait()
        assert (xs[0] == 111.0).all()


# -- what MPI refuses ---------------------------------------------------------------

FUNCTIONS = ("MPI_Isend", "MPI_Irecv", "MPI_Test", "MPI_Get_count", "MPI_Iprobe")


def exchange(comm: Any) -> Iterator[Any]:
    """Start a short and a long message each way."""
    for tag, number in enumerate((3, 40_000)):
        out, x = np.zeros(number), np.full(number, 1.0)
        where = {"tag": tag, "nonblocking": True}
        yield comm.recv(out, source=1 - comm.rank, **where)
        yield comm.send(x, dest=1 - comm.rank, **where)


def reduce_twice(comm: Any) -> Iterator[Any]:
    """Start two allreduces, whose sums are one and two."""
    how = {"algorithm": "ring", "params": {"chunk": 4096}, "nonblocking": True}
    for total in (1, 2):
        yield comm.allreduce(np.full(1500, total / 2), **how)


def started(calls: Iterator[Any]) -> list[Any]:
    """Return the requests that were made before the communicator broke."""
    requests = []
    with contextlib.suppress(RevokedError):
        for request in calls:
            requests.append(request)
    return requests


def outcome(request: Any) -> str:
    """Return how a request ended; where it is complete, its result must be right."""
    try:
        result = request.wait(timeout_s=0.001)
    except TimeoutError:
        return "pending"
    except BackendError as error:
        return "failed" if str(error).endswith(CURE) else str(error)
    except RevokedError:
        return "revoked"
    total = 1 if request.operation == "recv" else request.seq + 1
    assert result is None or (result == total).all(), "wrong contents"
    return "done"


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("start", [exchange, reduce_twice])
def test_whichever_call_fails_nothing_hangs_and_nothing_is_wrong(
    start: Callable[[Any], Iterator[Any]], function: str
) -> None:
    seen = set()
    after = 0
    while after < 1000:
        ranks = FakeMpi().ranks(PAIR)
        ranks.mpi.fail(function, after=after)
        requests = [started(start(comm)) for comm in ranks.comms]
        settle(ranks)
        ended = [[outcome(request) for request in row] for row in requests]
        broken = [comm for comm in ranks.comms if core_of(comm).failure]
        if not broken:
            assert ended[0] == ended[1] == ["done"] * len(ended[0])
            break
        assert len(broken) == 1, "one call has failed"
        seen.update(ended[broken[0].rank])
        assert set(ended[broken[0].rank]) <= {"done", "failed", "revoked"}
        assert set(ended[1 - broken[0].rank]) <= {"done", "pending"}
        with pytest.raises(RevokedError, match=rf"{function} failed: {SAID}"):
            broken[0].barrier()
        after += 1 + after // 6
    else:
        pytest.fail("the calls never end")
    # A call that only looks for messages is not part of a collective.
    assert "failed" in seen or (function == "MPI_Iprobe" and start is reduce_twice)


def test_a_message_too_long_for_its_receive_is_a_mismatch() -> None:
    ranks = FakeMpi().ranks(PAIR)
    requests = [
        comm.allreduce(
            np.ones(9 + comm.rank), algorithm="recursive_doubling", nonblocking=True
        )
        for comm in ranks.comms
    ]
    settle(ranks)
    for request in requests:
        with pytest.raises(MismatchError, match="sent a message of another length"):
            request.wait()


@pytest.mark.parametrize("number", [1, 1024, 1025, 100_000])
@pytest.mark.parametrize(
    ("odd", "words"),
    [
        ({"op": "max"}, "op='max'.*op='sum'"),
        ({"dtype": np.int64}, "int64, op='sum'.*float64, op='sum'"),
        ({"coll": "reduce"}, "reduce of float64, op='sum', root=0.*allreduce"),
    ],
    ids=["reduction", "type", "operation"],
)
def test_a_message_of_another_call_is_a_mismatch(
    number: int, odd: dict[str, Any], words: str
) -> None:
    """Messages with their stamp, and long ones behind it."""

    def start(
        comm: Any, coll: str = "allreduce", dtype: Any = float, **how: Any
    ) -> Any:
        x, out = np.ones(number, dtype), np.zeros(number, dtype)
        return getattr(comm, coll)(
            x, out=out, algorithm="direct", nonblocking=True, **how
        )

    ranks = FakeMpi().ranks(PAIR)
    requests = [start(ranks.comms[0]), start(ranks.comms[1], **odd)]
    settle(ranks)
    first, second = words.split(".*")
    # A rank that only sends is done by then.
    for request in requests[: 1 if "coll" in odd else 2]:
        with pytest.raises(MismatchError, match=f"{words}|{second}.*{first}"):
            request.wait()


def test_a_call_that_breaks_the_communicator_halfway_ends_with_the_reason() -> None:
    ranks = FakeMpi().ranks(PAIR)
    first = ranks.comms[0]
    pending = first.recv(np.empty(1), source=1, tag=3, nonblocking=True)
    ranks.mpi.fail("MPI_Isend")
    reason = (
        f"no messages to and from rank 1: MPI_Isend failed: {SAID}; messages may be"
    )
    where = r"rank 1, tag \d, on local, rank 0"
    with pytest.raises(BackendError, match=rf"^send #1 to {where}: {reason} lost"):
        first.send(np.ones(1), dest=1)
    with pytest.raises(BackendError, match=rf"^recv #0 from {where}: {reason} lost"):
        pending.wait()
    # Nothing of it is left: the communicator can be freed.
    first.free()

    ranks = FakeMpi().ranks(PAIR)
    first = ranks.comms[0]
    ranks.mpi.fail("MPI_Iprobe")  # as the receive is posted, before the send
    both = rf"recv from rank 1, tag 0: {reason} lost.*; and send to rank 1.*{reason}"
    with pytest.raises(BackendError, match=both.replace("Isend", "Iprobe")):
        first.sendrecv(np.ones(1), dest=1, out=np.empty(1), source=1)
    assert "MPI_Isend" not in ranks.mpi.calls


def native_allreduce(comm: Any, x: Any, *, nonblocking: bool) -> Any:
    """Run the library's own collective, which never ends."""
    shape = _native.CallShape(
        coll=0, dtype=12, redop=0, root=0, label="mpi/native", returns_out=True,
        counts=0, x_part=(1, 1), out_part=(1, 1), x_is_own=False, out_is_own=False,
        has_in=True, has_out=True, divides=False,
    )  # fmt: skip
    core = core_of(comm)
    plan = _native.make_native_template(
        core, shape, datatype=0, op=0, comm=0, unit=1, is_blocked=False
    ).plan(core, x.size, [])
    address = x.ctypes.data
    return core.run_plan(
        plan, address, address, x, None, x, "allreduce", nonblocking, 20.0
    )


@pytest.mark.parametrize(
    ("function", "what"),
    [
        ("MPI_Iallreduce", "refused the collective: MPI_Iallreduce failed"),
        ("MPI_Test", "failed the collective: MPI_Test failed"),
    ],
)
def test_a_collective_of_the_library_that_fails(function: str, what: str) -> None:
    ranks = FakeMpi().ranks(PAIR)
    ranks.mpi.fail(function)
    with pytest.raises(BackendError, match=f"the MPI library {what}: {SAID}{CURE}"):
        native_allreduce(ranks.comms[0], np.ones(4), nonblocking=False)
    with pytest.raises(RevokedError, match=function):
        ranks.comms[0].barrier()


def test_a_collective_of_the_library_that_meets_other_lengths() -> None:
    ranks = FakeMpi().ranks(PAIR)
    ranks.mpi.fail("MPI_Test", ERR_TRUNCATE)
    with pytest.raises(MismatchError, match="met a message of another length"):
        native_allreduce(ranks.comms[0], np.ones(4), nonblocking=False)


@pytest.mark.parametrize("nonblocking", [True, False])
def test_arrays_that_mpi_may_still_use_are_kept_for_ever(nonblocking: bool) -> None:
    """A failed operation has ended for its caller, but not for the library."""
    ranks = FakeMpi().ranks(PAIR)
    mpi, (first, _) = ranks.mpi, ranks.comms
    kept: Any = np.ones(4)
    mpi.fail("MPI_Test", after=int(nonblocking))
    before = sys.getrefcount(kept)
    with pytest.raises(BackendError):
        native_allreduce(first, kept, nonblocking=nonblocking).wait()
    core_of(first).world.engine.step()
    assert sys.getrefcount(kept) > before


def test_arrays_that_mpi_cannot_touch_any_more_are_let_go() -> None:
    ranks = FakeMpi().ranks(PAIR)
    first, second = ranks.comms
    how = {"algorithm": "direct", "nonblocking": True}
    other = second.allgather(np.ones(4), **how)
    x, out = np.ones(4), np.empty((2, 4))
    before = [sys.getrefcount(x), sys.getrefcount(out)]
    ranks.mpi.fail("MPI_Get_count")
    request = first.allgather(x, out=out, **how)
    with pytest.raises(BackendError, match="MPI_Get_count failed"):
        request.wait()
    del request
    assert [sys.getrefcount(x), sys.getrefcount(out)] == before
    settle(ranks)
    assert other.wait().all()


def test_a_failed_operation_takes_its_receives_back() -> None:
    ranks = FakeMpi().ranks([[0], [1], [2]])
    how = {"algorithm": "direct", "nonblocking": True}
    others = [ranks.comms[1].allgather(np.ones(4), **how)]
    out = np.full((3, 4), -1.0)
    ranks.mpi.fail("MPI_Get_count")  # of rank 1's message; that of rank 2 is to come
    with pytest.raises(BackendError, match="no message from rank 1"):
        ranks.comms[0].allgather(np.ones(4), out=out, algorithm="direct")
    others.append(ranks.comms[2].allgather(np.ones(4), **how))
    settle(ranks)
    assert (out[2] == -1.0).all()
    assert [outcome(request) for request in others] == ["done", "done"]
