# SPDX-License-Identifier: Apache-2.0
"""Calls on device arrays that are like ones before: started without Python.

They have the results of the first ones, say the same of what is wrong, and are
forgotten where what was found out about them no longer holds.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from device_call_cache import calls_of_python, num_cached, said, without_python
from ipc_ranks import ipc_here, on_ipc_threads
from nccl_ranks import nccl_here, on_nccl_threads
from staged_ranks import Rank, SimRanks, forget_ranks, on_threads
from started_operations import num_started

from commrt.backends.ipc.sharing import ENDING
from commrt.comm import core_of
from commrt.devices import DeviceArray, DeviceStream
from commrt.errors import CaptureError, TimeoutError_
from commrt.vocabulary.operations import OPERATIONS

SIZES = (1, 2, 3)
COUNTS = (0, 1, 7)


@pytest.fixture(autouse=True, scope="module")
def no_ranks_left() -> Iterator[None]:
    yield
    forget_ranks()


def values(rank: int, count: int, dtype: str, turn: int = 0) -> Any:
    return (np.arange(count) % 5 + rank + 2 * turn).astype(dtype)


def reduced(size: int, count: int, dtype: str, op: str, turn: int) -> Any:
    each = [values(rank, count, dtype, turn) for rank in range(size)]
    combine = {"sum": np.add, "max": np.maximum}[op]
    found = each[0]
    for one in each[1:]:
        found = combine(found, one)
    return found


def fetched(rank: Rank, array: DeviceArray) -> Any:
    value = rank.fetch(array)
    rank.stream.synchronize()
    return value()


def ones(rank: Rank, count: int = 8, dtype: str = "f4") -> DeviceArray:
    return rank.array(np.full(count, 1 + rank.rank, dtype))


# --- results ---


@pytest.mark.parametrize("size", SIZES)
def test_later_calls_in_place_have_the_results_of_the_first(size: int) -> None:
    def main(rank: Rank) -> None:
        comm = rank.comm
        for count in COUNTS:
            for dtype, op in (("f4", "sum"), ("i8", "max"), ("f4", "max")):
                for turn in range(3):
                    x = rank.array(values(rank.rank, count, dtype, turn))
                    with calls_of_python(comm) as looked_at:
                        if turn % 2:
                            assert comm.allreduce(x, op=op) is x
                        else:
                            request = comm.allreduce(x, op=op, nonblocking=True)
                            assert request.operation == "allreduce"
                            assert request.stream == rank.stream.handle
                            assert request.wait() is x
                    assert looked_at == ["allreduce"] * (turn == 0)
                    expected = reduced(size, count, dtype, op, turn)
                    np.testing.assert_array_equal(fetched(rank, x), expected)
        rank.finish()

    for seed in range(2):
        ranks = SimRanks(size, seed)
        ranks.run(main)
        ranks.close()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("coll", ["bcast", "reduce"])
def test_each_root_is_a_call_of_its_own(coll: str, size: int) -> None:
    def main(rank: Rank) -> None:
        comm = rank.comm
        for turn in range(2):
            for root in range(size):
                x = rank.array(values(rank.rank, 5, "f4", turn + root))
                with calls_of_python(comm) as looked_at:
                    request = getattr(comm, coll)(x, root=root, nonblocking=True)
                assert looked_at == [coll] * (turn == 0)
                found = request.wait()
                is_out = coll == "bcast" or root == rank.rank
                assert found is (x if is_out else None)
                if coll == "bcast":
                    expected = values(root, 5, "f4", turn + root)
                else:
                    expected = reduced(size, 5, "f4", "sum", turn + root)
                if is_out:
                    np.testing.assert_array_equal(fetched(rank, x), expected)
        rank.finish()

    ranks = SimRanks(size, 1)
    ranks.run(main)
    ranks.close()


WITH_OUT = [
    spec.name
    for spec in OPERATIONS
    if spec.x_count != "none" and not spec.count_arguments
]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("coll", WITH_OUT)
def test_later_calls_with_an_output_have_the_results_of_the_first(
    coll: str, size: int
) -> None:
    spec = next(each for each in OPERATIONS if each.name == coll)
    per_rank = 3
    counts = {"times_size": size * size * per_rank, "div_size": per_rank}
    count = size * per_rank
    out_count = counts.get(spec.out_count, count)

    def main(rank: Rank) -> list[Any]:
        found = []
        for turn in range(3):
            x = rank.array(values(rank.rank, count, "f4", 1))
            out = rank.array(np.zeros(out_count, "f4"))
            with calls_of_python(rank.comm) as looked_at:
                result = getattr(rank.comm, coll)(x, out=out)
            assert looked_at == [coll] * (turn == 0)
            is_root = spec.output_on != "root" or rank.rank == 0
            assert result is (out if is_root else None)
            found.append(fetched(rank, out).tolist())
            untouched = fetched(rank, x)
            np.testing.assert_array_equal(untouched, values(rank.rank, count, "f4", 1))
        rank.finish()
        assert found[0] == found[1] == found[2]
        return found[0]

    ranks = SimRanks(size, 2)
    found = ranks.run(main)
    ranks.close()
    written = found[-1] if spec.output_on != "root" else found[0]
    assert any(written) or coll == "exscan"  # rank 0 has none


def test_an_array_and_itself_as_output_is_a_call_in_place() -> None:
    def main(rank: Rank) -> None:
        x = ones(rank)
        for turn in range(2):
            with calls_of_python(rank.comm) as looked_at:
                assert rank.comm.allreduce(x, out=x) is x
            assert looked_at == ["allreduce"] * (turn == 0)
        np.testing.assert_array_equal(fetched(rank, x), np.full(8, 6, "f4"))
        rank.finish()

    ranks = SimRanks(2, 4)
    ranks.run(main)
    ranks.close()


@pytest.mark.parametrize("size", SIZES)
def test_calls_by_nccl_are_known(size: int) -> None:
    def main(rank: Rank) -> None:
        comm = rank.comm
        for count in COUNTS:
            for turn in range(3):
                x = rank.array(values(rank.rank, count, "f4", turn))
                out = x.new_empty(count)
                rank.arrays.append(out)
                with calls_of_python(comm) as looked_at:
                    comm.allreduce(x, out=out, nonblocking=True).wait()
                    comm.allreduce(x, nonblocking=True).wait()
                assert looked_at == ["allreduce"] * (2 * (turn == 0))
                expected = reduced(size, count, "f4", "sum", turn)
                np.testing.assert_array_equal(fetched(rank, x), expected)
                np.testing.assert_array_equal(fetched(rank, out), expected)
        assert core_of(comm).attached["nccl"].is_made

    with nccl_here():
        on_nccl_threads(size, main)


def test_calls_over_memory_of_peers_are_known_while_nothing_else_ends_there() -> None:
    def main(rank: Rank) -> None:
        comm = rank.comm
        rank.device.load_kernels(b"")
        for turn in range(3):
            x = rank.array(values(rank.rank, 7, "f4", turn))
            with calls_of_python(comm) as looked_at:
                comm.allreduce(x, nonblocking=True).wait()
            assert looked_at == ["allreduce"] * (turn == 0)
            expected = reduced(2, 7, "f4", "sum", turn)
            np.testing.assert_array_equal(fetched(rank, x), expected)
        assert core_of(comm).attached["ipc"]._shared is not None
        barrier.wait(300)
        if rank.rank == 0:
            ENDING.append(ended)
        barrier.wait(300)
        x = ones(rank)
        comm.allreduce(x)  # of another length, in full
        with calls_of_python(comm) as looked_at:
            comm.allreduce(x)
        assert looked_at == ["allreduce"]
        rank.stream.synchronize()
        barrier.wait(300)
        if rank.rank == 0:
            ENDING.remove(ended)
        barrier.wait(300)
        with without_python(comm):
            comm.allreduce(x)

    class Ended:
        """What was shared on a device that nobody here has."""

        device = None
        is_ending = True

    ended: Any = Ended()
    barrier = threading.Barrier(2)
    with ipc_here():
        on_ipc_threads(2, main)


# --- what is another call ---


def test_another_length_type_or_reduction_is_looked_at_in_full() -> None:
    def main(rank: Rank) -> None:
        comm = rank.comm
        comm.allreduce(ones(rank))
        others: list[tuple[DeviceArray, dict[str, Any]]] = [
            (ones(rank, 9), {}),
            (ones(rank, 8, "i4"), {}),
            (ones(rank), {"op": "max"}),
            (ones(rank), {"algorithm": "direct"}),
            (ones(rank), {"params": {"piece": 16}}),
            (ones(rank), {"op": "premul_sum", "factor": 1.0}),
            (ones(rank), {"op": "premul_sum", "factor": 2.0}),
        ]
        for x, arguments in others:
            with calls_of_python(comm) as looked_at:
                comm.allreduce(x, **arguments)
            assert looked_at == ["allreduce"], arguments
            factor = arguments.get("factor", 1.0)
            expected = 2 if arguments.get("op") == "max" else 3 * factor
            np.testing.assert_array_equal(
                fetched(rank, x), np.full(x.shape, expected, x.dtype)
            )
        with without_python(comm):
            comm.allreduce(ones(rank))
        rank.finish()

    ranks = SimRanks(2, 0)
    ranks.run(main)
    ranks.close()


def test_a_call_may_be_given_a_stream_and_a_limit() -> None:
    def main(rank: Rank) -> None:
        comm, other = rank.comm, DeviceStream(rank.device)
        comm.allreduce(ones(rank))
        given: list[tuple[dict[str, Any], int, float]] = [
            ({"stream": other}, other.handle, comm.timeout_s),
            ({"stream": other.handle}, other.handle, comm.timeout_s),
            ({"stream": rank.stream}, rank.stream.handle, comm.timeout_s),
            ({"stream": None}, rank.stream.handle, comm.timeout_s),
            ({"timeout_s": 300}, rank.stream.handle, 300.0),
            ({"timeout_s": 400.5, "stream": other}, other.handle, 400.5),
            ({"timeout_s": None}, rank.stream.handle, comm.timeout_s),
        ]
        for arguments, handle, timeout_s in given:
            # Filled in one stream, summed in another, as the array says.
            x = ones(rank)
            with without_python(comm):
                request = comm.allreduce(x, nonblocking=True, **arguments)
            assert (request.stream, request.timeout_s) == (handle, timeout_s)
            request.wait()
            check = fetched(rank, x)
            np.testing.assert_array_equal(check, np.full(8, 3, "f4"))
            request.synchronize()
        rank.finish()
        other.destroy()

    for seed in range(3):
        ranks = SimRanks(2, seed)
        ranks.run(main)
        ranks.close()


def test_a_limit_of_a_known_call_is_kept() -> None:
    def main(rank: Rank) -> str:
        comm, x = rank.comm, ones(rank)
        comm.allreduce(x, nonblocking=True).synchronize()
        if rank.rank == 1:
            return ""
        with without_python(comm):
            request = comm.allreduce(x, nonblocking=True, timeout_s=0.05)
        request.wait()
        with pytest.raises(TimeoutError_, match=r"within 0\.05 s.*were let go"):
            request.synchronize(timeout_s=300)
        rank.stream.synchronize()
        return "let go"

    assert on_threads(2, main, survives=False) == ["let go", ""]


def test_a_thread_has_its_own_current_stream() -> None:
    def main(rank: Rank) -> None:
        comm, streams = rank.comm, []
        comm.allreduce(ones(rank))
        rank.finish()

        def other_thread() -> None:
            mine = DeviceStream(rank.device)
            x = DeviceArray(rank.device, 8).put(np.ones(8), stream=mine.handle)

            def called_in() -> int:
                request = comm.allreduce(x, nonblocking=True)
                request.synchronize()  # the next one is in another stream
                streams.append(request.stream)
                return len(streams)

            with without_python(comm):
                called_in()
                with mine:
                    called_in()
                    with DeviceStream(rank.device) as inner:
                        assert called_in() == 3
            assert streams == [0, mine.handle, inner.handle]
            assert x.get(stream=mine.handle).tolist() == [8.0] * 8

        thread = threading.Thread(target=other_thread)
        thread.start()
        thread.join(300)
        assert len(streams) == 3

    on_threads(2, main)


# --- what is wrong with a call ---


def wrong_calls(rank: Rank) -> list[tuple[Callable[[], Any], Any]]:
    """Return calls that must not be made, with what says so."""
    comm, device = rank.comm, rank.device
    x, out = ones(rank), ones(rank)
    readonly = DeviceArray(device, 8, readonly=True)
    freed = DeviceArray(device, 8)
    freed.free()
    rank.arrays.append(readonly)

    class Part(DeviceArray):
        """Some elements of another array."""

        def __init__(self, of: DeviceArray, begin: int, count: int) -> None:
            self.__dict__.update(of.__dict__)
            self.shape = (count,)
            self._address = of.address + begin * of.dtype.itemsize
            self._pinned = 0

        def _give_back(self) -> None:
            """It is not ours."""

    long = ones(rank, 12)
    return [
        (lambda: comm.allreduce(readonly), "read-only"),
        (lambda: comm.allreduce(x, out=readonly), "read-only"),
        (lambda: comm.allreduce(freed), "freed"),
        (lambda: comm.allreduce(x, out=freed), "freed"),
        (lambda: comm.allreduce(x, out=ones(rank, 9)), "out has 9 elements"),
        (lambda: comm.allreduce(x, out=ones(rank, 8, "i4")), "out has dtype int32"),
        (lambda: comm.allreduce(x, out=np.zeros(8, "f4")), "not on the same device"),
        (
            lambda: comm.allreduce(Part(long, 0, 8), out=Part(long, 4, 8)),
            "out overlaps x",
        ),
        (lambda: comm.allreduce(x, out="there"), "out is a str"),
        (lambda: comm.bcast(x, root=7), "root=7 is not a rank"),
        (lambda: comm.bcast(x, op="sum"), "no argument 'op'"),
        (lambda: comm.allreduce(x, root=0), "no argument 'root'"),
        (lambda: comm.allreduce(x, op="sun"), "sun"),
        (lambda: comm.allreduce(x, nonblocking=1), "must be True or False"),
        (lambda: comm.allreduce(x, stream="fast"), "must be None, the integer"),
        (lambda: comm.allreduce(x, stream=-3), "must be None, the integer"),
        (lambda: comm.allreduce(x, timeout_s=0), "seconds above 0"),
        (lambda: comm.allreduce(x, timeout_s=float("nan")), "seconds above 0"),
        (lambda: comm.allreduce(x, timeout_s=True), "seconds above 0"),
        (lambda: comm.barrier(x), "takes nothing by position"),
        (lambda: comm.allreduce(x, out), "is an array: pass it by keyword"),
    ]


def test_later_calls_say_what_the_first_ones_say_of_what_is_wrong() -> None:
    def main(rank: Rank) -> None:
        comm = rank.comm
        core_of(comm).devices.forget_plans()
        before = [said(call) for call, _ in wrong_calls(rank)]
        x, out = ones(rank), ones(rank)
        comm.allreduce(x)
        comm.allreduce(x, out=out)
        comm.bcast(x)
        seq, known = num_started(comm), num_cached(comm)
        assert known == 3
        for (call, text), first in zip(wrong_calls(rank), before, strict=True):
            assert text in first
            assert said(call) == first
        assert num_started(comm) == seq
        with without_python(comm):
            comm.allreduce(x)
        rank.finish()

    ranks = SimRanks(2, 0)
    ranks.run(main)
    ranks.close()


def test_an_array_on_another_device_is_not_the_known_one() -> None:
    def main(rank: Rank) -> None:
        comm, x = rank.comm, ones(rank)
        comm.allreduce(x)
        comm.allreduce(x, out=ones(rank))
        there = elsewhere[rank.rank]
        first = said(lambda: comm.allreduce(x, out=there, algorithm="direct"))
        assert "x and out are not on the same device" in first
        assert said(lambda: comm.allreduce(x, out=there)) == first
        rank.finish()

    ranks = SimRanks(2, 0)
    others = [ranks.world.device(f"other {rank}", ordinal=1) for rank in range(2)]
    elsewhere = [DeviceArray(device, 8) for device in others]
    ranks.run(main)
    for array in elsewhere:
        array.free()
    ranks.close()


def test_a_captured_stream_is_refused_in_known_calls_too() -> None:
    def main(rank: Rank) -> None:
        comm, x = rank.comm, ones(rank)
        comm.allreduce(x)
        rank.finish()
        rank.stream.synchronize()
        rank.device.begin_capture(rank.stream.handle)
        seq = num_started(comm)
        text = rf"^allreduce on {comm.name}, rank {rank.rank}: stream \d+ is being capt"
        with without_python(comm):
            for arguments in ({}, {"nonblocking": True}):
                with pytest.raises(CaptureError, match=text) as caught:
                    comm.allreduce(x, **arguments)
                assert caught.value.status == "capturing"
            other = DeviceStream(rank.device)
            ordered = rf"^allreduce on {comm.name}, .*: an array is ordered by stream"
            with pytest.raises(CaptureError, match=ordered):
                comm.allreduce(x, stream=other)  # which x is not ordered by
        assert num_started(comm) == seq
        graph = rank.device.end_capture(rank.stream.handle)
        assert rank.device.num_graph_commands(graph) == 0
        with without_python(comm):
            comm.allreduce(x)
        rank.finish()

    ranks = SimRanks(2, 3)
    ranks.run(main)
    ranks.close()
