# SPDX-License-Identifier: Apache-2.0
"""Compressed collectives on ranks that are threads: bounded, the same everywhere."""

from __future__ import annotations

import gc
import itertools
import random
from typing import Any

import numpy as np
import pytest
from wire_reference import allreduce_off_by, off_by, share_starts

from commrt.compression.exchange import share_length
from commrt.errors import (
    RevokedError,
    TimeoutError_,
    UsageError,
)
from commrt.local import run
from commrt.request import wait_all
from commrt.vocabulary.wire_formats import WIRE_FORMATS, wire_format

Array = np.ndarray[Any, Any]

NAMES = tuple(one.name for one in WIRE_FORMATS)
LENGTHS = (0, 1, 5, 63, 65, 255, 256, 257, 1023, 5000)
FORMS = ("blocking", "nonblocking", "persistent", "started")
SPREADS = ("ordinary", "small", "huge", "zeros", "few")
LIMIT_S = 300


def drawn(spread: str, rank: int, count: int, dtype: str, seed: int = 0) -> Array:
    rng = np.random.default_rng([rank, count, seed])
    x = rng.standard_normal(count)
    if spread == "small":  # subnormal in float16, and in float32
        x *= 2.0 ** rng.integers(-148, -15, count)
    elif spread == "huge":
        x *= 1000.0
    elif spread == "zeros":
        x[:] = 0
    elif spread == "few":
        x[rng.random(count) < 0.99] = 0
    return x.astype(dtype)


def run_call(form: str, method: str, comm: Any, x: Array, **arguments: Any) -> Any:
    """Make one call in one of its forms."""
    if form in ("persistent", "started"):
        call = getattr(comm.plan, method)(x, **arguments)
        return call() if form == "persistent" else call.start().wait()
    if form == "nonblocking":
        request = getattr(comm, method)(x, nonblocking=True, **arguments)
        return request.wait()
    return getattr(comm, method)(x, **arguments)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", range(1, 9))
def test_an_allreduce_is_off_by_no_more_than_is_stated(
    size: int, name: str, seed: int
) -> None:
    cases = list(
        itertools.product(
            SPREADS, LENGTHS, ("float32", "float64"), ("sum", "avg"), FORMS, (0, 1)
        )
    )
    chosen = random.Random(f"{seed} {name} {size}").sample(cases, 40)

    def rank_main(comm: Any) -> list[bytes]:
        results = []
        for spread, count, dtype, op, form, in_place in chosen:
            x = drawn(spread, comm.rank, count, dtype)
            given = x.copy()
            out = x if in_place else np.full_like(x, 7)
            more = {} if in_place else {"out": out}
            got = run_call(form, "allreduce", comm, x, op=op, compress=name, **more)
            assert got is out
            assert in_place or x.tobytes() == given.tobytes()
            results.append(out.tobytes())
        return results

    said = run(size, rank_main, timeout_s=LIMIT_S)
    assert said == [said[0]] * size
    for (spread, count, dtype, op, *_), text in zip(chosen, said[0], strict=True):
        inputs = [drawn(spread, rank, count, dtype) for rank in range(size)]
        divisor = size if op == "avg" else 1
        exact = sum((x.astype(np.float64) for x in inputs), np.zeros(count)) / divisor
        wrong = np.abs(np.frombuffer(text, dtype) - exact)
        if size == 1:
            assert not wrong.any()
        else:
            assert (wrong <= allreduce_off_by(name, inputs, divisor)).all()


@pytest.mark.parametrize("name", NAMES)
def test_shares_are_those_that_the_bound_counts_with(name: str) -> None:
    for count, size in itertools.product(LENGTHS, range(2, 9)):
        share = share_length(wire_format(name), count, size)
        starts = share_starts(name, count, size)
        assert starts == [min(count, rank * share) for rank in range(size + 1)]
        assert starts[-1] == count


@pytest.mark.parametrize("name", NAMES)
def test_bits_do_not_depend_on_what_moves_them(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rank_main(comm: Any) -> bytes:
        x = drawn("ordinary", comm.rank, 5000, "float32")
        comm.allreduce(x, compress=name)
        return x.tobytes()

    found = set()
    for text in ("alltoall:local/pairwise,allgather:local/ring", ""):
        if text:
            monkeypatch.setenv("COMMRT_ALGORITHM", text)
        found.update(run(4, rank_main))
        monkeypatch.delenv("COMMRT_ALGORITHM", raising=False)
    assert len(found) == 1


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", range(1, 7))
def test_an_alltoall_is_off_by_one_compression(size: int, name: str, seed: int) -> None:
    cases = list(
        itertools.product(
            SPREADS, (0, 1, 65, 257, 1000), ("float32", "float64"), FORMS, (0, 1)
        )
    )
    chosen = random.Random(f"{seed} {name} {size}").sample(cases, 25)

    def rank_main(comm: Any) -> None:
        for spread, count, dtype, form, in_place in chosen:
            inputs = [drawn(spread, r, count * size, dtype) for r in range(size)]
            x = inputs[comm.rank].copy()
            more = {} if in_place else {"out": np.full_like(x, 7)}
            got = run_call(form, "alltoall", comm, x, compress=name, **more)
            for source, given in enumerate(inputs):
                block = given.reshape(size, count)[comm.rank]
                wrong = np.abs(got.reshape(size, count)[source] - block)
                if source == comm.rank:
                    assert not wrong.any()
                else:
                    magnitude = np.abs(block.astype(np.float64))
                    assert (wrong <= 1.0001 * off_by(name, magnitude)).all()

    run(size, rank_main, timeout_s=LIMIT_S)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("told", [True, False])
def test_an_alltoallv_is_compressed_pair_by_pair(
    size: int, name: str, told: bool
) -> None:
    lengths = [[(3 * i + 7 * j) % 5 * 70 for j in range(size)] for i in range(size)]

    def rank_main(comm: Any) -> None:
        me = comm.rank
        x = drawn("ordinary", me, sum(lengths[me]), "float32")
        received = [lengths[i][me] for i in range(size)]
        more = {"recv_counts": received} if told else {}
        got = comm.alltoallv(x, send_counts=lengths[me], compress=name, **more)
        at = 0
        for source in range(size):
            first = sum(lengths[source][:me])
            theirs = drawn("ordinary", source, sum(lengths[source]), "float32")
            block = theirs[first : first + lengths[source][me]].astype(np.float64)
            wrong = np.abs(got[at : at + block.size] - block)
            limit = off_by(name, np.abs(block)) * (1.0001 if source != me else 0)
            assert (wrong <= limit).all()
            at += block.size
        assert at == got.size

    run(size, rank_main)


# -- error feedback --------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("op", ["sum", "avg"])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_results_and_residuals_together_are_what_all_ranks_put_in(
    size: int, name: str, op: str, dtype: str
) -> None:
    count, calls = 1500, 12

    def rank_main(comm: Any) -> tuple[Array, Array, Array]:
        residual = np.zeros(count, dtype)
        put_in, got = np.zeros(count), np.zeros(count)
        for turn in range(calls):
            x = drawn("ordinary", comm.rank, count, dtype, turn)
            put_in += x
            got += comm.allreduce(x, op=op, compress=name, residual=residual)
        return put_in, got, residual.astype(np.float64)

    said = run(size, rank_main, timeout_s=LIMIT_S)
    times = size if op == "avg" else 1
    total = sum(put_in for put_in, _, _ in said)
    owed = sum(residual for _, _, residual in said)
    assert np.abs(total - (times * said[0][1] + owed)).max() < 1e-4
    # What is owed is what one call loses at most, not what all of them lost.
    limit = {"float16": 0.05, "bfloat16": 0.3, "int8": 0.4}[name]
    assert np.abs(owed).max() < limit


@pytest.mark.parametrize("name", NAMES)
def test_the_mean_of_equal_calls_comes_near_the_exact_one_as_1_over_n(
    name: str,
) -> None:
    size, count = 3, 700
    inputs = [drawn("ordinary", rank, count, "float32") for rank in range(size)]
    exact = sum(x.astype(np.float64) for x in inputs)

    def rank_main(comm: Any, feeds_back: bool) -> dict[int, float]:
        residual = np.zeros(count, np.float32)
        more = {"residual": residual} if feeds_back else {}
        total, errors = np.zeros(count), {}
        for n in range(1, 65):
            x = inputs[comm.rank].copy()
            total += comm.allreduce(x, compress=name, **more)
            errors[n] = float(np.abs(total / n - exact).max())
        return errors

    with_feedback = run(size, lambda comm: rank_main(comm, True))[0]
    without = run(size, lambda comm: rank_main(comm, False))[0]
    once = float(allreduce_off_by(name, inputs).max())
    for n, error in with_feedback.items():
        assert error <= 2 * once / n + 1e-5
    assert without[64] > 0.5 * without[1] > 0
    assert with_feedback[64] < without[64] / 8


@pytest.mark.parametrize("coll", ["alltoall", "alltoallv"])
def test_what_an_alltoall_loses_goes_with_the_next(coll: str) -> None:
    size, count = 3, 300

    def rank_main(comm: Any) -> None:
        counts = [count] * size
        pair = {"send_counts": counts, "recv_counts": counts}
        more = pair if coll == "alltoallv" else {}
        x = drawn("ordinary", comm.rank, size * count, "float32")
        residual = np.zeros_like(x)
        total = np.zeros(size * count)
        for n in range(1, 33):
            out = np.empty_like(x)
            arguments = {"compress": "int8", "residual": residual, "out": out, **more}
            total += getattr(comm, coll)(x, **arguments)
            exact = np.concatenate(
                [
                    drawn("ordinary", rank, size * count, "float32").reshape(size, -1)[
                        comm.rank
                    ]
                    for rank in range(size)
                ]
            )
            assert np.abs(total / n - exact).max() <= 0.03 / n + 1e-5
            assert not residual.reshape(size, -1)[comm.rank].any()
        in_place = x.copy()
        residual[:] = 0.25
        own = x.reshape(size, -1)[comm.rank] + np.float32(0.25)
        if coll == "alltoallv":
            more["out"] = in_place
        getattr(comm, coll)(in_place, compress="int8", residual=residual, **more)
        assert np.array_equal(in_place.reshape(size, -1)[comm.rank], own)

    run(size, rank_main)


def test_on_one_rank_nothing_is_lost() -> None:
    def rank_main(comm: Any) -> None:
        x = drawn("ordinary", 0, 300, "float32")
        residual = np.full(300, 0.5, np.float32)
        want = x + residual
        for op in ("sum", "avg"):
            got = comm.allreduce(
                x.copy(), op=op, compress="int8", residual=residual.copy()
            )
            assert np.array_equal(got, want)
        comm.allreduce(x, compress="int8", residual=residual)
        assert np.array_equal(x, want)
        assert not residual.any()

    run(1, rank_main)


# -- numbers that are none -------------------------------------------------------


def test_nan_and_infinity_are_seen_and_not_owed() -> None:
    def rank_main(comm: Any) -> None:
        for name in NAMES:
            x = np.ones(1024, np.float32)
            if comm.rank == 0:
                x[900] = np.nan
                x[300] = -np.inf
                x[5] = 70000.0
            residual = np.zeros_like(x)
            got = comm.allreduce(x.copy(), compress=name, residual=residual)
            assert np.isfinite(residual).all()
            if name == "int8":  # whole blocks of 256
                assert np.isnan(got[256:512]).all()
                assert np.isnan(got[768:]).all()
                assert np.isfinite(got[:256]).all()
                assert np.allclose(got[512:768], 2, rtol=0.01)
                continue
            assert np.isnan(got[900])
            assert got[300] == -np.inf
            assert np.isinf(got[5]) == (name == "float16")
            rest = np.delete(got, [5, 300, 900])
            assert (rest == 2).all()

    run(2, rank_main)


# -- in flight -------------------------------------------------------------------


def test_many_in_flight_are_waited_for_in_any_order(seed: int) -> None:
    size, count, many = 3, 900, 20

    def rank_main(comm: Any) -> list[bytes]:
        order = random.Random(f"{seed} {comm.rank}")
        arrays = [
            drawn("ordinary", comm.rank, count, "float32", at) for at in range(many)
        ]
        requests = []
        for at, x in enumerate(arrays):
            method = comm.alltoall if at % 5 == 4 else comm.allreduce
            requests.append(method(x, compress=NAMES[at % 3], nonblocking=True))
            if order.random() < 0.3:
                requests[order.randrange(len(requests))].test()
        waiting = list(requests)
        order.shuffle(waiting)
        for request in waiting[: many // 2]:
            request.wait()
        wait_all(requests)
        return [x.tobytes() for x in arrays]

    said = run(size, rank_main, timeout_s=LIMIT_S)
    for at in range(many):
        inputs = [drawn("ordinary", rank, count, "float32", at) for rank in range(size)]
        if at % 5 == 4:
            continue
        exact = sum(x.astype(np.float64) for x in inputs)
        texts = {one[at] for one in said}
        assert len(texts) == 1
        wrong = np.abs(np.frombuffer(texts.pop(), np.float32) - exact)
        assert (wrong <= allreduce_off_by(NAMES[at % 3], inputs)).all()


def test_a_request_that_waits_only_by_test_ends() -> None:
    def rank_main(comm: Any) -> None:
        x = np.ones(5000, np.float32)
        first = comm.allreduce(x, compress="float16", nonblocking=True)
        y = np.ones(5000, np.float32)
        second = comm.allreduce(y, compress="float16", nonblocking=True)
        while not second.test():
            pass
        first.wait()
        assert (x == 3).all()
        assert (y == 3).all()

    run(3, rank_main)


def test_a_rank_that_does_not_come_is_a_timeout_and_may_come_later() -> None:
    def rank_main(comm: Any) -> None:
        x = np.full(1000, 2.0, np.float32)
        comm.allreduce(np.ones(8, np.float32), compress="int8")
        if comm.rank == 0:
            with pytest.raises(TimeoutError_, match="stays in flight") as raised:
                comm.allreduce(x, compress="float16", timeout_s=0.2)
            comm.barrier()
            assert (raised.value.request.wait() == 4).all()
        else:
            comm.barrier()
            assert (comm.allreduce(x, compress="float16") == 4).all()

    run(2, rank_main)


def start_and_drop(comm: Any, x: Array) -> None:
    comm.allreduce(x, compress="int8", nonblocking=True)
    gc.collect()


def test_a_dropped_request_ends_what_others_wait_for() -> None:
    def rank_main(comm: Any) -> None:
        x = np.ones(1000, np.float32)
        if comm.rank == 0:
            with pytest.warns(ResourceWarning, match="was dropped"):
                start_and_drop(comm, x)
        with pytest.raises(RevokedError):
            comm.allreduce(x, compress="int8")
        # What is not compressed goes on.
        assert (comm.allreduce(np.ones(3)) == 2).all()

    run(2, rank_main)


def test_free_says_what_has_not_ended() -> None:
    def rank_main(comm: Any) -> None:
        x = np.ones(1000, np.float32)
        request = comm.allreduce(x, compress="int8", nonblocking=True)
        with pytest.raises(UsageError, match="1 compressed operations have not ended"):
            comm.free()
        request.wait()
        comm.barrier()
        comm.free()

    run(2, rank_main)
