# SPDX-License-Identifier: Apache-2.0
"""However buckets of device arrays end: nothing is held, and no error is lost."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from staged_ranks import Rank, SimRanks, forget_ranks, on_threads, renew_ranks
from started_operations import num_started
from test_fused_device import ones

import commrt
from commrt.comm import core_of
from commrt.devices import DeviceArray
from commrt.errors import (
    CommError,
    MismatchError,
    RevokedError,
    TimeoutError_,
    UsageError,
)
from commrt.fusion.device_buckets import DeviceBuckets
from commrt.fusion.device_copies import BucketCopies
from commrt.fusion.device_requests import FusedDeviceRequest

F = np.float32
SEEDS, FULL_SEEDS = 2, 100


@pytest.fixture(autouse=True, scope="module")
def no_ranks_left() -> Iterator[None]:
    yield
    forget_ranks()


@pytest.fixture
def seeds(full: bool, seed: int) -> range:
    return range(seed, seed + (FULL_SEEDS if full else SEEDS))


def fused(rank: Rank, *arrays: Any, **how: Any) -> list[Any]:
    """Return the requests of allreduces in place that went together."""
    with rank.comm.fused(**how):
        return [rank.comm.allreduce(x, nonblocking=True) for x in arrays]


# -- nothing is held -------------------------------------------------------------------


def drop(rank: Rank, *arrays: DeviceArray) -> list[weakref.ref[DeviceArray]]:
    """Return references that keep nothing alive; the rank forgets the arrays."""
    for each in arrays:
        rank.arrays.remove(each)
    return [weakref.ref(each) for each in arrays]


def left_of(kept: list[weakref.ref[DeviceArray]]) -> int:
    gc.collect()
    return sum(each() is not None for each in kept)


@pytest.mark.parametrize("flags", [True, False], ids=["flags", "events"])
@pytest.mark.parametrize("how", ["synchronize", "test", "done", "sweep", "next call"])
def test_nothing_is_held_after_the_end(how: str, flags: bool) -> None:
    """Whoever sees the end lets the arrays of all calls go, also those not asked."""

    def main(rank: Rank) -> None:
        comm, mine = rank.comm, ones(rank)
        x, y, out = ones(rank), ones(rank), ones(rank)
        with comm.fused():
            requests = [
                comm.allreduce(x, nonblocking=True),
                comm.allreduce(y, out=out, nonblocking=True),
            ]
        kept = drop(rank, x, y, out)
        for request in requests:
            request.wait()
        request = requests.pop()
        if how in ("sweep", "next call"):
            del request
        requests.clear()
        del x, y, out
        if how == "synchronize":
            request.synchronize()
        while how == "test" and not request.test():
            rank.device.pause()
        while how == "done" and not request.done:
            core_of(comm).world.engine.step()
            rank.device.pause()
        if how == "sweep":
            rank.finish()
        if how == "next call":
            rank.stream.synchronize()
            while rank.stager.outstanding:
                core_of(comm).world.engine.step()
                rank.device.pause()
            with comm.fused():
                last = comm.allreduce(mine, nonblocking=True)
                assert left_of(kept) == 0
            last.synchronize()
        if how not in ("sweep", "next call"):
            assert left_of(kept) == 2  # of the call whose request is here
            del request
        assert left_of(kept) == 0

    ranks = SimRanks(2, 3, memory_flags=flags)
    for rank in ranks.ranks:
        rank.device.load_kernels(b"")
    ranks.run(main)
    ranks.close()


def test_arrays_stay_until_the_device_has_done_all() -> None:
    def main(rank: Rank) -> None:
        comm = rank.comm
        gate = rank.pin(64)
        rank.device.flag_store(gate, 0)
        x, y = ones(rank), ones(rank)
        fused(rank, x)[0].synchronize()  # there is memory
        kept = drop(rank, x, y)
        rank.device.wait_value32_geq(rank.stream.handle, gate, 1)
        requests = fused(rank, x, y)
        for request in requests:
            request.be_quiet()
        requests.clear()
        del request, x, y
        assert left_of(kept) == 2
        assert core_of(comm).fusion.buckets.outstanding == 1
        rank.device.flag_store(gate, 1)
        rank.finish()
        assert left_of(kept) == 0

    ranks = SimRanks(2, 3, 0)
    for rank in ranks.ranks:
        rank.device.load_kernels(b"")
    ranks.run(main)
    ranks.close()


def test_a_dropped_request_warns() -> None:
    def main(rank: Rank) -> None:
        x = ones(rank)
        with pytest.warns(ResourceWarning, match="dropped without wait"):
            fused(rank, x)
        rank.finish()

    on_threads(1, main)


def test_communicators_give_everything_back() -> None:
    def main(rank: Rank) -> None:
        comm, x = rank.comm.dup(), ones(rank)
        with comm.fused():
            request = comm.allreduce(x, nonblocking=True)
        request.wait()
        rank.stream.synchronize()
        rank.finish()
        [lane] = core_of(comm).fusion.buckets.lanes.values()
        comm.free()
        assert len(lane.copies.events) == 0
        assert lane.copies.blocks.nbytes == 0
        assert request.synchronize() is x
        del request
        assert len(lane.copies.events) == 0  # destroyed, not kept for nobody

    on_threads(2, main)


# -- failures --------------------------------------------------------------------------


def outcome(request: Any) -> str:
    """What a request says in the end, by the name of its error."""
    try:
        request.synchronize()
        return ""
    except CommError as raised:
        error = raised
    with pytest.raises(type(error)) as again:
        request.wait()
    assert again.value is error
    with pytest.raises(type(error)):
        request.test()
    assert request.done
    assert "failed" in repr(request)
    return type(error).__name__


def test_a_bucket_that_fails_fails_each_of_its_calls(seeds: range) -> None:
    """And says which call of the communicator it was; nothing hangs, all streams go."""
    for each in seeds:

        def main(rank: Rank) -> Any:
            x, y, z = ones(rank), ones(rank, 5 + rank.rank), ones(rank)
            requests = fused(rank, x, y)
            said = [outcome(request) for request in requests]
            text = ""
            try:
                requests[0].wait()
            except CommError as error:
                text = str(error)
            with pytest.raises((MismatchError, RevokedError)):
                rank.comm.allreduce(z, nonblocking=True)
            rank.stream.synchronize()
            rank.finish()
            return said, text

        ranks = SimRanks(2, each)
        found = ranks.run(main)
        ranks.world.check()
        ranks.world.run_until_idle()
        for said, text in found:
            assert said[0] == said[1] in ("MismatchError", "RevokedError"), found
            assert "allreduce #" in text
            assert "rank " in text
        renew_ranks()


def test_a_rank_that_never_comes_is_a_timeout() -> None:
    def main(rank: Rank) -> str:
        comm = rank.comm
        comm.timeout_s = 0.2 if rank.rank == 0 else 20
        x, y = ones(rank), ones(rank)
        requests = []
        if rank.rank == 0:
            requests = fused(rank, x, y)
            with pytest.raises(TimeoutError_) as caught:
                requests[1].synchronize(timeout_s=0.01)
            assert caught.value.request in (None, requests[1])
        while not all(request.done for request in requests):
            core_of(comm).world.engine.step()
            rank.device.pause()
        said = {outcome(request) for request in requests}
        if requests:
            assert said == {"TimeoutError_"}
        rank.stream.synchronize()
        rank.finish()
        return "".join(said)

    assert on_threads(2, main, survives=False) == ["TimeoutError_", ""]
    forget_ranks()


@pytest.mark.parametrize("limit", [None, 60.0])
def test_an_exception_sends_what_was_called(limit: float | None) -> None:
    class Stop(Exception):  # noqa: N818
        pass

    def main(rank: Rank) -> Any:
        requests: list[Any] = []
        arrays = [ones(rank, n) for n in (1, 2, 3)]

        def stops() -> None:
            with rank.comm.fused(time_limit_s=limit):
                for x in arrays:
                    requests.append(rank.comm.allreduce(x, nonblocking=True))
                raise Stop

        with pytest.raises(Stop):
            stops()
        outs = [rank.fetch(out) for out in commrt.wait_all(requests)]
        rank.stream.synchronize()
        return [value()[0] for value in outs]

    assert on_threads(3, main) == [[6.0] * 3] * 3


@pytest.mark.parametrize("early", [0, 1])
@pytest.mark.parametrize("limit", [None, 0.001, 60.0])
def test_a_rank_that_leaves_early_gives_errors(early: int, limit: float | None) -> None:
    def main(rank: Rank) -> str:
        comm, requests = rank.comm, []
        comm.timeout_s = 300
        arrays = [ones(rank, 100) for _ in range(4)]
        try:
            with comm.fused(time_limit_s=limit):
                for i, x in enumerate(arrays):
                    if i == 2 and comm.rank == early:
                        break
                    requests.append(comm.allreduce(x, nonblocking=True))
            for request in requests:
                request.synchronize()
            comm.allreduce(ones(rank, 7), nonblocking=True).synchronize()
        except CommError as error:
            for request in requests:
                request.be_quiet()
            said = {outcome(request) for request in requests}
            assert "" not in said or limit is not None
            return type(error).__name__
        return "nothing"

    kinds = on_threads(2, main, survives=False)
    assert set(kinds) <= {"MismatchError", "RevokedError", "TimeoutError_"}, kinds
    forget_ranks()


@pytest.mark.parametrize("how", ["length", "place", "type", "reduction"])
def test_with_a_time_limit_any_difference_is_found(how: str) -> None:
    def main(rank: Rank) -> str:
        comm, odd = rank.comm, rank.rank == 1
        comm.timeout_s = 300
        x: Any = np.ones(12 if how == "length" and odd else 16, F)
        if how == "type" and odd:
            x = x.astype(np.int32)
        if not (how == "place" and odd):
            x = rank.array(x)
        op = "max" if how == "reduction" and odd else "sum"
        requests = []
        try:
            with comm.fused(time_limit_s=60):
                requests = [comm.allreduce(x, op=op, nonblocking=True)]
        except (MismatchError, RevokedError) as error:
            said = {outcome(request) for request in requests}
            assert said <= {"MismatchError", "RevokedError"}
            return type(error).__name__
        return "nothing"

    found = on_threads(2, main, survives=False)
    assert "nothing" not in found
    assert "MismatchError" in found
    forget_ranks()


def test_what_nothing_can_run_fails_on_all_ranks_and_is_not_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def main(rank: Rank) -> list[str]:
        comm, asked = rank.comm, core_of(rank.comm).selection.asked

        def refuse(call: Any, bound: Any) -> Any:
            if bound.num_elements >= 10:
                raise UsageError(f"nothing runs {bound.num_elements} elements")
            return asked(call, bound)

        def plan(call: Any, bound: Any, **kwargs: Any) -> Any:
            refuse(call, bound)
            return plain(call, bound, **kwargs)

        plain = core_of(comm).devices.plan
        core_of(comm).selection.asked, core_of(comm).devices.plan = refuse, plan
        begin = num_started(comm)
        requests = fused(rank, ones(rank, 6), ones(rank, 7))
        said = [outcome(request) for request in requests]
        assert num_started(comm) == begin
        [request] = fused(rank, ones(rank, 6))
        said.append(outcome(request))
        del core_of(comm).selection.asked, core_of(comm).devices.plan
        return said

    assert on_threads(2, main) == [["UsageError", "UsageError", ""]] * 2


def test_a_bucket_that_cannot_be_sent_hangs_nobody() -> None:
    def main(rank: Rank) -> str:
        def broken(*args: Any, **kwargs: Any) -> None:
            raise RuntimeError("broken")

        if rank.rank == 0:
            core_of(rank.comm).devices.start = broken
        requests = fused(rank, ones(rank), ones(rank))
        kinds = set()
        for request in requests:
            with pytest.raises((RuntimeError, RevokedError)) as caught:
                request.synchronize()
            kinds.add(type(caught.value).__name__)
        return " ".join(kinds)

    assert on_threads(2, main, survives=False) == ["RuntimeError", "RevokedError"]
    forget_ranks()


def test_an_interrupt_while_parts_are_put_back_loses_nothing() -> None:
    """The requests come to it again."""

    def main(rank: Rank) -> float:
        x = ones(rank)
        plain = BucketCopies.put_back
        turns = iter([True])

        def put_back(self: BucketCopies, parts: Any, block: Any) -> Any:
            if self.device is rank.device and next(turns, False):
                raise KeyboardInterrupt
            return plain(self, parts, block)

        context = rank.comm.fused()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(BucketCopies, "put_back", put_back)
            with pytest.raises(KeyboardInterrupt), context:
                request = rank.comm.allreduce(x, nonblocking=True)
            assert isinstance(request, FusedDeviceRequest)
            request.wait()
        value = rank.fetch(x)
        rank.stream.synchronize()
        request.synchronize()
        return float(value()[0])

    assert on_threads(1, main) == [1.0]


def test_a_call_after_the_context_is_closed_has_no_bucket(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another thread may leave it between the checks and the bucket."""

    def main(rank: Rank) -> None:
        x = ones(rank)
        lane = DeviceBuckets.lane_of

        def leaves(self: DeviceBuckets, device: Any) -> Any:
            commrt._native.close_fusion(core_of(rank.comm))
            return lane(self, device)

        with rank.comm.fused(), monkeypatch.context() as patch:
            patch.setattr(DeviceBuckets, "lane_of", leaves)
            request = rank.comm.allreduce(x, nonblocking=True)
        assert not isinstance(request, FusedDeviceRequest)
        request.synchronize()

    on_threads(1, main)
