# SPDX-License-Identifier: Apache-2.0
"""A CUDA driver whose card is the CPU, for processes that run the real CudaDevice.

``environment()`` returns the variables with which a process finds it: a libcuda.so.1
(``cuda_on_host/``) and a libnvrtc (``nvrtc_on_host/``), which gives the driver commrt's
own kernels, compiled as C++. Nothing of commrt is changed for it. The process itself
may then let calls fail, by ``fail()``.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import kernels_on_cpu
from stub_library import build_stub

__all__ = ["environment", "fail", "library", "num_calls"]


def library() -> Path:
    """Return the driver, compiled where its sources have changed."""
    return build_stub("cuda_on_host", "libcuda.so.1")


def environment(
    *,
    queues: int | None = None,
    max_delay_us: int = 0,
    seed: int = 0,
    guard: bool = True,
    fails: tuple[str, int, int] | None = None,
) -> dict[str, str]:
    """Return variables with which a process that is started finds the driver.

    ``queues`` are hardware queues; None: one for each stream. Before each command a
    stream waits for up to ``max_delay_us``, drawn by the seed. With ``guard`` a host
    thread that touches memory of the device ends its process, as with a card. ``fails``
    are a function of the driver, which of its calls is to fail, and with which result.
    """
    driver, kernels = library(), kernels_on_cpu.build()
    folders = [str(driver.parent), os.environ.get("LD_LIBRARY_PATH", "")]
    nvrtc = build_stub("nvrtc_on_host", "libnvrtc.so.12")
    made = {
        "LD_LIBRARY_PATH": os.pathsep.join(filter(None, folders)),
        "COMMRT_NVRTC_LIB": str(nvrtc),
        # What was compiled names the library of the kernels, and is not for others.
        "COMMRT_KERNEL_CACHE": str(nvrtc.parent / f"of-{kernels.parent.name}"),
        "CUDA_ON_HOST_KERNELS": str(kernels),
        "CUDA_DEVICE_MAX_CONNECTIONS": str(queues or ""),
        "CUDA_ON_HOST_MAX_DELAY_US": str(max_delay_us),
        "CUDA_ON_HOST_SEED": str(seed),
        "CUDA_ON_HOST_GUARD": str(int(guard)),
    }
    if fails is not None:
        made["CUDA_ON_HOST_FAIL"] = ":".join(map(str, fails))
    return made


def fail(function: str, nth: int, result: int) -> None:
    """Let the nth call from now of a function of this process's driver fail.

    ``*`` stands for all functions; 0 lets none fail.
    """
    ctypes.CDLL("libcuda.so.1").cuda_on_host_fail(
        function.encode(), ctypes.c_long(nth), result
    )


def num_calls() -> int:
    """Return how often the function of ``fail()`` was called since."""
    counted = ctypes.CDLL("libcuda.so.1").cuda_on_host_calls
    counted.restype = ctypes.c_long
    return int(counted())
