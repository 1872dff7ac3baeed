# SPDX-License-Identifier: Apache-2.0
"""Ranks that MPI started start newcomers themselves, and take them in: ``grow``."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpi_ranks import MpiRun, mpirun_of

import commrt
import commrt.founding
from commrt import growing_by_mpi
from commrt.bootstrap.mpi import MpiBootstrap
from commrt.comm import Communicator, core_of
from commrt.errors import (
    BackendError,
    CommError,
    MismatchError,
    PeerFailedError,
    RevokedError,
    TimeoutError_,
    UsageError,
)

FAILED = (PeerFailedError, RevokedError)
LIMIT_S = 250.0
NATIVE = {"backend": "mpi", "algorithm": "native"}
BY_TCP = {"OMPI_MCA_btl": "self,sm,tcp"}
"""Open MPI connects newcomers by TCP, which tests leave out elsewhere."""


@pytest.fixture(params=["openmpi", "mpich"])
def of_library(request: pytest.FixtureRequest, tmp_path: Path) -> MpiRun:
    """Return a way to run ranks of either library."""
    return mpirun_of(request.param, tmp_path)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def sum_of(comm: Communicator, **how: Any) -> float:
    return float(comm.allreduce(np.array([2.0**comm.rank]), **how)[0])


def until_it_fails(comm: Communicator) -> Communicator:
    """Return what is left of the ranks, once one of them has died."""
    while True:
        try:
            comm.allreduce(np.ones(1000))
        except FAILED:
            return comm.shrink(timeout_s=LIMIT_S)


def said_by_all(comm: Communicator, said: Any) -> list[Any]:
    """Return what each rank says; newcomers' words come by the others."""
    return [json.loads(text) for text in comm.allgather_object(json.dumps(said))]


def lines_of(text: str) -> Iterator[Any]:
    return (json.loads(line) for line in text.splitlines() if line.startswith("["))


# -- nobody has died -------------------------------------------------------------------


def grows_twice(counts: list[int]) -> Any:
    """Take in newcomers twice; their program is this one, so those go on below."""
    comm = commrt.init()
    old = None
    while comm.size < 2 + sum(counts):
        first = comm.size == 2
        made = comm.grow(counts[0 if first else 1], timeout_s=LIMIT_S)
        assert sum_of(comm) == 2.0**comm.size - 1  # it works on
        old = old or comm
        comm = made
        if not first:
            break
    said = [
        comm.rank,
        [*comm.joined],
        sum_of(comm),
        sum_of(comm, **NATIVE),
        float(comm.bcast(np.full(30_001, float(comm.rank)), root=comm.size - 1).sum()),
        commrt.init().size,
        comm.timeout_s,
    ]
    return said_by_all(comm, said)


@pytest.mark.full(sample=2)
@pytest.mark.parametrize("nodes", ["", "1"])
@pytest.mark.parametrize("counts", [[1, 1], [3, 2]])
def test_ranks_of_mpi_grow(of_library: MpiRun, counts: list[int], nodes: str) -> None:
    variables = {**BY_TCP, **({"COMMRT_NODES": nodes} if nodes else {})}
    found = of_library(2, grows_twice, counts=counts, env=variables)
    size = 2 + sum(counts)
    new = [*range(2 + counts[0], size)]
    total = 2.0**size - 1
    large = 30_001.0 * (size - 1)
    same = [new, total, total, large, size, 600.0]
    assert found == [[[rank, *same] for rank in range(size)]] * 2


def grows_with(program: list[str] | None, count: int, timeout_s: float) -> Any:
    """Say how grow ends, that the communicator works on, and that grow does again."""
    os.chdir("/")  # code of -c looks for modules here first
    comm = commrt.init()
    begun = time.monotonic()
    try:
        made = comm.grow(count, program=program, timeout_s=timeout_s)
    except CommError as error:
        said: list[Any] = [type(error).__name__, str(error)]
    else:
        said = ["", made.size]
    took_s = time.monotonic() - begun
    assert took_s < timeout_s + 60, took_s
    said += [sum_of(comm)]
    if comm.rank == 0 and program is not None and "fifo" in program:
        with Path(program[-1]).open("w"):  # lets the newcomers go on
            pass
    again = comm.grow(1, program=["-c", JOINS], timeout_s=LIMIT_S)
    return [*said, sum_of(again)]


JOINS = """
import numpy as np
import commrt
comm = commrt.init()
comm.allreduce(np.array([2.0 ** comm.rank]))
"""


TELLS = """
import os, sys
import numpy as np
import commrt
comm = commrt.init()
named = os.environ.get("COMMRT_TIMEOUT_S"), os.environ.get("COMMRT_JOIN")
said = [sys.argv[1:], os.getcwd(), *named, sys.flags.optimize, sys.flags.utf8_mode]
comm.allgather_object([comm.rank, said])
"""


def hears_what_a_newcomer_has() -> Any:
    os.chdir("/")
    os.environ["COMMRT_TIMEOUT_S"] = "599"
    comm = commrt.init()
    program = ["-O", "-X", "utf8", "-c", TELLS, "a b", "--x"]
    grown = comm.grow(1, program=program, timeout_s=LIMIT_S)
    return grown.allgather_object([grown.rank, []])


def test_newcomers_have_program_folder_and_variables(of_library: MpiRun) -> None:
    for said in of_library(2, hears_what_a_newcomer_has, env=BY_TCP):
        new = [["a b", "--x"], "/", "599", None, 1, 1]
        assert said == [[0, []], [1, []], [2, new]]


def grows_beside_modules_in_the_way(folder: str, program: list[str]) -> Any:
    os.chdir(folder)
    return sum_of(commrt.init().grow(1, program=program, timeout_s=LIMIT_S))


def test_modules_of_the_current_folder_are_not_in_the_way(
    of_library: MpiRun, tmp_path: Path
) -> None:
    """They are not in the way of a script in another folder."""
    beside, program = tmp_path / "beside", tmp_path / "train.py"
    beside.mkdir()
    for name in ("commrt", "json", "numpy"):
        (beside / f"{name}.py").write_text("raise ImportError('in the way')")
    program.write_text(JOINS)
    found = of_library(
        *(2, grows_beside_modules_in_the_way),
        folder=str(beside),
        program=[str(program)],
        env=BY_TCP,
    )
    assert found == [7.0, 7.0]


def test_a_program_that_ends_before_it_joins_is_named(of_library: MpiRun) -> None:
    for said in of_library(
        2, grows_with, program=["-c", "pass"], count=2, timeout_s=LIMIT_S, env=BY_TCP
    ):
        assert said[0] == "BackendError"
        assert re.search(
            r"newcomer \d of 2 has not come: its program ended before it called "
            r"commrt.init\(\); the communicator works as before",
            said[1],
        )
        assert said[2:] == [3.0, 7.0]


WAITS = """
import sys
open(sys.argv[2]).read()
import commrt
try:
    commrt.init()
except commrt.errors.BackendError as error:
    sys.stderr.write(f"newcomer: {error}")
    raise
"""


def test_newcomers_that_do_not_come_in_time_are_refused(
    of_library: MpiRun, tmp_path: Path
) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    program = ["-c", WAITS, "fifo", str(fifo)]
    for said in of_library(
        2, grows_with, program=program, count=1, timeout_s=5.0, env=BY_TCP
    ):
        assert said[0] == "TimeoutError_"
        late = r"(0 of 1 newcomers have called|MPI has not started 1 newcomers).*5 s"
        assert re.search(late, said[1]), said[1]
        assert said[2:] == [3.0, 7.0]


def test_one_that_asks_for_other_results_is_refused(of_library: MpiRun) -> None:
    text = "import commrt; commrt.init(deterministic=True)"
    for said in of_library(
        2, grows_with, program=["-c", text], count=1, timeout_s=LIMIT_S, env=BY_TCP
    ):
        assert said[0] == "MismatchError"
        assert "has deterministic=True, and the ranks have False" in said[1]
        assert said[2:] == [3.0, 7.0]


def cannot_start(python: str) -> list[Any]:
    comm = commrt.init()
    sys.executable = python or sys.executable
    with pytest.raises(BackendError) as raised:
        comm.grow(1, timeout_s=LIMIT_S)
    return [str(raised.value), sum_of(comm)]


def test_a_launcher_that_starts_nothing_is_named(tmp_path: Path) -> None:
    # MPICH's launcher says nothing to the ranks, which wait in MPI. The status of Open
    # MPI's one is that of its failure.
    run = mpirun_of("openmpi", tmp_path)
    done = run.failing(2, cannot_start, python="/no/such/python", env=BY_TCP)
    files = tmp_path.glob("cannot_start_*/*.json")
    said = [json.loads(file.read_text()) for file in files]
    assert len(said) == 2, done.describe_failure()
    for words, total in said:
        assert "does not start 1 newcomers" in words
        assert total == 3.0


def starts_what_never_starts_mpi() -> None:
    comm = commrt.init()
    growing_by_mpi._RUNNER = ("-c", "pass")
    with pytest.raises(TimeoutError_) as raised:
        comm.grow(1, timeout_s=4.0)
    sys.stdout.write(json.dumps([str(raised.value), sum_of(comm)]) + "\n")
    sys.stdout.flush()
    comm.barrier()  # without MPI_Finalize, the launcher ends the others


@pytest.mark.parametrize("options", [(), ("--with-ft", "ulfm")])
def test_newcomers_that_never_start_mpi_end_at_the_deadline(
    tmp_path: Path, options: tuple[str, ...]
) -> None:
    run = replace(mpirun_of("openmpi", tmp_path), options=options)
    done = run.failing(2, starts_what_never_starts_mpi, env=BY_TCP)
    assert not done.timed_out
    assert "Segmentation" not in done.stderr
    said = [*lines_of(done.stdout)]
    assert len(said) == 2, done.describe_failure()
    for words, total in said:
        assert "MPI has not started 1 newcomers within 4 s" in words
        assert total == 3.0


def test_ranks_that_cannot_reach_newcomers_say_so(tmp_path: Path) -> None:
    for words, total in mpirun_of("openmpi", tmp_path)(2, cannot_start, python=""):
        assert "OMPI_MCA_btl=self,sm leaves Open MPI no way to reach" in words
        assert total == 3.0


def wrong_calls() -> list[Any]:
    comm = commrt.init()
    rows = []
    calls: dict[str, Callable[[], Any]] = {
        "counts": lambda: comm.grow(1 + comm.rank),
        "text": lambda: comm.grow(1, program="train.py"),
        "empty": lambda: comm.grow(1, program=[]),
        "no script": lambda: comm.grow(1, program=["-u"]),
        "negative": lambda: comm.grow(-1),
        "some": lambda: comm.split(comm.rank // 2).grow(1),
    }
    for call in calls.values():
        try:
            call()
        except CommError as error:
            rows.append([type(error).__name__, str(error)])
    rows.append([comm.grow() is comm, comm.num_waiting(), sum_of(comm)])
    return rows


def test_wrong_calls_are_refused_on_all_ranks(of_library: MpiRun) -> None:
    expected = [
        (MismatchError, r"ask for \[1, 2, 3\] newcomers"),
        (UsageError, r"program='train.py' must be a list"),
        (UsageError, r"program=\[\] must be a list"),
        (UsageError, r"\['-u'\] of Python name no script"),
        (UsageError, r"count=-1 must be a number"),
        (UsageError, r"these are some of them"),
    ]
    for *rows, last in of_library(3, wrong_calls, env=BY_TCP):
        assert last == [True, 0, 7.0]
        for (kind, text), (name, words) in zip(expected, rows, strict=True):
            assert name == kind.__name__
            assert re.search(text, words), words


# -- ranks die -------------------------------------------------------------------------


def is_replaced(dying: list[int]) -> Any:
    """Ranks die one after the other, and a newcomer comes for each."""
    comm = commrt.init()
    size, done = 3, 0
    if comm.joined:
        done = int(comm.bcast(np.zeros(1), root=0)[0])
    for number in range(done, len(dying)):
        if comm.rank == dying[number]:
            die()
        comm = until_it_fails(comm)
        assert sum_of(comm) == 2.0**comm.size - 1
        comm = comm.grow(1, timeout_s=LIMIT_S)
        assert [*comm.joined] == [size - 1]
        comm.bcast(np.full(1, number + 1.0), root=0)
    same = core_of(commrt.init()) is core_of(comm)
    return said_by_all(comm, [comm.rank, comm.size, sum_of(comm), same])


@pytest.mark.full(sample=1)
@pytest.mark.parametrize("nodes", ["", "1"])
@pytest.mark.parametrize("dying", [[1], [0, 1], [2, 0]])
def test_newcomers_take_the_places_of_the_dead(
    ulfm: MpiRun, dying: list[int], nodes: str
) -> None:
    variables = {**BY_TCP, **({"COMMRT_NODES": nodes} if nodes else {})}
    found = ulfm.survivors(3, is_replaced, dying=dying, env=variables)
    assert found
    for said in found.values():
        assert said == [[rank, 3, 7.0, True] for rank in range(3)]


def loses_a_newcomer() -> Any:
    """The newcomer dies as the communicator is made, or later; the ranks go on."""
    comm = commrt.init()
    grown = comm.grow(2, program=["-c", DIES], timeout_s=LIMIT_S)
    came = [*grown.joined]
    try:
        total = sum_of(grown)
    except FAILED:
        total = 0.0
    while grown.size > 2:
        grown = until_it_fails(grown)
    sys.stdout.write(json.dumps([came, total, grown.size, sum_of(grown)]) + "\n")
    sys.stdout.flush()


DIES = """
import os
from mpi4py import MPI
import numpy as np
import commrt, commrt.founding
def die(*_, **__):
    os.kill(os.getpid(), 9)
if MPI.COMM_WORLD.Get_rank() == 0:
    commrt.founding.connect_world = die
comm = commrt.init()
comm.allreduce(np.array([2.0 ** comm.rank]))
die()
"""


def test_newcomers_that_die_are_left_out(ulfm: MpiRun) -> None:
    # The launcher's status is that of the newcomers, which were killed.
    done = ulfm.failing(2, loses_a_newcomer, env=BY_TCP)
    assert not done.timed_out
    said = [*lines_of(done.stdout)]
    assert [each[2:] for each in said] == [[2, 3.0]] * 2, done.describe_failure()
    assert said[0][0] == said[1][0]
    for came, total, *_ in said:
        # Open MPI's launcher ends the other newcomer, too, sooner or later.
        assert (came, total) in (([2], 7.0), ([2], 0.0), ([], 3.0))


def loses_a_rank_meanwhile(when: str) -> Any:
    comm = commrt.init()
    if comm.joined:
        return said_by_all(comm, [comm.size, sum_of(comm), [*comm.joined]])
    if comm.rank == 1 and when == "starting":
        MpiBootstrap.own_comm = lambda *_: die()
    if comm.rank == 1 and when == "connecting":
        commrt.founding.connect_world = lambda *_, **__: die()
    if when == "starting":
        with pytest.raises(PeerFailedError, match=r"call shrink\(\)"):
            comm.grow(1, timeout_s=LIMIT_S)
        comm = comm.shrink(timeout_s=LIMIT_S)
    comm = comm.grow(1, timeout_s=LIMIT_S)
    return said_by_all(comm, [comm.size, sum_of(comm), [*comm.joined]])


@pytest.mark.parametrize("when", ["starting", "connecting"])
def test_a_rank_may_die_while_newcomers_join(ulfm: MpiRun, when: str) -> None:
    found = ulfm.survivors(3, loses_a_rank_meanwhile, when=when, env=BY_TCP)
    assert [*found] == [0, 2]
    for said in found.values():
        assert said == [[3, 7.0, [2]]] * 3
