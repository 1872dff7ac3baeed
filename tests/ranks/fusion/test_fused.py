# SPDX-License-Identifier: Apache-2.0
"""fused(): short allreduces that go together give what each of them would give."""

from __future__ import annotations

import gc
import random
import threading
from typing import Any

import numpy as np
import pytest
from rounding import same_numbers, telling

import commrt
from commrt.comm import core_of
from commrt.core import Core
from commrt.errors import (
    BufferError_,
    RefusedError,
    TimeoutError_,
    UsageError,
)
from commrt.local import LocalRanks, run

F = np.float32
pytestmark = pytest.mark.filterwarnings("error::ResourceWarning")


def finish(ranks: LocalRanks, *requests: Any) -> None:
    """Step all ranks until the requests are done."""
    for _ in range(100_000):
        if all(request.done for request in requests):
            return
        for rank in range(len(ranks.comms)):
            ranks.step(rank)
    pytest.fail(f"not done: {requests}")


# -- values ----------------------------------------------------------------------------

KINDS = ["float32", "float64", "int32", "uint8", "float16", "complex64", "bool"]
OPS = {
    "sum": np.add,
    "prod": np.multiply,
    "max": np.maximum,
    "lor": np.logical_or,
    "avg": np.add,
}
COUNTS = (0, 1, 1, 2, 3, 17, 64, 255, 1024, 6000)


def draw_call(rng: random.Random) -> tuple[str, str, int, bool]:
    """Return type, reduction, length, and whether it is in place."""
    dtype = rng.choice(KINDS)
    ops = {"bool": ["lor", "sum"], "complex64": ["sum", "prod"]}
    op = rng.choice(ops.get(dtype, ["sum", "prod", "max", "lor", "avg"]))
    return dtype, op, rng.choice(COUNTS), rng.random() < 0.5


def values(dtype: str, rank: int, count: int, salt: int) -> Any:
    """Return small numbers, exact in every type and every order of operands."""
    return ((np.arange(count) * 7 + rank * 3 + salt) % 3).astype(dtype)


def expected(dtype: str, op: str, size: int, count: int, salt: int) -> Any:
    """Return numpy's result, as the type holds it."""
    wide: Any = np.complex128 if dtype == "complex64" else np.float64
    rows = [values(dtype, rank, count, salt).astype(wide) for rank in range(size)]
    total = rows[0]
    for row in rows[1:]:
        total = OPS[op](total, row)
    if op == "lor":
        total = np.logical_or.reduce(rows)
    if op == "avg":
        total = total // size if dtype in ("int32", "uint8") else total / size
    if dtype in ("bool", "uint8"):
        total = total.astype(np.int64)
    return total.astype(dtype)


def drawn(comm: Any, seed: int, limit: float | None, turns: int = 40) -> int:
    """Make drawn calls within a context and compare each result; return how many."""
    rng = random.Random(f"{seed} {comm.size} {limit}")
    # Without a time limit ranks wait after the same calls, else each as it likes.
    own = rng if limit is None else random.Random(f"{seed} {comm.size} {comm.rank}")
    nbytes = rng.choice([1, 64, 1000, 4096, 20_000, 1 << 20])
    started: list[tuple[Any, Any, Any]] = []
    with comm.fused(nbytes=nbytes, time_limit_s=limit):
        for turn in range(turns):
            dtype, op, count, in_place = draw_call(rng)
            x = values(dtype, comm.rank, count, turn)
            before = x.copy()
            out = x if in_place else np.full(count, 9).astype(dtype)
            kwargs = {} if in_place else {"out": out}
            request = comm.allreduce(x, op=op, nonblocking=True, **kwargs)
            right = expected(dtype, op, comm.size, count, turn)
            started.append((request, out, right))
            if not in_place:
                started.append((request, x, before))
            if own.random() < 0.1:
                assert own.choice(started)[0].wait() is not None
            if own.random() < 0.05:
                own.choice(started)[0].test()
            other = rng.random()
            if other < 0.05:
                comm.barrier()
            elif other < 0.1:
                root = turn % comm.size
                sent = comm.bcast(np.full(5, turn * (comm.rank == root)), root=root)
                assert sent.tolist() == [turn] * 5
            elif other < 0.15:
                assert comm.allreduce(np.ones(3))[0] == comm.size
            elif other < 0.2:
                gathered = comm.allgather(np.full(1, comm.rank), nonblocking=True)
                assert gathered.wait().ravel().tolist() == list(range(comm.size))
    for request, array, right in own.sample(started, len(started)):
        request.wait()
        tolerance = 0 if array.dtype.kind in "iub" else 4 * np.finfo(array.dtype).eps
        assert np.allclose(array, right, rtol=tolerance, atol=0), array.dtype
    return len(started)


@pytest.mark.parametrize(
    ("size", "limit"),
    [
        *((size, None) for size in (1, 2, 3, 4, 5, 8)),
        *((size, 0.0005) for size in (1, 2, 4)),
        (3, 1.0),
    ],
)
def test_drawn_calls_give_what_numpy_gives(
    size: int, limit: float | None, seed: int
) -> None:
    done = run(size, lambda comm: drawn(comm, seed, limit), timeout_s=300)
    assert min(done) >= 40


@pytest.mark.parametrize("limit", [None, 1.0])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_bits_are_those_of_single_calls_where_order_is_fixed(
    size: int, limit: float | None
) -> None:
    """In deterministic mode no bit shows which algorithm ran, or on which part."""

    def rank_main(comm: Any) -> bool:
        fixed = comm.dup(deterministic=True)
        kinds = ["float32", "float16", "bfloat16", "float64", "float32"]
        xs = [
            telling(kind, comm.rank, count)
            for kind in kinds
            for count in (1, 5, 700, 3001)
        ]
        alone = [fixed.allreduce(x, out=np.empty_like(x)) for x in xs]
        with fixed.fused(nbytes=30_000, time_limit_s=limit):
            requests = [
                fixed.allreduce(x, out=np.empty_like(x), nonblocking=True) for x in xs
            ]
        together = commrt.wait_all(requests)
        fixed.free()
        return all(map(same_numbers, alone, together))

    assert run(size, rank_main) == [True] * size


def test_every_schedule_works_on_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    def rank_main(comm: Any) -> bool:
        xs = [np.arange(n) % 9 + comm.rank for n in (1, 0, 700, 33, 4000, 0, 2)]
        with comm.fused(nbytes=1 << 20):
            requests = [comm.allreduce(x, nonblocking=True) for x in xs]
        commrt.wait_all(requests)
        total = sum(range(comm.size))
        right = [(np.arange(x.size) % 9) * comm.size + total for x in xs]
        return all(map(np.array_equal, xs, right))

    ran = set()
    for size in (2, 3, 4):
        with LocalRanks(size) as ranks:
            found = map(str, ranks.comms[0].candidates("allreduce", 40_000))
            names = [name.partition("{")[0] for name in found]
        for name in {*names, f"{names[0]}{{chunk=4096}}"}:
            monkeypatch.setenv("COMMRT_ALGORITHM", f"allreduce:{name}")
            assert run(size, rank_main) == [True] * size, name
            ran.add(name)
    assert len(ran) > 5


# -- where buckets end -----------------------------------------------------------------


def sent_after(comm: Any, lengths: list[int], **how: Any) -> list[int]:
    """Return how many operations were started after each call, and at the end."""
    begin, seen, requests = core_of(comm).next_seq, [], []
    with comm.fused(**how):
        for length in lengths:
            x = np.ones(length, np.uint8)
            requests.append(comm.allreduce(x, nonblocking=True))
            seen.append(core_of(comm).next_seq - begin)
    commrt.wait_all(requests)
    return [*seen, core_of(comm).next_seq - begin]


@pytest.mark.parametrize(
    ("lengths", "expected_counts"),
    [
        ([25] * 5, [0, 0, 0, 1, 1, 2]),  # full
        ([40, 40, 40, 40], [0, 0, 1, 1, 2]),  # the third does not fit any more
        ([10, 100, 10], [0, 2, 2, 3]),  # what is as long as a bucket goes by itself
        ([0, 0, 0], [0, 0, 0, 1]),
        ([], [0]),
    ],
)
def test_a_bucket_ends_where_it_is_full(
    lengths: list[int], expected_counts: list[int]
) -> None:
    counts = run(2, lambda comm: sent_after(comm, lengths, nbytes=100))
    assert counts == [expected_counts] * 2


def test_types_and_reductions_have_buckets_of_their_own() -> None:
    def rank_main(comm: Any) -> list[tuple[int, int]]:
        begin = core_of(comm).next_seq
        with comm.fused():
            requests = [
                comm.allreduce(np.ones(2, dtype), op=op, nonblocking=True)
                for dtype, op in [
                    (np.float32, "sum"),
                    (np.float64, "sum"),
                    (np.float32, "max"),
                    (np.float64, "sum"),
                    (np.float32, "sum"),
                ]
            ]
        results = commrt.wait_all(requests)
        return [
            (request.seq - begin, int(result[0]))
            for request, result in zip(requests, results, strict=True)
        ]

    expected_rows = [(0, 2), (1, 2), (2, 1), (1, 2), (0, 2)]
    assert run(2, rank_main) == [expected_rows] * 2


def test_other_collectives_come_after_what_was_called_before() -> None:
    def rank_main(comm: Any) -> list[int]:
        x = np.full(2, comm.rank)
        seen = []
        plan = comm.plan.bcast(np.zeros(2), root=0)
        calls = [
            comm.barrier,
            lambda: comm.allreduce(np.ones(2)),
            lambda: comm.allreduce(np.ones(2), op="premul_sum", factor=2.0),
            lambda: comm.reduce(np.ones(2), nonblocking=True).wait(),
            lambda: comm.allreduce(
                np.ones(2), algorithm="direct", nonblocking=True
            ).wait(),
            plan,
        ]
        with comm.fused() as context:
            for call in calls:
                request = comm.allreduce(x.copy(), nonblocking=True)
                begin = core_of(comm).next_seq
                call()
                seen.append((request.seq - begin, core_of(comm).next_seq - begin))
                request.wait()
            request = comm.allreduce(x, nonblocking=True)
            context.send()
            seen.append(request.seq >= 0)
        assert request.wait().tolist() == [1, 1]
        return seen

    assert run(2, rank_main) == [[*[(0, 2)] * 6, True]] * 2


def test_a_message_between_two_ranks_ends_no_bucket() -> None:
    def rank_main(comm: Any) -> int:
        with comm.fused():
            requests = [comm.allreduce(np.ones(2), nonblocking=True)]
            if comm.rank == 0:
                comm.send(np.ones(3), dest=1)
            elif comm.rank == 1:
                comm.recv(np.ones(3), source=0)
            requests.append(comm.allreduce(np.ones(2), nonblocking=True))
        commrt.wait_all(requests)
        return int(requests[1].seq - requests[0].seq)

    assert run(3, rank_main) == [0, 0, 0]


def test_several_communicators_have_contexts_of_their_own() -> None:
    def rank_main(comm: Any) -> list[float]:
        halves = comm.split(comm.rank % 2)
        with comm.fused(time_limit_s=30), halves.fused(nbytes=100):
            requests = []
            for i in range(30):
                each = halves if i % 3 else comm
                requests.append(each.allreduce(np.full(3, float(i)), nonblocking=True))
        results = [result[2] for result in commrt.wait_all(requests)]
        halves.free()
        return [result / max(i, 1) for i, result in enumerate(results)]

    assert run(4, rank_main) == [[0, *[2 if i % 3 else 4 for i in range(1, 30)]]] * 4


# -- requests --------------------------------------------------------------------------


def test_a_request_has_what_an_ordinary_one_has() -> None:
    with LocalRanks(2) as ranks:
        contexts = [comm.fused() for comm in ranks.comms]
        outs = [np.zeros(3), np.zeros(3)]
        requests = []
        for context, comm, out in zip(contexts, ranks.comms, outs, strict=True):
            context.__enter__()
            x = np.full(3, 1.0 + comm.rank)
            requests.append(comm.allreduce(x, out=out, nonblocking=True))
        first = requests[0]
        assert repr(first) == (
            "<commrt.Request allreduce in an open bucket on local: pending>"
        )
        assert (first.operation, first.seq, first.done) == ("allreduce", -1, False)
        assert (first.received_nbytes, first.source) == (-1, -1)
        assert (first.device, first.stream) == (None, None)
        assert first.timeout_s == ranks.comms[0].timeout_s
        with pytest.raises(TypeError, match=r"not its completion: call test\(\)"):
            bool(first)
        with pytest.raises(UsageError, match=r"wait\(stream=\.\.\.\) is for device"):
            first.wait(stream=3)
        with pytest.raises(UsageError, match=r"open bucket .*timeout_s=0 .* above 0"):
            first.wait(timeout_s=0)
        with pytest.raises(TypeError, match="no argument 'timeout'"):
            first.wait(timeout=3)
        with pytest.raises(TypeError, match="keyword"):
            first.wait(3)
        assert first.seq == -1
        for context in contexts:
            context.__exit__(None, None, None)
        assert repr(first) == "<commrt.Request allreduce #0 on local: pending>"
        finish(ranks, *requests)
        assert repr(first) == "<commrt.Request allreduce #0 on local: done>"
        for request, out in zip(requests, outs, strict=True):
            assert request.wait() is out
            assert request.wait(timeout_s=300) is out
            assert request.synchronize() is out
            assert request.test()
            assert out.tolist() == [3.0] * 3
        with pytest.raises(TypeError):
            type(first)()


def test_wait_and_test_send_the_bucket() -> None:
    with LocalRanks(2) as ranks:
        requests = []
        for comm in ranks.comms:
            with comm.fused():
                requests.append(comm.allreduce(np.ones(2), nonblocking=True))
                assert requests[-1].seq == -1
                requests[-1].test()
                assert requests[-1].seq == 0
                requests.append(comm.allreduce(np.ones(2), nonblocking=True))
                if comm.rank == 1:
                    continue
                with pytest.raises(TimeoutError_, match="allreduce #1 on local") as e:
                    requests[-1].wait(timeout_s=0.01)
                assert e.value.request is requests[-1]  # type: ignore[attr-defined]
                assert requests[-1].seq == 1
        finish(ranks, *requests)
        assert all(each.tolist() == [2, 2] for each in commrt.wait_all(requests))


def test_a_dropped_request_warns_and_its_arrays_live_on() -> None:
    with LocalRanks(2) as ranks:
        with ranks.comms[0].fused():
            with pytest.warns(
                ResourceWarning, match="open bucket on local was dropped"
            ):
                ranks.comms[0].allreduce(np.full(300, 1.0), nonblocking=True)
            gc.collect()
        poison = [np.full(300, 77.0) for _ in range(8)]
        with ranks.comms[1].fused():
            other = ranks.comms[1].allreduce(np.full(300, 2.0), nonblocking=True)
        finish(ranks, other)
        while not core_of(ranks.comms[0]).idle:
            ranks.step(0)
        assert (other.wait() == 3.0).all()
        assert all((each == 77.0).all() for each in poison)


def test_all_kinds_of_host_arrays(seed: int) -> None:
    class Buffer:
        """Has DLPack, and nothing else."""

        def __init__(self, array: Any) -> None:
            self.array = array

        def __dlpack__(self, **how: Any) -> Any:
            return self.array.__dlpack__(**how)

        def __dlpack_device__(self) -> Any:
            return self.array.__dlpack_device__()

    def rank_main(comm: Any) -> list[bool]:
        dlpack, plain = Buffer(np.ones(3)), np.ones(3)
        shared = comm.empty(3)
        shared += 1
        inputs = [bytearray(b"\x01\x02"), dlpack, plain, shared, np.ones((2, 2))[1]]
        with comm.fused():
            requests = [comm.allreduce(each, nonblocking=True) for each in inputs]
            result = comm.allreduce(
                b"\x01", out=bytearray(1), op="sum", nonblocking=True
            )
        same = [a is b for a, b in zip(commrt.wait_all(requests), inputs, strict=True)]
        assert bytes(result.wait()) == b"\x02"
        assert bytes(inputs[0]) == b"\x02\x04"
        assert all((each == 2).all() for each in (dlpack.array, plain, shared))
        return same

    assert run(2, rank_main) == [[True] * 5] * 2


# -- what is refused -------------------------------------------------------------------


def test_what_an_ordinary_call_refuses_is_refused_with_its_bucket() -> None:
    def rank_main(comm: Any) -> bool:
        x = np.ones(8)
        read_only = np.ones(8)
        read_only.setflags(write=False)
        wrong: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
            (read_only, {}, BufferError_, "read-only"),
            (x, {"out": read_only}, BufferError_, "read-only"),
            (x[:4], {"out": x[2:6]}, UsageError, "overlaps"),
            (x, {"out": np.ones(7)}, UsageError, "out has 7 elements"),
            (x, {"out": np.ones(8, F)}, UsageError, "float32"),
            (x, {"op": "band"}, UsageError, "band"),
            (x, {"timeout_s": -1}, UsageError, "timeout_s"),
        ]
        # Another rank's may run by themselves, behind the bucket.
        alone: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
            (x, {"factor": 2.0}, UsageError, "premul_sum"),
            (x, {"root": 0}, TypeError, "no argument 'root'"),
        ]
        begin = core_of(comm).next_seq
        with comm.fused() as context:
            first = comm.allreduce(x.copy(), nonblocking=True)
            for again in range(2):  # before the kind of call is known, and after
                for array, arguments, kind, message in wrong:
                    with pytest.raises(kind, match=message):
                        comm.allreduce(array, nonblocking=True, **arguments)
                assert first.seq == -1, again
            for array, arguments, kind, message in alone:
                with pytest.raises(kind, match=message):
                    comm.allreduce(array, nonblocking=True, **arguments)
                second = comm.allreduce(x.copy(), nonblocking=True)
                assert second.wait().tolist() == [2] * 8
            assert context.nbytes > 0
        with pytest.raises(RefusedError, match=r"same bucket of fused.*read-only"):
            first.wait()
        assert comm.allreduce(x.copy()).tolist() == [2] * 8
        # Two buckets were refused: one by the reduction that floats do not have.
        return core_of(comm).next_seq == begin + 2 + 2 * len(alone) + 1

    assert run(2, rank_main) == [True, True]


@pytest.mark.parametrize("wrong", [0, -1, 1.5, "1", True, None])
def test_limits_must_make_sense(wrong: Any) -> None:
    with LocalRanks(1) as ranks:
        (comm,) = ranks.comms
        with pytest.raises(UsageError, match=r"fused: nbytes=.* in 1"):
            comm.fused(nbytes=wrong)
        if wrong not in (None, 1.5):
            with pytest.raises(UsageError, match=r"fused: time_limit_s=.* above 0"):
                comm.fused(time_limit_s=0 if wrong is True else wrong)


def test_one_context_at_a_time() -> None:
    with LocalRanks(1) as ranks:
        (comm,) = ranks.comms
        context = comm.fused()
        with context:
            with pytest.raises(UsageError, match="is open already"), comm.fused():
                pass
            with pytest.raises(UsageError, match="is open already"):
                context.__enter__()
            with pytest.raises(UsageError, match=r"a fused\(\) of it is open"):
                comm.free()
            request = comm.allreduce(np.ones(1), nonblocking=True)
        with pytest.raises(UsageError, match="used before"):
            context.__enter__()
        with pytest.raises(UsageError, match="outside of the context"):
            context.send()
        with comm.fused():
            pass
        assert request.wait().tolist() == [1]


# -- time limit: any rank waits when it likes ------------------------------------------


@pytest.mark.parametrize("waits", [0, 1])
def test_what_follows_from_a_bucket_may_be_waited_for(waits: int) -> None:
    """One rank waits for a request, and only then sends what the other waits for."""

    def rank_main(comm: Any) -> float:
        with comm.fused(time_limit_s=0.001):
            request = comm.allreduce(np.ones(2), nonblocking=True)
            if comm.rank == waits:
                request.wait()
                comm.send(np.ones(1), dest=1 - waits)
            else:
                comm.recv(np.ones(1), source=waits)
        return float(request.wait()[0])

    assert run(2, rank_main) == [2.0, 2.0]


def test_old_calls_are_sent_while_another_communicator_is_waited_for() -> None:
    def rank_main(comm: Any) -> float:
        other = comm.dup()
        with comm.fused(time_limit_s=0.001):
            request = comm.allreduce(np.ones(2), nonblocking=True)
            if comm.rank == 1:
                request.wait()
            other.barrier()
        other.free()
        return float(request.wait()[0])

    assert run(3, rank_main) == [3.0] * 3


def test_threads_add_to_the_same_buckets() -> None:
    def rank_main(comm: Any) -> list[float]:
        results: list[float] = []

        def work() -> None:
            requests = [comm.allreduce(np.ones(4), nonblocking=True) for _ in range(50)]
            results.extend(float(each[0]) for each in commrt.wait_all(requests))

        # Equal calls, and no cut before the end: any order of them will do.
        with comm.fused(nbytes=1 << 20, time_limit_s=60):
            threads = [threading.Thread(target=work) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        return results

    assert run(2, rank_main) == [[2.0] * 200] * 2


def test_a_kind_of_call_is_looked_into_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the first such call takes, a thousand others do not."""
    calls = []
    slow = Core._call

    def counted(comm: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(comm.rank)
        return slow(comm, *args, **kwargs)

    monkeypatch.setattr(Core, "_call", counted)

    def rank_main(comm: Any) -> list[float]:
        totals = []
        for turn in range(5):
            with comm.fused():
                each = [np.full(n, 1.0 + turn) for n in (3, 1, 20)]
                commrt.wait_all([comm.allreduce(x, nonblocking=True) for x in each])
            totals.append(float(each[2][0]))
        return totals

    assert run(2, rank_main) == [[2.0, 4.0, 6.0, 8.0, 10.0]] * 2
    assert sorted(calls) == [0, 1]
