# SPDX-License-Identifier: Apache-2.0
"""A call by NCCL that one rank refuses, in processes: how it ends on every rank."""

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


def refused_by_nccl(refuses: int) -> list[Any]:
    """Refuse the second call on one rank; return a result and two errors."""
    os.environ.setdefault("NCCL_HOSTID", f"host{detect().rank}")
    comm = commrt.init()
    gpu = cuda_device(0)
    with DeviceStream(gpu) as stream:
        x = DeviceArray(gpu, COUNT, "float32").put(np.ones(COUNT, "float32"))
        short = DeviceArray(gpu, COUNT - 1, "float32")

        def start(**arguments: Any) -> None:
            comm.allreduce(
                x, algorithm="nccl/native", nonblocking=True, **arguments
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
    """Check what the ranks said: all of them heard at once who refused, and why."""
    assert len(said) > 1
    for rank, (result, first, later) in said.items():
        assert result == len(said)
        if rank == refuses:
            assert first.startswith(f"UsageError: allreduce: out has {COUNT - 1} ")
            assert later.startswith("RevokedError"), later
            assert "refused its call" in later or "another node has ended it" in later
        else:
            assert first.split(":")[0] in ("RefusedError", "RevokedError"), first
            assert f"rank {refuses} has refused its call" in first, first
            assert later.startswith("RevokedError"), later
