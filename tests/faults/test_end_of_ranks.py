# SPDX-License-Identifier: Apache-2.0
"""Exceptions, signals, aborts and exits: the job ends, and leaves nothing behind."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import commrt
from commrt.comm import core_of

X = 1000
FOR_EVER_S = 500.0
"""Far beyond the deadline of the launch: waiting so long is a failure."""


def shared_memory() -> set[str]:
    """Return commrt's names in /dev/shm."""
    folder = Path("/dev/shm")
    return {file.name for file in folder.glob("*commrt*")} if folder.is_dir() else set()


def raises() -> None:
    comm = commrt.init()
    comm.barrier()
    if comm.rank == 1:
        raise RuntimeError("boom on purpose")
    comm.allreduce(np.ones(X), timeout_s=FOR_EVER_S)


def test_uncaught_exception_ends_the_job(mpirun: Any) -> None:
    done = mpirun.failing(3, raises)
    assert not done.timed_out
    assert done.returncode != 0
    assert "RuntimeError: boom on purpose" in done.stderr
    assert "commrt: rank 1 ended with RuntimeError; aborting the job" in done.stderr


def raises_quietly() -> None:
    comm = commrt.init()
    comm.barrier()
    if comm.rank == 1:
        raise RuntimeError("boom on purpose")
    comm.allreduce(np.ones(X), timeout_s=1)


def test_the_switch_leaves_exceptions_to_the_program(mpirun: Any) -> None:
    env = {"COMMRT_ABORT_ON_EXCEPTION": "0"}
    done = mpirun.failing(2, raises_quietly, env=env)
    assert not done.timed_out
    assert done.returncode != 0
    assert "RuntimeError: boom on purpose" in done.stderr
    assert "aborting the job" not in done.stderr


def interrupted() -> None:
    comm = commrt.init()
    comm.barrier()
    if comm.rank == 1:
        raise KeyboardInterrupt
    comm.allreduce(np.ones(X), timeout_s=FOR_EVER_S)


def test_keyboard_interrupt_ends_the_job(mpirun: Any) -> None:
    done = mpirun.failing(2, interrupted)
    assert not done.timed_out
    assert done.returncode != 0
    assert "rank 1 ended with KeyboardInterrupt; aborting the job" in done.stderr


def killed() -> None:
    comm = commrt.init()
    comm.allreduce(np.ones(100_000))
    request = comm.allreduce(np.ones(100_000), nonblocking=True)
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    request.wait(timeout_s=FOR_EVER_S)
    comm.barrier(timeout_s=FOR_EVER_S)


def killed_with_symmetric_arrays() -> None:
    """The others read and write the arrays of the one that is gone."""
    comm = commrt.init()
    x, out = comm.empty(100_000), comm.empty(100_000)
    comm.allreduce(x, out=out)
    if comm.rank == 1:
        comm.allreduce(x, out=out, nonblocking=True)
        os.kill(os.getpid(), signal.SIGKILL)
    for _ in range(3):
        comm.allreduce(x, out=out, timeout_s=FOR_EVER_S)


@pytest.mark.parametrize("memory", ["memfd", "devshm"])
@pytest.mark.parametrize("function", [killed, killed_with_symmetric_arrays])
def test_killed_rank_ends_the_job_and_leaves_no_shared_memory(
    mpirun: Any, memory: str, function: Any
) -> None:
    before = shared_memory()
    done = mpirun.failing(3, function, env={"COMMRT_SHM": memory})
    assert not done.timed_out
    assert done.returncode != 0
    assert shared_memory() <= before


def aborts() -> None:
    comm = commrt.init()
    comm.barrier()
    if comm.rank == 1:
        comm.abort(13)
    comm.allreduce(np.ones(X), timeout_s=FOR_EVER_S)


def test_abort_ends_the_job_with_its_status(mpirun: Any) -> None:
    done = mpirun.failing(3, aborts)
    assert not done.timed_out
    # MPICH's mpiexec may report the signal that it ends the other ranks with.
    assert done.returncode == 13 or mpirun.flavour == "mpich"
    assert done.returncode != 0


def interrupted_in_wait(blocking: bool) -> list[Any]:
    """SIGINT arrives at rank 0 while it waits for rank 1."""
    comm = commrt.init()
    comm.barrier()
    x = np.ones(X)
    if comm.rank == 1:
        core_of(comm).world.meet(range(2), "interrupted")
        return [0.0, float(comm.allreduce(x)[0])]
    # The main thread is in the wait long before: it does nothing else.
    timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
    request = None if blocking else comm.allreduce(x, nonblocking=True)
    timer.start()
    begin = time.monotonic()
    wait = (
        request.wait
        if request is not None
        else lambda **limit: comm.allreduce(x, **limit)
    )
    with pytest.raises(KeyboardInterrupt):
        wait(timeout_s=FOR_EVER_S)
    elapsed_s = time.monotonic() - begin
    core_of(comm).world.meet(range(2), "interrupted")
    if request is None:
        # The operation goes on by itself; the next one finds it done.
        commrt.synchronize()
    else:
        assert not request.done or x[0] == 2.0
        assert request.wait() is x
    return [elapsed_s, float(x[0])]


@pytest.mark.parametrize("where", ["", "1,1"])
@pytest.mark.parametrize("blocking", [True, False])
def test_ctrl_c_interrupts_a_wait_and_nothing_is_lost(
    mpirun: Any, blocking: bool, where: str
) -> None:
    env = {"COMMRT_NODES": where} if where else {}
    (elapsed_s, total), (_, other) = mpirun(
        2, interrupted_in_wait, env=env, blocking=blocking
    )
    assert elapsed_s < FOR_EVER_S / 10
    assert total == other == 2.0


def exits_with_pending() -> float:
    """Rank 0 starts an operation and ends; rank 1 needs its part in it."""
    comm = commrt.init()
    x = np.ones(300_000)
    request = comm.allreduce(x, nonblocking=True, algorithm="ring")
    if comm.rank == 0:
        comm.keep_until_exit = request  # type: ignore[attr-defined]
        return 0.0
    return float(request.wait()[0])


@pytest.mark.parametrize("where", ["", "1,1"])
def test_a_rank_that_ends_first_does_its_part(mpirun: Any, where: str) -> None:
    env = {"COMMRT_NODES": where} if where else {}
    assert mpirun(2, exits_with_pending, env=env) == [0.0, 2.0]


def exits_with_hopeless() -> None:
    comm = commrt.init()
    comm.barrier()
    if comm.rank == 0:
        request = comm.allreduce(np.ones(X), nonblocking=True)
        comm.keep_until_exit = request  # type: ignore[attr-defined]


@pytest.mark.parametrize("where", ["", "1,1"])
@pytest.mark.parametrize("progress", ["on", "off"])
def test_exit_with_an_operation_that_never_ends_does_not_hang(
    mpirun: Any, where: str, progress: str
) -> None:
    env = {"COMMRT_PROGRESS": progress, **({"COMMRT_NODES": where} if where else {})}
    done = mpirun.failing(2, exits_with_hopeless, env=env)
    assert not done.timed_out
    assert "commrt: rank 0 ends with operations in flight" in done.stderr


def exits_while_a_thread_waits() -> None:
    comm = commrt.init()
    comm.barrier()
    if comm.rank == 0:
        begun = threading.Event()
        request = comm.allreduce(np.ones(X), nonblocking=True)

        def wait() -> None:
            begun.set()
            request.wait()

        threading.Thread(target=wait, daemon=True).start()
        begun.wait()


@pytest.mark.parametrize("where", ["", "1,1"])
@pytest.mark.parametrize("progress", ["on", "off"])
def test_exit_while_a_daemon_thread_waits_does_not_hang(
    mpirun: Any, where: str, progress: str
) -> None:
    env = {"COMMRT_PROGRESS": progress, **({"COMMRT_NODES": where} if where else {})}
    done = mpirun.failing(2, exits_while_a_thread_waits, env=env)
    assert not done.timed_out
    # The thread may learn of an end before its process has ended, or not.
    assert re.search("rank 0 ends with operations in flight|in thread", done.stderr)


def lengths_differ_on_three() -> str:
    """Rank 2 alone sees the wrong length; the others must not wait for ever."""
    comm = commrt.init()
    try:
        comm.allreduce(np.ones(X + (comm.rank == 2)), algorithm="direct",
                       timeout_s=FOR_EVER_S)  # fmt: skip
    except commrt.errors.CommError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def test_a_rank_that_gives_up_ends_the_waits_of_its_node(mpirun: Any) -> None:
    got = mpirun(3, lengths_differ_on_three)
    assert "no error" not in got
    for text in got:
        assert text.startswith(
            ("MismatchError: allreduce #0", "RevokedError: allreduce")
        )
