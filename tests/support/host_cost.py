# SPDX-License-Identifier: Apache-2.0
"""What a nonblocking call on a device array costs its caller, without the device.

    python tests/support/host_cost.py [--calls 20000] [--progress]

The driver and NCCL are libraries that do nothing but count (``fake_cuda.cpp`` with
``COMMRT_SILENT``, ``silent_nccl.cpp``), so what is left is commrt's own: from the call
to the request in hand. The device's own calls, and what they took here, stand beside:
on a GPU each takes what the driver takes. One rank; with ``--progress`` the progress
thread runs, which every call wakes.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from commrt.comm import core_of

__all__ = ["Cost", "main", "measure"]

_SOURCES = Path(__file__).with_name("fake_libraries")
_BATCH = 16
"""Calls between two looks at the clock."""


@dataclass(frozen=True)
class Cost:
    """What one call took, medians in microseconds."""

    what: str
    """Which engine and call."""
    call_us: float
    """From the call to the request."""
    wait_us: float
    """The request's ``wait()``."""
    drop_us: float
    """To let the request go."""
    num_calls: float
    """Calls of the driver and of NCCL that the first two made."""
    device_us: float
    """What these took."""
    is_known: bool
    """Whether Python had no part in it."""


def build(name: str, source: str, folder: Path) -> Path:
    """Return a library compiled from a source of the tests."""
    compiler = shutil.which("g++")
    assert compiler is not None, "building commrt needs g++, too"
    made = folder / name
    flags = ["-std=c++17", "-O2", "-shared", "-fPIC", "-DCOMMRT_SILENT"]
    command = [compiler, *flags, "-o", str(made), str(_SOURCES / source)]
    subprocess.run(command, check=True, timeout=300)
    return made


def measure(num_calls: int) -> list[Cost]:
    """Return the cost of staged calls, and of calls by NCCL."""
    with tempfile.TemporaryDirectory() as folder:
        driver = build("libsilentcuda.so", "fake_cuda.cpp", Path(folder))
        nccl = build("libnccl.so.2", "silent_nccl.cpp", Path(folder))
        return [*_measure(driver, None, num_calls), *_measure(driver, nccl, num_calls)]


def _measure(driver: Path, nccl: Path | None, num_calls: int) -> list[Cost]:
    from commrt import _native
    from commrt.backends.nccl.attached import NcclFacts
    from commrt.devices import CudaDevice, DeviceArray, DeviceStream
    from commrt.local import run
    from commrt.nccl import Library, libnccl

    counters = ctypes.CDLL(str(driver))
    counters.fake_num_calls.restype = ctypes.c_long
    counters.fake_call_ns.restype = ctypes.c_double
    count: Callable[[], int] = counters.fake_num_calls
    before = list(libnccl._found)
    if nccl is not None:
        of_nccl = ctypes.CDLL(str(nccl)).silent_num_calls
        of_nccl.restype = ctypes.c_long
        opened, problem = _native.nccl_open(str(nccl), only_loaded=False)
        assert opened is not None, problem
        libnccl._found[:] = [Library(opened, "silent")]
        count = lambda: counters.fake_num_calls() + of_nccl()  # noqa: E731
    device = CudaDevice(library=str(driver))
    backend = "staged" if nccl is None else "nccl"

    def main(comm: Any) -> list[Cost]:
        if nccl is None:  # which this process may have from elsewhere
            core_of(comm).attached["nccl"]._agreed = NcclFacts(
                "staged calls are measured"
            )
        core_of(
            comm
        ).devices.flags_without_progress = True  # as the thread would have them
        with DeviceStream(device) as stream:
            x, out = DeviceArray(device, 4), DeviceArray(device, 4)
            label = comm.plan.allreduce(x).label
            assert label.startswith(backend), f"{label} runs, not {backend}"
            in_place = f"{label} allreduce(x)"
            given = f"{label} allreduce(x, out=out)"
            streamed = f"{label} allreduce(x, stream=s)"
            in_full = f"{label} allreduce(x, backend=...)"
            calls: list[tuple[str, Callable[[], Any]]] = [
                (in_place, lambda: comm.allreduce(x, nonblocking=True)),
                (given, lambda: comm.allreduce(x, out=out, nonblocking=True)),
                (
                    streamed,
                    lambda: comm.allreduce(x, stream=stream, nonblocking=True),
                ),
                (
                    in_full,
                    lambda: comm.allreduce(x, backend=backend, nonblocking=True),
                ),
            ]
            call_ns = min(counters.fake_call_ns() for _ in range(9))
            return [
                _time(comm, what, call, num_calls, count, call_ns)
                for what, call in calls
            ]

    try:
        return run(1, main)[0]
    finally:
        libnccl._found[:] = before


def _time(
    comm: Any,
    what: str,
    call: Callable[[], Any],
    num_calls: int,
    count: Callable[[], int],
    call_ns: float,
) -> Cost:
    call().synchronize()  # the first one is looked at in full
    looked_at = []
    look, core_of(comm)._call = (
        core_of(comm)._call,
        lambda *given: looked_at.append(1) or look(*given),
    )
    call().synchronize()
    is_known = not looked_at
    del core_of(comm)._call
    clock = time.perf_counter_ns
    called: list[float] = []
    waited: list[float] = []
    dropped: list[float] = []
    made = 0
    for _ in range(max(2, num_calls // _BATCH)):
        before = count()
        start = clock()
        requests = [call() for _ in range(_BATCH)]
        given = clock()
        for request in requests:
            request.wait()
        end = clock()
        made += count() - before
        for request in requests:
            request.synchronize()
        del request
        last = clock()
        requests.clear()
        gone = clock()
        called.append((given - start) / _BATCH / 1000)
        waited.append((end - given) / _BATCH / 1000)
        dropped.append((gone - last) / _BATCH / 1000)
    each = made / (len(called) * _BATCH)
    times = median(called), median(waited), median(dropped)
    return Cost(what, *times, each, each * call_ns / 1000, is_known)


def main(arguments: list[str] | None = None) -> list[Cost]:
    """Print the table, and return its rows."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--calls", type=int, default=20000, help="of each kind")
    parser.add_argument(
        "--progress", action="store_true", help="with the progress thread"
    )
    given = parser.parse_args(arguments)
    if not given.progress:
        os.environ["COMMRT_PROGRESS"] = "off"
    rows = measure(given.calls)
    print(f"{'us':>48}   call   wait   drop   device's calls")
    for row in rows:
        print(
            f"{row.what:>48} {row.call_us:6.2f} {row.wait_us:6.2f} {row.drop_us:6.2f}"
            f"   {row.num_calls:.0f} in {row.device_us:.2f}"
        )
    return rows


if __name__ == "__main__":
    main()
