# SPDX-License-Identifier: Apache-2.0
"""Python functions as reductions of arrays on devices: as of arrays of the host."""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from staged_ranks import Rank, on_threads

import commrt
from commrt.devices import DeviceArray, DeviceStream, arrays
from commrt.errors import (
    BackendError,
    CommError,
    MismatchError,
    ReductionError,
    UsageError,
)
from commrt.vocabulary.operations import OPERATIONS, operation

LENGTH = 24
REDUCING = [spec.name for spec in OPERATIONS if spec.reduces]


def first_digits(a: Any, b: Any) -> Any:
    """Keep what comes from lower ranks where it is not zero; not commutative."""
    return np.where(a != 0, a, b)


ORDERED = commrt.reduction(first_digits, name="first")
FREE = commrt.reduction(np.logaddexp, commutative=True, dtype="float32")


def drawn(rank: int, seed: int, dtype: str) -> Any:
    rng = np.random.default_rng((seed, rank))
    values = rng.integers(-3, 4, LENGTH)
    return values.astype(dtype)


def arguments(coll: str, size: int) -> dict[str, Any]:
    """What an operation needs beside x and op."""
    if coll == "reduce_scatterv":
        counts = [LENGTH // size] * size
        counts[-1] += LENGTH - sum(counts)
        return {"counts": counts}
    return {"root": size - 1} if operation(coll).has_root else {}


@pytest.mark.parametrize("coll", REDUCING)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_every_reduction_is_the_hosts(size: int, coll: str, seed: int) -> None:
    def main(rank: Rank) -> None:
        comm, more = rank.comm, arguments(coll, size)
        for op, dtype in ((ORDERED, "int16"), (FREE, "float32")):
            mine = drawn(rank.rank, seed, dtype)
            want = getattr(comm, coll)(mine.copy(), op=op, **more)
            x = rank.array(mine)
            got = getattr(comm, coll)(x, op=op, **more)
            same(got, want)
            x.put(mine)
            request = getattr(comm, coll)(x, op=op, nonblocking=True, **more)
            same(request.wait(stream=rank.stream), want)
            request.synchronize()
            assert request.test()
            x.put(mine)
            bound = getattr(comm.plan, coll)(x, op=op, **more)
            assert bound.label.startswith("staged/")
            same(bound(), want)
            x.put(mine)
            same(bound.start().wait(), want)
            x.put(mine)
            out = into = None
            if want is not None:
                out = rank.array(np.full(np.shape(want), 7, dtype))
                into = np.full(np.shape(want), 7, dtype)
            getattr(comm, coll)(mine, op=op, out=into, **more)
            same(getattr(comm, coll)(x, op=op, out=out, **more), into)
            assert np.array_equal(x.get(), mine)

    def same(got: Any, want: Any) -> None:
        if want is None:
            assert got is None
            return
        assert np.array_equal(got.get(), want)

    on_threads(size, main)


def test_what_the_first_ranks_output_holds_stays(seed: int) -> None:
    def main(rank: Rank) -> None:
        x = rank.array(drawn(rank.rank, seed, "int16"))
        out = rank.array(np.full(LENGTH, 7, "int16"))
        rank.comm.exscan(x, op=ORDERED, out=out)
        if rank.rank == 0:
            assert out.get().tolist() == [7] * LENGTH

    on_threads(2, main)


def test_every_algorithm_that_may_run_runs_and_explain_names_it(seed: int) -> None:
    def main(rank: Rank) -> None:
        comm = rank.comm
        mine = drawn(rank.rank, seed, "int32")
        want = comm.allreduce(mine.copy(), op=ORDERED)
        told = comm.explain("allreduce", mine.nbytes, op=ORDERED, device="cuda")
        x = rank.array(mine)
        bound = comm.plan.allreduce(x, op=ORDERED)
        assert bound.label == str(told.choice.candidate)
        host = comm.candidates("allreduce", mine.nbytes, op=ORDERED)
        for each in host:
            for named in (each.algorithm, f"staged/{each.algorithm}"):
                x.put(mine)
                how = {"params": each.params} if each.params else {}
                comm.allreduce(x, op=ORDERED, algorithm=named, **how)
                assert np.array_equal(x.get(), want), named
        with pytest.raises(UsageError, match=r"ring.* not commutative"):
            comm.allreduce(x, op=ORDERED, algorithm="ring")
        with pytest.raises(BackendError, match="nccl"):
            comm.allreduce(x, op=ORDERED, backend="nccl")

    on_threads(3, main)


def test_the_caller_waits_for_nobody_and_no_caller_runs_the_function() -> None:
    """The second rank calls only once the first one's call has returned."""
    returned = threading.Event()
    ran: set[int] = set()

    def noted(a: Any, b: Any) -> Any:
        ran.add(threading.get_ident())
        return np.maximum(a, b)

    op = commrt.reduction(noted, commutative=True)

    def main(rank: Rank) -> int:
        comm = rank.comm
        x = rank.array(np.arange(8.0) + rank.rank)
        comm.allreduce(x, op=op)  # the ranks meet for the first one
        rank.stream.synchronize()
        if rank.rank == 1:
            assert returned.wait(300)
        comm.allreduce(x, op=op)
        if rank.rank == 0:
            returned.set()
        assert x.get().tolist() == (np.arange(8.0) + 1).tolist()
        return threading.get_ident()

    callers = on_threads(2, main)
    assert ran
    assert not ran & set(callers)


def test_calls_stay_in_order_with_others_of_the_stream(seed: int) -> None:
    def main(rank: Rank) -> None:
        comm = rank.comm
        x = rank.array(np.full(5, rank.rank + 1.0))
        biggest = commrt.reduction(np.maximum, commutative=True)
        for _ in range(10):
            comm.allreduce(x)
            comm.allreduce(x, op=biggest)
            comm.allreduce(x, op="avg", nonblocking=True).wait()
        assert x.get().tolist() == [3 * 2.0**9] * 5

    on_threads(2, main)


def test_what_the_function_raises_comes_from_the_request() -> None:
    def broken(a: Any, b: Any) -> Any:
        raise ValueError("no such thing")

    op = commrt.reduction(broken, commutative=True)

    def main(rank: Rank) -> str:
        comm = rank.comm
        x = rank.array(np.ones(8))
        request = comm.allreduce(x, op=op, nonblocking=True)
        with suppress(CommError):
            request.wait()
        rank.stream.synchronize()  # it is let go
        with pytest.raises(CommError) as failed:
            request.synchronize()
        assert comm.allreduce(np.ones(1))[0] == 2  # others go on
        return f"{type(failed.value).__name__}: {failed.value}"

    said = on_threads(2, main)
    raised = [each for each in said if each.startswith(ReductionError.__name__)]
    assert raised
    assert "broken raised ValueError: no such thing" in raised[0]


def test_check_mode_names_ranks_that_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMMRT_DEBUG", "check")

    def main(rank: Rank) -> None:
        comm = rank.comm
        x = rank.array(np.ones(8))
        ops = [commrt.reduction(np.maximum, name=name) for name in ("one", "two")]
        with pytest.raises(MismatchError, match=r"one\(\).*|two\(\)"):
            comm.allreduce(x, op=ops[rank.rank])
        comm.allreduce(x, op=ops[0])
        assert x.get().tolist() == [1] * 8

    on_threads(2, main)


def test_without_a_thread_requests_do_the_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COMMRT_PROGRESS", "off")

    def main(rank: Rank) -> None:
        x = rank.array(np.arange(8.0) * (rank.rank + 1))
        op = commrt.reduction(np.maximum, commutative=True)
        request = rank.comm.allreduce(x, op=op, nonblocking=True)
        while not request.test():
            pass
        assert x.get().tolist() == (np.arange(8.0) * 2).tolist()

    on_threads(2, main)


def test_a_wrong_type_is_said_at_the_call() -> None:
    def main(rank: Rank) -> None:
        x = rank.array(np.ones(8))
        with pytest.raises(UsageError, match=r"logaddexp takes float32 only"):
            rank.comm.allreduce(x, op=FREE)

    on_threads(1, main)


def test_a_job_frees_no_memory_that_its_own_callers_stream_holds_up() -> None:
    """To free pinned memory waits for the device, whose streams wait for the job.

    What goes in its thread is left to others.
    """

    def main(rank: Rank) -> None:
        device = rank.device
        found = [DeviceArray(device, 8).put(np.ones(8))]
        assert found[0]._pinned

        def add(a: Any, b: Any) -> Any:
            found.clear()
            return a + b

        x = rank.array(np.ones(4))
        aside = DeviceStream(device)
        request = rank.comm.allreduce(x, op=commrt.reduction(add), nonblocking=True)
        request.wait()
        request.wait(stream=aside)
        got = rank.fetch_in(x, aside)
        aside.synchronize()
        assert got().tolist() == [rank.comm.size] * 4
        request.synchronize()
        if not found:  # not every rank's host combines anything
            waits = device.__dict__[arrays._LEFT]
            assert [bool(pinned) for _, pinned in waits] == [True]
            DeviceArray(device, 1).free()
            assert not waits
        told.append(not found)

    told: list[bool] = []
    on_threads(2, main)
    assert any(told)
