# SPDX-License-Identifier: Apache-2.0
"""NaN and infinity in arrays on devices are found before they leave."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from device_carriers import Run
from nccl_ranks import nccl_here, on_nccl_threads
from staged_ranks import Rank, SimRanks, on_threads

import commrt
from commrt.devices import DeviceStream
from commrt.errors import NotFiniteError, RefusedError
from commrt.group import finite_values

COUNT, AT = 5000, 4321
ADDED = commrt.reduction(lambda a, b: np.add(a, b, out=b), commutative=True)


@pytest.fixture(autouse=True)
def in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let an array take several copies."""
    monkeypatch.setattr(finite_values, "_COPIED_NBYTES", 4096)


def array(rank: Rank, *, is_bad: bool, dtype: Any = "f4") -> Any:
    values = np.ones(COUNT, dtype)
    if is_bad:
        values[AT], values[-1] = np.inf, np.nan
    return rank.array(values)


def checking(rank: Rank) -> Any:
    comm = rank.comm.dup()
    comm.timeout_s = 300
    comm.nan_check = True
    return comm


CALLS: dict[str, Callable[[Any, Any, str], Any]] = {
    "blocking": lambda comm, x, name: comm.allreduce(x, backend=name),
    "nonblocking": lambda comm, x, name: comm.allreduce(
        x, backend=name, nonblocking=True
    ),
    "chosen": lambda comm, x, name: comm.allreduce(x, nonblocking=True),
    "planned": lambda comm, x, name: comm.plan.allreduce(x, backend=name).start(),
    "bcast": lambda comm, x, name: comm.bcast(x, root=1, nonblocking=True),
    "alltoall": lambda comm, x, name: comm.alltoall(x, nonblocking=True),
}


def ended_by(start: Callable[[], Any]) -> str:
    """Return what ends a call, blocking or not; empty: nothing."""
    try:
        request = start()
        if hasattr(request, "synchronize"):
            request.synchronize()
    except RefusedError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("call", CALLS)
def test_a_collective_is_refused(carrier: tuple[str, Run], call: str) -> None:
    name, run = carrier

    def main(rank: Rank) -> None:
        comm = checking(rank)
        begin = CALLS[call]
        good = array(rank, is_bad=False)
        for _ in range(2):  # the second one may be known
            assert ended_by(lambda: begin(comm, good, name)) == ""
            rank.stream.synchronize()
        bad = array(rank, is_bad=rank.rank == 1)
        if rank.rank == 1:
            words = rf"rank 1: x has infinity at element {AT} of {COUNT}"
            with pytest.raises(NotFiniteError, match=words):
                begin(comm, bad, name)
        else:
            told = ended_by(lambda: begin(comm, bad, name))
            rank.stream.synchronize()
        # A blocking call has not waited for its end: the next one tells, and is made.
        later = ended_by(lambda: comm.allreduce(np.ones(1)))
        if rank.rank == 0:
            assert f"x has infinity at element {AT}" in told + later
        assert comm.allreduce(np.ones(1))[0] == 2
        rank.stream.synchronize()

    run(2, main)


@pytest.mark.parametrize("asked", [{"compress": "bfloat16"}, {"op": ADDED}])
def test_a_call_that_the_host_runs_is_refused(asked: dict[str, Any]) -> None:
    def main(rank: Rank) -> None:
        comm = checking(rank)
        good, bad = array(rank, is_bad=False), array(rank, is_bad=rank.rank == 1)
        calls = [
            lambda x: comm.allreduce(x, nonblocking=True, **asked),
            lambda x: comm.plan.allreduce(x, **asked).start(),
        ]
        for call in calls:
            call(good).synchronize()
            if rank.rank == 1:
                with pytest.raises(NotFiniteError, match=f"element {AT} of"):
                    call(bad)
            else:
                with pytest.raises(RefusedError, match="rank 1 has refused its call"):
                    call(bad).synchronize()
            call(good).synchronize()
        rank.stream.synchronize()
        comm.free()

    on_threads(2, main)


def test_calls_in_buckets_are_looked_at() -> None:
    def main(rank: Rank) -> None:
        comm = checking(rank)
        good, bad = array(rank, is_bad=False), array(rank, is_bad=True)
        with comm.fused():
            for _ in range(2):
                comm.allreduce(good, nonblocking=True).wait()
            with pytest.raises(NotFiniteError, match=f"element {AT} of"):
                comm.allreduce(bad, nonblocking=True)
        rank.stream.synchronize()
        comm.free()

    on_threads(2, main)


MESSAGES: dict[str, Callable[[Any, Any, Any, int], Any]] = {
    "send": lambda comm, x, y, peer: comm.send(x, peer, nonblocking=True),
    "sendrecv": lambda comm, x, y, peer: comm.sendrecv(x, peer, y, peer),
    "list": lambda comm, x, y, peer: comm.multi_sendrecv(
        sends=[(x, peer)], recvs=[(y, peer)]
    ),
    "planned send": lambda comm, x, y, peer: comm.plan.send(x, dest=peer)(),
    "planned list": lambda comm, x, y, peer: comm.plan.multi_sendrecv(
        sends=[(x, peer)], recvs=[(y, peer)]
    )(),
}


@pytest.mark.parametrize("kind", MESSAGES)
def test_a_message_does_not_leave(kind: str) -> None:
    def main(rank: Rank) -> None:
        comm = checking(rank)
        x, y = array(rank, is_bad=True), array(rank, is_bad=False)
        with pytest.raises(NotFiniteError, match=f"infinity at element {AT} of"):
            MESSAGES[kind](comm, x, y, 1 - rank.rank)
        assert comm.allreduce(np.ones(1))[0] == 2
        rank.stream.synchronize()
        comm.free()

    on_threads(2, main)


def test_a_list_by_nccl_is_refused() -> None:
    def main(rank: Rank) -> None:
        comm = checking(rank)
        x, y = array(rank, is_bad=rank.rank == 1), array(rank, is_bad=False)
        messages = {"sends": [(x, 1 - rank.rank)], "recvs": [(y, 1 - rank.rank)]}
        good = {"sends": [(y, 1 - rank.rank)], "recvs": [(x, 1 - rank.rank)]}
        call = comm.multi_sendrecv
        call(**good, backend="nccl", nonblocking=True).synchronize()
        x = array(rank, is_bad=rank.rank == 1)
        messages["sends"] = [(x, 1 - rank.rank)]
        rank.comm.barrier()
        if rank.rank == 1:
            with pytest.raises(NotFiniteError, match=r"sends\[0\]: x has infinity"):
                call(**messages, backend="nccl")
        else:
            with pytest.raises(RefusedError, match=r"sends\[0\]: x"):
                call(**messages, backend="nccl", nonblocking=True).synchronize()
        call(**good, backend="nccl", nonblocking=True).synchronize()
        assert comm.allreduce(np.ones(1))[0] == 2
        rank.stream.synchronize()

    with nccl_here(is_clean=False):
        on_nccl_threads(2, main)


def test_what_is_finite_or_no_float_is_sent() -> None:
    def main(rank: Rank) -> list[float]:
        comm = checking(rank)
        sums = []
        for dtype in ("f4", "f8", "i4", "i8"):
            x = array(rank, is_bad=False, dtype=dtype)
            comm.allreduce(x)
            seen = rank.fetch(x)
            rank.stream.synchronize()
            sums.append(float(seen()[AT]))
        comm.free()
        return sums

    assert on_threads(2, main) == [[2.0] * 4] * 2


def test_a_captured_call_is_not_looked_at() -> None:
    """Its values are those of each launch of the graph."""

    def main(rank: Rank) -> None:
        comm = checking(rank)
        x = array(rank, is_bad=False)
        comm.allreduce(x, backend="nccl")
        rank.stream.synchronize()
        rank.fill(x, np.nan)
        rank.device.begin_capture(rank.stream.handle, 2)
        comm.allreduce(x, backend="nccl")
        graph = rank.device.end_capture(rank.stream.handle)
        rank.device.graph_destroy(graph)
        rank.stream.synchronize()

    with nccl_here(is_clean=False):
        on_nccl_threads(2, main)


@pytest.mark.parametrize("seed", range(4))
def test_the_check_comes_after_the_streams_of_the_array(seed: int) -> None:
    """The call's stream is another one than what the array is ordered by."""

    def main(rank: Rank) -> float:
        rank.comm.nan_check = True
        x = rank.array(np.ones(100, "f4"))
        side = DeviceStream(rank.device)
        rank.comm.allreduce(x, stream=side)
        follow = rank.device.event_create()
        rank.device.event_record(follow, side.handle)
        rank.device.stream_wait_event(rank.stream.handle, follow)
        value = rank.fetch(x)
        rank.stream.synchronize()
        rank.device.event_destroy(follow)
        rank.comm.nan_check = False
        return float(value()[0])

    ranks = SimRanks(2, seed)
    assert ranks.run(main) == [2.0, 2.0]
    assert not ranks.world.violations
    ranks.close()
