# SPDX-License-Identifier: Apache-2.0
"""Reductions of the user's own: order, forms, errors, who runs them."""

from __future__ import annotations

import ctypes
import gc
import threading
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from affine import AFFINE, REDUCING, compose, in_c, maps, run_all, wanted
from started_operations import num_started

import commrt
from commrt.comm import core_of
from commrt.errors import (
    BufferError_,
    MismatchError,
    ReductionError,
    RevokedError,
    UsageError,
)
from commrt.local import LocalRanks, run

SMALL_CHUNK = {"chunk": 1024}
"""So small that a few hundred elements make several fragments."""


def every_way(comm: Any, coll: str, op: Any) -> Iterator[dict[str, Any]]:
    """Name every algorithm that may run the reduction, whole and in fragments."""
    for each in comm.candidates(coll, 4096, op=op):
        for transport in ({}, SMALL_CHUNK):
            params = {**each.params, **transport}
            yield {"algorithm": each.algorithm, "params": params}


@pytest.mark.full(sample=3)
@pytest.mark.parametrize("size", range(1, 9))
def test_rank_order_is_kept_by_every_algorithm_that_may_run(size: int) -> None:
    wrong = run(size, lambda c: run_all(c, (0, 1, 333), every_way), timeout_s=300)
    assert [line for lines in wrong for line in lines] == []


def test_algorithms_that_do_not_keep_rank_order_are_refused_and_explained() -> None:
    def rank_main(comm: Any) -> str:
        ordered = commrt.reduction(compose)
        with pytest.raises(
            UsageError, match=r"ring.* not commutative: rank \d .*order"
        ):
            comm.allreduce(maps(0, 8), op=ordered, algorithm="ring")
        free = commrt.reduction(np.maximum, commutative=True)
        x = np.array([float(comm.rank)])
        assert comm.allreduce(x, op=free, algorithm="ring").tolist() == [comm.size - 1]
        names = {each.algorithm for each in comm.candidates("allreduce", 8, op=ordered)}
        assert "ring" not in names
        assert "direct" in names
        return str(comm.explain("allreduce", 8, op=ordered))

    text = run(4, rank_main, timeout_s=300)[0]
    assert "op=compose() in rank order" in text
    assert "not    local/ring: the reduction is not commutative: rank" in text


def test_parameters_cannot_smuggle_in_another_order() -> None:
    def rank_main(comm: Any) -> None:
        op = commrt.reduction(compose)
        way = {"algorithm": "shifted_halving_doubling", "params": {"k": 1}}
        names = [str(each) for each in comm.candidates("reduce_scatter", 64, op=op)]
        assert names == ["local/direct", "local/bine"]  # which keep it on four ranks
        comm.allreduce(maps(comm.rank, 8), op=op, **way)

    run(4, rank_main, timeout_s=300)


def test_functions_may_return_an_array_or_write_into_the_second() -> None:
    def accumulate(a: Any, b: Any) -> None:
        b += a

    def rank_main(comm: Any) -> list[Any]:
        found = []
        for fn in (accumulate, np.add, lambda a, b: a + b, np.logaddexp):
            op = commrt.reduction(fn, commutative=True)
            x = np.full(1000, comm.rank + 1.0)
            found.append(float(comm.allreduce(x, op=op)[-1]))
        return found

    for found in run(3, rank_main, timeout_s=300):
        assert found[:3] == [6.0] * 3
        assert found[3] == pytest.approx(np.log(np.exp([1.0, 2.0, 3.0]).sum()))


@pytest.mark.parametrize(
    "dtype",
    ["?", "i1", "u2", "f2", "f4", "c16", "longdouble", "m8[s]", "S3", "V5", "bfloat16"],
)
def test_any_type_of_plain_bytes(dtype: str) -> None:
    kind = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)

    @commrt.reduction
    def highest(a: Any, b: Any) -> Any:
        assert a.dtype == b.dtype == kind
        return b

    def rank_main(comm: Any) -> bool:
        # Of a bool the only bytes are 0 and 1.
        raw = np.full(501 * kind.itemsize, comm.rank // 2, np.uint8)
        x = raw.view(kind)
        want = np.ones_like(raw).tobytes()
        out = np.empty_like(x)
        comm.allreduce(x, op=highest, out=out)
        return out.tobytes() == want

    assert run(3, rank_main, timeout_s=300) == [True] * 3


def test_records_wider_than_a_page() -> None:
    wide = np.dtype([("m", "f8", (40, 40))])

    @commrt.reduction
    def product(a: Any, b: Any) -> None:
        b["m"] = a["m"] @ b["m"]

    def rank_main(comm: Any) -> Any:
        rng = np.random.default_rng(comm.rank)
        x = comm.empty(7, wide)
        x["m"] = rng.integers(-2, 3, (7, 40, 40))
        mine = x.copy()
        return mine, comm.allreduce(x, op=product, params=SMALL_CHUNK)

    results = run(3, rank_main, timeout_s=300)
    want = results[0][0]["m"] @ results[1][0]["m"] @ results[2][0]["m"]
    for _, got in results:
        assert (got["m"] == want).all()


def test_arrays_of_the_symmetric_heap() -> None:
    def rank_main(comm: Any) -> list[bool]:
        right = []
        for op in (commrt.reduction(compose), commrt.reduction(in_c(), dtype=AFFINE)):
            xs = [maps(rank, 30_000) for rank in range(comm.size)]
            x, out = comm.empty(30_000, AFFINE), comm.empty(30_000, AFFINE)
            for _ in range(2):
                x[:] = xs[comm.rank]
                comm.allreduce(x, op=op, out=out if comm.rank else None)
                got = out if comm.rank else x
                want = wanted("allreduce", comm.rank, xs, 0)
                right.append(want is not None and got.tobytes() == want.tobytes())
        return right

    assert run(3, rank_main, timeout_s=300) == [[True] * 4] * 3


def test_arguments_are_the_functions_own() -> None:
    kept: list[tuple[Any, Any]] = []

    def keep(a: Any, b: Any) -> Any:
        assert not a.flags.writeable
        kept.append((a, b.copy()))
        return a + b

    def rank_main(comm: Any) -> None:
        op = commrt.reduction(keep, commutative=True)
        for round_ in range(20):
            x = np.full(5000, 100.0 * round_ + comm.rank)
            comm.allreduce(x, op=op, algorithm="direct")

    run(2, rank_main, timeout_s=300)
    for a, b in kept:
        assert (a == a[0]).all()
        assert (b - a == 1).all()


def test_an_exception_fails_the_operation_and_nobody_hangs() -> None:
    def rank_main(comm: Any) -> Any:
        def wrong(a: Any, b: Any) -> Any:
            if comm.rank == 1:
                raise ValueError("no such sum")
            return a + b

        op = commrt.reduction(wrong, commutative=True)
        try:
            return comm.allreduce(np.ones(9000), op=op)
        except (ReductionError, RevokedError) as error:
            return error

    found = run(3, rank_main, timeout_s=300)
    assert type(found[1]) is ReductionError
    assert isinstance(found[1].__cause__, ValueError)
    message = "rank 1: the reduction wrong raised ValueError: no such sum"
    assert message in str(found[1])
    # Whoever had its result before is done.
    others = [each for each in (found[0], found[2]) if isinstance(each, Exception)]
    assert others
    assert all("gave up" in str(each) for each in others)


@pytest.mark.parametrize("wait", ["wait", "test", "wait_any", "persistent"])
def test_the_error_comes_from_whatever_waits(wait: str) -> None:
    def wrong(a: Any, b: Any) -> Any:
        raise ZeroDivisionError("never")

    def wait_for_it(comm: Any) -> None:
        op = commrt.reduction(wrong, commutative=True)
        x = np.ones(5)
        if wait == "persistent":
            comm.plan.allreduce(x, op=op).start().wait()
        request = comm.allreduce(x, op=op, nonblocking=True)
        if wait == "wait_any":
            commrt.wait_any([request])
        while not getattr(request, wait)():
            pass

    def rank_main(comm: Any) -> None:
        with pytest.raises((ReductionError, RevokedError)):
            wait_for_it(comm)
        with pytest.raises(RevokedError):
            comm.allreduce(np.ones(5))

    run(2, rank_main, timeout_s=300)


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (lambda a, b: a[:-1], r"returned float64 of shape \(4,\), expected"),
        (lambda a, b: (a + b).astype("f4"), r"float32 .*\.astype\(a\.dtype\)"),
        (lambda a, b: 3, "returned int64 of shape"),
        (lambda a, b: a.__setitem__(0, 1), "read-only"),
        (lambda a: a, "takes 1 positional argument"),
    ],
)
def test_results_of_another_kind_are_errors(result: Any, message: str) -> None:
    def rank_main(comm: Any) -> None:
        op = commrt.reduction(result, commutative=True)
        with pytest.raises(ReductionError, match=message):
            comm.allreduce(np.ones(5), op=op)

    run(2, rank_main, timeout_s=300)


@pytest.mark.parametrize("nonblocking", [False, True])
def test_an_interrupt_in_the_function_stays_one(nonblocking: bool) -> None:
    def interrupted(a: Any, b: Any) -> Any:
        raise KeyboardInterrupt

    def rank_main(comm: Any) -> str:
        op = commrt.reduction(interrupted, commutative=True)
        try:
            if nonblocking:
                request = comm.allreduce(np.ones(3), op=op, nonblocking=True)
                try:
                    request.wait()
                finally:
                    with pytest.raises((ReductionError, RevokedError)):
                        request.wait()
            comm.allreduce(np.ones(3), op=op)
        except KeyboardInterrupt:
            with pytest.raises(RevokedError):
                comm.allreduce(np.ones(3))
            return "interrupted"
        except RevokedError:
            return "revoked"
        return "done"

    found = run(2, rank_main, timeout_s=300)
    assert {*found} <= {"interrupted", "revoked"}
    assert "interrupted" in found


@pytest.mark.parametrize("language", ["python", "c"])
def test_a_progress_thread_leaves_python_to_those_who_wait(language: str) -> None:
    names: set[str] = set()

    def noted(a: Any, b: Any) -> Any:
        names.add(threading.current_thread().name)
        return compose(a, b)

    def rank_main(comm: Any) -> bool:
        engine = core_of(comm).world.engine
        engine.start_thread()
        try:
            op = commrt.reduction(noted)
            if language == "c":
                op = commrt.reduction(in_c(), dtype=AFFINE)
            xs = [maps(rank, 20_000) for rank in range(comm.size)]
            requests = [
                comm.allreduce(xs[comm.rank].copy(), op=op, nonblocking=True)
                for _ in range(5)
            ]
            want = wanted("allreduce", comm.rank, xs, 0)
            assert want is not None
            return all(r.wait().tobytes() == want.tobytes() for r in requests)
        finally:
            engine.stop_thread()

    assert run(3, rank_main, timeout_s=300) == [True] * 3
    assert names <= {"rank0", "rank1", "rank2"}
    assert bool(names) == (language == "python")


def test_several_threads_of_a_rank_wait_for_one_another() -> None:
    def rank_main(comm: Any) -> list[bool]:
        comms = [comm, comm.dup(), comm.dup()]
        op = commrt.reduction(compose)
        xs = [maps(rank, 3000) for rank in range(comm.size)]
        want = wanted("allreduce", comm.rank, xs, 0)
        assert want is not None
        right: list[bool] = []

        def work(own: Any) -> None:
            for _ in range(10):
                got = own.allreduce(xs[comm.rank].copy(), op=op)
                right.append(got.tobytes() == want.tobytes())

        threads = [threading.Thread(target=work, args=(each,)) for each in comms]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(300)
        for each in comms[1:]:
            each.free()
        return right

    assert run(3, rank_main, timeout_s=300) == [[True] * 30] * 3


@pytest.mark.parametrize("coll", REDUCING)
def test_ranks_stepped_from_one_thread(coll: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    with LocalRanks(3) as ranks:
        op = commrt.reduction(compose)
        xs = [maps(rank, 999) for rank in range(3)]
        requests = [
            getattr(comm, coll)(xs[comm.rank].copy(), op=op, nonblocking=True)
            for comm in ranks.comms
        ]
        for _ in range(20_000):
            if all(request.done for request in requests):
                break
            ranks.step(int(rng.integers(3)))
        for rank, request in enumerate(requests):
            want = wanted(coll, rank, xs, 0)
            got = request.wait()
            assert want is None or got.tobytes() == want.tobytes()


def test_functions_die_with_their_plans_and_not_before() -> None:
    class Sum:
        alive = 0

        def __init__(self) -> None:
            Sum.alive += 1

        def __del__(self) -> None:
            Sum.alive -= 1

        def __call__(self, a: Any, b: Any) -> Any:
            return a + b

    def rank_main(comm: Any) -> None:
        for _ in range(10):
            op = commrt.reduction(Sum(), commutative=True)
            comm.allreduce(np.ones(3), op=op)
        plan = comm.plan.allreduce(
            np.ones(3), op=commrt.reduction(Sum(), commutative=True)
        )
        core_of(comm).host.forget()
        assert plan().tolist() == [comm.size] * 3

    run(2, rank_main, timeout_s=300)
    gc.collect()  # plans die with their communicators, which may be in circles
    # The next plan of any such reduction drops what the last ones had.
    run(1, lambda comm: comm.allreduce(np.ones(1), op=commrt.reduction(np.add)))
    assert Sum.alive == 0


def test_check_mode_compares_names_and_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMMRT_DEBUG", "check")

    def rank_main(comm: Any) -> None:
        x = np.ones(4)
        same = commrt.reduction(np.add, commutative=True)
        assert comm.allreduce(x, op=same)[0] == 2
        for other in (
            commrt.reduction(np.add),
            commrt.reduction(np.multiply, commutative=True),
            "sum",
        ):
            with pytest.raises(MismatchError, match=r"disagree on op.*add\(\)|add"):
                comm.allreduce(x, op=other if comm.rank else same)

    run(2, rank_main, timeout_s=300)


WRONG: list[tuple[str, Any, str]] = [
    ("no function", lambda: commrt.reduction(3), "neither a Python function"),
    ("order", lambda: commrt.reduction(np.add, commutative=1), "True or False"),
    ("name", lambda: commrt.reduction(np.add, name=3), "a string that UTF-8"),
    ("dtype", lambda: commrt.reduction(np.add, dtype="nope"), "dtype='nope'"),
    ("C without dtype", lambda: commrt.reduction(in_c()), "dtype='float64'"),
    (
        "null",
        lambda: commrt.reduction(ctypes.CFUNCTYPE(None)(), dtype="f8"),
        "pointer is null",
    ),
    (
        "callback",
        lambda: commrt.reduction(ctypes.CFUNCTYPE(None)(lambda: None), dtype="f8"),
        "pass the Python function itself",
    ),
]


@pytest.mark.parametrize(
    ("call", "message"), [w[1:] for w in WRONG], ids=[w[0] for w in WRONG]
)
def test_what_is_no_reduction_is_refused(call: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        call()


def test_wrong_calls_send_nothing() -> None:
    def rank_main(comm: Any) -> None:
        only = commrt.reduction(in_c(), name="maps", dtype=AFFINE)
        before = num_started(comm)
        for x, op, kind, message in (
            (np.ones(3), only, UsageError, "float64, and the reduction maps takes"),
            (np.array([{}]), commrt.reduction(np.add), BufferError_, "references"),
            (maps(0, 6)[::2], only, BufferError_, "not C-contiguous"),
            (maps(0, 6), "sum", BufferError_, "cannot be communicated"),
            (np.ones(3), np.fmax, UsageError, r"commrt.reduction\(fn\)"),
        ):
            with pytest.raises(kind, match=message):
                comm.allreduce(x, op=op)
        assert num_started(comm) == before

    run(2, rank_main, timeout_s=300)


def test_it_can_be_a_decorator_and_be_tried_out() -> None:
    @commrt.reduction(commutative=True, name="both")
    def add(a: Any, b: Any) -> None:
        b += a

    assert repr(add) == "<commrt.reduction both, commutative>"
    assert add(np.ones(2), np.ones(2)).tolist() == [2, 2]
    with pytest.raises(UsageError, match="call it itself"):
        commrt.reduction(in_c(), dtype=AFFINE)(1, 2)
