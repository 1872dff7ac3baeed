# SPDX-License-Identifier: Apache-2.0
"""How torch.distributed and cupyx.distributed are called: by modules that record it."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from commrt.bench.device_memory import DeviceMemory
from commrt.bench.peer_cupyx import CupyxPeer
from commrt.bench.peer_torch_nccl import TorchNcclPeer
from commrt.bench.worker import CommrtPeer
from commrt.devices import ThreadDevice
from commrt.errors import UsageError


class Recorder:
    """Writes down every call of a method, with its arguments."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any, **more: Any) -> Any:
            self.calls.append((name, args, more))
            return SimpleNamespace(wait=lambda: None)

        return call


class Seen:
    """What a library makes of an array on a device."""

    def __init__(self, array: Any, rows: int = 0) -> None:
        self.address = array.__cuda_array_interface__["data"][0]
        self.size, self.rows, self._array = array.size, rows, array

    def reshape(self, rows: int, columns: int) -> Seen:
        assert columns == -1
        return Seen(self._array, rows)


@pytest.fixture
def peer() -> Iterator[CommrtPeer]:
    with ThreadDevice() as device:
        memory = DeviceMemory(device, "events")
        comm = SimpleNamespace(rank=0, size=2, bcast=lambda x, root: x)
        yield CommrtPeer(comm, memory)
        memory.close()


def test_torch_gets_the_arrays_and_the_stream(peer: CommrtPeer) -> None:
    dist, streams = Recorder(), []
    cuda = SimpleNamespace(
        set_device=lambda device: None,
        ExternalStream=lambda handle, device: handle,
        set_stream=streams.append,
    )
    torch = SimpleNamespace(
        cuda=cuda,
        device=lambda kind, number: (kind, number),
        as_tensor=lambda array, device: Seen(array),
    )
    made = TorchNcclPeer(peer, torch, dist)
    memory: Any = peer.memory
    assert streams == [memory.stream.handle]
    ((name, args, more),) = dist.calls
    assert (name, args, more["rank"], more["world_size"]) == (
        *("init_process_group", ("nccl",)),
        *(0, 2),
    )
    x, out = (memory.empty(8, np.dtype("float32")) for _ in range(2))
    for coll, function, order in (
        ("allreduce", "all_reduce", (x,)),
        ("bcast", "broadcast", (x, 1)),
        ("reduce", "reduce", (x, 1)),
        ("allgather", "all_gather_into_tensor", (out, x)),
        ("reduce_scatter", "reduce_scatter_tensor", (out, x)),
        ("alltoall", "all_to_all_single", (out, x)),
    ):
        made.bind(coll, x, out, 1)()
        name, args, _ = dist.calls[-1]
        assert name == function
        found = [getattr(each, "address", each) for each in args]
        assert found == [getattr(each, "address", each) for each in order]
    made.bind_outstanding("allreduce", [(x, None), (out, None)], 0)()
    assert [more for _, _, more in dist.calls[-2:]] == [{"async_op": True}] * 2
    with pytest.raises(UsageError, match="not compared in scan"):
        made.bind("scan", x, out, 0)


def test_cupyx_gets_the_arrays_and_the_stream(peer: CommrtPeer) -> None:
    comm = Recorder()
    cuda = SimpleNamespace(
        Device=lambda number: SimpleNamespace(use=lambda: None),
        ExternalStream=lambda handle, number: ("stream", handle),
    )
    cupy = SimpleNamespace(cuda=cuda, asarray=Seen)
    made_by: list[Any] = []

    def backend(size: int, rank: int, host: str, port: int) -> Recorder:
        made_by.extend((size, rank, host))
        return comm

    made = CupyxPeer(peer, cupy, SimpleNamespace(NCCLBackend=backend))
    assert made_by == [2, 0, "127.0.0.1"]
    memory: Any = peer.memory
    x, out = (memory.empty(8, np.dtype("float32")) for _ in range(2))
    here, there = x.address, out.address
    for coll, function, wanted in (
        ("allreduce", "all_reduce", [here, there]),
        ("bcast", "broadcast", [here, 1]),
        ("reduce", "reduce", [here, there, 1]),
        ("allgather", "all_gather", [here, there, 8]),
        ("reduce_scatter", "reduce_scatter", [here, there, 8]),
        ("alltoall", "all_to_all", [here, there]),
        ("gather", "gather", [here, there, 1]),
        ("scatter", "scatter", [here, there, 1]),
    ):
        made.bind(coll, x, out, 1)()
        name, args, more = comm.calls[-1]
        assert name == function
        assert [getattr(each, "address", each) for each in args] == wanted
        assert more == {"stream": ("stream", memory.stream.handle)}
        by_rank = [each.rows for each in args if isinstance(each, Seen) and each.rows]
        expected = {"alltoall": [2, 2], "gather": [2], "scatter": [2]}.get(coll, [])
        assert by_rank == expected
    made.bind_outstanding("allreduce", [(x, None), (out, None)], 0)()
    assert len(comm.calls) == 10
    with pytest.raises(UsageError, match="not compared in scan"):
        made.bind("scan", x, out, 0)
