# SPDX-License-Identifier: Apache-2.0
"""Graphs with calls of NCCL on a GPU; a staged call in a capture is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gpu_cases import MOVED, OWN_HOST, draw, say_own_host
from run_ranks import RunRanks

DEADLINE_S = 300.0


def captured(seed: int) -> dict[str, Any]:
    """Capture calls between launches of the driver's own graphs; launch them thrice."""
    import commrt
    from commrt.devices import DeviceArray, DeviceStream
    from commrt.devices.registry import cuda_device

    say_own_host()
    comm = commrt.init()
    gpu = cuda_device(0)
    wrong = []
    with DeviceStream(gpu) as stream:
        factor = 2.0
        x = DeviceArray(gpu, 1000, "float32")
        out = DeviceArray(gpu, 1000, "float32")
        call: dict[str, Any] = {"op": "premul_sum", "factor": factor}
        comm.allreduce(x.put(np.ones(1000)), out=out, backend="nccl", **call)
        stream.synchronize()
        gpu.begin_capture(stream.handle, 2)
        comm.allreduce(x, out=out, backend="nccl", **call)
        request = comm.allreduce(out, out=x, backend="nccl", nonblocking=True)
        request.wait()
        graph = gpu.end_capture(stream.handle)
        for launch in range(3):
            x.put(np.full(1000, launch + 1.0, "float32"))
            gpu.graph_launch(graph, stream.handle)
            stream.synchronize()
            # The sum of sums of all ranks.
            want = (launch + 1.0) * factor * comm.size**2
            if not (x.get() == want).all():
                wrong.append(f"launch {launch}: {x.get()[:3]}, not {want}")
            comm.allreduce(x, backend="nccl")  # between launches
        stream.synchronize()
        gpu.graph_destroy(graph)
        wrong += each_operation(comm, gpu, stream, seed)
        wrong += refused(comm, gpu, stream, x)
    comm.free()
    return {"wrong": wrong}


def each_operation(comm: Any, gpu: Any, stream: Any, seed: int) -> list[str]:
    """Capture one call of each operation; a launch does what a call does."""
    from commrt.devices import DeviceArray
    from commrt.errors import BackendError

    wrong, made = [], 0
    for case in draw(comm.size, seed, 2):
        if case.dtype.startswith(("float8", "bfloat16")) or case.count == 0:
            continue
        from cases import difference, expected, inputs

        from commrt.vocabulary.operations import operation

        xs = inputs(case)
        want = expected(case, xs)[comm.rank]
        x = DeviceArray(gpu, xs[comm.rank].size, xs[comm.rank].dtype)
        x.put(xs[comm.rank])
        arguments = case.arguments(comm.rank)
        if want is not None and not (case.in_place and operation(case.coll).in_place):
            arguments["out"] = DeviceArray(gpu, want.size, x.dtype)
        call = getattr(comm, case.coll)
        try:
            call(x, backend="nccl", **arguments)
        except BackendError:
            continue
        stream.synchronize()
        x.put(xs[comm.rank])
        gpu.begin_capture(stream.handle, 2)
        out = call(x, backend="nccl", **arguments)
        graph = gpu.end_capture(stream.handle)
        gpu.graph_launch(graph, stream.handle)
        stream.synchronize()
        made += 1
        found = None if want is None else difference(case, xs, out.get(), want)
        if found is not None:
            wrong.append(f"{found} ({case})")
        gpu.graph_destroy(graph)
    return wrong if made >= len(MOVED) // 2 else [*wrong, f"only {made} were captured"]


def refused(comm: Any, gpu: Any, stream: Any, x: Any) -> list[str]:
    """A staged call in a capture raises, and the capture goes on."""
    from commrt.errors import CaptureError

    comm.allreduce(x, algorithm="staged/direct")
    stream.synchronize()
    gpu.begin_capture(stream.handle, 2)
    try:
        comm.allreduce(x, algorithm="staged/direct")
    except CaptureError:
        gpu.graph_destroy(gpu.end_capture(stream.handle))
        return []
    return ["a staged call was captured"]


@pytest.mark.parametrize("size", [1, 2])
def test_calls_of_nccl_are_captured_and_launched(
    size: int, seed: int, nccl_ranks: RunRanks
) -> None:
    found = nccl_ranks(size, captured, env=OWN_HOST, deadline_s=DEADLINE_S, seed=seed)
    assert found == [{"wrong": []}] * size
