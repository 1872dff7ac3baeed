# SPDX-License-Identifier: Apache-2.0
"""How torch.distributed and cupyx.distributed are called: by modules that record it."""

from __future__ import annotations

import json
import multiprocessing
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from commrt.bench import timing_loop
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
        comm = SimpleNamespace(
            rank=0, size=2, bcast=lambda x, root: x, barrier=lambda: None
        )
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
    made.close()
    assert dist.calls[-1][0] == "destroy_process_group"


@pytest.fixture
def start_method() -> Iterator[None]:
    """Leave to later tests how Python starts processes."""
    before = multiprocessing.get_start_method(allow_none=True)
    yield
    multiprocessing.set_start_method(before, force=True)


@pytest.mark.usefixtures("start_method")
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
    assert comm.calls.pop()[0] == "stop"  # the process over which ranks have met
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


@pytest.mark.usefixtures("start_method")
def test_what_cupyx_has_started_does_not_outlive_a_failure(peer: CommrtPeer) -> None:
    """Else this process would wait for it at its end, for ever."""

    def backend(*arguments: Any) -> None:
        multiprocessing.Process(target=time.sleep, args=(600,)).start()
        raise RuntimeError("no driver")

    cuda = SimpleNamespace(
        Device=lambda number: SimpleNamespace(use=lambda: None),
        ExternalStream=lambda handle, number: None,
    )
    distributed = SimpleNamespace(NCCLBackend=backend)
    with pytest.raises(RuntimeError, match="no driver"):
        CupyxPeer(peer, SimpleNamespace(cuda=cuda), distributed)
    for child in multiprocessing.active_children():
        child.join(300)
    assert not multiprocessing.active_children()


class Library(CommrtPeer):
    """A peer that writes down that it was closed."""

    def __init__(self) -> None:
        super().__init__(SimpleNamespace(rank=1, size=2))
        self.closed = 0

    def gather(self, values: list[float]) -> None:
        assert not self.closed

    def close(self) -> None:
        self.closed += 1


@pytest.mark.parametrize("fails", [False, True])
def test_a_launch_ends_its_library_unless_it_failed(
    fails: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """After a failure the others may never come to their end."""
    made = Library()

    def run_job(*arguments: Any) -> list[Any]:
        if fails:
            raise RuntimeError("wrong")
        return []

    monkeypatch.setattr(timing_loop, "run_job", run_job)
    job = tmp_path / "job.json"
    job.write_text(json.dumps({"pin": False}))
    with pytest.raises(RuntimeError) if fails else nullcontext():
        timing_loop.work(str(job), lambda: (made, {}))
    assert made.closed == (not fails)
