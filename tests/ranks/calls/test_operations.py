# SPDX-License-Identifier: Apache-2.0
"""Every operation, algorithm, type, reduction and placement against numpy.

An ordinary run draws a sample, another one each time; ``--full`` runs everything.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cases import Case, legal_pairs, numpy_dtype, run_cases, sample

from commrt import algorithms
from commrt.core import Core
from commrt.errors import UsageError
from commrt.local import LocalRanks, run
from commrt.vocabulary.dtypes import DTYPES
from commrt.vocabulary.operations import COLLECTIVES

SIZES = range(1, 9)
DRAWN = 15


def _all_right(size: int, cases: list[Case], timeout_s: float = 300) -> None:
    wrong = run(size, lambda comm: run_cases(comm, cases), timeout_s=timeout_s)
    assert [line for lines in wrong for line in lines] == []


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("coll", COLLECTIVES)
def test_sample_agrees_with_numpy(coll: str, size: int, seed: int) -> None:
    _all_right(size, sample(coll, size, seed, DRAWN))


@pytest.mark.parametrize(("dtype", "op"), legal_pairs())
def test_every_type_and_reduction(dtype: str, op: str) -> None:
    cases = [
        Case("allreduce", 3, "direct", {}, dtype, op, count=37),
        Case("reduce_scatter", 3, "ring", {}, dtype, op, count=5),
        Case("reduce", 3, "binomial", {}, dtype, op, root=2, count=37, in_place=True),
    ]
    _all_right(3, cases)


@pytest.mark.parametrize("dtype", [dtype.name for dtype in DTYPES])
def test_every_type_can_be_moved(dtype: str) -> None:
    cases = [
        Case(coll, 3, dtype=dtype, count=7, root=1)
        for coll in ("bcast", "allgather", "alltoall", "gather", "scatter")
    ]
    _all_right(3, cases)


def _allreduce(x: Any, size: int, op: str) -> list[Any]:
    return run(size, lambda comm: comm.allreduce(x.copy(), op=op), timeout_s=300)


def test_integers_wrap() -> None:
    big = np.full(3, 2**31 - 1, np.int32)
    for total in _allreduce(big, 2, "sum"):
        assert total.tolist() == [-2, -2, -2]


def test_average_of_integers_goes_toward_zero() -> None:
    results = run(
        2, lambda comm: comm.allreduce(np.array([-1, 1, -4]) * comm.rank, op="avg")
    )
    assert [result.tolist() for result in results] == [[0, 0, -2]] * 2


def test_average_of_floats_does_not_overflow() -> None:
    largest = np.array([np.finfo(np.float32).max], np.float32)
    for mean in _allreduce(largest, 4, "avg"):
        assert np.isfinite(mean).all()


@pytest.mark.parametrize(
    "dtype", [each.name for each in DTYPES if each.kind == "float"]
)
@pytest.mark.parametrize("op", ["min", "max"])
@pytest.mark.parametrize("nan_at", [0, 1, 2])
def test_nan_wins_on_every_rank(dtype: str, op: str, nan_at: int) -> None:
    kind = numpy_dtype(dtype)

    def rank_main(comm: Any) -> Any:
        x = np.full(3, float(comm.rank)).astype(kind)
        if comm.rank == nan_at:
            x[1] = np.nan
        return comm.allreduce(x, op=op).astype(float)

    want = 0.0 if op == "min" else 2.0
    for result in run(3, rank_main, timeout_s=300):
        np.testing.assert_array_equal(result, [want, np.nan, want])


def test_bool_sum_is_or_and_product_is_and() -> None:
    def rank_main(comm: Any) -> list[list[bool]]:
        x = np.array([True, comm.rank == 0, False])
        return [comm.allreduce(x.copy(), op=op).tolist() for op in ("sum", "prod")]

    assert run(3, rank_main)[2] == [[True, True, False], [True, False, False]]


def test_results_are_bitwise_equal_on_all_ranks() -> None:
    def rank_main(comm: Any) -> list[bytes]:
        rng = np.random.default_rng(comm.rank)
        names = sorted({c.algorithm for c in comm.candidates("allreduce", 4000)})
        return [
            comm.allreduce(
                rng.normal(size=1000).astype("float32"), algorithm=name
            ).tobytes()
            for name in names
        ]

    results = run(5, rank_main)
    assert all(result == results[0] for result in results)


@pytest.mark.parametrize("op", ["avg", "premul_sum"])
@pytest.mark.parametrize("name", ["float16", "bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("size", [3, 4])
def test_averages_of_short_floats_are_bitwise_equal_on_all_ranks(
    size: int, name: str, op: str
) -> None:
    def rank_main(comm: Any) -> list[bytes]:
        rng = np.random.default_rng(comm.rank)
        # Some of float16's quotients are subnormal, which are rounded too.
        values = rng.normal(size=1000) * 10.0 ** rng.integers(-4, 1, 1000)
        x = values.astype(numpy_dtype(name))
        factor = {} if op == "avg" else {"factor": 0.3}
        return [
            comm.allreduce(
                x.copy(), op=op, algorithm=each.algorithm, params=each.params, **factor
            ).tobytes()
            for each in comm.candidates("allreduce", 4000, dtype=name, op=op)
        ]

    results = run(size, rank_main, timeout_s=300)
    assert all(result == results[0] for result in results)


@pytest.mark.parametrize("coll", ["allreduce", "alltoall", "bcast", "reduce"])
def test_ranks_may_differ_in_place_and_out_of_place(coll: str) -> None:
    def rank_main(comm: Any) -> list[str]:
        cases = [
            Case(coll, 4, name, root=1, count=3000, in_place=comm.rank % 2 == 0)
            for name in algorithms.names(coll, 4)
        ]
        return run_cases(comm, cases)

    assert run(4, rank_main) == [[]] * 4


def test_multidimensional_arrays_keep_their_shapes() -> None:
    def rank_main(comm: Any) -> list[tuple[int, ...]]:
        x = np.ones((4, 3), np.float32)
        return [
            comm.allreduce(x).shape,
            comm.allgather(x).shape,
            comm.reduce_scatter(x).shape,
            comm.scatter(x).shape,
            comm.allreduce(np.array(2.0)).shape,
            comm.allgather(np.array(1.0)).shape,
        ]

    shapes = [(4, 3), (2, 4, 3), (2, 3), (2, 3), (), (2,)]
    assert run(2, rank_main) == [shapes] * 2


def test_ranks_without_an_x_are_served_by_the_dispatcher_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What it does not recognise goes through ``_call``, thirty times slower."""
    calls = []
    slow = Core._call

    def counted(comm: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(comm.rank)
        return slow(comm, *args, **kwargs)

    monkeypatch.setattr(Core, "_call", counted)

    def rank_main(comm: Any) -> list[float]:
        found = []
        for turn in range(20):
            root = turn % 3
            x = np.arange(6.0) + turn if comm.rank == root else None
            out = comm.scatter(x, out=np.empty(2), root=root)
            found.append(float(out[1]))
        return found

    expected = [[1.0 + 2 * rank + turn for turn in range(20)] for rank in range(3)]
    assert run(3, rank_main) == expected
    assert sorted(calls) == [0, 0, 0, 1, 1, 1, 2, 2, 2]  # once for each root


def test_an_x_that_is_missing_on_the_root_is_an_error_each_time() -> None:
    def rank_main(comm: Any) -> None:
        for number in (0, 4):
            whole = np.ones(number)
            out = np.empty(number)
            comm.scatter(whole, out=out)
            with pytest.raises(UsageError, match="pass x on the root"):
                comm.scatter(None, out=out)

    run(1, rank_main)


def test_every_rank_scales_by_a_factor_of_its_own() -> None:
    def rank_main(comm: Any) -> list[list[float]]:
        factor = (0.5, -1.0, 4.0)[comm.rank]
        found = []
        for name in algorithms.names("allreduce", 3):
            x = np.full(5000, comm.rank + 1.0, np.float32)
            out = np.empty_like(x)
            arguments = {"op": "premul_sum", "factor": factor, "algorithm": name}
            assert comm.allreduce(x, out=out, **arguments) is out
            assert (x == comm.rank + 1).all()
            assert comm.allreduce(x, **arguments) is x
            found.append([*{*x.tolist(), *out.tolist()}])
        return found

    for found in run(3, rank_main):
        assert found == [[0.5 - 2.0 + 12.0]] * len(algorithms.names("allreduce", 3))


@pytest.mark.parametrize("size", [1, 2])
def test_plans_never_keep_the_factor_of_another_call(size: int) -> None:
    def rank_main(comm: Any) -> int:
        factors = [2.0, 0.5, 0.5, 3, -1.0, 0.0, 2.0, np.float32(0.25)]
        x = np.full(3, 8.0, np.float32)
        comm.allreduce(x, out=np.empty_like(x), op="premul_sum", factor=1.0)
        before = comm.stats().plans
        for factor in [*factors, *range(100)]:
            for number, kind in ((3, "float32"), (5000, "float64")):
                x = np.full(number, 8, kind)
                comm.allreduce(x, op="premul_sum", factor=factor)
                assert (x == 8 * factor * comm.size).all(), factor
            ints = np.full(3, 8)
            comm.allreduce(ints, op="premul_sum", factor=int(factor))
            assert (ints == 8 * int(factor) * comm.size).all()
        return int(comm.stats().plans - before)

    # The two lengths and types that were new, whatever the number of factors.
    assert run(size, rank_main) == [2] * size


def test_a_request_in_flight_keeps_its_factor() -> None:
    with LocalRanks(2) as ranks:
        requests = []
        for factor in (2.0, 5.0):
            for comm in ranks.comms:
                x = np.ones(3000, np.float32)
                requests.append(
                    comm.allreduce(x, op="premul_sum", factor=factor, nonblocking=True)
                )
        while not all(request.done for request in requests):
            ranks.step(0)
            ranks.step(1)
        totals = [float(request.wait()[0]) for request in requests]
    assert totals == [4.0, 4.0, 10.0, 10.0]


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float8_e5m2"])
def test_short_floats_are_multiplied_in_float32(name: str) -> None:
    kind = numpy_dtype(name)

    def rank_main(comm: Any) -> float:
        # A factor of float16 would be 0, its product too.
        x = np.array([57344.0]).astype(kind)
        return float(comm.allreduce(x, op="premul_sum", factor=1e-8)[0])

    for total in run(2, rank_main):
        assert total == pytest.approx(2 * 57344e-8, rel=0.15)


@pytest.mark.parametrize("coll", ["allreduce", "reduce", "reduce_scatter"])
@pytest.mark.parametrize("op", ["land", "lor", "lxor"])
@pytest.mark.parametrize("name", ["int32", "uint8", "float32", "float16", "complex128"])
def test_alone_a_logical_reduction_gives_zero_or_one(
    coll: str, op: str, name: str
) -> None:
    def rank_main(comm: Any) -> list[complex]:
        x = np.array([0, 7, 1, 2]).astype(name)
        out = np.full_like(x, 9)
        returned = getattr(comm, coll)(x.copy(), op=op)
        assert (getattr(comm, coll)(x, out=out, op=op) == returned).all()
        return [complex(value) for value in returned]

    assert run(1, rank_main) == [[0, 1, 1, 1]]


@pytest.mark.parametrize("op", ["min", "max", "sum", "prod", "avg"])
def test_alone_a_number_is_its_own_result(op: str) -> None:
    def rank_main(comm: Any) -> None:
        for name in ("float32", "float64", "int16"):
            x = np.array([-3, 0, 5]).astype(name)
            if name != "int16":
                x[1] = np.nan
            np.testing.assert_array_equal(comm.allreduce(x.copy(), op=op), x)
        if op != "avg":
            flags = np.array([True, False])
            assert comm.allreduce(flags.copy(), op=op).tolist() == [True, False]

    run(1, rank_main)
