# SPDX-License-Identifier: Apache-2.0
"""How the benchmarks call commrt: against a communicator that records the calls."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from commrt.bench import worker
from commrt.bench.worker import CommrtPeer
from commrt.vocabulary.operations import COLLECTIVES


class _RecordingComm:
    """Stands for a communicator of two ranks; remembers how it was called."""

    size = 2

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.calls: list[tuple[str, int, set[str]]] = []

    def __getattr__(self, name: str) -> Any:
        if name not in COLLECTIVES:
            raise AttributeError(name)

        def call(*arrays: Any, **options: Any) -> None:
            self.calls.append((name, len(arrays), set(options)))

        return call


@pytest.mark.parametrize(
    ("coll", "rank", "in_place", "options"),
    [
        ("allreduce", 0, False, {"out"}),
        ("allreduce", 0, True, set()),
        ("reduce", 0, False, {"out", "root"}),
        ("reduce", 1, False, {"root"}),
        ("bcast", 1, True, {"root"}),
        ("allgather", 1, False, {"out"}),
        ("reduce_scatter", 1, False, {"out"}),
        ("alltoall", 1, False, {"out"}),
        ("gather", 0, False, {"out", "root"}),
        ("gather", 1, False, {"root"}),
        ("scatter", 1, False, {"out", "root"}),
        ("scan", 1, False, {"out"}),
        ("exscan", 0, False, {"out"}),
        ("exscan", 1, True, set()),
        ("allgatherv", 1, False, {"counts", "out"}),
        ("gatherv", 1, False, {"counts", "root"}),
        ("scatterv", 1, False, {"counts", "out", "root"}),
        ("reduce_scatterv", 0, False, {"counts", "out"}),
        ("alltoallv", 1, False, {"send_counts", "recv_counts", "out"}),
    ],
)
def test_calls_follow_the_contract(
    coll: str, rank: int, in_place: bool, options: set[str]
) -> None:
    comm = _RecordingComm(rank)
    x = np.zeros(4, np.float32)
    CommrtPeer(comm).bind(coll, x, None if in_place else x, 0)()
    CommrtPeer(comm).bind_nonblocking(coll, x, None if in_place else x, 0)()
    assert comm.calls == [
        (coll, 1, options),
        (coll, 1, {*options, "nonblocking"}),
    ]


def test_outstanding_calls_are_all_submitted_before_the_first_wait() -> None:
    comm = _RecordingComm(0)
    waited: list[int] = []
    x = np.zeros(4, np.float32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("commrt.request.wait_all", lambda all_: waited.append(len(all_)))
        call = CommrtPeer(comm).bind_outstanding("allreduce", [(x, None), (x, x)], 0)
        call()
    assert waited == [2]
    assert comm.calls == [
        ("allreduce", 1, {"nonblocking"}),
        ("allreduce", 1, {"nonblocking", "out"}),
    ]


def test_barrier_takes_no_array() -> None:
    comm = _RecordingComm(0)
    CommrtPeer(comm).bind("barrier", np.zeros(0), None, 0)()
    assert comm.calls == [("barrier", 0, set())]


def test_every_mode_has_a_measurement() -> None:
    assert worker.measure_of("blocking") is None
    for mode in ("nonblocking", "latency", "bw", "bibw", "submit"):
        assert callable(worker.measure_of(mode))
