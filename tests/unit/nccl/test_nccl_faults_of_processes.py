# SPDX-License-Identifier: Apache-2.0
"""Faults of calls by NCCL, in processes with the real CudaDevice and no GPU.

The driver is ``cuda_on_host``, and NCCL the pretended one for processes.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cuda_on_host
import numpy as np
import pytest
from nccl_of_processes import NcclOfProcesses, error_of, here
from refused_by_nccl import check_refused, refused_by_nccl
from run_ranks import RunRanks

import commrt
from commrt.comm import Communicator, core_of
from commrt.devices import DeviceArray, DeviceStream
from commrt.devices.registry import cuda_device
from commrt.launch.detect import detect

DEADLINE_S = 300.0
INTERNAL_ERROR, REMOTE_ERROR = 3, 6
NATIVE = "nccl/native"
THREAD_LOCAL = 1
"""The mode of captures that other threads do not disturb."""


class Rank:
    """This rank, its GPU and a stream."""

    def __init__(self) -> None:
        os.environ.setdefault("NCCL_HOSTID", f"host{detect().rank}")
        self.comm = commrt.init()
        self.rank, self.size = self.comm.rank, self.comm.size
        self.gpu = cuda_device(0)
        self.arrays: list[DeviceArray] = []

    def ones(self) -> DeviceArray:
        """Return an array of ones on the GPU, which stays."""
        made = DeviceArray(self.gpu, 1000, "float32")
        self.arrays.append(made.put(np.ones(1000, "float32")))
        return made

    def meet(self, step: str, ranks: list[int] | None = None) -> None:
        """Wait for other ranks without a call of commrt's."""
        everyone = list(range(self.size)) if ranks is None else ranks
        core_of(self.comm).world.bootstrap.exchange(everyone, step, b"", DEADLINE_S)

    def start(self, comm: Communicator, **arguments: Any) -> Any:
        """Begin a sum by NCCL of arrays of ones."""
        return comm.allreduce(
            self.ones(), algorithm=NATIVE, nonblocking=True, **arguments
        )

    def sums(self, comm: Communicator, stream: DeviceStream) -> float:
        """Return an element of the sum of arrays of ones."""
        x = comm.allreduce(self.ones(), algorithm=NATIVE)
        stream.synchronize()
        return float(x.get()[0])


def run(
    folder: Path,
    size: int,
    function: Callable[..., Any],
    *,
    is_whole: bool = True,
    hosts: str | None = None,
    more: dict[str, str] | None = None,
    **arguments: Any,
) -> tuple[dict[int, Any], list[str]]:
    """Return what the ranks that live said, and what was called wrongly."""
    nccl = NcclOfProcesses(folder)
    env = {**cuda_on_host.environment(), **nccl.environment, **(more or {})}
    if hosts is not None:
        env["NCCL_HOSTID"] = hosts
    said = RunRanks(folder).survivors(
        *(size, function), env=env, deadline_s=DEADLINE_S, **arguments
    )
    assert not is_whole or sorted(said) == list(range(size))
    return said, nccl.complaints()


def killed(dies: int) -> list[Any]:
    """Wait in a call by NCCL for a rank that is killed then."""
    me = Rank()
    with DeviceStream(me.gpu) as stream:
        said: list[Any] = [me.sums(me.comm, stream)]
        if me.rank == dies:
            me.meet("started")
            os.kill(os.getpid(), signal.SIGKILL)
        request = me.start(me.comm)
        request.wait()  # the stream's, behind NCCL's work
        me.meet("started")
        said.append(error_of(lambda: request.synchronize(timeout_s=DEADLINE_S)))
        stream.synchronize()  # what NCCL had in it was let go
        said.append(error_of(lambda: me.start(me.comm)))
        said.append(here().counter("aborted"))
    return said


def test_a_rank_that_is_killed_is_named_and_streams_go_on(tmp_path: Path) -> None:
    said, complaints = run(tmp_path, 3, killed, is_whole=False, dies=1)
    assert sorted(said) == [0, 2]
    for result, first, later, aborted in said.values():
        assert result == 3.0
        assert first.startswith("PeerFailedError: allreduce #3 on"), first
        assert "rank 1" in first
        assert "has ended" in first
        assert later.startswith("RevokedError"), later
        assert aborted == 1
    assert complaints == []


def killed_between_launches(dies: int) -> list[Any]:
    """Launch a graph with a call by NCCL that another rank launches no more."""
    me = Rank()
    with DeviceStream(me.gpu) as stream:
        me.sums(me.comm, stream)
        x, out = me.ones(), me.ones()
        me.gpu.begin_capture(stream.handle, THREAD_LOCAL)
        me.comm.allreduce(x, out=out, algorithm=NATIVE)
        graph = me.gpu.end_capture(stream.handle)
        said: list[Any] = []
        for _ in range(2):
            me.gpu.graph_launch(graph, stream.handle)
            stream.synchronize()
            said.append(float(out.get()[0]))
        me.meet("launched")
        if me.rank == dies:
            os.kill(os.getpid(), signal.SIGKILL)
        me.gpu.graph_launch(graph, stream.handle)
        core_of(me.comm).give_up("its peer is gone")
        stream.synchronize()
        said.append(error_of(lambda: me.start(me.comm)))
        me.gpu.graph_destroy(graph)
    return said


def test_a_launch_whose_peer_was_killed_ends_when_the_communicator_is_given_up(
    tmp_path: Path,
) -> None:
    said, complaints = run(tmp_path, 2, killed_between_launches, is_whole=False, dies=1)
    assert list(said) == [0]
    assert said[0][:2] == [2.0, 2.0]
    assert said[0][2].startswith("RevokedError")
    assert complaints == []


def late() -> dict[str, Any]:
    """Call what the last rank does not; use another communicator then."""
    me = Rank()
    said: dict[str, Any] = {}
    with DeviceStream(me.gpu) as stream:
        lost = me.comm.dup()
        said["before"] = me.sums(lost, stream)
        if me.rank != me.size - 1:
            request = me.start(lost, timeout_s=1.0)
            request.wait()
            said["late"] = error_of(request.synchronize)
            stream.synchronize()
            said["later"] = error_of(lambda: me.start(lost))
        me.meet("gave up")
        said["other"] = me.sums(me.comm, stream)
    said["aborted"] = here().counter("aborted")
    return said


def test_who_is_missing_is_named_and_other_communicators_work(
    tmp_path: Path,
) -> None:
    found, complaints = run(tmp_path, 3, late)
    assert all(each["before"] == each["other"] == 3.0 for each in found.values())
    firsts = [found[rank]["late"] for rank in (0, 1)]
    for rank in (0, 1):
        # One tells the other, whose own limit is not over yet.
        text = firsts[rank]
        told = text.startswith("RevokedError") and f"rank {1 - rank} gave up" in text
        assert told or "rank 2 on this node has not started it" in text, text
        assert found[rank]["later"].startswith("RevokedError")
        assert found[rank]["aborted"] == 1
    assert any(text.startswith("TimeoutError_: allreduce #3") for text in firsts)
    assert complaints == []


def injected(background: bool) -> dict[str, Any]:
    """Let NCCL fail on rank 0, in the call or behind it; then use another one."""
    me = Rank()
    said: dict[str, Any] = {}
    with DeviceStream(me.gpu) as stream:
        lost = me.comm.dup()
        me.sums(lost, stream)
        if me.rank == 0 and not background:
            here().fail("ncclAllReduce", INTERNAL_ERROR)
        if me.rank == 0 and background:
            request = me.start(lost)
            here().async_error(REMOTE_ERROR)
            said["error"] = error_of(request.synchronize)
        elif me.rank == 0 or not background:
            said["error"] = error_of(lambda: me.start(lost).synchronize())
        me.meet("failed")
        stream.synchronize()
        said["other"] = me.sums(me.comm, stream)
    return said


@pytest.mark.parametrize("background", [False, True])
def test_an_error_of_nccl_is_told_and_peers_do_not_wait(
    tmp_path: Path, background: bool
) -> None:
    found, complaints = run(tmp_path, 2, injected, background=background)
    assert [each["other"] for each in found.values()] == [2.0, 2.0]
    if background:
        assert found[0]["error"].startswith("PeerFailedError")
        assert "remote process exited" in found[0]["error"]
    else:
        assert "NCCL failed: internal error (3)" in found[0]["error"]
        assert "rank 0 gave up at operation #3" in found[1]["error"]
    assert complaints == []


def unseen() -> float:
    """End the process when no look at flags has seen that a call has ended."""
    me = Rank()
    with DeviceStream(me.gpu) as stream:
        return me.sums(me.comm.dup(), stream)


def test_a_process_ends_well_whose_calls_nobody_has_seen_end(tmp_path: Path) -> None:
    """Progress at the end of the process looked at flags that were given back."""
    found, complaints = run(tmp_path, 2, unseen, more={"COMMRT_PROGRESS": "off"})
    assert found == {0: 2.0, 1: 2.0}
    assert complaints == []


def refused() -> list[str]:
    """Call where NCCL takes no two ranks of a GPU; return what ran instead."""
    me = Rank()
    x = me.comm.allreduce(me.ones())
    assert core_of(me.comm).attached["nccl"].is_agreed
    told = str(me.comm.explain("allreduce", 4000, device="cuda"))
    return [error_of(lambda: me.start(me.comm)), told, str(x.get()[0])]


def test_where_ranks_cannot_share_a_gpu_that_is_said(tmp_path: Path) -> None:
    found, complaints = run(tmp_path, 2, refused, hosts="one host")
    for error, told, result in found.values():
        assert "Duplicate GPU detected" in error or "Duplicate GPU detected" in told
        assert result == "2.0"
    assert complaints == []


def two_communicators(bug: str, watched: str) -> list[float]:
    """Begin two calls before the other rank does; they run one after the other."""
    me = Rank()
    with DeviceStream(me.gpu) as stream:
        both = [me.comm, me.comm.dup()]
        for comm in both:
            me.sums(comm, stream)
            if bug:
                core_of(comm).attached["nccl"].runner(me.gpu).plant(bug)
        if me.rank == 1:
            me.meet("given")
        streams = [DeviceStream(me.gpu) for _ in both]
        begun = [
            comm.allreduce(me.ones(), algorithm=NATIVE, stream=own)
            for comm, own in zip(both, streams, strict=True)
        ]
        if me.rank == 0:
            deadline = time.monotonic() + DEADLINE_S
            while bug and not Path(watched).exists() and time.monotonic() < deadline:
                os.sched_yield()
            me.meet("given")
        for own in streams:
            own.synchronize()
        return [float(x.get()[0]) for x in begun]


@pytest.mark.parametrize("bug", ["", "no_chain"])
def test_communicators_of_a_gpu_take_turns(tmp_path: Path, bug: str) -> None:
    """Or the library complains, which a planted bug shows."""
    watched = str(tmp_path / "complaints of NCCL")
    found, complaints = run(tmp_path, 2, two_communicators, bug=bug, watched=watched)
    assert list(found.values()) == [[2.0, 2.0]] * 2
    if bug:
        assert complaints
        assert all("two communicators run at the same time" in c for c in complaints)
    else:
        assert complaints == []


def test_the_others_hear_of_a_refused_call(tmp_path: Path) -> None:
    said, complaints = run(tmp_path, 3, refused_by_nccl, refuses=1)
    check_refused(said, 1)
    assert complaints == []


def stop(pid: int) -> None:
    """Stop a process, whose threads then look at nothing."""
    os.kill(pid, signal.SIGSTOP)
    while ") T " not in Path(f"/proc/{pid}/stat").read_text():
        os.sched_yield()


def start_with_alarm(me: Rank) -> None:
    """Start a sum; in 0.3 s there is a signal."""
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    me.start(me.comm, timeout_s=DEADLINE_S)


def interrupted() -> list[Any]:
    """Interrupt the wait for a rank that does not look at a refused call."""
    me = Rank()
    said = core_of(me.comm).world.bootstrap.exchange(
        *(range(me.size), "processes", str(os.getpid()).encode(), DEADLINE_S)
    )
    with DeviceStream(me.gpu) as stream:
        found: list[Any] = [me.sums(me.comm, stream)]
        if me.rank == 1:
            stop(int(said[0]))
            short = DeviceArray(me.gpu, 999, "float32")
            found.append(error_of(lambda: me.start(me.comm, out=short)))
            signal.signal(signal.SIGALRM, signal.default_int_handler)
            with pytest.raises(KeyboardInterrupt):
                start_with_alarm(me)
            os.kill(int(said[0]), signal.SIGCONT)
            found.append(error_of(lambda: me.start(me.comm).synchronize()))
        else:
            for _ in range(2):
                found.append(error_of(lambda: me.start(me.comm).synchronize()))
        stream.synchronize()
    return found


def test_ctrl_c_ends_the_wait_after_a_refused_call(tmp_path: Path) -> None:
    said, complaints = run(tmp_path, 2, interrupted)
    result, refused, later = said[1]
    assert (result, refused.split(":")[0], later) == (2.0, "UsageError", "none")
    result, refused, later = said[0]
    assert result == 2.0
    assert "rank 1 has refused its call" in refused
    assert later == "none"
    assert complaints == []
