# SPDX-License-Identifier: Apache-2.0
"""A refused call that nobody can make in its place ends the communicator on all ranks.

Such a call is in a graph, or is a plan of another package that says nothing of itself.
Here no plan does. The others hear at once: each deadline here is far away.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from device_carriers import LONG_S, Run, carrier_here, duplicate
from staged_ranks import Rank

from commrt.comm import core_of
from commrt.device_calls import collectives, refused_calls
from commrt.device_calls.refused_calls import words_of
from commrt.errors import CommError, DeviceError, RefusedError, RevokedError, UsageError


@pytest.fixture(autouse=True)
def without_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no plan say how another rank makes it."""
    monkeypatch.setattr(collectives, "words_of", lambda *_: "")


def begin(rank: Rank, comm: Any, x: Any, name: str) -> None:
    """Run a first call to its end on all ranks: a later failure may end it else."""
    comm.allreduce(x, backend=name, nonblocking=True).synchronize()
    rank.comm.barrier()


def wrong(rank: Rank, comm: Any, x: Any, **kwargs: Any) -> None:
    """Make a call that is refused here."""
    out = rank.array(np.zeros(x.shape[0] + 1, "f4"))
    with pytest.raises(UsageError, match=f"out has {x.shape[0] + 1} elements"):
        comm.allreduce(x, out=out, **kwargs)


def fail(start: Callable[[], Any]) -> str:
    """Start a call and wait for it; return how it fails, which it does at once."""
    began_s = time.monotonic()
    with pytest.raises((RefusedError, RevokedError)) as raised:
        start().synchronize()
    assert time.monotonic() - began_s < LONG_S / 4
    return str(raised.value)


def end(rank: Rank, comm: Any) -> str:
    """Return how the communicator has ended: soon, once another rank has ended it.

    That rank may have sent its part of a call before it heard of it.
    """

    def go_on() -> None:
        for _ in range(4):
            comm.allreduce(np.ones(1))

    with pytest.raises(RevokedError) as raised:
        go_on()
    rank.stream.synchronize()
    return str(raised.value)


@pytest.mark.parametrize("size", [2, 3])
def test_all_ranks_hear_of_it(carrier: tuple[str, Run], size: int) -> None:
    name, run = carrier

    def main(rank: Rank) -> str:
        comm = duplicate(rank)
        x = rank.array(np.ones(5000, "f4"))
        begin(rank, comm, x, name)
        if rank.rank == 1:
            wrong(rank, comm, x, backend=name)
            return end(rank, comm)
        told = fail(lambda: comm.allreduce(x, backend=name, nonblocking=True))
        assert "rank 1 has refused its call" in told
        return end(rank, comm)

    told = run(size, main)
    assert "gave up" in told.pop(1)
    assert all("rank 1 has refused its call" in each for each in told)


def test_the_next_call_meets_no_earlier_one(carrier: tuple[str, Run]) -> None:
    """The rank in error goes on with its next call, which must not take theirs."""
    name, run = carrier

    def main(rank: Rank) -> str:
        comm = duplicate(rank)
        x = rank.array(np.ones(1000, "f4"))
        begin(rank, comm, x, name)
        if rank.rank == 1:
            wrong(rank, comm, x, backend=name)
            y = rank.array(np.full(1000, 100, "f4"))
            fail(lambda: comm.allreduce(y, backend=name, nonblocking=True))
            told = end(rank, comm)
            while core_of(comm).devices.outstanding:  # its streams were let go
                core_of(comm).world.engine.step()
            seen = rank.fetch(y)
            rank.stream.synchronize()
            assert 110.0 not in set(seen())
            return told
        z = rank.array(np.full(1000, 10, "f4"))
        fail(lambda: comm.allreduce(z, backend=name, nonblocking=True))
        return end(rank, comm)

    run(2, main)


def test_the_others_are_told_before_they_call(carrier: tuple[str, Run]) -> None:
    name, run = carrier

    def main(rank: Rank) -> str:
        comm = duplicate(rank)
        x = rank.array(np.ones(100, "f4"))
        begin(rank, comm, x, name)
        if rank.rank == 1:
            wrong(rank, comm, x, backend=name)
        rank.comm.barrier()
        if rank.rank != 1:
            told = fail(lambda: comm.allreduce(x, backend=name, nonblocking=True))
            assert "rank 1 has refused its call" in told
        return end(rank, comm)

    run(3, main)


@pytest.mark.parametrize("name", ["nccl", "ipc"])
def test_a_root_that_was_done_hears_of_it(name: str) -> None:
    """A root may have sent all that there is to send; its communicator ends too."""

    def main(rank: Rank) -> str:
        comm = duplicate(rank)
        x = rank.array(np.full(50, rank.rank, "f4"))
        begin(rank, comm, x, name)
        if rank.rank == 1:
            with pytest.raises(UsageError, match="root"):
                comm.bcast(x, root=7, backend=name)
            rank.comm.barrier()
            return end(rank, comm)
        with suppress(RefusedError, RevokedError):  # it may have sent all before
            comm.bcast(x, backend=name, nonblocking=True).synchronize()
        rank.comm.barrier()
        return end(rank, comm)

    with carrier_here(name) as run:
        run(2, main)


def test_shrink_makes_a_communicator_that_works(carrier: tuple[str, Run]) -> None:
    """All ranks live: the new communicator has all of them."""
    name, run = carrier

    def main(rank: Rank) -> list[float]:
        comm = duplicate(rank)
        x = rank.array(np.ones(4, "f4"))
        begin(rank, comm, x, name)
        if rank.rank == 1:
            wrong(rank, comm, x, backend=name)
        else:
            fail(lambda: comm.allreduce(x, backend=name, nonblocking=True))
        end(rank, comm)
        renewed = comm.shrink()
        assert renewed.size == 2
        x = rank.array(np.ones(4, "f4"))
        renewed.allreduce(x, backend=name, nonblocking=True).synchronize()
        value = rank.fetch(x)
        rank.stream.synchronize()
        renewed.free()
        comm.free()
        return [float(each) for each in value()]

    assert run(2, main) == [[2.0] * 4] * 2


def test_a_refused_host_call_ends_nothing(carrier: tuple[str, Run]) -> None:
    """The ranks go on in step, with calls on the device before and behind it."""
    name, run = carrier

    def main(rank: Rank) -> list[float]:
        comm = duplicate(rank)
        x = rank.array(np.ones(64, "f4"))
        for _ in range(3):
            comm.allreduce(x, backend=name, nonblocking=True).synchronize()
            out = np.zeros(3 + (rank.rank == 1))
            with pytest.raises(Exception, match="out has 4 elements"):
                comm.allreduce(np.ones(3), out=out)
        comm.allreduce(x, backend=name, nonblocking=True).synchronize()
        assert not core_of(comm).failure
        value = rank.fetch(x)
        rank.stream.synchronize()
        comm.free()
        return [float(each) for each in value()]

    assert run(2, main) == [[16.0] * 64] * 2


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("limit_s", [None, 60.0])
def test_buckets_without_the_same_calls_are_no_wrong_sum(
    carrier: tuple[str, Run], is_first: bool, limit_s: float | None
) -> None:
    """Rank 0 has no first call: its bucket has as many elements as the others'."""
    _, run = carrier

    def main(rank: Rank) -> list[str]:
        comm = duplicate(rank)
        x = [rank.array(np.full(4, 10.0**k, "f4")) for k in range(4)]
        if not is_first:
            with comm.fused(nbytes=32):
                comm.allreduce(x[3], nonblocking=True).be_quiet()
            rank.stream.synchronize()
            rank.comm.barrier()
        wrong = rank.array(np.zeros(5, "f4"))
        requests = []
        limit = {} if limit_s is None else {"time_limit_s": limit_s}
        with suppress(CommError), comm.fused(nbytes=32, **limit):  # two of them fill it
            if rank.rank == 0:
                with suppress(UsageError):
                    comm.allreduce(x[0], out=wrong, nonblocking=True)
            else:
                requests.append(comm.allreduce(x[0], nonblocking=True))
            for each in x[1 : 3 if rank.rank == 0 else 2]:
                requests.append(comm.allreduce(each, nonblocking=True))
        said = []
        for each in requests:
            try:
                each.synchronize()
                said.append("done")
            except CommError as error:
                said.append(type(error).__name__)
        return said

    for said in run(2, main):
        assert len(said) > 0
        assert {*said} <= {"RefusedError", "RevokedError", "MismatchError"}


def test_a_fused_call_that_all_refuse_ends_its_bucket_alone(
    carrier: tuple[str, Run],
) -> None:
    _, run = carrier

    def main(rank: Rank) -> list[float]:
        comm = duplicate(rank)
        wrong = rank.array(np.zeros(5, "f4"))
        x = [rank.array(np.full(4, float(k), "f4")) for k in range(6)]
        requests = []
        with comm.fused(nbytes=32):
            for k in range(6):
                with suppress(UsageError):
                    out = wrong if k == 1 else None
                    requests.append(comm.allreduce(x[k], out=out, nonblocking=True))
        with pytest.raises(RefusedError, match="same bucket"):
            requests[0].synchronize()
        for each in requests[1:]:
            each.synchronize()
        seen = [rank.fetch(each) for each in x]
        rank.stream.synchronize()
        comm.free()
        return [float(each()[0]) for each in seen]

    assert run(3, main) == [[0.0, 1.0, 6.0, 9.0, 12.0, 15.0]] * 3


def test_buckets_that_lack_different_calls_are_no_wrong_sum(
    carrier: tuple[str, Run],
) -> None:
    """Each rank refuses another one of three calls: the buckets are equally long."""
    _, run = carrier

    def main(rank: Rank) -> list[str]:
        comm = duplicate(rank)
        wrong = rank.array(np.zeros(5, "f4"))
        x = [rank.array(np.full(4, 10.0**k, "f4")) for k in range(3)]
        requests, said = [], []
        with suppress(CommError), comm.fused():
            for k in range(3):
                out = wrong if k == rank.rank else None
                with suppress(UsageError):
                    requests.append(comm.allreduce(x[k], out=out, nonblocking=True))
        for each in requests:
            with pytest.raises(CommError) as raised:
                each.synchronize()
            said.append(type(raised.value).__name__)
        return said

    for said in run(2, main):
        assert len(said) == 2
        assert {*said} <= {"MismatchError", "RefusedError", "RevokedError"}


@pytest.mark.parametrize("kind", ["staged first", "algorithm", "params"])
@pytest.mark.parametrize("name", ["nccl", "ipc"])
def test_a_call_is_refused_before_the_ranks_join(name: str, kind: str) -> None:
    """They have met, and make what NCCL and memory of peers use."""

    def main(rank: Rank) -> list[float]:
        comm = duplicate(rank)
        x = rank.array(np.ones(600, "f4"))
        wrong: dict[str, Any] = {"backend": name}
        if kind == "staged first":
            comm.allreduce(x, backend="staged", nonblocking=True).synchronize()
            wrong["out"] = rank.array(np.zeros(7, "f4"))
        elif kind == "algorithm":
            wrong = {"algorithm": f"{name}/nope"}
        else:
            wrong["params"] = {"chunk": -3}
        if rank.rank == 1:
            with pytest.raises(UsageError):
                comm.allreduce(x, **wrong)
        else:
            told = fail(lambda: comm.allreduce(x, backend=name, nonblocking=True))
            assert "rank 1 has refused its call" in told
        y = rank.array(np.ones(8, "f4"))
        comm.allreduce(y, backend=name, nonblocking=True).synchronize()
        value = rank.fetch(y)
        rank.stream.synchronize()
        comm.free()
        return [float(each) for each in value()][:1]

    with carrier_here(name) as run:
        assert run(2, main) == [[2.0]] * 2


def test_a_stand_in_without_memory_ends_the_communicator(
    carrier: tuple[str, Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    name, run = carrier
    monkeypatch.setattr(collectives, "words_of", words_of)

    def no_memory(*_: Any) -> Any:
        raise DeviceError("out of memory", "failed")

    monkeypatch.setattr(refused_calls, "zeros", no_memory)

    def main(rank: Rank) -> str:
        comm = duplicate(rank)
        x = rank.array(np.ones(5000, "f4"))
        begin(rank, comm, x, name)
        if rank.rank == 1:
            wrong(rank, comm, x, backend=name)
            return end(rank, comm)
        fail(lambda: comm.allreduce(x, backend=name, nonblocking=True))
        return end(rank, comm)

    for said in run(2, main):
        assert "rank 1 could not make a call that it had refused" in said
        assert "out of memory" in said


def test_no_thread_can_be_had(
    carrier: tuple[str, Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody waits for answers then, and nobody hangs."""
    name, run = carrier
    monkeypatch.setattr(collectives, "words_of", words_of)

    class NoThread(threading.Thread):
        def start(self) -> None:
            raise RuntimeError("can't start new thread")

    def main(rank: Rank) -> str:
        comm = duplicate(rank)
        x = rank.array(np.ones(5000, "f4"))
        begin(rank, comm, x, name)
        if rank.rank == 1:
            monkeypatch.setattr(refused_calls.threading, "Thread", NoThread)
            wrong(rank, comm, x, backend=name)
            monkeypatch.undo()
            return end(rank, comm)
        fail(lambda: comm.allreduce(x, backend=name, nonblocking=True))
        return end(rank, comm)

    run(2, main)
