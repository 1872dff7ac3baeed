# SPDX-License-Identifier: Apache-2.0
"""Calls by NCCL in captures of streams, and launches of the graphs, between calls."""

from __future__ import annotations

import gc
import os
import random
import time
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from cases import Case
from nccl_ranks import NcclSimRanks, nccl_here, on_nccl_threads
from program_cases import draw
from staged_cases import DeviceAttempt
from staged_ranks import Rank, forget_ranks
from test_nccl_order import QUEUES, check, given, verdict

from commrt import _native
from commrt.comm import core_of
from commrt.devices import DeviceArray, DeviceStream
from commrt.errors import CaptureError, CommError, RevokedError
from commrt.nccl.orders import order_of
from commrt.vocabulary.operations import OPERATIONS

SEEDS, FULL_SEEDS = 1, 60
GOOD_SEEDS, FULL_GOOD_SEEDS = 5, 200
BUGS = [bug for bug in _native.planted_nccl_bugs() if bug.startswith("graph_")]
ALONE = ("graph_flags", "graph_drops", "graph_seed_alone")
"""They have tests of their own; the last one is in test_graphs_beside_mpi.py."""
RELAXED = 2
COLLS = [spec.name for spec in OPERATIONS if spec.nccl != "none"]
BY_ROUNDS = [spec.name for spec in OPERATIONS if spec.x_count != "none"]


@pytest.fixture(autouse=True, scope="module")
def no_ranks_left() -> Iterator[None]:
    yield
    forget_ranks()


def after(device: Any, stream: DeviceStream, before: DeviceStream) -> None:
    """Let a stream wait for what another one was given."""
    event = device.event_create()
    device.event_record(event, before.handle)
    device.stream_wait_event(stream.handle, event)
    device.event_destroy(event)


def quiet(request: Any) -> Any:
    request.be_quiet()
    return request


def launches(groups: list[list[Any]], rank: Rank) -> None:
    """Two graphs of two communicators' calls, launched between calls in other streams.

    No stream of the test waits for another one but where arrays are filled: all that
    orders the operations among each other is theirs.
    """
    first, second = groups[rank.rank][0], groups[rank.rank][-1]
    device, stream, size = rank.device, rank.stream, len(groups)
    gated, other, launcher = (DeviceStream(device) for _ in range(3))
    arrays = [rank.array(given(rank.rank, n, 4 * size)) for n in range(9)]
    first.alltoall(rank.array(given(0, 0, 4 * size)))  # memory for copies is there
    for each in (gated, other, launcher):
        after(device, each, stream)
    # Nothing ends until all is given: what the host saw would order what comes later.
    gate = rank.pin(64)
    device.flag_store(gate, 0)
    if device.memory_flags:
        device.wait_value32_geq(gated.handle, gate, 1)
    with gated:  # nobody waits for this one
        requests = [quiet(first.allreduce(arrays[0], nonblocking=True))]
    device.begin_capture(stream.handle)
    first.allreduce(arrays[1])
    forked = quiet(second.allreduce(arrays[2], nonblocking=True))
    first.allreduce(arrays[3])
    forked.wait()
    graphs = [device.end_capture(stream.handle)]
    device.graph_launch(graphs[0], launcher.handle)
    device.begin_capture(stream.handle)
    # With a copy of its input.
    forked = quiet(first.alltoall(arrays[4], nonblocking=True))
    with other:  # a call that is not in the capture
        requests.append(quiet(second.allreduce(arrays[5], nonblocking=True)))
    second.allreduce(arrays[6])
    forked.wait()
    graphs.append(device.end_capture(stream.handle))
    # After a launch a call in the device's own stream, and after that one a launch.
    device.graph_launch(graphs[1], launcher.handle)
    requests.append(quiet(first.allreduce(arrays[7], nonblocking=True)))
    device.graph_launch(graphs[0], launcher.handle)
    with other:
        second.allreduce(arrays[8])
    device.graph_launch(graphs[1], launcher.handle)
    device.flag_store(gate, 1)
    found = [(n, rank.fetch_in(arrays[n], launcher)) for n in (1, 2, 3, 4, 6)]
    found.append((8, rank.fetch_in(arrays[8], other)))
    for request in requests:
        request.synchronize()
    for each in (launcher, other, gated):
        each.synchronize()
    sums = [sum(given(each, n, 4 * size) for each in range(size)) for n in range(9)]
    for number, value in found:
        twice = number in (1, 2, 3, 6)
        wanted = sums[number] * (size if twice else 1)
        if number == 4:  # there and back
            wanted = given(rank.rank, 4, 4 * size)
        check(rank, f"array {number}", value(), wanted)
    for graph in graphs:
        device.graph_destroy(graph)
    for each in (launcher, other, gated):
        each.destroy()


@pytest.mark.parametrize("queues", QUEUES)
def test_launches_are_ordered_with_calls(queues: int, full: bool, seed: int) -> None:
    seeds = range(seed, seed + (FULL_GOOD_SEEDS if full else GOOD_SEEDS))
    wrong = {
        each: found
        for each in seeds
        if (found := verdict(each, queues, None, launches))
    }
    assert wrong == {}


def test_launches_are_ordered_where_streams_have_no_flags(seed: int) -> None:
    for queues in (1, 8):
        assert verdict(seed, queues, None, launches, memory_flags=False) == ""


@pytest.mark.parametrize("queues", [1, 8])
@pytest.mark.parametrize("bug", [bug for bug in BUGS if bug not in ALONE])
def test_a_planted_bug_is_caught_by_every_seed(
    bug: str, queues: int, full: bool, seed: int
) -> None:
    seeds = range(seed, seed + (FULL_SEEDS if full else SEEDS))
    assert [each for each in seeds if not verdict(each, queues, bug, launches)] == []


def one_rank(bug: str | None, main: Any) -> None:
    """Run a caller without progress beside it, on one simulated rank."""
    with nccl_here():
        ranks = NcclSimRanks(1, 0, bug=bug)
        rank = ranks.ranks[0]

        def caller() -> None:
            rank.begin()
            with rank.stream:
                main(rank)

        ranks.world.run({"caller": caller})
        ranks.close()


def captured(rank: Rank, x: DeviceArray) -> int:
    rank.device.begin_capture(rank.stream.handle)
    rank.comm.allreduce(x)
    return int(rank.device.end_capture(rank.stream.handle))


@pytest.mark.parametrize("bug", [None, "graph_flags"])
def test_a_launch_does_not_tell_of_calls(bug: str | None) -> None:
    """Its flags would have the values of the capture, and take the later ones back."""

    def main(rank: Rank) -> None:
        x = rank.array(np.ones(4, "f4"))
        graph = captured(rank, x)
        request = rank.comm.allreduce(x, nonblocking=True)
        request.wait()
        rank.device.graph_launch(graph, rank.stream.handle)
        rank.stream.synchronize()
        core_of(rank.comm).world.engine.step()
        seen.append(request.done)
        rank.device.graph_destroy(graph)
        if not request.done:
            forget_ranks()
            core_of(rank.comm).give_up("the bug was seen")

    seen: list[bool] = []
    if bug is None:
        one_rank(bug, main)
    else:
        with pytest.raises((AssertionError, CommError)):
            one_rank(bug, main)
        forget_ranks()
    assert seen == [bug is None]


@pytest.mark.parametrize("bug", [None, "graph_drops"])
def test_arrays_stay_alive_until_the_communicator_is_closed(bug: str | None) -> None:
    def main(rank: Rank) -> None:
        comm = rank.comm.dup()
        comm.allreduce(rank.array(np.ones(4, "f4")))
        if bug is not None:
            core_of(comm).attached["nccl"].runner(rank.device).plant(bug)
        x = rank.array(np.ones(4, "f4"))
        rank.device.begin_capture(rank.stream.handle)
        comm.allreduce(x)
        graph = rank.device.end_capture(rank.stream.handle)
        alive = weakref.ref(x)
        rank.arrays.remove(x)
        del x
        # What is dropped goes with a later call.
        comm.allreduce(rank.array(np.ones(4, "f4")))
        gc.collect()
        assert (alive() is not None) == (bug is None)
        rank.device.graph_destroy(graph)
        rank.stream.synchronize()
        comm.free()
        rank.comm.allreduce(rank.array(np.ones(4, "f4")))
        gc.collect()
        assert alive() is None

    with nccl_here():
        on_nccl_threads(1, main)


class Captured(DeviceAttempt):
    """A case that is captured, and launched once."""

    def start(self, comm: Any, *, nonblocking: bool = False) -> Any:
        self.device.begin_capture(self.stream, RELAXED)
        return super().start(comm, nonblocking=nonblocking)

    def settle(self) -> None:
        graph = self.device.end_capture(self.stream)
        self.device.graph_launch(graph, self.stream)
        super().settle()
        self.device.graph_destroy(graph)


def run_captured(rank: Rank, cases: list[Case]) -> list[str]:
    """Capture each case and launch it; return what was wrong."""
    wrong = []
    for case in cases:
        # Whatever the first one of a kind has to make is made before.
        for kind in (DeviceAttempt, Captured):
            attempt = kind(case, rank.comm.rank, rank.device, rank.stream.handle)
            attempt.start(rank.comm)
            if (found := attempt.verdict()) is not None:
                wrong.append(f"{kind.__name__}, rank {rank.rank}: {found} ({case})")
            attempt.free()
    return wrong


@pytest.mark.parametrize("size", [1, 2, 3])
def test_every_collective_is_captured_and_launched(size: int, seed: int) -> None:
    rng = random.Random(f"{size} {seed}")
    cases = [
        Case(
            *(coll, size, "nccl/native", {}, "int32", "sum"),
            count=rng.choice([1, 5, 64]),
            root=rng.randrange(size) if spec.has_root else 0,
        )
        for coll, spec in ((spec.name, spec) for spec in OPERATIONS)
        if coll in COLLS and spec.x_count != "none"
    ]
    for coll in BY_ROUNDS:
        case = draw(coll, size, rng)
        cases.append(
            Case(**{**vars(case), "algorithm": f"nccl/{case.algorithm}"}),
        )
    with nccl_here():
        wrong = on_nccl_threads(size, lambda rank: run_captured(rank, cases))
    assert [line for lines in wrong for line in lines] == []


def test_what_a_capture_cannot_hold_is_refused_and_the_capture_goes_on() -> None:
    def main(rank: Rank) -> None:
        comm, device, stream = rank.comm.dup(), rank.device, rank.stream
        x = rank.array(np.ones(8, "f4"))
        stream.synchronize()
        device.begin_capture(stream.handle)
        said = rf"allreduce on {comm.name}, rank 0: .* communicator is not made yet"
        with pytest.raises(CaptureError, match=said):
            comm.allreduce(x)
        graphs = [device.end_capture(stream.handle)]
        comm.allreduce(x)
        before = comm.allreduce(x, nonblocking=True)
        device.begin_capture(stream.handle)
        with pytest.raises(CaptureError, match="started outside of the capture"):
            before.wait()
        with pytest.raises(CaptureError, match="through host memory"):
            comm.allreduce(x, backend="staged")
        other = DeviceStream(device)
        with pytest.raises(CaptureError, match="not a part of that"):
            comm.allreduce(x, stream=other)  # x says that the captured one orders it
        inside = comm.allreduce(x, nonblocking=True)
        with pytest.raises(CaptureError, match="a stream of the capture"):
            inside.wait(stream=other)
        inside.wait()
        for method in (inside.synchronize, inside.test):
            with pytest.raises(CaptureError, match="as often as that is launched"):
                method()
        assert not inside.done
        assert "captured" in repr(inside)
        graphs.append(device.end_capture(stream.handle))
        with pytest.raises(CaptureError, match="wait for the stream that the graph"):
            inside.wait()
        before.synchronize()
        for graph in graphs:
            device.graph_launch(graph, stream.handle)
        value = rank.fetch(x)
        stream.synchronize()
        assert value().tolist() == [1.0] * 8
        for graph in graphs:
            device.graph_destroy(graph)
        comm.free()

    with nccl_here():
        on_nccl_threads(1, main)


def test_a_capture_that_was_lost_leaves_the_communicator_as_it_was() -> None:
    def main(rank: Rank) -> None:
        device, stream = rank.device, rank.stream
        x = rank.array(np.ones(8, "f4"))
        rank.comm.allreduce(x)
        stream.synchronize()
        device.begin_capture(stream.handle)
        with pytest.raises(CaptureError):
            device.stream_synchronize(stream.handle)
        with pytest.raises(CaptureError, match="was lost before"):
            rank.comm.allreduce(x)
        with pytest.raises(CaptureError):
            device.end_capture(stream.handle)
        rank.comm.allreduce(x)
        value = rank.fetch(x)
        stream.synchronize()
        assert value().tolist() == [1.0] * 8

    with nccl_here():
        on_nccl_threads(1, main)


def test_a_communicator_ends_after_its_graphs() -> None:
    def main(rank: Rank) -> None:
        comm = rank.comm.dup()
        x = rank.array(np.ones(8, "f4"))
        comm.allreduce(x)
        rank.stream.synchronize()
        rank.device.begin_capture(rank.stream.handle)
        comm.allreduce(x)
        graph = rank.device.end_capture(rank.stream.handle)
        comm.free()
        order = order_of(rank.device)
        assert order.sweep() == 1
        rank.device.graph_destroy(graph)
        deadline = time.monotonic() + 300
        while order.sweep():  # a thread ends it
            assert time.monotonic() < deadline
            os.sched_yield()

    with nccl_here():
        on_nccl_threads(1, main)


def test_a_launch_that_waits_in_vain_goes_on_once_somebody_gives_up() -> None:
    """Nobody watches launches: a deadline is none of theirs, an abort is."""

    def main(rank: Rank) -> None:
        lost = rank.comm.dup()
        x = rank.array(np.ones(8, "f4"))
        lost.allreduce(x)
        rank.stream.synchronize()
        rank.device.begin_capture(rank.stream.handle)
        lost.allreduce(x, timeout_s=0.1)
        graph = rank.device.end_capture(rank.stream.handle)
        if rank.rank == 0:
            rank.device.graph_launch(graph, rank.stream.handle)
            core_of(rank.comm).world.engine.step()
            core_of(lost).give_up("rank 1 launches nothing")
            rank.stream.synchronize()
            with pytest.raises(RevokedError):
                lost.allreduce(x)
        core_of(rank.comm).world.bootstrap.exchange([0, 1], "given up", b"", 20)
        rank.device.graph_destroy(graph)
        rank.comm.allreduce(x)

    with nccl_here(is_clean=False):
        on_nccl_threads(2, main)
