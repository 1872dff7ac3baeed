# SPDX-License-Identifier: Apache-2.0
"""Arrays of benchmarks on a device: their values, and whose clock times them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from commrt.bench import cli, compare, formats
from commrt.bench.algorithm import resolve
from commrt.bench.device_memory import DeviceMemory, open_memory
from commrt.bench.engines import submit_engines
from commrt.bench.launch import KINDS, parse_peer
from commrt.bench.options import parse
from commrt.devices import ThreadDevice
from commrt.errors import DeviceMissingError, UsageError
from commrt.launch.detect import detect


@pytest.fixture
def memory() -> Iterator[DeviceMemory]:
    with ThreadDevice(seed=3, max_delay_us=50) as device:
        made = DeviceMemory(device, "events")
        yield made
        made.close()


@pytest.mark.parametrize("dtype", ["uint8", "float16", "float64"])
@pytest.mark.parametrize("count", [0, 1, 7, 32_768, 100_001])
def test_values_come_back(memory: DeviceMemory, count: int, dtype: str) -> None:
    array = memory.empty(count, np.dtype(dtype))
    memory.fill(array, 3)
    assert np.array_equal(memory.read(array, 0, count), np.full(count, 3, dtype))
    if count > 2:
        memory.write(array, 1, np.array([8, 9]))
        assert memory.read(array, 0, 4).tolist()[:3] == [3, 8, 9]
        assert memory.read(array, count - 1, count)[0] in (3, 9)
    array.free()


def test_parts_share_memory(memory: DeviceMemory) -> None:
    array = memory.empty(6, np.dtype("int32"))
    memory.write(array, 0, np.arange(6))
    first, second = memory.split(array, 2)
    memory.fill(second, -1)
    assert memory.read(array, 0, 6).tolist() == [0, 1, 2, -1, -1, -1]
    assert memory.read(first, 1, 3).tolist() == [1, 2]
    array.free()


@pytest.mark.parametrize("timing", ["events", "host"])
def test_the_time_is_up_to_the_end_of_the_work(timing: Any) -> None:
    with ThreadDevice() as device:
        memory = DeviceMemory(device, timing)
        stream, done = memory.stream.handle, []
        gate = device.pinned_alloc(64)
        device.flag_store(gate, 0)

        def call() -> None:  # returns at once; its work waits for the gate
            device.wait_value32_geq(stream, gate, 1)
            device.launch_host(stream, lambda: done.append(1))
            opener.start()

        opener = threading.Thread(target=lambda: device.flag_store(gate, 1))
        took_us = memory.timed(call, 1)
        opener.join()
        assert done == [1]
        assert took_us > 0
        device.pinned_free(gate)
        memory.close()


def test_progress_that_is_off_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMMRT_PROGRESS", "off")
    with pytest.raises(UsageError, match="leave it out"):
        open_memory("thread", "events", 0)


def without_driver() -> bool:
    try:
        open_memory("cuda", "events", 0).close()
    except DeviceMissingError:
        return True
    return False


@pytest.mark.skipif(not without_driver(), reason="here is a GPU")
@pytest.mark.parametrize("benchmark", ["allreduce", "latency", "submit", "compare"])
def test_without_a_gpu_nothing_is_launched(
    benchmark: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([benchmark, "-d", "cuda"]) == 2
    assert "driver" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("allreduce -d thread --symmetric", "host memory"),
        ("allreduce -d thread --nonblocking -t 3", "the device computes"),
        ("submit -d thread --root-call", "waits for nobody"),
        ("compare -d thread --peer mpi4py", "arrays in host memory"),
        ("allreduce -d thread --algorithm ring", "nccl/ring, ipc/ring, staged/ring"),
        ("allreduce -d thread --algorithm shm/ring", "staged/ring"),
        ("allreduce -d gpu", "invalid choice"),
    ],
)
def test_what_means_nothing_is_refused(
    line: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(line.split()) == 2
    assert words in capsys.readouterr().err


def test_peers_that_are_not_here_are_skipped_with_the_reason() -> None:
    peers, skipped = compare.choose_device_peers([], "thread")
    assert [peer.name for peer in peers] == ["commrt"]
    assert set(skipped) == {"nccl", "torch_nccl", "cupyx"}
    assert all("GPUs only" in why for why in skipped.values())
    assert {parse_peer(kind).kind for kind in skipped} <= set(KINDS)
    if without_driver():
        _, skipped = compare.choose_device_peers(["nccl"], "cuda")
        assert "driver" in skipped["nccl"]
    data: dict[str, Any] = {
        "command": ["compare"],
        "machine": {"cpu": "C", "cpus_available": [0]},
        "fresh": False,
        "dtype": "float32",
        "device": "cuda",
        "timing": "events",
        "skipped": {"nccl": "why"},
        "launches": [],
        "failures": [],
    }
    text = compare.report(data)
    assert "Not compared: nccl: why" in text
    assert "arrays on a GPU, timed by events" in text


def test_engines_of_a_submission() -> None:
    assert [each.name for each in submit_engines("allreduce", "thread")] == ["staged"]
    names = [each.kind for each in submit_engines("alltoall", "cuda")]
    assert names == ["commrt", "commrt", "nccl"]
    for coll in ("allreduce", "alltoallv", "gather", "scan"):
        staged = submit_engines(coll, "cuda")[0].candidate
        assert str(resolve(staged, coll, 2, detect(), "cuda")) == staged


def test_osu_names_cuda_in_the_title() -> None:
    text = formats.osu_text([], coll="allreduce", device="cuda")
    assert "# OSU MPI-CUDA Allreduce Latency Test v7.4" in text
    assert "OSU MPI Allreduce" in formats.osu_text(
        [], coll="allreduce", device="thread"
    )
    args = parse(["allreduce"])
    assert (args.device, args.timing) == ("cpu", "events")
