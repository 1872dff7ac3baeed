# SPDX-License-Identifier: Apache-2.0
"""Collectives on a GPU's arrays; the ranks are threads that share it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from cases import Case, difference, expected, inputs, sample

from commrt.comm import Communicator, core_of
from commrt.devices import DeviceArray, DeviceStream
from commrt.devices.arrays import current_stream
from commrt.errors import TimeoutError_
from commrt.local import run
from commrt.vocabulary.operations import OPERATIONS, operation


def on_gpu(size: int, gpu: Any, function: Callable[[Communicator], Any]) -> list[Any]:
    """Run a function on ranks that have a current stream each."""

    def main(comm: Communicator) -> Any:
        stream = DeviceStream(gpu)
        with stream:
            result = function(comm)
        stream.synchronize()
        comm.free()
        return result

    return run(size, main)


def all_cases(comm: Communicator, gpu: Any, cases: list[Case]) -> list[str]:
    """Run cases on one rank; return what was wrong.

    The ranks share the GPU, and to allocate or free memory may wait for all of it: so
    no rank does while another one's calls are under way.
    """
    made = []
    for case in cases:
        xs = inputs(case)
        want = expected(case, xs)[comm.rank]
        x = DeviceArray(gpu, xs[comm.rank].size, xs[comm.rank].dtype)
        x.put(xs[comm.rank])
        arguments = case.arguments(comm.rank)
        if want is not None and not (case.in_place and operation(case.coll).in_place):
            arguments["out"] = DeviceArray(gpu, want.size, x.dtype)
        made.append((case, xs, want, x, arguments))
    core_of(comm).devices.stager(gpu)
    comm.barrier()
    outs = [
        getattr(comm, case.coll)(x, **arguments) for case, _, _, x, arguments in made
    ]
    gpu.stream_synchronize(current_stream(gpu))
    comm.barrier()
    wrong = []
    for (case, xs, want, _, _), out in zip(made, outs, strict=True):
        found = None if want is None else difference(case, xs, out.get(), want)
        if found is not None:
            wrong.append(f"rank {comm.rank}: {found} ({case})")
    comm.barrier()
    return wrong


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize(
    "coll", [spec.name for spec in OPERATIONS if spec.x_count != "none"]
)
def test_every_operation(coll: str, size: int, seed: int, gpu: Any) -> None:
    cases = sample(coll, size, seed, 6)
    found = on_gpu(size, gpu, lambda comm: all_cases(comm, gpu, cases))
    assert [wrong for each in found for wrong in each] == []


@pytest.mark.parametrize("count", [1, 1000, 3_000_001])
def test_many_in_flight_in_pieces(count: int, gpu: Any) -> None:
    def main(comm: Communicator) -> None:
        xs = [DeviceArray(gpu, count).put(np.full(count, i)) for i in range(20)]
        core_of(comm).devices.stager(gpu)
        comm.barrier()
        requests = [comm.allreduce(x, nonblocking=True) for x in xs]
        for request in requests:
            request.wait()
        for i, x in enumerate(xs):
            assert (x.get() == i * comm.size).all()

    on_gpu(2, gpu, main)


def test_a_peer_that_never_comes_does_not_stop_the_gpu(gpu: Any) -> None:
    ended = threading.Event()

    def main(comm: Communicator) -> None:
        x = DeviceArray(gpu, 8).put(np.ones(8))
        comm.allreduce(x)  # in the first call on a device the ranks meet
        current = current_stream(gpu)
        gpu.stream_synchronize(current)
        comm.barrier()
        if comm.rank == 1:
            ended.wait(300)  # to free memory would hold up what the other one gives
            return
        request = comm.allreduce(x, nonblocking=True, timeout_s=0.2)
        request.wait()
        with pytest.raises(TimeoutError_):
            request.synchronize(timeout_s=30)
        ended.set()

    on_gpu(2, gpu, main)


@pytest.mark.parametrize("name", ["torch", "cupy"])
def test_arrays_and_streams_of_libraries(name: str, gpu: Any) -> None:
    library = pytest.importorskip(name)

    def main(comm: Communicator) -> None:
        if name == "torch":
            stream = library.cuda.Stream()
            with library.cuda.stream(stream):
                x = library.full((1000,), 1.0 + comm.rank, device="cuda")
                comm.allreduce(x)
                y = comm.allgather(x.to(library.bfloat16))
                assert y.float().cpu().tolist() == [[3.0] * 1000] * 2
        else:
            with library.cuda.Stream(non_blocking=True):
                x = library.full(1000, 1.0 + comm.rank, "f4")
                comm.allreduce(x)
                y = comm.allgather(x)
                assert y.get().tolist() == [[3.0] * 1000] * 2

    on_gpu(2, gpu, main)
