# SPDX-License-Identifier: Apache-2.0
"""Ranks whose CUDA driver fails in the midst of calls; see ``cuda_on_host``."""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["outcomes"]

LIMIT_S = 5.0
COUNT = 4096


def outcomes(algorithm: str, result: int, first: int, step: int) -> list[list[str]]:
    """Let one call of the driver on rank 0 fail, each in turn, within an allreduce.

    Each time the ranks have a communicator of their own. Return what each said: of the
    call, and of the next one on the same communicator.
    """
    import cuda_on_host

    import commrt
    from commrt.devices import DeviceArray, DeviceStream
    from commrt.devices.registry import cuda_device
    from commrt.errors import CommError

    world = commrt.init()
    gpu = cuda_device(0)
    found = []
    with DeviceStream(gpu) as stream:
        x = DeviceArray(gpu, COUNT, "float32")
        call = {"algorithm": algorithm, "timeout_s": LIMIT_S}

        def said(comm: Any) -> str:
            try:
                comm.allreduce(x, nonblocking=True, **call).synchronize()
            except CommError as error:
                return f"{type(error).__name__}: {error}"
            return "done"

        nth, more = first, True
        while more:
            comm = world.dup()
            x.put(np.ones(COUNT, "float32"))
            assert said(comm) == "done"  # the ranks have met, and have what they need
            world.barrier()
            if world.rank == 0:
                cuda_on_host.fail("*", nth, result)
            first_said, then_said = said(comm), said(comm)
            made = cuda_on_host.num_calls()
            cuda_on_host.fail("*", 0, 0)
            found.append([first_said, then_said])
            more = bool(world.bcast(np.array([made >= nth]), root=0)[0])
            comm.free()
            nth += step
        stream.synchronize()
    world.free()
    return found
