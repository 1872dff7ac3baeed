# SPDX-License-Identifier: Apache-2.0
"""Benchmarks of arrays on devices: what is timed is right, and a wrong result is seen.

Ranks are threads with a device of threads each; NCCL is the pretended one.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import pytest
from nccl_ranks import nccl_here
from quick_jobs import QUICK

from commrt.bench import (
    device_halo,
    device_leaks,
    device_memory,
    device_parts,
    timing_loop,
    turns,
)
from commrt.bench.bench_operations import MEASURED
from commrt.bench.device_memory import DeviceMemory, Timing
from commrt.bench.launch import make_job
from commrt.bench.options import TURNS
from commrt.bench.peer_nccl import NcclPeer
from commrt.bench.worker import CommrtPeer, measure_of
from commrt.devices import ThreadDevice
from commrt.errors import UsageError
from commrt.local import run

T = TypeVar("T")
DEADLINE_S = 300.0


def on_devices(
    size: int, function: Callable[[CommrtPeer], T], timing: Timing = "events"
) -> list[T]:
    """Run a function on ranks whose arrays are on devices of threads."""

    def main(comm: Any) -> T:
        with ThreadDevice(seed=comm.rank) as device:
            memory = DeviceMemory(device, timing)
            try:
                return function(CommrtPeer(comm, memory))
            finally:
                memory.drain()
                comm.free()
                memory.close()

    return run(size, main, timeout_s=DEADLINE_S)


def rows_of(size: int, coll: str, sizes: list[int], **settings: Any) -> list[Any]:
    """Return rank 0's rows of a job."""
    job = make_job(coll, sizes, **{**QUICK, **settings})
    measure = measure_of(job["mode"])

    def main(peer: CommrtPeer) -> list[Any]:
        return timing_loop.run_job(peer, job, measure)

    return on_devices(size, main, job["timing"])[0]


def is_timed(row: dict[str, Any]) -> bool:
    return (
        bool(row["valid"]) and 0 < row["low_us"] <= row["median_us"] <= row["high_us"]
    )


@pytest.mark.full(sample=6)
@pytest.mark.parametrize("timing", ["events", "host"])
@pytest.mark.parametrize("coll", [spec.name for spec in MEASURED])
def test_every_operation_is_checked_then_timed(coll: str, timing: str) -> None:
    rows = rows_of(2, coll, [8, 1000], timing=timing)
    assert [row["nbytes"] for row in rows] == ([0] if coll == "barrier" else [8, 1000])
    assert all(map(is_timed, rows))


@pytest.mark.parametrize(
    "settings",
    [
        {"in_place": True, "fresh": True},
        {"outstanding": 3},
        {"root": 2, "dtype": "float64"},
    ],
)
def test_other_forms(settings: dict[str, Any]) -> None:
    assert all(map(is_timed, rows_of(3, "reduce", [200_000], **settings)))


@pytest.mark.parametrize("mode", ["latency", "bw", "bibw", "submit"])
def test_messages_and_submission(mode: str) -> None:
    # As in OSU, the receives of a window write one buffer: a race that is meant.
    window = 1 if "libtsan" in os.environ.get("LD_PRELOAD", "") else 3
    (row,) = rows_of(2, "allreduce", [256], mode=mode, window=window, timing="host")
    assert is_timed(row)


def test_overlap_has_kernels_between_the_call_and_its_wait() -> None:
    (row,) = rows_of(2, "allreduce", [4096], mode="device_overlap")
    assert is_timed(row)
    assert 0 <= row["overlap_percent"] <= 100
    assert row["compute_us"] > 0
    assert 0 < row["pure_min_us"] <= row["pure_max_us"]


def test_a_wrong_result_is_never_timed() -> None:
    class Wrong(CommrtPeer):
        def bind(self, coll: str, x: Any, out: Any, root: int) -> Any:
            call, spoiled = super().bind(coll, x, out, root), np.full(1, 99.0)

            def wrong() -> None:
                call()
                if self.rank == 1:
                    self.memory.write(out, out.size - 1, spoiled)

            return wrong

    job = make_job("allreduce", [64], **QUICK)

    def main(peer: CommrtPeer) -> list[Any]:
        return timing_loop.run_job(Wrong(peer.comm, peer.memory), job)

    (row,) = on_devices(2, main)[0]
    assert row["valid"] is False
    assert "samples_us" not in row


@pytest.mark.parametrize("version", [22809, 22703])
def test_raw_nccl_is_a_peer(version: int) -> None:
    has = {"allreduce", "reduce", "bcast", "allgather", "reduce_scatter"}
    if version >= 22800:
        has |= {"alltoall", "gather", "scatter"}

    def main(peer: CommrtPeer) -> list[Any]:
        made = NcclPeer(peer)
        found = []
        for coll in sorted(has):
            job = make_job(coll, [16, 1000], root=1, **QUICK)
            found += timing_loop.run_job(made, job)
        job = make_job("allreduce", [8], mode="submit", in_place=True, **QUICK)
        found += timing_loop.run_job(made, job, measure_of("submit"))
        for coll in ("alltoallv", "barrier"):
            x = peer.memory.empty(4, np.dtype("float32"))
            with pytest.raises(UsageError, match="no function for"):
                made.bind(coll, x, None, 0)
        with pytest.raises(UsageError, match="no type int16"):
            made.bind("allreduce", peer.memory.empty(4, np.dtype("int16")), None, 0)
        made.close()
        return found

    with nccl_here(version):
        rows = on_devices(3, main)[0]
    assert len(rows) == 2 * len(has) + 1
    assert all(map(is_timed, rows))


@pytest.mark.parametrize("size", [1, 2])
def test_a_staged_call_stands_beside_its_parts(size: int) -> None:
    def main(peer: CommrtPeer) -> dict[str, Any]:
        memory = peer.memory
        assert isinstance(memory, DeviceMemory)
        return device_parts.Parts(peer.comm, memory).measured(100_000, 2)

    found = on_devices(size, main)[0]
    assert found["rows"] == [{"valid": True}]
    assert all(us > 0 for part in ("long", "short") for us in found[part].values())
    slower = max(found["long"]["to_host_us"], found["long"]["to_device_us"])
    assert found["of_slower_copy"] == slower / found["long"]["call_us"]
    short = dict(found["short"])
    assert found["of_parts"] == short.pop("call_us") / sum(short.values())
    about = {"ranks": size, "device_name": "D"}
    shown = device_parts.text({}, {**about, **found})
    assert len(shown.splitlines()) == 2 + 5 + 1 + 1 + 7 + 1
    wrong = {**about, **found, "rows": [{"valid": False}]}
    assert "WRONG" in device_parts.text({}, wrong)


@pytest.mark.parametrize("size", [1, 3])
def test_calls_leave_nothing_and_what_is_left_is_seen(size: int) -> None:
    def main(peer: CommrtPeer) -> dict[str, int]:
        memory = peer.memory
        assert isinstance(memory, DeviceMemory)
        return device_leaks.run_calls(peer.comm, memory, 400)

    for found in on_devices(size, main):
        found["resident_nbytes"] = 0  # of a process that runs other tests, too
        assert device_leaks.nothing_is_left(400, found), found
        for name in ("events", "pinned_nbytes", "under_way", "wrong"):
            assert not device_leaks.nothing_is_left(400, {**found, name: 1})
        larger = {**found, "resident_nbytes": device_leaks.MOST_NBYTES + 41}
        assert not device_leaks.nothing_is_left(400, larger)


@pytest.mark.parametrize("operation", TURNS)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_operations_beside_other_ways(operation: str, size: int) -> None:
    job = {"dtype": "float32", "grid": None, "periodic": True, "operation": operation}
    job["density"] = 0.1
    others = ["dense allreduce"] if "topk" in operation else []

    def main(peer: CommrtPeer) -> bool:
        found = turns.ways(peer.comm, job, 1000, peer.memory)
        assert list(found.calls) == ["commrt", *others]
        before = found.is_right()
        for call in found.calls.values():
            call()
        return not before and found.is_right()

    assert on_devices(size, main) == [True] * size


@pytest.mark.parametrize("reduce", [False, True])
def test_a_halo_is_that_of_the_host(reduce: bool) -> None:
    job = {
        "shape": [5, 4, 3],
        "grid": None,
        "width": 1,
        "periodic": True,
        "corners": True,
        "direct": None,
        "reduce": reduce,
        "dtype": "float32",
        "fresh": not reduce,
        "iterations": 2,
        "device": "thread",
        "timing": "events",
    }

    def main(peer: CommrtPeer) -> Any:
        return device_halo.measured(peer.comm, peer.memory, job)

    found, other = on_devices(2, main)
    assert other is None
    (row,) = found["rows"]
    assert row["valid"]
    assert {len(times) for times in row["samples_us"].values()} == {2}
    assert "one copy on the device" in device_halo.text(job, found)
    assert "WRONG" in device_halo.text(
        job, {**found, "rows": [{**row, "valid": False}]}
    )


def test_devices_are_shared_by_the_ranks_of_a_node() -> None:
    assert [device_memory.local_rank(r, (0, 1, 0, 1, 1)) for r in range(5)] == [
        *(0, 0, 1, 1, 2)
    ]
    assert device_memory.local_rank(3, ()) == 3
