# SPDX-License-Identifier: Apache-2.0
"""A log says which stream ordered a call on a device, however that was given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from staged_ranks import Rank, on_threads

from commrt import trace
from commrt.devices import DeviceStream
from commrt.trace.job import join
from commrt.trace.log import Operation
from commrt.trace.perfetto import events_of

X = np.arange(5, dtype=np.float32)


class Spoken:
    """A stream of another library's, by CUDA's protocol."""

    def __init__(self, stream: DeviceStream) -> None:
        self.stream = stream

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.stream.handle


def recorded(main: Callable[[Rank], Any]) -> tuple[list[Any], Any]:
    with trace.record() as recording:
        results = on_threads(2, main)
    return results, join(recording.logs())


def by_rank(job: Any) -> list[list[Operation]]:
    return [log.operations for log in job.logs]


def test_calls_have_the_stream_that_orders_them() -> None:
    def main(rank: Rank) -> list[int | None]:
        own, other = rank.stream, DeviceStream(rank.device)
        rank.asides.append(other)
        comm: Any = rank.comm
        x, out = rank.array(X), rank.array(X)
        on_host = X.copy()  # ranks are threads, and sum in place
        expected: list[int | None] = []
        for _ in range(3):  # new, then known by heart, in turn
            comm.allreduce(on_host)
            comm.allreduce(x)
            with other:
                comm.allreduce(x, out=out)
            comm.allreduce(x, stream=other)
            comm.allreduce(x, stream=other.handle)
            comm.allreduce(x, stream=Spoken(other))
            comm.allreduce(x, stream=None, nonblocking=True).wait()
            expected += [None, own.handle, *[other.handle] * 4, own.handle]
        other.synchronize()
        return expected

    expected, job = recorded(main)
    assert [[one.stream for one in calls] for calls in by_rank(job)] == expected
    for calls in by_rank(job):
        assert [one.seq for one in calls] == list(range(21))


def test_messages_and_barriers_have_it_too() -> None:
    def main(rank: Rank) -> list[int | None]:
        own, other = rank.stream, DeviceStream(rank.device)
        rank.asides.append(other)
        comm: Any = rank.comm
        x, y = rank.array(X), rank.array(0 * X)
        peer = 1 - comm.rank
        for _ in range(2):
            comm.sendrecv(x, out=y, dest=peer, source=peer)
            with other:
                comm.sendrecv(x, out=y, dest=peer, source=peer)
            comm.barrier(stream=other)
            comm.barrier()
            comm.multi_sendrecv(sends=[(x, peer)], recvs=[(y, peer)], stream=other)
        other.synchronize()
        at = other.handle
        return [own.handle, own.handle, at, at, at, None, at, at] * 2

    expected, job = recorded(main)
    assert [[one.stream for one in calls] for calls in by_rank(job)] == expected


def test_each_run_of_a_bound_call_has_the_stream_of_its_moment() -> None:
    def main(rank: Rank) -> list[int]:
        own, other = rank.stream, DeviceStream(rank.device)
        rank.asides.append(other)
        plan = rank.comm.plan
        x, out = rank.array(X), rank.array(X)
        peer = 1 - rank.comm.rank
        moving = plan.allreduce(x, out=out)
        fixed = plan.allreduce(x, out=out, stream=other)
        messages = plan.multi_sendrecv(sends=[(x, peer)], recvs=[(out, peer)])
        for _ in range(2):
            moving()
            fixed.start().wait()
            messages()
            with other:
                moving.start().wait()
                messages()
        other.synchronize()
        mine, at = own.handle, other.handle
        return [mine, at, mine, mine, at, at, at] * 2

    expected, job = recorded(main)
    assert [[one.stream for one in calls] for calls in by_rank(job)] == expected


def test_messages_in_one_direction_that_are_bound() -> None:
    def main(rank: Rank) -> list[int]:
        own, other = rank.stream, DeviceStream(rank.device)
        rank.asides.append(other)
        x, peer = rank.array(X), 1 - rank.comm.rank
        which = "recvs" if rank.comm.rank else "sends"
        lists = {which: [(x, peer)]}
        bound = rank.comm.plan.multi_sendrecv(**lists)
        lists[which].clear()  # of which the bound call has its own
        for _ in range(2):
            bound()
            with other:
                bound()
        other.synchronize()
        return [own.handle, other.handle] * 2

    expected, job = recorded(main)
    assert [[one.stream for one in calls] for calls in by_rank(job)] == expected


def test_halos_on_the_host_and_on_streams_are_told_apart() -> None:
    def main(rank: Rank) -> list[int | None]:
        own, other = rank.stream, DeviceStream(rank.device)
        rank.asides.append(other)
        grid: Any = rank.comm.cart((2,), periodic=True)
        x, y = rank.array(np.arange(8.0)), np.arange(8.0)
        for _ in range(2):
            grid.halo_exchange(y, 1)
            grid.halo_exchange(x, 1)
            with other:
                grid.halo_exchange(x, 1)
            grid.halo_exchange(x, 1, stream=other)
            grid.halo_exchange(np.arange(16.0)[::2], 1)  # not contiguous
        other.synchronize()
        return [None, own.handle, other.handle, other.handle, None] * 2

    expected, job = recorded(main)
    found = [
        [one.stream for one in calls if one.op == "halo_exchange"]
        for calls in by_rank(job)
    ]
    assert found == expected


def test_an_interrupt_within_a_streams_protocol_reaches_the_program() -> None:
    class Interrupted:
        def __cuda_stream__(self) -> tuple[int, int]:
            raise KeyboardInterrupt

    def main(rank: Rank) -> None:
        with pytest.raises(KeyboardInterrupt):
            rank.comm.allreduce(rank.array(X), stream=Interrupted())

    with trace.record() as recording:
        on_threads(2, main)
    assert recording.logs() == []


def test_a_trace_has_a_track_per_stream() -> None:
    def main(rank: Rank) -> int:
        other = DeviceStream(rank.device)
        rank.asides.append(other)
        x = rank.array(X)
        for stream in (rank.stream, other):
            rank.comm.allreduce(x, stream=stream)
        rank.comm.allreduce(X.copy())
        other.synchronize()
        return 3

    tracks, job = recorded(main)
    events = list(events_of(job))
    for rank, num in enumerate(tracks):
        slices = [
            one
            for one in events
            if one["ph"] == "X" and one["pid"] == rank and one["name"] != "waiting"
        ]
        assert len({one["tid"] for one in slices}) == num
        assert len({one["args"].get("stream") for one in slices}) == num


def test_a_stream_that_is_none_is_the_calls_own_error() -> None:
    def main(rank: Rank) -> None:
        x = rank.array(X)
        for wrong in ("fast", object(), 1.5):
            with pytest.raises(Exception, match="stream="):
                rank.comm.allreduce(x, stream=wrong)

    with trace.record() as recording:
        on_threads(2, main)
    assert recording.logs() == []
