# SPDX-License-Identifier: Apache-2.0
"""The real cupyx.distributed as a peer of the benchmarks, without a GPU.

Its own code runs: how ranks meet, what it checks of arrays, what it calls NCCL with.
Only NCCL is the pretended one, in the streams of devices of threads. ``make
test-gpu-libraries`` installs cupy.
"""

from __future__ import annotations

import ctypes
import math
import multiprocessing
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from nccl_ranks import nccl_here
from quick_jobs import QUICK

from commrt import nccl
from commrt.bench import timing_loop
from commrt.bench.device_memory import DeviceMemory
from commrt.bench.launch import make_job
from commrt.bench.peer_cupyx import CupyxPeer
from commrt.bench.worker import CommrtPeer
from commrt.comm import core_of
from commrt.devices import ThreadDevice
from commrt.errors import UsageError
from commrt.local import run

COLLECTIVES = (
    *("allreduce", "bcast", "reduce", "allgather", "reduce_scatter"),
    *("alltoall", "gather", "scatter"),
)
FLOAT32, SUM = 7, 0
"""As nccl.h numbers them."""
_RANKS: dict[int, CommrtPeer] = {}
"""Of this process's threads, by rank: cupyx knows no others."""


@pytest.fixture(autouse=True, scope="module")
def shared_memory() -> None:
    """Let Python have what its processes share, which it keeps from then on."""
    multiprocessing.Value("b")


@pytest.fixture
def cupy() -> Any:
    return pytest.importorskip("cupy", reason="make test-gpu-libraries")


class OfCupy:
    """cupy's functions, where these ask a driver."""

    def __init__(self, cupy: Any) -> None:
        self._cupy = cupy
        self.cuda = SimpleNamespace(
            Device=lambda number: SimpleNamespace(use=lambda: None),
            ExternalStream=cupy.cuda.ExternalStream,
        )

    def asarray(self, array: Any) -> Any:
        """Return an array of cupy in the memory of another one."""
        cuda, told = self._cupy.cuda, array.__cuda_array_interface__
        assert told["strides"] is None
        address, dtype = told["data"][0], np.dtype(told["typestr"])
        nbytes = math.prod(told["shape"]) * dtype.itemsize
        memory = cuda.UnownedMemory(address, nbytes, array, device_id=0)
        pointer = cuda.MemoryPointer(memory, 0)
        return self._cupy.ndarray(told["shape"], dtype, memptr=pointer)


class Communicator:
    """What cupy has for NCCL's communicators, in place of its own."""

    def __init__(self, size: int, unique_id: Any, rank: int) -> None:
        assert size == len(_RANKS)
        assert bytes(each % 256 for each in unique_id) == UNIQUE_ID
        peer = _RANKS[rank]
        memory = peer.memory
        assert isinstance(memory, DeviceMemory)
        self._nccl = nccl.NcclComm.create(
            core_of(peer.comm).world.bootstrap,
            config=nccl.NcclConfig(blocking=True),
            taken=nccl.library(),
            name="cupyx",
            device=memory.device,
        )

    def __getattr__(self, name: str) -> Callable[..., None]:
        library = ctypes.CDLL(nccl.library().path)
        function = getattr(library, f"nccl{name[0].upper()}{name[1:]}")
        pointers = 1 if name in ("send", "recv") else 2

        def call(*given: int) -> None:
            *arguments, stream = given
            code = function(
                *map(ctypes.c_void_p, arguments[:pointers]),
                ctypes.c_size_t(arguments[pointers]),
                *map(ctypes.c_int, arguments[pointers + 1 :]),
                ctypes.c_void_p(self._nccl.pointer),
                ctypes.c_void_p(stream),
            )
            assert code == 0, (name, code)

        return call

    def close(self) -> None:
        self._nccl.close()


UNIQUE_ID = bytes(range(128))


@pytest.fixture
def distributed(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """cupyx.distributed, with the pretended NCCL below it."""
    monkeypatch.setitem(sys.modules, "mpi4py", None)  # it would start MPI
    distributed = pytest.importorskip("cupyx.distributed")
    inside = distributed._nccl_comm
    is_tuple = int(cupy.__version__.split(".")[0]) < 14
    told: Any = tuple(each - 256 * (each > 127) for each in UNIQUE_ID)

    def of_library(name: str) -> None:
        code = getattr(ctypes.CDLL(nccl.library().path), name)()
        assert code == 0, (name, code)

    module = SimpleNamespace(
        NcclCommunicator=Communicator,
        get_unique_id=lambda: told if is_tuple else UNIQUE_ID,
        groupStart=lambda: of_library("ncclGroupStart"),
        groupEnd=lambda: of_library("ncclGroupEnd"),
    )
    monkeypatch.setattr(inside, "nccl", module)
    monkeypatch.setattr(inside, "_nccl_dtypes", {"f": FLOAT32})
    monkeypatch.setattr(inside, "_nccl_ops", {"sum": SUM})
    before = multiprocessing.get_start_method(allow_none=True)
    yield distributed
    multiprocessing.set_start_method(before, force=True)
    _RANKS.clear()


@pytest.mark.filterwarnings("ignore:ExternalStream is deprecated")
@pytest.mark.filterwarnings("ignore:notifyAll..")
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork")
@pytest.mark.parametrize("size", [1, 2, 3])
def test_every_call_is_right_and_timed(size: int, cupy: Any, distributed: Any) -> None:
    """The loop compares each result with the expected one before it times a call."""

    def main(comm: Any) -> list[Any]:
        with ThreadDevice(seed=comm.rank) as device:
            memory = DeviceMemory(device, "events")
            peer = _RANKS[comm.rank] = CommrtPeer(comm, memory)
            comm.barrier()
            made = CupyxPeer(peer, OfCupy(cupy), distributed)
            found = []
            for coll in COLLECTIVES:
                for in_place in {False, coll in ("allreduce", "bcast")}:
                    more = {"root": size - 1, "in_place": in_place}
                    job = make_job(coll, [16, 4000], **more, **QUICK)
                    found += timing_loop.run_job(made, job)
            job = make_job("allreduce", [64], outstanding=3, **QUICK)
            found += timing_loop.run_job(made, job)
            with pytest.raises(UsageError, match="not compared in"):
                made.bind("scan", memory.empty(4, np.dtype("f4")), None, 0)
            memory.drain()
            made._cupyx._comm.close()
            comm.free()
            memory.close()
            return found

    with nccl_here():
        rows = run(size, main, timeout_s=300)[0]
    assert not multiprocessing.active_children()
    assert len(rows) == 2 * (len(COLLECTIVES) + 2) + 1
    for row in rows:
        assert row["valid"], row
        assert row["median_us"] > 0
