# SPDX-License-Identifier: Apache-2.0
"""fused() with arrays on devices: what buckets give, where they end, their order."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from rounding import same_numbers, telling
from staged_ranks import Rank, SimRanks, WrongResultError, forget_ranks, on_threads
from test_fused import draw_call, expected, values

import commrt
from commrt._native import FusedRequest, Request
from commrt.comm import core_of
from commrt.devices import DeviceArray, DeviceStream
from commrt.errors import UsageError
from commrt.fusion.device_requests import FusedDeviceRequest

F = np.float32
pytestmark = pytest.mark.filterwarnings("error::ResourceWarning")


@pytest.fixture(autouse=True, scope="module")
def no_ranks_left() -> Iterator[None]:
    yield
    forget_ranks()


def on_sim(
    size: int, function: Callable[[Rank], Any], seed: int = 0, **options: Any
) -> Any:
    """Run a function on ranks of one simulated GPU, and see that all is in order."""
    ranks = SimRanks(size, seed, **options)
    for rank in ranks.ranks:
        rank.device.load_kernels(b"")
    found = ranks.run(function)
    ranks.close()
    return found


def ones(rank: Rank, count: int = 8, dtype: Any = F) -> DeviceArray:
    return rank.array(np.full(count, 1 + rank.rank, dtype))


# -- values ----------------------------------------------------------------------------


def drawn(rank: Rank, seed: int, limit: float | None, turns: int = 30) -> int:
    """Make drawn calls on arrays here and there; compare each result."""
    comm = rank.comm
    rng = random.Random(f"{seed} {comm.size} {limit}")
    # Streams are a rank's own affair; without a time limit waits are not.
    alone = random.Random(f"{seed} {comm.size} {comm.rank}")
    own = rng if limit is None else alone
    streams = [rank.stream, DeviceStream(rank.device), DeviceStream(rank.device)]
    nbytes = rng.choice([1, 64, 1000, 4096, 20_000, 1 << 20])
    started: list[tuple[Any, Any, Any]] = []
    copies: list[tuple[Any, Any]] = []
    requests: list[Any] = []
    with comm.fused(nbytes=nbytes, time_limit_s=limit):
        for turn in range(turns):
            dtype, op, count, in_place = draw_call(rng)
            given = values(dtype, comm.rank, count, turn)
            right = expected(dtype, op, comm.size, count, turn)
            kwargs: dict[str, Any] = {}
            if rng.random() < 0.2:  # on the host
                x = out = given.copy()
            else:
                stream = alone.choice(streams)
                x = out = rank.array(given)
                rank.stream.synchronize()
                if not in_place:
                    out = kwargs["out"] = rank.array(np.full(count, 9).astype(dtype))
                if stream is not rank.stream:
                    follow(rank, stream, rank.stream)
                kwargs["stream"] = stream
                if not in_place:
                    copies.append((x, given))
            request = comm.allreduce(x, op=op, nonblocking=True, **kwargs)
            started.append((request, out, right))
            requests.append(request)
            if own.random() < 0.1:
                assert waited_for(rank, own.choice(requests)) is not None
            if own.random() < 0.05:
                own.choice(requests).test()
            other = rng.random()
            if other < 0.05:
                comm.barrier(stream=rank.stream)
            elif other < 0.15:
                y = ones(rank, 3)
                comm.allreduce(y)
                started.append((None, y, np.full(3, sum(range(1, comm.size + 1)))))
            elif other < 0.2:
                root = turn % comm.size
                y = rank.array(np.full(5, turn * (comm.rank == root)))
                started.append((comm.bcast(y, root=root, nonblocking=True), y, turn))
    ends = []
    for request, out, right in own.sample(started, len(started)):
        if request is not None:
            waited_for(rank, request)
            if own.random() < 0.3:
                request.synchronize()
        value = rank.fetch(out) if isinstance(out, DeviceArray) else lambda out=out: out
        ends.append((value, right))
    ends += [(rank.fetch(x), given) for x, given in copies]
    rank.stream.synchronize()
    for value, right in ends:
        found = value()
        tolerance = 0 if found.dtype.kind in "iub" else 4 * np.finfo(found.dtype).eps
        if not np.allclose(found, right, rtol=tolerance, atol=0):
            raise WrongResultError(f"rank {rank.rank}: {found}, not {right}")
    for request, *_ in started:
        if request is not None:
            request.synchronize()
    for each in streams[1:]:
        each.destroy()
    rank.finish()
    return len(ends)


def waited_for(rank: Rank, request: Any) -> Any:
    """Wait for a request; on the host in such a way that a simulation goes on."""
    of_host = isinstance(request, FusedRequest | Request)
    while rank.device.kind == "simulated" and of_host:
        if request.test():
            break
        rank.device.flag_load(rank.stop)
    return request.wait()


def follow(rank: Rank, stream: DeviceStream, before: DeviceStream) -> None:
    """Let a stream wait for what another one holds."""
    event = rank.device.event_create()
    rank.device.event_record(event, before.handle)
    rank.device.stream_wait_event(stream.handle, event)
    rank.device.event_destroy(event)


@pytest.mark.parametrize("flags", [True, False], ids=["flags", "events"])
@pytest.mark.parametrize(
    ("size", "limit"),
    [*((size, None) for size in (1, 2, 3)), (1, 1.0), (2, 0.0005), (3, 1.0)],
)
def test_drawn_calls_give_what_numpy_gives(
    size: int, limit: float | None, flags: bool, seed: int
) -> None:
    done = on_threads(
        size, lambda rank: drawn(rank, seed, limit), memory_flags=flags, seed=seed
    )
    assert min(done) >= 30


@pytest.mark.parametrize("queues", [0, 1, 2, 8])
def test_the_order_is_right_whatever_happens_when(
    queues: int, full: bool, seed: int
) -> None:
    for each in range(seed, seed + (20 if full else 3)):
        size = 1 + each % 3
        on_sim(size, lambda rank, n=each: drawn(rank, n, None, 12), each, queues=queues)


def test_the_order_is_right_where_streams_have_no_flags(seed: int) -> None:
    on_sim(2, lambda rank: drawn(rank, seed, None, 12), seed, memory_flags=False)


@pytest.mark.parametrize("count", [15, 16, 17, 33, 1100])
def test_any_number_of_arrays_goes_together(count: int) -> None:
    """More than one launch takes, and more layouts than there are tables for."""

    def main(rank: Rank) -> Any:
        lengths = [1 + (7 * i) % 5 + (i // 16) % 16 for i in range(count)]
        xs = [
            DeviceArray(rank.device, n, F).put(np.full(n, i + rank.rank))
            for i, n in enumerate(lengths)
        ]
        begin = core_of(rank.comm).next_seq
        for _ in range(2):  # the second time tables are there, or there is no room
            with rank.comm.fused():
                requests = [rank.comm.allreduce(x, nonblocking=True) for x in xs]
            commrt.wait_all(requests)
        assert core_of(rank.comm).next_seq == begin + 2
        rank.stream.synchronize()
        rank.arrays += xs
        return [float(x.get()[-1]) for x in xs]

    wanted = [2.0 * (2 * i + 1) for i in range(count)]
    assert on_threads(2, main) == [wanted] * 2


def test_bits_are_those_of_single_calls_where_order_is_fixed() -> None:
    def main(rank: Rank) -> bool:
        fixed = rank.comm.dup(deterministic=True)
        kinds = ["float32", "float16", "float64"]
        given = [
            telling(kind, rank.rank, count) for kind in kinds for count in (1, 5, 3001)
        ]
        alone = [fixed.allreduce(x, out=np.empty_like(x)) for x in given]
        with fixed.fused(nbytes=30_000):
            requests = [fixed.allreduce(rank.array(x), nonblocking=True) for x in given]
        found = [rank.fetch(each) for each in commrt.wait_all(requests)]
        rank.stream.synchronize()
        same = all(same_numbers(a, b()) for a, b in zip(alone, found, strict=True))
        fixed.free()
        return same

    assert on_threads(3, main) == [True] * 3


# -- where buckets end -----------------------------------------------------------------


def sent_after(rank: Rank, lengths: list[Any], **how: Any) -> list[int]:
    """Return how many operations were started after each call, and at the end.

    A negative length is that of an array on the host.
    """
    begin, seen, requests = core_of(rank.comm).next_seq, [], []
    with rank.comm.fused(**how):
        for length in lengths:
            x: Any = np.ones(abs(length), np.uint8)
            if length >= 0:
                x = rank.array(x)
            requests.append(rank.comm.allreduce(x, nonblocking=True))
            seen.append(core_of(rank.comm).next_seq - begin)
    for request in requests:
        request.synchronize()
    return [*seen, core_of(rank.comm).next_seq - begin]


@pytest.mark.parametrize(
    ("lengths", "expected_counts"),
    [
        ([25] * 5, [0, 0, 0, 1, 1, 2]),  # full
        ([40, 40, 40, 40], [0, 0, 1, 1, 2]),  # the third does not fit any more
        ([10, 100, 10], [0, 2, 2, 3]),  # what is as long as a bucket goes by itself
        ([0, 0, 0], [0, 0, 0, 1]),
        ([], [0]),
        ([25, -25, 25, -25, 25], [0, 0, 0, 2, 2, 3]),  # together they are full
        ([-25, 25, -60], [0, 0, 2, 3]),
        ([-10, 100], [0, 2, 2]),  # it comes after what the host's arrays hold
    ],
)
def test_a_bucket_ends_where_it_is_full(
    lengths: list[int], expected_counts: list[int]
) -> None:
    found = on_sim(2, lambda rank: sent_after(rank, lengths, nbytes=100))
    assert found == [expected_counts] * 2


def test_types_and_reductions_have_buckets_of_their_own() -> None:
    """Streams have not: they are one rank's own affair."""

    def main(rank: Rank) -> list[tuple[int, int]]:
        begin = core_of(rank.comm).next_seq
        other = DeviceStream(rank.device)
        follow(rank, other, rank.stream)
        kinds = [(F, "sum"), (np.int32, "sum"), (F, "max"), (F, "sum"), (F, "sum")]
        xs = [ones(rank, 2, dtype) for dtype, _ in kinds]
        follow(rank, other, rank.stream)
        requests = []
        with rank.comm.fused():
            for i, (x, (_, op)) in enumerate(zip(xs, kinds, strict=True)):
                uses = other if i > 2 and rank.rank else rank.stream
                requests.append(
                    rank.comm.allreduce(x, op=op, nonblocking=True, stream=uses)
                )
            host = rank.comm.allreduce(np.ones(2, F), nonblocking=True)
        outs = [rank.fetch(each) for each in commrt.wait_all(requests)]
        assert host.wait()[0] == 2
        for request in requests:
            request.synchronize()
        rank.stream.synchronize()
        other.destroy()
        numbers = [request.seq - begin for request in [*requests, host]]
        return list(zip(numbers, [int(out()[0]) for out in outs], strict=False))

    wanted = [(0, 3), (1, 3), (2, 2), (0, 3), (0, 3)]
    assert on_sim(2, main) == [wanted] * 2


def test_other_collectives_come_after_what_was_called_before() -> None:
    def main(rank: Rank) -> None:
        comm, x, y = rank.comm, ones(rank, 4), ones(rank, 4)
        cart = comm.cart((2,), periodic=True)
        field, once, again = ones(rank, 4), ones(rank, 4), ones(rank, 4)
        out = ones(rank, 8)
        halo = cart.plan.halo_exchange(field, 1)
        cart.halo_exchange(field, 1)
        bound = comm.plan.bcast(once, root=0)
        comm.bcast(again, root=0)
        calls: list[Callable[[], Any]] = [
            lambda: comm.barrier(stream=rank.stream),
            comm.barrier,
            lambda: comm.allreduce(once),
            lambda: comm.allreduce(once, op="premul_sum", factor=2.0),
            lambda: comm.allreduce(once, algorithm="direct", nonblocking=True),
            lambda: comm.bcast(again, root=0),
            lambda: comm.bcast(again, root=0, nonblocking=True),
            lambda: comm.allgather(once, out=out),
            bound,
            bound.start,
        ]
        for number, call in enumerate(calls):
            with comm.fused():
                request = comm.allreduce(x, nonblocking=True)
                found = call()
                assert request.seq >= 0, number
                if hasattr(found, "synchronize"):
                    found.synchronize()
            request.synchronize()
        with cart.fused():
            request = cart.allreduce(x, nonblocking=True)
            halo()
            assert request.seq >= 0
            again_in = cart.allreduce(y, nonblocking=True)
            cart.halo_exchange(field, 1)
            assert again_in.seq >= 0
        request.synchronize()
        again_in.synchronize()
        rank.stream.synchronize()
        cart.free()

    on_threads(2, main)


def test_messages_send_nothing() -> None:
    def main(rank: Rank) -> None:
        x, y = ones(rank), ones(rank)
        with rank.comm.fused() as context:
            request = rank.comm.allreduce(x, nonblocking=True)
            if rank.rank == 0:
                rank.comm.send(y, dest=1)
            else:
                rank.comm.recv(y, source=0)
            assert request.seq == -1
            assert "in an open bucket" in repr(request)
            context.send()
            assert request.seq >= 0
        request.synchronize()
        rank.finish()

    on_sim(2, main)


@pytest.mark.parametrize("how", ["wait", "synchronize", "test", "wait_all"])
def test_who_asks_has_the_bucket_sent(how: str) -> None:
    def main(rank: Rank) -> None:
        x, y = ones(rank), ones(rank)
        with rank.comm.fused():
            first = rank.comm.allreduce(x, nonblocking=True)
            second = rank.comm.allreduce(y, nonblocking=True)
            assert not first.done
            if how == "wait_all":
                commrt.wait_all([second], timeout_s=300)
            else:
                getattr(second, how)()
            assert first.seq == second.seq >= 0
        for each in (first, second):
            assert each.wait() is each.synchronize()
            assert each.done
            assert each.test()
            assert repr(each).endswith("done>")

    on_sim(2, main)


def test_with_a_time_limit_ranks_wait_in_any_order() -> None:
    def main(rank: Rank) -> Any:
        xs = [ones(rank, n) for n in (1, 5, 9, 2)]
        requests: list[Any] = []
        with rank.comm.fused(time_limit_s=0.002):
            for i, x in enumerate(xs):
                requests.append(rank.comm.allreduce(x, nonblocking=True))
                if i == 1 and rank.rank == 0:
                    requests[0].synchronize()
                if i == 2 and rank.rank == 1:
                    requests[2].wait()
                    assert rank.comm.allreduce(np.ones(1), nonblocking=True).wait()[0]
                elif i == 2:
                    rank.comm.allreduce(np.ones(1), nonblocking=True).wait()
        found = [rank.fetch(out) for out in commrt.wait_all(requests)]
        rank.stream.synchronize()
        return [value().tolist() for value in found]

    total = [[3.0] * n for n in (1, 5, 9, 2)]
    assert on_threads(2, main) == [total] * 2


def test_a_cut_in_the_middle_of_a_bucket_leaves_the_others_open() -> None:
    """The ranks agree on fewer calls than one of them has made."""

    def main(rank: Rank) -> Any:
        comm = rank.comm
        xs = [ones(rank, n) for n in (3, 4, 5, 6)]
        gate = np.zeros(1)
        with comm.fused(time_limit_s=60):
            requests = [comm.allreduce(x, nonblocking=True) for x in xs[:2]]
            if rank.rank == 0:  # two calls further when the other one asks
                requests += [comm.allreduce(x, nonblocking=True) for x in xs[2:]]
                comm.send(gate, dest=1)
                while requests[0].seq < 0:
                    requests[0].test()
                seen = [request.seq >= 0 for request in requests]
            else:
                comm.recv(gate, source=0)
                requests[1].synchronize()
                requests += [comm.allreduce(x, nonblocking=True) for x in xs[2:]]
                seen = []
        found = [rank.fetch(out) for out in commrt.wait_all(requests)]
        rank.stream.synchronize()
        return seen, [value().tolist() for value in found]

    total = [[3.0] * n for n in (3, 4, 5, 6)]
    first, second = on_threads(2, main)
    assert first == ([True, True, False, False], total)
    assert second[1] == total


# -- order -----------------------------------------------------------------------------


def test_a_bucket_comes_after_what_streams_held_at_the_calls() -> None:
    """And not after what they were given later, which may wait for its end."""

    def main(rank: Rank) -> Any:
        gate = rank.pin(64)
        rank.device.flag_store(gate, 0)
        x = ones(rank)
        with rank.comm.fused():
            request = rank.comm.allreduce(x, nonblocking=True)
            rank.device.wait_value32_geq(rank.stream.handle, gate, 1)
        request.synchronize()
        rank.device.flag_store(gate, 1)
        value = rank.fetch(x)
        rank.stream.synchronize()
        return value().tolist()

    for seed in range(3):
        assert on_sim(2, main, seed, queues=0) == [[3.0] * 8] * 2


def test_wait_orders_any_stream_and_may_be_repeated() -> None:
    def main(rank: Rank) -> None:
        x = ones(rank)
        other = DeviceStream(rank.device)
        with rank.comm.fused():
            request = rank.comm.allreduce(x, nonblocking=True)
        assert isinstance(request, FusedDeviceRequest)
        assert (request.operation, request.stream) == ("allreduce", rank.stream.handle)
        assert (request.received_nbytes, request.source, request.device) == (-1, -1, 0)
        assert request.timeout_s == rank.comm.timeout_s
        assert request.wait(stream=other) is x
        assert request.wait(stream=other.handle) is x
        value = rank.fetch_in(x, other)
        assert request.wait() is x
        with pytest.raises(UsageError, match=r"belongs to synchronize"):
            request.wait(timeout_s=1)
        with pytest.raises(UsageError, match=r"must be None, the integer handle"):
            request.wait(stream="fast")
        with pytest.raises(TypeError, match="not its completion"):
            bool(request)
        assert request.synchronize(timeout_s=300) is x
        other.synchronize()
        assert value().tolist() == [3.0] * 8
        rank.stream.synchronize()
        other.destroy()

    def main_in_order(rank: Rank) -> None:
        # The other stream has read it before this one fills it.
        rank.comm.barrier(stream=rank.stream)
        main_with_event(rank)

    def main_with_event(rank: Rank) -> None:
        x = ones(rank)
        other = DeviceStream(rank.device)
        with rank.comm.fused():
            request = rank.comm.allreduce(x, nonblocking=True)
        request.wait(stream=other)
        value = rank.fetch_in(x, other)
        follow(rank, rank.stream, other)
        rank.fill(x, 7)
        request.synchronize()
        other.synchronize()
        assert value().tolist() == [3.0] * 8
        rank.stream.synchronize()
        other.destroy()

    on_threads(2, main)
    for seed in range(3):
        on_sim(2, main_in_order, seed)


def test_calls_in_place_like_one_before_take_the_short_way() -> None:
    def main(rank: Rank) -> Any:
        x = ones(rank)
        with rank.comm.fused():
            for _ in range(3):
                request = rank.comm.allreduce(x, nonblocking=True)
                request.wait()
            assert (
                core_of(rank.comm).fusion.buckets.again(
                    "allreduce", (x,), {"nonblocking": True, "op": "max"}
                )
                is None
            )
        value = rank.fetch(x)
        request.synchronize()
        rank.stream.synchronize()
        return value().tolist()

    assert on_sim(2, main) == [[12.0] * 8] * 2


def test_memory_is_used_again(seed: int) -> None:
    def main(rank: Rank) -> None:
        x, y = ones(rank), ones(rank)
        requests: list[Any] = []
        for _ in range(30):
            with rank.comm.fused(nbytes=256):
                requests = [rank.comm.allreduce(a, nonblocking=True) for a in (x, y)]
            commrt.wait_all(requests)
        for request in requests:
            request.synchronize()
        [lane] = core_of(rank.comm).fusion.buckets.lanes.values()
        assert lane.copies.blocks.nbytes == 1024
        assert core_of(rank.comm).devices.outstanding == 0
        assert len(lane.copies.events) <= 30 + 2  # the ends of all, and of one bucket
        requests.clear()

    def longer(rank: Rank) -> None:
        """A later context takes more at once; what is longer than 16 MiB, as needed."""
        x = ones(rank)
        nbytes = []
        for limit in (256, 1024, 100, 1 << 30):
            with rank.comm.fused(nbytes=limit):
                request = rank.comm.allreduce(x, nonblocking=True)
            request.synchronize()
            [lane] = core_of(rank.comm).fusion.buckets.lanes.values()
            nbytes.append(lane.copies.blocks.nbytes)
        assert nbytes == [1024, 4096, 4096, 64 << 20]

    on_sim(2, main, seed)
    on_sim(1, longer)
