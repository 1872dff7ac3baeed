# SPDX-License-Identifier: Apache-2.0
"""What runs buckets of device arrays, and what goes alone or is refused inside."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from ipc_ranks import ipc_here, on_ipc_threads
from nccl_ranks import nccl_here, on_nccl_threads
from staged_ranks import Rank, forget_ranks, on_threads
from test_fused_device import drawn, on_sim, ones

import commrt
from commrt.comm import core_of
from commrt.devices import DeviceArray, ThreadDevice
from commrt.errors import CaptureError, ClosedError, MismatchError, UsageError
from commrt.fusion.device_requests import FusedDeviceRequest

F = np.float32
pytestmark = pytest.mark.filterwarnings("error::ResourceWarning")


@pytest.fixture(autouse=True, scope="module")
def no_ranks_left() -> Iterator[None]:
    yield
    forget_ranks()


# -- with NCCL, with memory of peers ---------------------------------------------------


def test_buckets_run_by_nccl() -> None:
    def main(rank: Rank) -> int:
        return drawn(rank, 5, None)

    with nccl_here() as fake:
        assert min(on_nccl_threads(2, main)) >= 30
        assert fake.counter("kernels") > 0


def test_buckets_run_over_memory_of_peers() -> None:
    def main(rank: Rank) -> int:
        asked = rank.comm.explain("allreduce", 64, device="cuda")
        assert str(asked.choice.candidate).startswith("ipc/")
        return drawn(rank, 5, None)

    with ipc_here():
        os.environ["COMMRT_ALGORITHM"] = "allreduce:ipc/direct"
        try:
            assert min(on_ipc_threads(2, main)) >= 30
        finally:
            del os.environ["COMMRT_ALGORITHM"]


def test_what_a_stream_is_captured_for_goes_by_itself() -> None:
    """A graph may hold a collective by NCCL; it has no bucket."""

    def main(rank: Rank) -> Any:
        device, comm = rank.device, rank.comm
        x, y = ones(rank), ones(rank)
        comm.allreduce(ones(rank))  # NCCL is there
        with comm.fused():
            open_one = comm.allreduce(y, nonblocking=True)
            device.begin_capture(rank.stream.handle, 2)
            captured = comm.allreduce(x, nonblocking=True)
            assert not isinstance(captured, FusedDeviceRequest)
            assert open_one.seq >= 0  # sent before
            with pytest.raises(CaptureError, match="outside of the capture"):
                open_one.wait()
            captured.wait()
            graph = device.end_capture(rank.stream.handle)
        open_one.wait()
        device.graph_launch(graph, rank.stream.handle)
        device.graph_launch(graph, rank.stream.handle)
        found = [rank.fetch(each) for each in (x, y)]
        rank.stream.synchronize()
        device.graph_destroy(graph)
        open_one.synchronize()
        return [value()[0] for value in found]

    with nccl_here():
        assert on_nccl_threads(2, main) == [[6.0, 3.0]] * 2


def test_a_staged_call_refuses_a_stream_that_is_captured() -> None:
    def main(rank: Rank) -> None:
        device, x = rank.device, ones(rank)
        with rank.comm.fused() as context:
            for kwargs in ({}, {"op": "max"}):
                device.begin_capture(rank.stream.handle, 2)
                with pytest.raises(CaptureError, match=r"allreduce on .* captured"):
                    rank.comm.allreduce(x, nonblocking=True, **kwargs)
                graph = device.end_capture(rank.stream.handle)
                device.graph_destroy(graph)
            context.send()  # what was refused has a place in a bucket
            request = rank.comm.allreduce(x, nonblocking=True)
        request.synchronize()

    on_threads(2, main)


# -- what is refused, and what goes alone ----------------------------------------------


def test_what_asks_for_more_goes_by_itself() -> None:
    def main(rank: Rank) -> Any:
        comm, begin = rank.comm, core_of(rank.comm).next_seq
        x = ones(rank)
        more: list[dict[str, Any]] = [
            {"op": "premul_sum", "factor": 2.0},
            {"algorithm": "direct"},
            {"params": {"piece": 16}},
            {"nonblocking": False},
        ]
        with comm.fused():
            for each in more:
                found = comm.allreduce(x, **{"nonblocking": True, **each})
                assert not isinstance(found, FusedDeviceRequest)
                if found is not x:
                    found.wait()
        value = rank.fetch(x)
        rank.stream.synchronize()
        rank.finish()
        return value()[0], core_of(comm).next_seq > begin

    assert on_sim(2, main) == [(48.0, True)] * 2


def test_python_reductions_go_by_themselves_after_what_is_open() -> None:
    def main(rank: Rank) -> None:
        comm, x, y = rank.comm, ones(rank), ones(rank)
        largest = commrt.reduction(np.maximum, commutative=True)
        with comm.fused():
            before = comm.allreduce(y, nonblocking=True)
            request = comm.allreduce(x, op=largest, nonblocking=True)
            assert not isinstance(request, FusedDeviceRequest)
            assert before.seq >= 0  # sent before
            assert request.wait() is x
        before.wait()
        assert x.get().tolist() == [2.0] * 8
        assert y.get().tolist() == [3.0] * 8

    on_threads(2, main)


def test_wrong_calls_are_refused_in_the_call() -> None:
    def main(rank: Rank) -> None:
        comm, x = rank.comm, ones(rank)
        with ThreadDevice() as elsewhere, comm.fused():
            far = DeviceArray(elsewhere, 8)
            for wrong in (
                {"out": np.ones(8, F)},
                {"out": far},
                {"out": ones(rank, 7)},
                {"stream": "fast"},
            ):
                with pytest.raises(UsageError):
                    comm.allreduce(x, nonblocking=True, **wrong)
            with pytest.raises(UsageError, match="in host memory"):
                comm.allreduce(np.ones(3), nonblocking=True, stream=rank.stream)
            foreign = commrt.reduction(lambda a, b: a, dtype="f8")
            with pytest.raises(UsageError, match="takes float64 only"):
                comm.allreduce(x, nonblocking=True, op=foreign)
            far.free()

    on_threads(1, main)


def test_nothing_goes_on_a_closed_communicator() -> None:
    def main(rank: Rank) -> None:
        comm, x = rank.comm.dup(), ones(rank)
        with comm.fused():
            request = comm.allreduce(x, nonblocking=True)
            with pytest.raises(UsageError, match="fused"):
                comm.free()
        request.synchronize()
        comm.free()
        assert request.wait() is x
        assert request.done
        with pytest.raises(ClosedError):
            comm.allreduce(x, nonblocking=True)

    on_threads(2, main)


# -- check mode ------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [None, 1.0])
def test_check_mode_compares_calls_one_by_one(
    limit: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COMMRT_DEBUG", "check")

    def main(rank: Rank) -> str:
        comm = rank.comm
        with comm.fused(time_limit_s=limit):
            good = [comm.allreduce(ones(rank, n), nonblocking=True) for n in (3, 4)]
            with pytest.raises(MismatchError) as caught:
                comm.allreduce(ones(rank, 5 + rank.rank), nonblocking=True)
            good.append(comm.allreduce(ones(rank, 6), nonblocking=True))
        found = [rank.fetch(out) for out in commrt.wait_all(good)]
        rank.stream.synchronize()
        assert [value()[0] for value in found] == [3.0] * 3
        assert all(isinstance(each, FusedDeviceRequest) for each in good)
        return str(caught.value)

    first, second = on_threads(2, main)
    assert first == second


# -- forks -----------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_leaves_the_context_alone() -> None:
    def main(rank: Rank) -> int:
        comm, x = rank.comm, ones(rank)
        status = 1
        with comm.fused():
            request = comm.allreduce(x, nonblocking=True)
            pid = os.fork()
            if pid == 0:
                code = 3
                try:
                    for ask in (request.wait, request.synchronize, request.test):
                        with pytest.raises(ClosedError, match="forked"):
                            ask()
                    assert not request.done
                    core_of(comm).fusion.context.__exit__(None, None, None)
                    del request
                    code = 0
                finally:
                    os._exit(code)
            _, status = os.waitpid(pid, 0)
        request.wait()
        value = rank.fetch(x)
        rank.stream.synchronize()
        assert value()[0] == 1.0
        return os.waitstatus_to_exitcode(status)

    assert on_threads(1, main) == [0]
