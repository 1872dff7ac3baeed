# SPDX-License-Identifier: Apache-2.0
"""The MPI library's own collectives, in place and not, where they keep the rules."""

from __future__ import annotations

import gc
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases import Case, legal_pairs, run_cases
from started_operations import num_started

import commrt
from commrt.comm import core_of
from commrt.errors import BackendError, UsageError
from commrt.select.facts import Candidate
from commrt.select.fingerprint import this_machine
from commrt.select.model import MpiBetweenNodes
from commrt.select.rules import Match, Rule
from commrt.select.table import Table
from commrt.select.write import dump
from commrt.vocabulary.operations import COLLECTIVES, operation

NATIVE = "mpi/native"
COUNTS = (0, 1, 5, 3001)


def is_offered(comm: Any, case: Case) -> bool:
    """Whether the library's own collective is a candidate for this case."""
    found = comm.candidates(case.coll, 64, dtype=case.dtype, op=case.op)
    return NATIVE in {candidate.name for candidate in found}


def run_native(coll: str) -> list[Any]:
    comm = commrt.init()
    pairs = (
        legal_pairs(coll)
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
    # NaN in min and max, rounding at each step, saturation, avg, factors,
    # undefined by MPI.
    for dtype, op in [
        ("float32", "min"),
        ("float64", "max"),
        ("float64", "premul_sum"),
        ("int32", "premul_sum"),
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
                core_of(comm)._forget_plans()  # so that plans die while others run

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


def free_and_dropped_groups() -> list[Any]:
    world = commrt.init()
    lender = core_of(world).world.native_comms
    before, maps = lender._made, mapped()
    for step in range(100):
        group = world.dup()
        group.allreduce(np.ones(3), algorithm=NATIVE)
        if step % 2:
            group.free()
        del group
        gc.collect()
    return [lender._made - before, mapped() - maps]


def mapped() -> int:
    """Count the shared memory that this process maps."""
    with open("/proc/self/maps") as lines:
        return sum("memfd:" in line for line in lines)


def test_groups_give_back_what_they_had(mpirun: Any) -> None:
    assert mpirun(2, free_and_dropped_groups) == [[1, 0]] * 2


def dropped_in_flight() -> list[float]:
    """A group that is dropped goes on for the sake of the others."""
    world = commrt.init()
    group = world.dup()
    x = np.ones(300_000)
    request = group.allreduce(x, nonblocking=True, algorithm="direct")
    if world.rank == 0:
        with pytest.warns(ResourceWarning):
            del request
        del group
        gc.collect()
    else:
        request.wait()
    world.barrier()
    world.dup().barrier()  # what was dropped is gone by now
    return [float(x[0]), len(core_of(world).world.lingering)]


@pytest.mark.parametrize("nodes", ["", "1,1"])
def test_a_group_dropped_in_flight_goes_on(mpirun: Any, nodes: str) -> None:
    env = {"COMMRT_NODES": nodes} if nodes else {}
    assert mpirun(2, dropped_in_flight, env=env) == [[2.0, 0]] * 2


def limited() -> list[str]:
    world = commrt.init()
    # As if the library's own were as quick as the best schedule: then it is chosen.
    core_of(world).world.mpi_between_nodes = MpiBetweenNodes(1.0, 1e-4)
    lender = core_of(world).world.native_comms
    lender._limit = lender._made + 1
    groups = [world.dup() for _ in range(2)]
    said = [
        str(group.explain("allreduce", 1 << 20).choice.candidate) for group in groups
    ]
    for group in groups:
        try:
            group.allreduce(np.ones(2), algorithm=NATIVE)
            said.append("native")
        except BackendError as error:
            said.append(str(error)[: len(group.name)])
            assert float(group.allreduce(np.ones(2))[0]) == world.size
    return said


def test_without_mpi_communicators_schedules_go_on(mpirun: Any) -> None:
    env = {"COMMRT_NODES": "1,1"}
    first, second = mpirun(2, limited, env=env)
    assert first == second
    assert first[0] == NATIVE
    assert first[1] != NATIVE
    assert first[1].startswith("mpi/")
    assert first[2:] == ["native", "world.dup2"]


def unasked_on_a_group() -> list[float]:
    """Rank 1 comes to the group's first collective after a message from rank 0."""
    world = commrt.init()
    group = world.split(0)
    assert group is not None
    token, x = np.zeros(1), np.ones(3)
    if group.rank == 0:
        request = group.allreduce(x, nonblocking=True)
        group.send(token, dest=1)
        request.wait()
    else:
        if group.rank == 1:
            group.recv(token, source=0)
        group.allreduce(x)
    chosen = str(group.explain("allreduce", 24, dtype="float64").choice.candidate)
    assert chosen.startswith("mpi/")
    total: list[float] = x.tolist()
    return total


@pytest.mark.parametrize("override", ["allreduce:mpi/native", ""])
def test_an_unasked_native_start_waits_for_nobody(mpirun: Any, override: str) -> None:
    env = {"COMMRT_NODES": "1,2"} | ({"COMMRT_ALGORITHM": override} if override else {})
    assert mpirun(3, unasked_on_a_group, env=env) == [[3.0] * 3] * 3


def rejected_on_a_group() -> list[str]:
    group = commrt.init().dup()
    rejected = group.explain("allreduce", 8).rejected
    return [each.reason for each in rejected if each.candidate.name == NATIVE]


def test_explain_says_that_native_wants_asking(mpirun: Any, tmp_path: Path) -> None:
    rule = Rule("allreduce", Match(0, None), Candidate("shm", "direct"))
    table = tmp_path / "direct.yaml"
    table.write_text(dump(Table(this_machine(), (rule,))))
    env = {"COMMRT_TABLE": str(table)}
    for reasons in mpirun(2, rejected_on_a_group, env=env):
        assert len(reasons) == 1
        assert "asks for it by name" in reasons[0]


def wrong_parameters() -> list[str]:
    comm = commrt.init()
    said = []
    for params in ({"chnk": 3}, {"chunk": 0}):
        try:
            comm.allreduce(np.ones(3), algorithm=NATIVE, params=params)
        except commrt.errors.UsageError as error:
            said.append(str(error))
    assert num_started(comm) == 0
    comm.allreduce(np.ones(3), algorithm=NATIVE, params={"chunk": 4096})
    return said


def test_unknown_parameters_are_refused_there_too(mpirun: Any) -> None:
    for unknown, wrong in mpirun(2, wrong_parameters):
        assert "native: unknown parameter 'chnk'; did you mean 'chunk'?" in unknown
        assert "parameter chunk=0 must be an integer" in wrong


def counts_of_64_bits() -> list[str]:
    comm = commrt.init()
    found = []
    for coll in ("allreduce", "bcast", "allgather", "alltoall"):
        for nbytes in (2**31, 2**33 + 4):
            names = {c.name for c in comm.candidates(coll, nbytes, dtype="int8")}
            found.append(NATIVE in names)
    return [f"{len(found)} {any(found)}"]


def test_not_offered_where_the_library_counts_in_32_bits(mpirun: Any) -> None:
    assert mpirun(2, counts_of_64_bits) == [["8 False"]] * 2


def long_copies() -> list[list[float]]:
    """What the library's collectives want copied is copied in slices, in order."""
    comm = commrt.init()
    count = 300_000 * comm.size
    step = core_of(comm).world.engine.step
    requests = []
    for number in range(4):
        x = np.full(count, float(10 * comm.rank + number))
        requests.append(comm.alltoall(x, nonblocking=True, algorithm=NATIVE))
        y = np.empty_like(x)
        mine = np.full(count, float(comm.rank + 100 * number))
        root = number % comm.size
        requests.append(
            comm.bcast(mine, out=y, root=root, nonblocking=True, algorithm=NATIVE)
        )
        step()
    found = [request.wait() for request in reversed(requests)][::-1]
    return [[float(each[0]), float(each[-1])] for each in found]


@pytest.mark.parametrize("progress", ["on", "off"])
def test_long_copies_keep_the_order(mpirun: Any, progress: str) -> None:
    expected = []
    for number in range(4):
        expected.append([float(number), 10.0 * 2 + number])
        expected.append([number % 3 + 100.0 * number] * 2)
    env = {"COMMRT_PROGRESS": progress}
    assert mpirun(3, long_copies, env=env) == [expected] * 3


def one_rank_asks() -> list[Any]:
    world = commrt.init()
    with world.split(world.rank // 2) as comm:
        told = []
        if world.rank == 0:
            told = [str(comm.explain("allreduce", 64).choice.candidate)]
            told += sorted({each.name for each in comm.candidates("bcast", 64)})
        world.barrier()  # the others have called nothing of it until now
        return [told != [], float(comm.allreduce(np.ones(1))[0])]


def test_to_ask_what_would_run_is_local(mpirun: Any) -> None:
    for nodes in (None, "1,2"):
        env = {} if nodes is None else {"COMMRT_NODES": nodes}
        assert mpirun(3, one_rank_asks, env=env) == [
            [True, 2.0],
            [False, 2.0],
            [False, 1.0],
        ]


def with_checksums() -> list[str]:
    """Return the words of a call that asks for MPI's own collective."""
    comm = commrt.init()
    said = []
    for coll in COLLECTIVES:
        names = {each.name for each in comm.candidates(coll, 64)}
        assert NATIVE not in names
        assert len(names) > 0
    x = np.full(4 * comm.size, 1.0)
    for call in (comm.allreduce, comm.alltoall, comm.scan, comm.bcast):
        call(x.copy())  # the ranks' messages have checksums
    try:
        comm.allreduce(x, algorithm=NATIVE)
    except UsageError as error:
        said.append(str(error))
    assert comm.allreduce(np.ones(3)).tolist() == [comm.size] * 3
    return said


@pytest.mark.parametrize("nodes", ["2", "1,1"])
def test_with_checksums_no_collective_is_the_librarys(mpirun: Any, nodes: str) -> None:
    said = mpirun(
        *(2, with_checksums), env={"COMMRT_CHECKSUM": "1", "COMMRT_NODES": nodes}
    )
    for (text,) in said:
        assert "must not run" in text
        assert "COMMRT_CHECKSUM=1 asks for checksums" in text
