# SPDX-License-Identifier: Apache-2.0
"""Symmetric buffers among ranks that are threads: every operation, any mixture."""

from __future__ import annotations

import gc
import random
import sys
import threading
from typing import Any

import numpy as np
import pytest
from cases import Attempt, Case, run_cases, sample
from heap_memory import HeapMemory

from commrt.comm import core_of
from commrt.errors import (
    BackendError,
    ClosedError,
    CommError,
    MismatchError,
    RefusedError,
    TimeoutError_,
    UsageError,
)
from commrt.job import symmetric
from commrt.local import run
from commrt.planning import host_plans
from commrt.vocabulary.operations import COLLECTIVES

POOL_NBYTES = 4 << 20
IN_FLIGHT = 80
"""More than there are lines to show results in."""
DEADLINE_S = 300.0


@pytest.fixture(autouse=True)
def short_messages_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_plans, "SYMMETRIC_NBYTES", 64)


@pytest.mark.full(sample=24)
@pytest.mark.parametrize("size", range(1, 9))
@pytest.mark.parametrize("coll", COLLECTIVES)
def test_any_mixture_agrees_with_numpy(coll: str, size: int, seed: int) -> None:
    cases = sample(coll, size, seed, 40)

    def rank_main(comm: Any) -> list[str]:
        memory = HeapMemory(comm, POOL_NBYTES, str(seed))
        return run_cases(comm, cases, memory)

    assert run(size, rank_main) == [[]] * size


@pytest.mark.parametrize("size", [2, 3, 4])
def test_many_in_flight(size: int, seed: int) -> None:
    drawn = [case for coll in COLLECTIVES for case in sample(coll, size, seed, 20)]
    cases = random.Random(seed).sample(drawn, IN_FLIGHT)

    def rank_main(comm: Any) -> list[str]:
        memory = HeapMemory(comm, 64 << 20, str(seed))
        attempts = [Attempt(case, comm.rank, memory) for case in cases]
        requests = [attempt.start(comm, nonblocking=True) for attempt in attempts]
        order = random.Random(seed + comm.rank).sample(range(len(cases)), len(cases))
        for index in order:
            attempts[index].result = requests[index].wait()
        return [f"{wrong} {a.case}" for a in attempts if (wrong := a.verdict())]

    assert run(size, rank_main) == [[]] * size


def test_plans_made_before_there_was_a_heap_go_on() -> None:
    def rank_main(comm: Any) -> list[float]:
        x = np.full(20_000, 1.0 + comm.rank)
        plan = comm.plan.allreduce(x, algorithm="direct", params={"shots": 2})
        plan()
        y = comm.empty(20_000, "float64")
        y[:] = comm.rank
        comm.allreduce(y, algorithm="direct", params={"shots": 2})
        plan()
        return [x[0], x[-1], y[0], y[-1]]

    assert run(2, rank_main) == [[6.0, 6.0, 1.0, 1.0]] * 2


@pytest.mark.parametrize("op", ["avg", "premul_sum"])
@pytest.mark.parametrize("dtype", ["int32", "float32", "bfloat16"])
@pytest.mark.parametrize("share", [1.0, 0.5])
def test_scaled_operands(op: str, dtype: str, share: float, seed: int) -> None:
    """Peers read them as they are, and multiply; those of slots are products."""
    cases = [
        Case(coll, 3, name, {}, dtype, op, count=5000, in_place=in_place)
        for coll, names in (
            ("allreduce", ("direct", "ring", "recursive_doubling")),
            ("reduce_scatter", ("direct", "ring")),
            ("reduce", ("direct", "binomial")),
        )
        for name in names
        for in_place in (False, True)
    ]

    def rank_main(comm: Any) -> list[str]:
        memory = HeapMemory(comm, POOL_NBYTES, f"scaled{seed}")
        memory.share = share
        return run_cases(comm, cases, memory)

    assert run(3, rank_main) == [[]] * 3


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("dtype", ["int8", "float16", "complex128"])
def test_every_element_is_right_wherever_each_rank_begins(
    dtype: str, size: int
) -> None:
    # Peers' arrays are read from another page on by each rank.
    page = 4096 // np.dtype(dtype).itemsize
    counts = [page, 2 * page - 1, size * page, size * page + 7, 3 * size * page + 1]

    def rank_main(comm: Any) -> list[int]:
        wrong = []
        for count in counts:
            x, out = comm.empty(count, dtype), comm.empty(count, dtype)
            x[:] = np.arange(count) % 7 + comm.rank
            comm.allreduce(x, out=out, algorithm="direct", params={"shots": 1})
            expected = (np.arange(count) % 7) * size + sum(range(size))
            if not np.array_equal(out, expected.astype(dtype)):
                wrong.append(count)
        return wrong

    assert run(size, rank_main) == [[]] * size


def test_slots_keep_what_one_peer_has_not_read_while_others_need_none() -> None:
    # A lane holds seven slots, one fragment has five messages.
    params = {"chunk": 524288, "reuse": 2}
    block = 1 << 19
    started, blocked = threading.Event(), threading.Event()

    def rank_main(comm: Any) -> bool:
        symmetric_out = comm.empty(block)
        out = symmetric_out if comm.rank == 3 else np.zeros(block, np.float32)
        x = np.arange(comm.size * block, dtype="float32") if comm.rank == 0 else None
        waits_for = {0: started, 1: blocked}.get(comm.rank)
        if waits_for is not None:
            assert waits_for.wait(DEADLINE_S)
        request = comm.scatter(
            x, out=out, algorithm="direct", params=params, nonblocking=True
        )
        request.test()
        if comm.rank == 3:
            started.set()
        elif comm.rank == 0:
            for _ in range(20_000):  # as far as it gets without rank 1
                request.test()
            blocked.set()
        request.wait(timeout_s=DEADLINE_S)
        first = comm.rank * block
        return np.array_equal(out, np.arange(first, first + block, dtype="float32"))

    assert run(6, rank_main) == [True] * 6


def test_an_array_given_back_by_an_error_is_not_read_as_a_result() -> None:
    given_back = threading.Event()

    def rank_main(comm: Any) -> str:
        x = comm.empty(100_000)
        x[:] = 1
        if comm.rank == 1:
            assert given_back.wait(DEADLINE_S)
        mine = x[:-5000] if comm.rank == 2 else x
        with pytest.raises(CommError) as caught:
            comm.bcast(mine, algorithm="direct", timeout_s=DEADLINE_S)
        if comm.rank == 0:
            x[:] = 7
            given_back.set()
        return type(caught.value).__name__

    assert run(3, rank_main) == ["MismatchError"] * 3


# -- the memory -------------------------------------------------------------------


def test_arrays_are_zero_and_of_the_wanted_kind() -> None:
    def rank_main(comm: Any) -> list[Any]:
        made = [
            comm.empty(5),
            comm.empty((2, 3), "int16"),
            comm.empty((), np.complex128),
            comm.empty((0, 4), bool),
        ]
        assert not any(array.any() for array in made)
        return [(array.shape, array.dtype.name) for array in made]

    kinds = [((5,), "float32"), ((2, 3), "int16"), ((), "complex128"), ((0, 4), "bool")]
    for size in (1, 3):
        assert run(size, rank_main) == [kinds] * size


def test_memory_is_given_out_again_once_every_rank_has_dropped_it() -> None:
    def rank_main(comm: Any) -> list[bool]:
        first = comm.empty(10_000)
        address = first.ctypes.data
        first[:] = 7
        kept = first[5:6] if comm.rank == 0 else None
        del first
        gc.collect()
        second = comm.empty(10_000)
        apart = second.ctypes.data != address
        del kept
        gc.collect()
        comm.barrier()
        third = comm.empty(10_000)
        return [apart, third.ctypes.data == address, not third.any()]

    assert run(2, rank_main) == [[True] * 3] * 2


def test_arrays_outlive_their_communicator() -> None:
    def rank_main(comm: Any) -> float:
        other = comm.split(color=0)
        x = other.empty(50_000)
        x[:] = comm.rank
        other.allreduce(x)
        other.free()
        with pytest.raises(ClosedError):
            other.empty(3)
        x += 1
        return float(comm.allreduce(x)[-1])

    assert run(3, rank_main) == [12.0] * 3


def test_different_lengths_are_an_error_on_every_rank() -> None:
    def rank_main(comm: Any) -> Any:
        with pytest.raises(MismatchError, match="rank 0 12, rank 1 16, rank 2 20"):
            comm.empty(3 + comm.rank)
        return comm.allreduce(comm.empty(40_000) + 1)[-1]

    assert run(3, rank_main) == [3.0] * 3


def test_what_does_not_fit_is_an_error_on_every_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(symmetric, "memory_limit_nbytes", lambda: 1 << 20)

    def rank_main(comm: Any) -> float:
        kept = comm.empty(1000)
        with pytest.raises(BackendError, match="asks for 800000 bytes on each of 2"):
            comm.empty(200_000)
        kept += 1
        more = comm.empty(1000)
        return float(comm.allreduce(kept + more)[0])

    assert run(2, rank_main) == [2.0] * 2


@pytest.mark.parametrize("size", [1, 2])
def test_more_than_any_machine_has(size: int) -> None:
    def rank_main(comm: Any) -> None:
        with pytest.raises(BackendError, match=r"asks for|asked for"):
            comm.empty(1 << 60)
        with pytest.raises(UsageError, match="too many elements"):
            comm.empty(1 << 70)

    run(size, rank_main)


@pytest.mark.parametrize(
    ("shape", "dtype", "message"),
    [
        (-1, "float32", "sizes must not be negative"),
        ("ab", "float32", "expected a number of elements"),
        ((2, 1.5), "float32", "expected a number of elements"),
        (3, "flaot32", "dtype='flaot32'"),
        (3, object, "plain bytes"),
        (3, "S0", "have a size"),
    ],
)
def test_a_wrong_request_is_one_on_all_ranks(
    shape: Any, dtype: Any, message: str
) -> None:
    def rank_main(comm: Any) -> tuple[int, ...]:
        if comm.rank == 0:
            with pytest.raises(UsageError, match=message):
                comm.empty(shape, dtype)
        else:
            with pytest.raises(RefusedError, match=f"rank 0 has refused.*{message}"):
                comm.empty(7)
        found: tuple[int, ...] = comm.empty((2, 2)).shape
        return found

    assert run(2, rank_main) == [(2, 2)] * 2


def test_other_arguments_are_found_out() -> None:
    def rank_main(comm: Any) -> str:
        x = comm.empty(20_000)
        with pytest.raises(CommError) as caught:
            comm.allreduce(x[: 10_000 + 5000 * comm.rank], timeout_s=5)
        return type(caught.value).__name__

    found = run(2, rank_main)
    assert "MismatchError" in found
    assert set(found) <= {"MismatchError", "RevokedError"}


def test_a_deadline_that_not_all_ranks_missed() -> None:
    def rank_main(comm: Any) -> float:
        kept = comm.empty(40_000)
        share = core_of(comm).symmetric.heap._share

        def too_late(*arguments: Any) -> None:
            share(*arguments).close()
            raise TimeoutError_("too late")

        if comm.rank == 0:
            core_of(comm).symmetric.heap._share = too_late
            with pytest.raises(TimeoutError_, match="too late"):
                comm.empty(1_000_000)
        else:
            comm.empty(1_000_000)
        for _ in range(2):
            with pytest.raises(BackendError, match="ended on some ranks only"):
                comm.empty(10)
        other = comm.dup()
        kept += 1
        return float(comm.allreduce(kept)[0] + other.allreduce(other.empty(10) + 1)[0])

    assert run(2, rank_main) == [4.0] * 2


def test_a_deadline_that_all_ranks_missed_changes_nothing() -> None:
    first = threading.Event()

    def rank_main(comm: Any) -> float:
        if comm.rank == 1:
            assert first.wait(DEADLINE_S)
        comm.timeout_s = 0.01
        with pytest.raises(TimeoutError_):
            comm.empty(10)
        first.set()
        core_of(comm).world.meet(range(2), "both missed it")
        comm.timeout_s = DEADLINE_S
        return float(comm.allreduce(comm.empty(40_000) + 1)[0])

    assert run(2, rank_main) == [2.0] * 2


def test_memory_is_attached_while_other_threads_ask_the_engine() -> None:
    # The plans that are let go then are Python's, too.
    before, ended = sys.getswitchinterval(), threading.Event()

    def ask(comm: Any) -> None:
        while not ended.is_set():
            core_of(comm)._records()

    def rank_main(comm: Any) -> None:
        other = threading.Thread(target=ask, args=(comm,))
        if comm.rank == 0:
            other.start()
        try:
            for turn in range(100):
                with comm.dup() as made:
                    for count in range(4):
                        made.allreduce(np.ones(7 * turn + count))
                    assert made.empty(1000).size == 1000
        finally:
            ended.set()
        if comm.rank == 0:
            other.join()

    sys.setswitchinterval(1e-5)
    try:
        run(2, rank_main)
    finally:
        sys.setswitchinterval(before)
