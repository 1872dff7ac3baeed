# SPDX-License-Identifier: Apache-2.0
"""Calls on device arrays: what they return, refuse, say and leave."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from dlpack_producer import OnlyDlpack
from staged_ranks import Rank, SimRanks, forget_ranks, kept_ranks, on_threads
from started_operations import num_started

from commrt.comm import core_of
from commrt.devices import DeviceArray, DeviceStream, SimWorld, serve, stop_serving
from commrt.devices.registry import find_device
from commrt.errors import (
    BufferError_,
    CaptureError,
    CommError,
    DeviceFailedError,
    DeviceMissingError,
    MismatchError,
    RevokedError,
    TimeoutError_,
    UsageError,
)
from commrt.request import DeviceRequest, test_all, wait_all, wait_any

test_all.__test__ = False  # type: ignore[attr-defined]


@pytest.fixture(autouse=True, scope="module")
def no_ranks_left() -> Iterator[None]:
    yield
    forget_ranks()


def on_device(function: Callable[[Rank], Any], seed: int = 0, **options: Any) -> Any:
    """Run a function on two ranks, and see that it left everything in order."""
    ranks = SimRanks(2, seed, **options)
    found = ranks.run(function)
    ranks.close()
    return found


def ones(rank: Rank, count: int = 8) -> DeviceArray:
    return rank.array(np.full(count, 1.0 + rank.rank, "f4"))


def test_a_blocking_call_orders_the_stream_and_returns_the_output() -> None:
    def main(rank: Rank) -> None:
        x = ones(rank)
        assert rank.comm.allreduce(x) is x
        out = x.new_empty(8)
        assert rank.comm.allreduce(x, out=out) is out
        gathered = rank.comm.allgather(x)
        assert gathered.shape == (2, 8)
        values = [rank.fetch(each) for each in (x, out, gathered)]
        rank.arrays += [out, gathered]
        rank.stream.synchronize()
        assert [value().tolist()[0] for value in values[:2]] == [3.0, 6.0]
        assert values[2]().tolist() == [[3.0] * 8] * 2
        rank.finish()

    for seed in range(3):
        on_device(main, seed)


def test_a_request_waits_in_a_stream_and_says_what_it_is() -> None:
    def main(rank: Rank) -> None:
        x = ones(rank)
        request = rank.comm.allreduce(x, nonblocking=True)
        assert isinstance(request, DeviceRequest)
        assert "allreduce #" in repr(request)
        assert (request.operation, request.stream) == ("allreduce", rank.stream.handle)
        assert (request.received_nbytes, request.source, request.device) == (-1, -1, 0)
        other = DeviceStream(rank.device)
        assert request.wait(stream=other) is x
        assert request.wait(stream=other.handle) is x
        assert request.wait() is x
        with pytest.raises(UsageError, match=r"belongs to synchronize"):
            request.wait(timeout_s=1)
        with pytest.raises(UsageError, match=r"must be None, the integer handle"):
            request.wait(stream="fast")
        with pytest.raises(TypeError, match="not its completion"):
            bool(request)
        assert request.synchronize() is x
        assert request.test()
        assert request.done
        assert repr(request).endswith("done>")
        other.destroy()

    for seed in range(3):
        on_device(main, seed)


def test_several_requests_are_waited_for_together() -> None:
    def main(rank: Rank) -> None:
        xs = [ones(rank, count) for count in (1, 5, 9)]
        requests = [rank.comm.allreduce(x, nonblocking=True) for x in xs]
        assert wait_all(requests) == xs
        assert wait_all(requests, timeout_s=300) == xs
        assert test_all(requests)
        assert wait_any(requests)[1] is xs[0]

    on_device(main)


def test_a_bound_call_runs_any_number_of_times() -> None:
    def main(rank: Rank) -> None:
        x = ones(rank)
        call = rank.comm.plan.allreduce(x, algorithm="direct", params={"piece": 16})
        assert call.operation == "allreduce"
        assert call.label.startswith("staged/direct{piece=16")
        call()
        call.start().synchronize()
        value = rank.fetch(x)
        rank.stream.synchronize()
        assert value().tolist() == [6.0] * 8

    on_device(main)


def test_a_barrier_has_only_a_stream() -> None:
    def main(rank: Rank) -> None:
        rank.comm.barrier(stream=rank.stream)
        rank.comm.barrier(stream=rank.stream, nonblocking=True).synchronize()

    on_device(main)


def test_hundreds_of_calls_on_several_communicators_with_little_memory() -> None:
    """In any interleaving that is the same on all ranks, also on one hardware queue."""

    def main(rank: Rank) -> None:
        rng = np.random.default_rng(7)
        xs = [ones(rank, 4) for _ in range(200)]
        requests = []
        for x in xs:
            comm = comms[rank.rank][int(rng.integers(3))]
            requests.append(comm.allreduce(x, op="avg", nonblocking=True))
        for request in requests:
            request.wait()
        values = [rank.fetch(x) for x in xs]
        for request in requests:
            request.synchronize()
        rank.stream.synchronize()
        assert [value().tolist() for value in values] == [[1.5] * 4] * len(xs)

    for seed, queues in enumerate((1, 2, 8)):
        ranks = SimRanks(2, seed, queues, staging={"first_nbytes": 4096})
        more = kept_ranks(2).each(lambda comm: [comm.dup(), comm.dup()])
        comms = [
            [rank.comm, *mine] for rank, mine in zip(ranks.ranks, more, strict=True)
        ]
        for rank, mine in zip(ranks.ranks, more, strict=True):
            for comm in mine:
                core_of(comm).devices.stager(rank.device)
        ranks.run(main)
        for mine in more:
            for comm in mine:
                comm.free()
        ranks.close()


# --- what is refused ---


def test_what_cannot_be_communicated_is_refused_before_anything_is_given() -> None:
    def main(rank: Rank) -> None:
        comm, x = rank.comm, ones(rank)
        seq = num_started(comm)
        readonly = DeviceArray(rank.device, 8, readonly=True)
        rank.arrays.append(readonly)
        wrong: list[tuple[type[Exception], str, Any, dict[str, Any]]] = [
            (BufferError_, "read-only", readonly, {}),
            (UsageError, "not on the same device", x, {"out": np.zeros(8, "f4")}),
            (UsageError, "stream= is for arrays on devices", np.ones(3), {"stream": 0}),
            (UsageError, "unknown compress='zip'", x, {"compress": "zip"}),
            (UsageError, "must be None, the integer", x, {"stream": 1.5}),
            (UsageError, "parameter piece=0", x, {"params": {"piece": 0}}),
            (UsageError, "unknown backend|no backend|shm", x, {"backend": "shm"}),
        ]
        for kind, text, given, arguments in wrong:
            with pytest.raises(kind, match=text):
                comm.allreduce(given, **arguments)
        assert num_started(comm) == seq
        comm.allreduce(x)
        rank.finish()

    on_device(main)


def test_a_stream_of_another_device_is_refused() -> None:
    def main(rank: Rank) -> None:
        x = ones(rank)
        other = streams[1 - rank.rank]
        with pytest.raises(UsageError, match="is not on the device of the array"):
            rank.comm.allreduce(x, stream=other)
        request = rank.comm.allreduce(x, nonblocking=True)
        with pytest.raises(UsageError, match="is not on the device of the array"):
            request.wait(stream=other)
        request.synchronize()

    ranks = SimRanks(2, 0)
    streams = [DeviceStream(rank.device) for rank in ranks.ranks]
    ranks.run(main)
    ranks.close()


def test_arrays_of_two_devices_are_refused() -> None:
    def main(rank: Rank) -> None:
        x, there = ones(rank), elsewhere[1 - rank.rank]
        seq = num_started(rank.comm)
        with pytest.raises(UsageError, match="x and out are not on the same device"):
            rank.comm.allreduce(x, out=there)
        with pytest.raises(UsageError, match="x and out are not on the same device"):
            rank.comm.allreduce(x, out=there, nonblocking=True)
        assert num_started(rank.comm) == seq
        rank.comm.allreduce(x, nonblocking=True).synchronize()

    ranks = SimRanks(2, 0)
    elsewhere = [DeviceArray(rank.device, 8) for rank in ranks.ranks]
    ranks.run(main)
    for array in elsewhere:
        array.free()
    ranks.close()


def test_a_captured_stream_is_refused_and_its_capture_goes_on() -> None:
    def main(rank: Rank) -> None:
        x = ones(rank)
        rank.stream.synchronize()
        rank.device.begin_capture(rank.stream.handle)
        seq = num_started(rank.comm)
        said = (
            r"allreduce on .*, rank \d: stream \d+ is being captured.*Call it outside"
        )
        with pytest.raises(CaptureError, match=said):
            rank.comm.allreduce(x)
        with pytest.raises(CaptureError, match=r"bcast on .* is being captured"):
            rank.comm.bcast(x, root=0)
        assert num_started(rank.comm) == seq
        graph = rank.device.end_capture(rank.stream.handle)
        assert rank.device.num_graph_commands(graph) == 0
        request = rank.comm.allreduce(x, nonblocking=True)
        rank.device.begin_capture(rank.stream.handle)
        with pytest.raises(CaptureError, match=r"wait\(\) for allreduce #.*captured"):
            request.wait()
        with pytest.raises(CaptureError, match=r"allreduce on .* is being captured"):
            rank.comm.allreduce(x, nonblocking=True)  # as the one before
        other = DeviceStream(rank.device)
        with pytest.raises(CaptureError, match="is being captured"):
            rank.comm.allreduce(x, stream=other)  # x says that the other one orders it
        request.synchronize()
        graph = rank.device.end_capture(rank.stream.handle)
        assert rank.device.num_graph_commands(graph) == 0

    on_device(main)


class Exported:
    """An array of a library that is known by its interface alone."""

    def __init__(self, array: DeviceArray, **changes: Any) -> None:
        self.array = array
        self.__cuda_array_interface__ = {**array.__cuda_array_interface__, **changes}


def test_arrays_are_known_by_their_interface() -> None:
    def main(rank: Rank) -> None:
        x, y = ones(rank), ones(rank)
        exported = Exported(x)
        assert rank.comm.allreduce(exported) is exported
        # It was filled in another stream than the call's, and says so.
        other = DeviceStream(rank.device)
        rank.comm.allreduce(Exported(y), stream=other)
        values = [rank.fetch(x)]
        with other:
            rank.stream, mine = other, rank.stream
            values.append(rank.fetch(y))
            rank.stream = mine
        other.synchronize()
        rank.stream.synchronize()
        assert [value().tolist() for value in values] == [[3.0] * 8] * 2
        for text, changes in (
            ("not C-contiguous", {"strides": (8,), "shape": (4,)}),
            ("has dtype", {"typestr": "<M8[s]"}),
            ("has dtype", {"typestr": ">f4"}),
            ("masked", {"mask": exported}),
            ("stream 0", {"stream": 0}),
            ("no device knows its address", {"data": (64, False)}),
            ("no device knows", {"data": (rank.stop, False)}),
        ):
            with pytest.raises(BufferError_, match=text):
                rank.comm.allreduce(Exported(x, **changes))
        with pytest.raises(UsageError, match="pass out="):
            rank.comm.allgather(exported)
        rank.finish()
        other.destroy()

    on_device(main)


@pytest.mark.parametrize("versioned", [True, False])
def test_arrays_are_known_by_dlpack_alone(versioned: bool) -> None:
    def main(rank: Rank) -> None:
        comm, x, y = rank.comm, ones(rank), ones(rank)
        rank.stream.synchronize()  # it is the producer's to order what it exports
        given = OnlyDlpack(x, versioned=versioned)
        assert comm.allreduce(given, stream=rank.stream) is given
        assert given.asked == [1]  # the legacy stream, behind which the call comes
        shifted = OnlyDlpack(y, versioned=versioned, offset=16, strides=(1,))
        comm.sendrecv(
            shifted, dest=1 - rank.rank, out=given, source=1 - rank.rank, sendtag=0
        )
        rank.stream.synchronize()
        value = rank.fetch(x)
        rank.stream.synchronize()
        rank.finish()
        assert value().tolist() == [2.0 - rank.rank] * 8
        wrong = [
            ("not C-contiguous", OnlyDlpack(x, versioned=versioned, strides=(2,))),
            ("type code 3 of 32 bits", OnlyDlpack(x, versioned=versioned, code=3)),
        ]
        if versioned:
            wrong += [
                ("read-only", OnlyDlpack(x, readonly=True)),
                (r"exports DLPack 2\.0", OnlyDlpack(x, major=2)),
            ]
        for text, array in wrong:
            with pytest.raises(BufferError_, match=text):
                comm.allreduce(array)
        with pytest.raises(UsageError, match="pass out="):
            comm.allgather(given)

    on_device(main)


def test_arrays_of_jax_are_read_and_never_written() -> None:
    """There is no JAX here; what is known of it is the name of its modules."""

    class Frozen(Exported):
        pass

    Frozen.__module__ = "jaxlib._jax"

    def main(rank: Rank) -> None:
        x, out = ones(rank), ones(rank)
        frozen = Frozen(x)
        with pytest.raises(BufferError_, match="read-only"):
            rank.comm.allreduce(frozen)
        with pytest.raises(UsageError, match="JAX's arrays never change"):
            rank.comm.allgather(frozen)
        assert rank.comm.allreduce(frozen, out=out) is out
        value = rank.fetch(out)
        rank.stream.synchronize()
        assert value().tolist() == [3.0] * 8
        rank.finish()

    on_device(main)


def test_a_device_that_is_served_is_found_by_address() -> None:
    world = SimWorld(preempt=0)
    device = world.device()
    array = DeviceArray(device, 8)
    with pytest.raises((DeviceMissingError, BufferError_)):  # nor does CUDA know it
        find_device(array.address, "x")
    serve(device)
    try:
        assert find_device(array.address, "x") == (device, 0)
    finally:
        stop_serving(device)


# --- what stays alive ---


def test_arrays_stay_alive_until_the_host_has_seen_the_end() -> None:
    def main(rank: Rank) -> None:
        x = DeviceArray(rank.device, 8)
        out = DeviceArray(rank.device, 8)
        alive = [weakref.ref(x), weakref.ref(out)]
        request = rank.comm.allreduce(x, out=out, nonblocking=True)
        request.wait()
        del x, out, request
        gc.collect()
        assert None not in [each() for each in alive]
        rank.finish()
        last = ones(rank)
        rank.comm.allreduce(last, nonblocking=True).synchronize()
        assert [each() for each in alive] == [None, None]

    on_device(main, preempt=0.0)


def test_who_drops_a_request_is_told() -> None:
    def main(rank: Rank) -> None:
        x = ones(rank)
        with pytest.warns(ResourceWarning, match="was dropped without wait"):
            rank.comm.allreduce(x, nonblocking=True)
        rank.finish()

    on_device(main)


# --- failures ---


def failure(request: DeviceRequest) -> str:
    try:
        request.synchronize()
    except CommError as error:
        return type(error).__name__
    return ""


def test_a_device_that_fails_is_told_of_and_peers_learn_of_it() -> None:
    for seed, fails_at in enumerate((1, 8, 15, 40, 60)):
        ranks = SimRanks(2, seed, staging={"first_nbytes": 4096})

        def main(rank: Rank, fails_at: int = fails_at) -> list[str]:
            x = ones(rank, 64)
            if rank.rank == 1:
                rank.device.fail_after(fails_at)
            found = []
            requests = []
            for _ in range(6):
                try:
                    requests.append(
                        rank.comm.allreduce(x, nonblocking=True, params={"piece": 64})
                    )
                except CommError as error:
                    found.append(type(error).__name__)
                    break
            return [*map(failure, requests), *found]

        found = ranks.run(main)
        assert {*found[1]} <= {"", "DeviceFailedError"}, found
        assert {*found[0]} <= {"", "RevokedError"}, found
        assert (found[0][-1], found[1][-1]) == ("RevokedError", "DeviceFailedError")
        forget_ranks()


def test_a_peer_that_never_comes_is_a_timeout_and_streams_go_on() -> None:
    def main(rank: Rank) -> str:
        if rank.rank == 1:
            return ""
        x = ones(rank)
        request = rank.comm.allreduce(x, nonblocking=True, timeout_s=0.05)
        request.wait()  # its stream waits for what does not come
        with pytest.raises(TimeoutError_, match=r"rank 1 on this node has not started"):
            request.synchronize(timeout_s=300)
        with pytest.raises(TimeoutError_, match="its streams were let go"):
            request.wait()
        rank.stream.synchronize()
        with pytest.raises(RevokedError):
            rank.comm.allreduce(x)
        return "let go"

    assert on_threads(2, main) == ["let go", ""]


def test_a_wait_that_ran_out_of_time_can_be_repeated() -> None:
    first_waits = threading.Event()

    def both(rank: Rank) -> None:
        if rank.rank == 0:
            x = ones(rank)
            request = rank.comm.allreduce(x, nonblocking=True)
            with pytest.raises(TimeoutError_, match="it stays in flight") as caught:
                request.synchronize(timeout_s=0.02)
            assert caught.value.request is request  # type: ignore[attr-defined]
            first_waits.set()
            assert request.synchronize() is x
        else:
            x = ones(rank)
            assert first_waits.wait(300)
            rank.comm.allreduce(x, nonblocking=True).synchronize()

    on_threads(2, both)


def test_other_communicators_work_after_a_failure() -> None:
    ranks = SimRanks(2, 3)
    others = kept_ranks(2).each(lambda comm: comm.dup())
    for rank in ranks.ranks:
        core_of(others[rank.rank]).devices.stager(rank.device)

    def main(rank: Rank) -> str:
        x, y = ones(rank), ones(rank)
        if rank.rank == 1:
            core_of(rank.comm).give_up("it was told to")
            said = "gave up"
        else:
            said = failure(rank.comm.allreduce(x, nonblocking=True))
        others[rank.rank].allreduce(y, nonblocking=True).synchronize()
        value = rank.fetch(y)
        rank.stream.synchronize()
        assert value().tolist() == [3.0] * 8
        return said

    assert ranks.run(main) == ["RevokedError", "gave up"]
    forget_ranks()


def test_a_failed_device_is_a_typed_error_at_the_call() -> None:
    world = SimWorld(preempt=0)
    device = world.device()
    device.fail_after(1)
    device.memcpy_async(device.alloc(4), device.pinned_alloc(4), 4, 0)
    world.step()
    with pytest.raises(DeviceFailedError):
        DeviceArray(device, 4)


# --- what would run ---


def test_explain_says_what_runs_arrays_on_devices() -> None:
    def main(rank: Rank) -> None:
        comm = rank.comm
        found = comm.explain("allreduce", 1 << 24, device="cuda")
        assert found.choice.candidate.backend == "staged"
        assert "cuda" in str(found)
        offered = comm.candidates("bcast", 64, device="cuda")
        assert {each.backend for each in offered} == {"staged"}
        with pytest.raises(UsageError, match=r"device='gpu'"):
            comm.explain("allreduce", 8, device="gpu")

    on_device(main)


def test_check_mode_sees_ranks_whose_arrays_are_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COMMRT_DEBUG", "check")

    def main(rank: Rank) -> None:
        rank.comm.allreduce(ones(rank))
        elsewhere = ones(rank) if rank.rank else np.ones(8, "f4")
        with pytest.raises(MismatchError, match="the ranks disagree on memory"):
            rank.comm.allreduce(elsewhere)

    on_threads(2, main)


def test_threads_of_a_rank_may_call_at_the_same_time() -> None:
    """Each on a communicator of its own, and all on one device."""

    def main(rank: Rank) -> None:
        comms = [rank.comm.dup() for _ in range(3)]

        def work(comm: Any) -> None:
            stream = DeviceStream(rank.device)
            x = DeviceArray(rank.device, 64)
            x.put(np.ones(64), stream=stream.handle)
            for number in range(20):
                request = comm.allreduce(
                    x, nonblocking=True, stream=stream, params={"piece": 64}
                )
                request.wait(stream=stream)
                if number % 5 == 0:
                    request.synchronize()
            assert x.get(stream=stream.handle).tolist() == [float(2**20)] * 64

        run_together([lambda comm=comm: work(comm) for comm in comms])
        for comm in comms:
            comm.free()

    on_threads(2, main, max_delay_us=20)


def run_together(functions: list[Callable[[], None]]) -> None:
    """Run functions in threads; raise the first error."""
    errors: list[BaseException] = []

    def guarded(function: Callable[[], None]) -> None:
        try:
            function()
        except BaseException as error:  # noqa: BLE001 - raised below
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(each,)) for each in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
