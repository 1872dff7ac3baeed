# SPDX-License-Identifier: Apache-2.0
"""commrt.init under every launcher: what it finds, and what it refuses."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import Any

import numpy as np
import pytest

import commrt
from commrt.comm import core_of
from commrt.errors import UsageError
from commrt.launch.detect import detect
from commrt.launch.mpiexec import child_environment

PLAIN = """
import numpy as np, commrt, sys
comm = commrt.init()
assert (comm.rank, comm.size, comm.mpi) == (0, 1, None)
assert commrt.init() is comm
x = np.arange(4.0)
assert comm.allreduce(x) is x and x.tolist() == [0, 1, 2, 3]
assert comm.allgather(x).shape == (1, 4)
comm.barrier()
comm.bcast(x)
assert not {"mpi4py", "torch"} & set(sys.modules)
print("fine")
"""


def plain_python(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run ``code`` in a process that no launcher started."""
    env = {**child_environment(sys.executable), **variables}
    command = [sys.executable, "-c", code]
    # Not from the repository's root, whose source tree would hide an installed wheel.
    return subprocess.run(
        command,
        env=env,
        cwd=os.sep,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_plain_python_is_a_world_of_one_without_mpi() -> None:
    done = plain_python(PLAIN)
    assert (done.returncode, done.stdout) == (0, "fine\n"), done.stderr


def facts_of_launch() -> list[Any]:
    comm = commrt.init()
    launch = detect()
    assert commrt.init() is comm
    assert comm.mpi.Get_rank() == comm.rank
    assert (launch.kind, launch.rank, launch.size) == ("mpi", comm.rank, comm.size)
    names = ("OMPI_COMM_WORLD_RANK", "PMI_RANK")
    ours = [os.environ[name] for name in names if name in os.environ]
    return [comm.size, str(comm.rank) in ours]


def test_mpiexec(mpirun: Any) -> None:
    assert mpirun(3, facts_of_launch) == [[3, True]] * 3


def adopted() -> list[Any]:
    from mpi4py import MPI

    part = MPI.COMM_WORLD.Split(MPI.COMM_WORLD.rank % 2)
    comm = commrt.init(part)
    assert commrt.init(part) is comm
    assert commrt.init() is comm
    with pytest.raises(UsageError, match="was called before with other ranks"):
        commrt.init(MPI.COMM_WORLD)
    return [comm.size, float(comm.allreduce(np.ones(1))[0])]


def test_a_given_mpi_communicator_is_the_world(mpirun: Any) -> None:
    assert mpirun(3, adopted) == [[2, 2.0], [1, 1.0], [2, 2.0]]


def freed_and_made_again() -> list[float]:
    totals = []
    for _ in range(3):
        comm = commrt.init()
        totals.append(float(comm.allreduce(np.ones(1))[0]))
        comm.free()
    with commrt.init() as comm:
        totals.append(float(comm.allreduce(np.ones(1))[0]))
    return totals


def test_init_after_free_makes_a_new_world(mpirun: Any) -> None:
    assert mpirun(2, freed_and_made_again) == [[2.0] * 4] * 2


def test_a_launcher_of_another_mpi_is_told_apart(mpirun: Any) -> None:
    # What mpi4py of one library sees when the other library's mpiexec starts it.
    foreign = {
        "openmpi": {"PMI_RANK": "0", "PMI_SIZE": "4"},
        "mpich": {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "4"},
    }[mpirun.flavour]
    done = plain_python("import commrt; commrt.init()", **foreign)
    assert done.returncode == 1
    said = {
        "openmpi": "says 4 ranks, but MPI (Open MPI",
        "mpich": "(OMPI_COMM_WORLD_SIZE) started 4 ranks, and mpi4py uses MPICH",
    }[mpirun.flavour]
    assert said in done.stderr
    assert "the launcher belongs to another MPI" in done.stderr
    assert "Start the program with that library's own mpiexec" in done.stderr


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        (
            {"COMMRT_ALGORITM": "x"},
            "unknown environment variable COMMRT_ALGORITM; did you mean "
            "'COMMRT_ALGORITHM'?",
        ),
        ({"COMMRT_DEBUG": "chekc"}, "COMMRT_DEBUG='chekc': not one of the allowed"),
        (
            {"COMMRT_TIMEOUT_S": "-1"},
            "COMMRT_TIMEOUT_S='-1': must be a number of seconds",
        ),
        ({"COMMRT_LAUNCH": "mpirun"}, "Expected mpi|run|torchrun|slurm|single"),
        ({"COMMRT_PROGRESS": "yes"}, "COMMRT_PROGRESS='yes'"),
        ({"COMMRT_ALGORITHM": "allreduce=ring"}, "write COLL:BACKEND/ALGORITHM"),
        ({"COMMRT_ALGORITHM": "allreduc:shm/ring"}, "did you mean 'allreduce'?"),
        (
            {"COMMRT_LAUNCH": "torchrun"},
            "RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT",
        ),
    ],
)
def test_wrong_variables_are_named(variables: dict[str, str], message: str) -> None:
    done = plain_python("import commrt; commrt.init()", **variables)
    assert done.returncode == 1
    assert "UsageError" in done.stderr
    assert message in done.stderr


def variables_differ(name: str, values: list[str]) -> list[Any]:
    rank = detect().rank
    os.environ[name] = values[rank]
    try:
        commrt.init()
    except UsageError as error:
        text = str(error)
    del os.environ[name]
    comm = commrt.init()  # corrected, it works
    return [text, float(comm.allreduce(np.ones(1))[0])]


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("COMMRT_LINK_CLASS", ["near", "near", "far"]),
        ("COMMRT_DEBUG", ["off", "off", "check"]),
        ("COMMRT_ALGORITHM", ["", "", "allreduce:mpi/native"]),
        ("COMMRT_SHM", ["memfd", "memfd", "off"]),
        ("COMMRT_TABLE", ["a.yaml", "a.yaml", "b.yaml"]),
    ],
)
def test_variables_that_differ_are_the_same_error_everywhere(
    mpirun: Any, name: str, values: list[str]
) -> None:
    got = mpirun(3, variables_differ, name=name, values=values)
    assert got == [got[0]] * 3
    text, total = got[0]
    assert "must be equal on all ranks" in text
    assert f"{name}={values[2]} on rank 2, {name}={values[0]} on rank 0" in text
    assert total == 3.0


def mode_of_progress() -> list[Any]:
    from mpi4py import MPI

    comm = commrt.init()
    # Longer than the slice of a call.
    request = comm.allreduce(np.ones(1 << 18), nonblocking=True)
    has_thread = core_of(comm).world.engine.has_thread
    if has_thread:
        sys.setswitchinterval(1000)  # the GIL stays here: the thread must not need it
        deadline = time.monotonic() + 20
        while not request.done and time.monotonic() < deadline:
            pass
        sys.setswitchinterval(0.005)
    MPI.COMM_WORLD.Barrier()
    return [has_thread, request.done, float(request.wait()[-1])]


@pytest.mark.parametrize(("mode", "thread"), [("on", True), ("off", False)])
def test_progress_thread_as_asked(mpirun: Any, mode: str, thread: bool) -> None:
    got = mpirun(2, mode_of_progress, env={"COMMRT_PROGRESS": mode})
    assert got == [[thread, thread, 2.0]] * 2


def too_few_threads() -> str:
    import mpi4py

    mpi4py.rc.thread_level = "serialized"
    try:
        commrt.init()
    except UsageError as error:
        return str(error)
    return ""


def test_progress_thread_needs_mpi_with_threads(mpirun: Any) -> None:
    for text in mpirun(2, too_few_threads, env={"COMMRT_PROGRESS": "on"}):
        assert "COMMRT_PROGRESS=on needs MPI initialised with THREAD_MULTIPLE" in text
        assert "COMMRT_PROGRESS=off" in text


def groups() -> list[Any]:
    comm = commrt.init()
    sums = []
    for group in (
        comm.split(comm.rank % 2, key=-comm.rank),
        comm.dup(name=f"of rank {comm.rank}"),
        comm.create_group([3, 1, 0, 2]),
        comm.create_group([comm.rank ^ 1, comm.rank] if comm.rank % 2 else
                          [comm.rank, comm.rank ^ 1]),
    ):  # fmt: skip
        assert group is not None
        with group:
            ranks = group.allgather(np.array([comm.rank])).reshape(-1).tolist()
            out = np.zeros(1)
            group.sendrecv(
                np.array([float(comm.rank)]),
                dest=(group.rank + 1) % group.size,
                out=out,
                source=(group.rank - 1) % group.size,
            )
            assert group.mpi.Get_size() == group.size
            sums.append([*ranks, int(out[0])])
    return sums


@pytest.mark.parametrize("where", ["", "2,2", "1,2,1"])
def test_groups_between_processes_and_nodes(mpirun: Any, where: str) -> None:
    env = {"COMMRT_NODES": where} if where else {}
    assert mpirun(4, groups, env=env) == [
        [[2, 0, 2], [0, 1, 2, 3, 3], [3, 1, 0, 2, 1], [0, 1, 1]],
        [[3, 1, 3], [0, 1, 2, 3, 0], [3, 1, 0, 2, 3], [0, 1, 0]],
        [[2, 0, 0], [0, 1, 2, 3, 1], [3, 1, 0, 2, 0], [2, 3, 3]],
        [[3, 1, 1], [0, 1, 2, 3, 2], [3, 1, 0, 2, 2], [2, 3, 2]],
    ]


def requests_across_new_groups() -> float:
    """Make a group while an operation is in flight that others already wait for."""
    comm = commrt.init()
    x = np.ones(400_000)
    request = comm.allreduce(x, nonblocking=True, algorithm="ring")
    if comm.rank == 0:
        group = comm.dup()
        request.wait()
    else:
        request.wait()
        group = comm.dup()
    return float(group.allreduce(x)[-1])


def test_meeting_ranks_goes_on_with_what_is_in_flight(mpirun: Any) -> None:
    env = {"COMMRT_PROGRESS": "off", "COMMRT_TIMEOUT_S": "300"}
    assert mpirun(2, requests_across_new_groups, env=env) == [4.0, 4.0]
