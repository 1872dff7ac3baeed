# SPDX-License-Identifier: Apache-2.0
"""When calls that are started without Python are forgotten, and what they keep."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from device_call_cache import calls_of_python, num_cached, said, without_python
from staged_ranks import Rank, SimRanks, forget_ranks, on_threads
from started_operations import num_started

from commrt.comm import core_of
from commrt.devices import DeviceArray
from commrt.errors import ClosedError, RevokedError
from commrt.request import DeviceRequest


@pytest.fixture(autouse=True, scope="module")
def no_ranks_left() -> Iterator[None]:
    yield
    forget_ranks()


def ones(rank: Rank, count: int = 8) -> DeviceArray:
    return rank.array(np.full(count, 1 + rank.rank, "f4"))


# --- what is forgotten ---


def test_calls_are_forgotten_with_the_plans() -> None:
    def main(rank: Rank) -> None:
        comm, x = rank.comm, ones(rank)
        core_of(comm).devices.forget_plans()
        assert num_cached(comm) == 0
        for forget in (
            core_of(comm).devices.forget_plans,
            core_of(comm).devices.forget_choices,
        ):
            comm.allreduce(x)
            assert num_cached(comm) == 1
            forget()
            assert num_cached(comm) == 0
            with calls_of_python(comm) as looked_at:
                comm.allreduce(x)
            assert looked_at == ["allreduce"]
        rank.finish()

    ranks = SimRanks(2, 0)
    ranks.run(main)
    ranks.close()


def test_symmetric_memory_forgets_them() -> None:
    def main(rank: Rank) -> None:
        comm, x = rank.comm, ones(rank)
        comm.allreduce(x)
        assert num_cached(comm) == 1
        kept = comm.empty(4)
        assert num_cached(comm) == 0
        comm.allreduce(x)
        assert kept.tolist() == [0.0] * 4

    on_threads(2, main)


def test_a_communicator_that_failed_or_was_freed_starts_nothing() -> None:
    def main(rank: Rank) -> None:
        x = ones(rank)
        comms = [rank.comm.dup(), rank.comm.dup()]
        for comm in comms:
            comm.allreduce(x, nonblocking=True).synchronize()
            with without_python(comm):
                comm.allreduce(x, nonblocking=True).synchronize()
        core_of(comms[0]).give_up("it was told to")
        seq = num_started(comms[0])
        with pytest.raises(RevokedError, match="it was told to"):
            comms[0].allreduce(x)
        assert num_started(comms[0]) == seq
        comms[1].free()
        assert num_cached(comms[1]) == 0
        with pytest.raises(ClosedError, match="was freed"):
            comms[1].allreduce(x)

    on_threads(2, main)


def test_a_work_that_failed_says_so_in_the_next_call() -> None:
    def main(rank: Rank) -> str:
        comm, x = rank.comm, ones(rank)
        comm.allreduce(x, nonblocking=True).synchronize()
        if rank.rank == 1:
            return ""
        request = comm.allreduce(x, nonblocking=True)
        stager = core_of(comm).devices.stager(rank.device)
        stager.give_up("it was told to")
        first = said(request.wait)
        assert said(request.synchronize) == said(request.wait) == first
        with pytest.raises(RevokedError, match="it was told to"):
            comm.allreduce(x)
        rank.stream.synchronize()
        return first

    found = on_threads(2, main, survives=False)
    assert found[0].startswith("RevokedError: allreduce #")


def test_check_mode_knows_no_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMMRT_DEBUG", "check")

    def main(rank: Rank) -> None:
        x = ones(rank)
        for _ in range(3):
            with calls_of_python(rank.comm) as looked_at:
                rank.comm.allreduce(x)
            assert looked_at == ["allreduce"]
        assert num_cached(rank.comm) == 0

    on_threads(2, main)


_FORKS = """
import os, sys
sys.path[:0] = {paths}
import numpy as np
import commrt
from commrt import _native
from commrt.comm import core_of
from commrt.devices import DeviceArray, DeviceStream, ThreadDevice

comm = commrt.init()
device = ThreadDevice()
with DeviceStream(device):
    x = DeviceArray(device, 4).put(np.ones(4, "f4"))
    comm.allreduce(x)
    request = comm.allreduce(x, nonblocking=True)
    assert _native.num_cached_device_calls(core_of(comm)) == 1
    child = os.fork()
    if child == 0:
        found = 0
        for call in (lambda: comm.allreduce(x), request.wait, request.synchronize,
                     request.test):
            try:
                call()
            except commrt.errors.ClosedError as error:
                found += "was forked" in str(error)
        os._exit(found)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    request.wait()
"""


def test_a_forked_process_is_refused(tmp_path: Path) -> None:
    paths = [str(Path(__file__).parents[2] / "support")]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _FORKS.format(paths=paths)],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=tmp_path,
        env={**os.environ, "COMMRT_LAUNCH": "single"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["4"]


# --- what stays alive ---


def test_arrays_of_known_calls_stay_alive_until_the_end() -> None:
    def main(rank: Rank) -> None:
        comm = rank.comm
        first = DeviceArray(rank.device, 8)
        comm.allreduce(first, out=DeviceArray(rank.device, 8), nonblocking=True).wait()
        rank.finish()
        x, out = DeviceArray(rank.device, 8), DeviceArray(rank.device, 8)
        alive = [weakref.ref(x), weakref.ref(out)]
        with without_python(comm):
            request = comm.allreduce(x, out=out, nonblocking=True)
        request.wait()
        del x, out, request
        gc.collect()
        assert None not in [each() for each in alive]
        rank.finish()
        comm.allreduce(first, nonblocking=True).synchronize()
        assert [each() for each in alive] == [None, None]

    ranks = SimRanks(2, 0, preempt=0.0)
    ranks.run(main)
    ranks.close()


def test_a_request_that_failed_and_its_error_go_together() -> None:
    """The error's traceback holds the frame that has the request."""

    class Held:
        pass

    def main(rank: Rank) -> None:
        comm, x = rank.comm, ones(rank)
        held = Held()
        if rank.rank == 1:
            return
        request = comm.allreduce(x, nonblocking=True)
        core_of(comm).give_up("it was told to")

        def ask(kept: Any, one: Any) -> None:
            with pytest.raises(RevokedError):
                one.wait()
            kept.request = one

        ask(held, request)
        rank.stream.synchronize()
        gone = weakref.ref(held), weakref.ref(request)
        del held, request
        gc.collect()
        assert [each() for each in gone] == [None, None]

    on_threads(2, main, survives=False)


def test_a_known_request_that_is_dropped_is_told_of() -> None:
    def main(rank: Rank) -> None:
        x = ones(rank)
        rank.comm.allreduce(x)
        with pytest.warns(ResourceWarning, match="allreduce #.* was dropped without"):
            rank.comm.allreduce(x, nonblocking=True)
        rank.finish()

    ranks = SimRanks(2, 0)
    ranks.run(main)
    ranks.close()


def test_requests_are_made_of_a_communicator_alone() -> None:
    make: Any = DeviceRequest
    for arguments in ([], [None] * 8):
        with pytest.raises(TypeError):
            make(*arguments)
