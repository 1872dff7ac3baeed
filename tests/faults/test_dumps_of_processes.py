# SPDX-License-Identifier: Apache-2.0
"""Dumps of real processes: what makes a rank write one, and what is then in it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from commrt.launch.mpiexec import child_environment
from commrt.trace.divergence import compare
from commrt.trace.dump_reader import Dump, find_dumps, read_dump

DEADLINE_S = 300.0
PROGRAM = """
import os, signal, sys
import numpy as np
import commrt
from commrt.comm import core_of
from commrt.errors import CommError

what = sys.argv[1]
if what == "own handler":
    signal.signal(signal.SIGTERM, lambda *_: (print("mine"), sys.exit(7)))
comm = commrt.init()
rank, last = comm.rank, comm.size - 1
world = core_of(comm).world
x = np.ones(5)
comm.allreduce(x.copy())

def raises(call):
    try:
        call()
    except CommError as error:
        return type(error).__name__
    return "none"

if what == "timeout":
    if rank != last:
        print(raises(lambda: comm.allreduce(x.copy(), timeout_s=0.4)))
    world.meet(range(comm.size), "given up")
if what == "mismatch":
    print(raises(lambda: comm.allreduce(x[: 4 if rank == last else 5].copy())))
if what == "death":
    if rank == last:
        os.kill(os.getpid(), signal.SIGKILL)
    print(raises(lambda: comm.allreduce(x.copy())))
if what == "exception":
    begun = comm.allreduce(x.copy(), nonblocking=True)
    if rank == 0:
        raise ZeroDivisionError("of the program")
    begun.wait()
    comm.barrier()
if what in ("SIGTERM", "SIGABRT", "own handler"):
    begun = None
    if rank != last:
        begun = comm.allreduce(x.copy(), nonblocking=True)
        name = "SIGABRT" if what == "SIGABRT" else "SIGTERM"
        os.kill(os.getpid(), getattr(signal, name))
        if what == "own handler":
            comm.barrier()
    world.meet([rank], "alone")
if what == "SIGUSR1":
    os.kill(os.getpid(), signal.SIGUSR1)
    print(float(comm.allreduce(x.copy())[0]))
if what == "child":
    # A child that was forked leaves its parent's dump alone.
    child = os.fork()
    if child == 0:
        os.kill(os.getpid(), signal.SIGTERM)
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    print(float(comm.allreduce(x.copy())[0]))
sys.stdout.flush()
if what in ("timeout", "mismatch", "death"):
    os._exit(0)
"""


def run(
    folder: Path, what: str, ranks: int, *, keep_going: bool = True, dumps: bool = True
) -> tuple[subprocess.CompletedProcess[str], list[Dump]]:
    """Return how a job has ended, and its dumps."""
    program, out = folder / "program.py", folder / "dumps"
    program.write_text(PROGRAM)
    words = ["-n", str(ranks), *["--keep-going"] * keep_going, str(program), what]
    environment = child_environment(sys.executable)
    if dumps:
        environment["COMMRT_DUMP"] = str(out)
    done = subprocess.run(
        [sys.executable, "-m", "commrt.run", *words],
        env=environment,
        cwd=os.sep,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    there = sorted(out.glob("*")) if out.exists() else []
    assert [one for one in there if one.suffix != ".json"] == []
    return done, [read_dump(path) for path in find_dumps([out])] if there else []


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_timeout_leaves_dumps_of_all_ranks(tmp_path: Path, ranks: int) -> None:
    done, dumps = run(tmp_path, "timeout", ranks)
    assert done.stdout.split() == ["TimeoutError_"] * (ranks - 1), done.stderr
    assert [one.rank for one in dumps] == [*range(ranks)]
    *those_that_waited, last = dumps
    assert {one.reason for one in those_that_waited} == {"timeout"}
    assert last.reason == "asked"
    assert re.fullmatch(r"rank \d of the job asked for it", last.message)
    found = compare(dumps)
    (one,) = found.divergences
    assert (one.seq, [*one.missing]) == (1, [ranks - 1])
    assert "its last call was allreduce #0" in one.missing[ranks - 1]
    assert [*found.absent] == []


def test_a_mismatch_leaves_a_dump_that_tells_both_calls(tmp_path: Path) -> None:
    done, dumps = run(tmp_path, "mismatch", 3)
    assert "MismatchError" in done.stdout, done.stderr
    assert "mismatch" in {one.reason for one in dumps}
    whole = json.loads(dumps[0].path.read_text())
    assert whole["entries"][-1]["state"] == "failed"


def test_a_death_leaves_dumps_that_have_the_last_words_of_the_dead(
    tmp_path: Path,
) -> None:
    done, dumps = run(tmp_path, "death", 3)
    assert done.stdout.split() == ["PeerFailedError"] * 2, done.stderr
    assert [(one.rank, one.reason) for one in dumps] == [(0, "death"), (1, "death")]
    found = compare(dumps)
    assert found.absent[2].startswith("dead, as rank")
    (one,) = found.divergences
    assert (one.seq, [*one.missing]) == (1, [2])
    assert "its last call was allreduce #0" in one.missing[2]


def test_an_exception_leaves_a_dump_before_it_ends_the_job(tmp_path: Path) -> None:
    done, dumps = run(tmp_path, "exception", 2, keep_going=False)
    assert done.returncode == 1
    assert "ZeroDivisionError: of the program" in done.stderr
    first = dumps[0]
    assert (first.rank, first.reason) == (0, "exception")
    assert first.message == "ZeroDivisionError: of the program"
    # The launcher ends the other one by SIGTERM, if it is not gone by itself.
    assert {one.reason for one in dumps[1:]} <= {
        *("asked", "signal", "death", "exception")
    }


@pytest.mark.parametrize("name", ["SIGTERM", "SIGABRT"])
def test_a_signal_leaves_a_dump_and_ends_the_rank_as_ever(
    tmp_path: Path, name: str
) -> None:
    done, dumps = run(tmp_path, name, 2)
    number = getattr(signal, name)
    assert f"was killed by signal {number:d}" in done.stderr, done.stderr
    one = dumps[0]
    assert (one.rank, one.message) == (0, name)
    assert one.reason == ("signal" if name == "SIGTERM" else "crash")
    last = one.entries[-1]
    assert (last.op, last.seq, last.state) == ("allreduce", 1, "started")
    assert (one.seen[0].rank, one.seen[0].state) == (0, "writing")


def test_sigterm_ends_the_job_with_143(tmp_path: Path) -> None:
    done, dumps = run(tmp_path, "SIGTERM", 2, keep_going=False)
    assert done.returncode == 128 + signal.SIGTERM, done.stderr
    assert dumps[0].message == "SIGTERM"


def test_a_handler_of_the_program_stays_the_only_one(tmp_path: Path) -> None:
    done, dumps = run(tmp_path, "own handler", 2)
    assert done.stdout.split() == ["mine"], done.stderr
    assert [one.rank for one in dumps if one.reason == "signal"] == []


def test_without_a_folder_nothing_is_written(tmp_path: Path) -> None:
    done, dumps = run(tmp_path, "timeout", 2, dumps=False)
    assert done.stdout.split() == ["TimeoutError_"], done.stderr
    assert dumps == []


@pytest.mark.parametrize("ranks", [1, 3])
def test_sigusr1_writes_and_the_program_goes_on(tmp_path: Path, ranks: int) -> None:
    done, dumps = run(tmp_path, "SIGUSR1", ranks)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(float(ranks))] * ranks
    assert [one.rank for one in dumps] == [*range(ranks)]
    assert {(one.reason, one.message) for one in dumps} == {("signal", "SIGUSR1")}


def test_a_forked_child_leaves_the_dump_alone(tmp_path: Path) -> None:
    done, dumps = run(tmp_path, "child", 2)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split()) == ["-15", "-15", "2.0", "2.0"]
    assert dumps == []


def test_a_folder_that_cannot_be_made_is_said_at_init(tmp_path: Path) -> None:
    (tmp_path / "dumps").write_text("a file")
    (tmp_path / "program.py").write_text("import commrt\ncommrt.init()\n")
    environment = child_environment(sys.executable)
    environment["COMMRT_DUMP"] = str(tmp_path / "dumps")
    done = subprocess.run(
        [sys.executable, str(tmp_path / "program.py")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 1
    assert "UsageError: the folder" in done.stderr
    assert "for dumps cannot be made: File exists" in done.stderr
