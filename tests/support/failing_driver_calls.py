# SPDX-License-Identifier: Apache-2.0
"""Ranks whose CUDA driver fails in the midst of calls, and ranks that are killed there.

They run over ``cuda_on_host``; rank 0 is the one that fails.
"""

from __future__ import annotations

import os
import signal
from typing import Any

import numpy as np

__all__ = ["LIMIT_S", "died", "failed_for_good", "failed_in_turn"]

LIMIT_S = 5.0
COUNT = 4096
DIES = 1


class Calls:
    """An array on the device, and calls on it."""

    def __init__(self, gpu: Any, stream: Any, algorithm: str) -> None:
        from commrt.devices import DeviceArray

        self.x = DeviceArray(gpu, COUNT, "float32")
        self.x.put(np.ones(COUNT, "float32"))
        self.out = DeviceArray(gpu, COUNT, "float32")
        self.algorithm, self.stream = algorithm, stream

    def start(self, comm: Any) -> Any:
        """Make a call; return its request."""
        how: dict[str, Any] = {"nonblocking": True, "timeout_s": LIMIT_S}
        if self.algorithm == "messages":
            other = 1 - comm.rank
            return comm.sendrecv(self.x, dest=other, source=other, out=self.out, **how)
        if self.algorithm == "compressed":
            return comm.allreduce(self.x, out=self.out, compress="float16", **how)
        return comm.allreduce(self.x, algorithm=self.algorithm, **how)

    def said(self, comm: Any) -> str:
        """Make a call and wait for its end; return what it says."""
        from commrt.errors import CommError

        try:
            self.start(comm).synchronize()
        except CommError as error:
            return f"{type(error).__name__}: {error}"
        return "done"


def failed_in_turn(
    algorithm: str, functions: list[str], result: int
) -> dict[str, list[list[str]]]:
    """Let each call of these functions fail that an allreduce makes, in turn.

    Each time the ranks have a communicator of their own. Return what this rank's call
    said, and the next one on the same communicator.
    """
    import cuda_on_host

    import commrt
    from commrt.devices import DeviceStream
    from commrt.devices.registry import cuda_device

    world = commrt.init()
    gpu = cuda_device(0)
    found: dict[str, list[list[str]]] = {name: [] for name in functions}
    with DeviceStream(gpu) as stream:
        calls = Calls(gpu, stream, algorithm)
        for name in functions:
            more = True
            while more:
                comm = world.dup()
                first = calls.said(comm)  # the ranks meet, and make what they need
                assert first == "done", first
                world.barrier()
                if world.rank == 0:
                    cuda_on_host.fail(name, len(found[name]) + 1, result)
                said = calls.said(comm)
                has_failed = cuda_on_host.num_calls() > len(found[name])
                cuda_on_host.fail("", 0, 0)
                more = bool(world.bcast(np.array([has_failed]), root=0)[0])
                if more:
                    found[name].append([said, calls.said(comm)])
                comm.free()
        stream.synchronize()  # nothing is held
    world.free()
    return found


def failed_for_good(algorithm: str, name: str) -> list[str]:
    """Let a call fail with an error that stays; return what two calls say."""
    import cuda_on_host

    import commrt
    from commrt.devices import DeviceStream
    from commrt.devices.registry import cuda_device

    world = commrt.init()
    gpu = cuda_device(0)
    with DeviceStream(gpu) as stream:
        calls = Calls(gpu, stream, algorithm)
        comm = world.dup()
        first = calls.said(comm)
        assert first == "done", first
        world.barrier()
        if world.rank == 0:
            cuda_on_host.fail(name, 1, 719)
        said = [calls.said(comm), calls.said(comm)]
    world.barrier()  # the host's own calls go on
    return said


def died(algorithm: str) -> list[str]:
    """Kill rank 1 in the midst of calls; return what the calls of the others say."""
    import commrt
    from commrt.devices import DeviceStream
    from commrt.devices.registry import cuda_device

    world = commrt.init()
    gpu = cuda_device(0)
    said = ["done"]
    with DeviceStream(gpu) as stream:
        calls = Calls(gpu, stream, algorithm)
        first = calls.said(world)
        assert first == "done", first
        while said[-1] == "done":
            said.append(calls.said(world))
            if world.rank == DIES and len(said) == 20:
                # Half a call is given, and the rest never comes.
                world.allreduce(calls.x, nonblocking=True, algorithm=algorithm)
                os.kill(os.getpid(), signal.SIGKILL)
        stream.synchronize()
        said.append(calls.said(world))
    return said[-2:]
