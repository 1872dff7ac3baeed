# SPDX-License-Identifier: Apache-2.0
"""A call on a device that one rank refuses, in processes: how it ends on each rank."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import numpy as np
from nccl_of_processes import error_of

import commrt
from commrt.devices import DeviceArray, DeviceStream
from commrt.devices.registry import cuda_device
from commrt.launch.detect import detect

__all__ = ["check_refused", "refused_by_nccl"]

COUNT = 1000


def refused_by_nccl(refuses: int, algorithm: str = "nccl/native") -> list[Any]:
    """Refuse the second call on one rank; return a result, and how two calls end."""
    os.environ.setdefault("NCCL_HOSTID", f"host{detect().rank}")
    comm = commrt.init()
    gpu = cuda_device(0)
    with DeviceStream(gpu) as stream:
        x = DeviceArray(gpu, COUNT, "float32").put(np.ones(COUNT, "float32"))
        short = DeviceArray(gpu, COUNT - 1, "float32")

        def start(**arguments: Any) -> None:
            comm.allreduce(
                x, algorithm=algorithm, nonblocking=True, **arguments
            ).synchronize()

        start()
        said: list[Any] = [float(x.get()[0])]
        said.append(
            error_of(lambda: start(**{"out": short} if comm.rank == refuses else {}))
        )
        said.append(error_of(start))
        stream.synchronize()
    return said


def check_refused(said: Mapping[int, Any], refuses: int) -> None:
    """Check what the ranks said: all heard who refused, and went on in step."""
    assert len(said) > 1
    for rank, (result, first, later) in said.items():
        assert result == len(said)
        if rank == refuses:
            assert first.startswith(f"UsageError: allreduce: out has {COUNT - 1} ")
        else:
            assert first.startswith("RefusedError"), first
            assert f"rank {refuses} has refused its call" in first, first
        assert later == "none", later  # all are in step
