# SPDX-License-Identifier: Apache-2.0
"""The MPI library's own collectives, in place and not, where they keep the rules."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from cases import Case, legal_pairs, run_cases

import commrt
from commrt.operations import COLLECTIVES, operation

NATIVE = "mpi/native"
COUNTS = (0, 1, 5, 3001)


def is_offered(comm: Any, case: Case) -> bool:
    """Whether the library's own collective is a candidate for this case."""
    found = comm.candidates(case.coll, 64, dtype=case.dtype, op=case.op)
    return NATIVE in {candidate.name for candidate in found}


def run_native(coll: str) -> list[Any]:
    comm = commrt.init()
    pairs = (
        legal_pairs()
        if operation(coll).reduces
        else [("int16", "sum"), ("bool", "sum")]
    )
    cases = []
    for i, (dtype, op) in enumerate(pairs):
        case = Case(coll, comm.size, NATIVE, {}, dtype, op, i % comm.size)
        if is_offered(comm, case):
            cases.append(case)
    wrong = []
    for i, case in enumerate(cases):
        for count in COUNTS:
            # Some ranks in place, some not, and all four mixtures on two ranks.
            in_place = (i + count + comm.rank * (i // 2)) % 2 == 0
            mine = Case(
                coll,
                comm.size,
                NATIVE,
                {},
                case.dtype,
                case.op,
                case.root,
                count,
                in_place,
            )
            wrong += run_cases(comm, [mine])
    return [len(cases), wrong]


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("coll", COLLECTIVES)
def test_agrees_with_numpy(mpirun: Any, coll: str, size: int) -> None:
    for offered, wrong in mpirun(size, run_native, coll=coll):
        assert offered >= 1
        assert wrong == []


def offered_reductions() -> list[list[str]]:
    comm = commrt.init()
    cases = [Case("allreduce", comm.size, None, {}, d, op) for d, op in legal_pairs()]
    return [[case.dtype, case.op] for case in cases if is_offered(comm, case)]


def test_not_offered_where_libraries_break_the_rules(mpirun: Any) -> None:
    first, second = mpirun(2, offered_reductions)
    assert first == second
    offered = {(dtype, op) for dtype, op in first}
    assert {("float32", "sum"), ("int64", "bxor"), ("complex128", "prod")} <= offered
    # NaN in min and max, rounding at each step, saturation, no avg, undefined by MPI.
    for dtype, op in [
        ("float32", "min"),
        ("float64", "max"),
        ("float16", "sum"),
        ("bfloat16", "sum"),
        ("int16", "sum"),
        ("uint8", "sum"),
        ("float64", "avg"),
        ("bool", "sum"),
        ("bool", "max"),
        ("float32", "land"),
    ]:
        assert (dtype, op) not in offered


def on_groups() -> list[float]:
    comm = commrt.init()
    sums = []
    for group in (comm.dup(), comm.split(comm.rank % 2), comm.create_group([0, 1, 2])):
        assert group is not None
        x = np.full(100, 1.0 + group.rank)
        way = NATIVE if group.size > 1 else None
        request = group.allreduce(x, algorithm=way, nonblocking=True)
        blocks = group.allgather(np.array([group.rank]), algorithm=way)
        assert blocks.reshape(-1).tolist() == list(range(group.size))
        sums.append(float(request.wait()[0]))
        group.free()
    return sums


def test_groups_have_their_own(mpirun: Any) -> None:
    assert mpirun(3, on_groups) == [[6.0, 3.0, 6.0], [6.0, 1.0, 6.0], [6.0, 3.0, 6.0]]


def native_among_schedules() -> list[float]:
    comm = commrt.init()
    requests = [
        comm.allreduce(
            np.full(20_000, float(i)),
            algorithm=NATIVE if i % 2 else "ring",
            nonblocking=True,
        )
        for i in range(20)
    ]
    for request in requests if comm.rank else reversed(requests):
        request.wait()
    return [float(request.wait()[-1]) for request in requests]


@pytest.mark.parametrize("progress", ["on", "off"])
def test_mixes_with_schedules(mpirun: Any, progress: str) -> None:
    env = {"COMMRT_PROGRESS": progress}
    expected = [2.0 * i for i in range(20)]
    assert mpirun(2, native_among_schedules, env=env) == [expected] * 2


def overridden() -> str:
    comm = commrt.init()
    comm.allreduce(np.ones(4))
    return str(comm.explain("allreduce", 32, dtype="float64").choice.candidate)


def test_the_environment_can_ask_for_it(mpirun: Any) -> None:
    env = {"COMMRT_ALGORITHM": "allreduce:mpi/native"}
    assert mpirun(2, overridden, env=env) == [NATIVE] * 2


def started_before_a_message() -> list[float]:
    """Rank 1 comes to the collective after a message that rank 0 sends meanwhile."""
    comm = commrt.init()
    token, x = np.zeros(1), np.ones(3)
    if comm.rank == 0:
        request = comm.allreduce(x, algorithm=NATIVE, nonblocking=True)
        comm.send(token, dest=1)
        request.wait()
    else:
        if comm.rank == 1:
            comm.recv(token, source=0)
        comm.allreduce(x, algorithm=NATIVE)
    total: list[float] = x.tolist()
    return total


def test_a_nonblocking_start_waits_for_nobody(mpirun: Any) -> None:
    assert mpirun(3, started_before_a_message) == [[3.0] * 3] * 3


def threads_with_communicators_of_their_own() -> list[Any]:
    world = commrt.init()
    wrong: list[Any] = []

    def work(number: int, comm: Any) -> None:
        for step in range(60):
            count = (3, 100, 5000, 40000)[step % 4]
            x = np.full(count, float(comm.rank + number + step), np.float32)
            y = np.empty_like(x)
            comm.allreduce(x, out=y, algorithm=NATIVE if step % 2 else None)
            expected = sum(rank + number + step for rank in range(comm.size))
            if not np.all(y == expected):
                wrong.append([number, step, float(y[0]), expected])
            if step % 20 == 0:
                comm._forget_plans()  # so that plans die while others run

    comms = [world.dup() for _ in range(3)]
    threads = [
        threading.Thread(target=work, args=(number, comm))
        for number, comm in enumerate(comms)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return wrong


@pytest.mark.parametrize("size", [2, 3])
def test_threads_with_communicators_of_their_own_do_not_meet(
    mpirun: Any, size: int
) -> None:
    found = mpirun(size, threads_with_communicators_of_their_own)
    assert found == [[]] * size
