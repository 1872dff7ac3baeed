# SPDX-License-Identifier: Apache-2.0
"""Latency and bandwidth loops, between two threads with queues for messages."""

from __future__ import annotations

import queue
import threading
from typing import Any

import numpy as np
import pytest

from commrt.bench import point_to_point, timing_loop
from commrt.bench.launch import make_job

Queues = dict[tuple[int, int], "queue.SimpleQueue[Any]"]


class _Later:
    """A request that does its work when waited for."""

    def __init__(self, work: Any) -> None:
        self.wait = work


class _ThreadComm:
    def __init__(self, rank: int, queues: Queues, spoil: bool) -> None:
        self._rank, self._queues, self._spoil = rank, queues, spoil

    def send(self, x: Any, *, dest: int, tag: int, nonblocking: bool = False) -> Any:
        self._queues[dest, tag].put(x + 1 if self._spoil else x.copy())
        return _Later(lambda: None)

    def recv(
        self, out: Any, *, source: int, tag: int, nonblocking: bool = False
    ) -> Any:
        def work() -> None:
            np.copyto(out, self._queues[self._rank, tag].get(timeout=300))

        if nonblocking:
            return _Later(work)
        return work()


class _ThreadPeer:
    size = 2

    def __init__(self, rank: int, shared: dict[str, Any], spoil: bool) -> None:
        self.rank = rank
        self.comm = _ThreadComm(rank, shared["queues"], spoil)
        self.barrier = shared["barrier"].wait
        self._shared = shared["values"]

    def gather(self, values: list[float]) -> list[list[float]] | None:
        self._shared[self.rank] = values
        self.barrier()
        rows = [self._shared[0], self._shared[1]]
        self.barrier()
        return rows if self.rank == 0 else None

    def agree(self, value: float) -> float:
        self._shared[self.rank] = value
        self.barrier()
        agreed = float(self._shared[0])
        self.barrier()
        return agreed


def _rows(mode: str, measure: timing_loop.Measure, spoil: bool = False) -> Any:
    queues: Queues = {(r, tag): queue.SimpleQueue() for r in (0, 1) for tag in (1, 2)}
    shared = {"queues": queues, "barrier": threading.Barrier(2), "values": {}}
    limits = {"iterations": 4, "floor_us": 1.0, "warmup": 1, "window": 3}
    job = make_job("allreduce", [2, 4, 64], mode=mode, **limits)
    rows: dict[int, Any] = {}

    def rank_main(rank: int) -> None:
        peer: Any = _ThreadPeer(rank, shared, spoil)
        rows[rank] = timing_loop.run_job(peer, job, measure)

    other = threading.Thread(target=rank_main, args=(1,))
    other.start()
    rank_main(0)
    other.join()
    assert all(waiting.empty() for waiting in queues.values())
    return rows[0]


def test_latency_is_half_a_round_trip_of_checked_messages() -> None:
    rows = _rows("latency", point_to_point.measure_latency)
    assert [(row["nbytes"], row["valid"]) for row in rows] == [(4, True), (64, True)]
    assert all(3 <= len(row["samples_us"]) <= 4 for row in rows)


@pytest.mark.parametrize(("mode", "ways"), [("bw", 1), ("bibw", 2)])
def test_bandwidth_counts_every_message_of_the_window(mode: str, ways: int) -> None:
    for row in _rows(mode, point_to_point.measure_bandwidth):
        assert row["valid"]
        assert row["MBps"] == pytest.approx(row["nbytes"] * 3 * ways / row["median_us"])


@pytest.mark.parametrize("mode", ["latency", "bibw"])
def test_changed_messages_are_seen(mode: str) -> None:
    measure = (
        point_to_point.measure_latency
        if mode == "latency"
        else point_to_point.measure_bandwidth
    )
    for row in _rows(mode, measure, spoil=True):
        assert not row["valid"]
        assert "not timed" in row["error"]
        assert "samples_us" not in row
