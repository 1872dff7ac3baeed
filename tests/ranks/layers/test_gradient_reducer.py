# SPDX-License-Identifier: Apache-2.0
"""Gradients summed in buckets, on ranks that are threads, against sums in float64."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from staged_ranks import Rank, on_threads
from wire_reference import allreduce_off_by

from commrt.errors import MismatchError, UsageError
from commrt.layers.data import GradientReducer, best_bucket_nbytes, dense_rows
from commrt.layers.data.bucket_size import SIZES
from commrt.local import run
from commrt.sparse.vector import SparseVector

Array = np.ndarray[Any, Any]
SHAPES = [(3, 5), (), (257,), (0,), (64, 33), (1,), (7, 2, 2), (1000,)]
STEPS = 3


def drawn(rank: int, step: int, index: int, dtype: str = "float32") -> Array:
    rng = np.random.default_rng([rank, step, index])
    return np.asarray(rng.standard_normal(SHAPES[index])).astype(dtype)


def parameters(dtype: str = "float32") -> list[Array]:
    return [np.zeros(shape, dtype) for shape in SHAPES]


def expected(size: int, step: int, index: int, ranks: Any = None) -> Array:
    """Return the mean in float64; of ``ranks`` those that have a gradient."""
    having = range(size) if ranks is None else ranks
    zero = np.zeros(SHAPES[index])
    total = sum((drawn(r, step, index).astype(np.float64) for r in having), zero)
    return np.asarray(total) / size


@pytest.mark.parametrize("priority", [False, True])
@pytest.mark.parametrize("nbytes", [1, 300, 1 << 20])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_any_order_of_gradients_gives_the_same_means(
    size: int, nbytes: int, priority: bool, seed: int
) -> None:
    def rank_main(comm: Any) -> tuple[list[list[bytes]], Any]:
        order = random.Random(f"{seed} {comm.rank}")
        found = []
        with GradientReducer(
            comm, parameters(), bucket_nbytes=nbytes, priority=priority
        ) as reducer:
            for step in range(STEPS):
                gradients = [drawn(comm.rank, step, i) for i in range(len(SHAPES))]
                for index in order.sample(range(len(SHAPES)), len(SHAPES)):
                    reducer.ready(index, gradients[index])
                    reducer.poll()
                if step == 1:  # some are taken one by one, before the end
                    assert reducer.wait(4) is gradients[4]
                means = reducer.finish()
                for index, mean in enumerate(means):
                    assert mean is gradients[index]
                    wanted = expected(size, step, index)
                    np.testing.assert_allclose(mean, wanted, rtol=1e-5, atol=1e-6)
                found.append([mean.tobytes() for mean in means])
            return found, reducer.buckets

    results = run(size, rank_main)
    assert all(result == results[0] for result in results)
    members = [index for bucket in results[0][1] for index in bucket]
    assert sorted(members) == list(range(len(SHAPES)))


@pytest.mark.parametrize("size", [1, 2, 3])
def test_gradients_that_some_ranks_or_all_have_not(size: int) -> None:
    def has(rank: int, step: int, index: int) -> bool:
        return index != 2 and (rank + step + index) % 3 != 0

    def rank_main(comm: Any) -> list[bytes | None]:
        found: list[bytes | None] = []
        with GradientReducer(comm, parameters(), bucket_nbytes=500) as reducer:
            for step in range(STEPS):
                means = reducer(
                    [
                        drawn(comm.rank, step, i) if has(comm.rank, step, i) else None
                        for i in range(len(SHAPES))
                    ]
                )
                for index, mean in enumerate(means):
                    having = [r for r in range(size) if has(r, step, index)]
                    assert (mean is None) == (not having)
                    if mean is not None:
                        wanted = expected(size, step, index, having)
                        np.testing.assert_allclose(mean, wanted, rtol=1e-5, atol=1e-6)
                found += [None if mean is None else mean.tobytes() for mean in means]
        return found

    results = run(size, rank_main)
    assert all(result == results[0] for result in results)


@pytest.mark.parametrize("size", [1, 3])
def test_gradients_of_several_batches_are_added_up_first(size: int) -> None:
    def rank_main(comm: Any) -> None:
        with GradientReducer(comm, parameters(), op="sum", sparse=[0]) as reducer:
            rows = [np.array([1, 1]), np.array([0])]
            values = [np.ones((2, 5), np.float32), np.full((1, 5), 2, np.float32)]
            with reducer.no_sync():
                for step in (0, 1):
                    for index in range(1, len(SHAPES)):
                        reducer.ready(index, drawn(comm.rank, step, index))
                reducer.ready(0, (rows[0], values[0]))
            for index in range(1, len(SHAPES) - 1):  # of the last one nothing comes
                reducer.ready(index, drawn(comm.rank, 2, index))
            reducer.ready(0, (rows[1], values[1]))
            sums = reducer.finish()
            for index in range(1, len(SHAPES)):
                last = 2 if index == len(SHAPES) - 1 else 3
                wanted = sum(size * expected(size, step, index) for step in range(last))
                np.testing.assert_allclose(sums[index], wanted, rtol=1e-4, atol=1e-5)
            at, parts = dense_rows(sums[0])
            assert at.tolist() == [0, 1]
            assert (parts == [[2 * size] * 5] * 2).all()
            # Nothing of it is left for the next step.
            assert reducer([None] * len(SHAPES)) == [None] * len(SHAPES)

    run(size, rank_main)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("compress", ["bfloat16", "float16", "int8"])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_compressed_gradients_are_off_by_what_is_stated(
    size: int, compress: str, dtype: str
) -> None:
    def rank_main(comm: Any) -> list[bytes]:
        with GradientReducer(
            comm, parameters(dtype), compress=compress, error_feedback=False
        ) as reducer:
            (bucket,) = reducer.buckets
            given = [drawn(comm.rank, 0, i, dtype) for i in range(len(SHAPES))]
            means = reducer(given)
            assert all(mean is one for mean, one in zip(means, given, strict=True))
            packed = [
                np.concatenate([drawn(r, 0, i, dtype).reshape(-1) for i in bucket])
                for r in range(size)
            ]
            mean = np.concatenate([means[index].reshape(-1) for index in bucket])
            exact = np.mean([x.astype(np.float64) for x in packed], axis=0)
            if size > 1:
                allowed = allreduce_off_by(compress, packed, size)
                assert (np.abs(mean - exact) <= allowed).all()
            else:
                assert (mean == exact).all()
            return [mean.tobytes() for mean in means]

    results = run(size, rank_main)
    assert all(result == results[0] for result in results)


@pytest.mark.parametrize("options", [{"compress": "int8"}, {"density": 0.2}])
def test_what_is_left_out_comes_with_later_steps(options: dict[str, Any]) -> None:
    steps = 40

    def rank_main(comm: Any) -> None:
        totals = [np.zeros(shape) for shape in SHAPES]
        with GradientReducer(
            comm, parameters(), bucket_nbytes=3000, **options
        ) as reducer:
            for step in range(steps):
                # The last steps give nothing, and what is owed still comes.
                given = [drawn(comm.rank, 0, i) for i in range(len(SHAPES))]
                if step >= steps // 2:
                    given = [None] * len(SHAPES)  # type: ignore[list-item]
                for total, mean in zip(totals, reducer(given), strict=True):
                    total += 0 if mean is None else mean
        for index, total in enumerate(totals):
            wanted = expected(2, 0, index) * (steps // 2)
            np.testing.assert_allclose(total, wanted, atol=0.02)

    run(2, rank_main)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_largest_elements_of_the_sum_alone(size: int) -> None:
    def rank_main(comm: Any) -> None:
        x = np.zeros(40, np.float32)
        x[[3, 20 + comm.rank]] = 8, 1
        with GradientReducer(
            comm, [x, x], density=0.0125, error_feedback=False
        ) as reducer:
            means = reducer([x.copy(), None])
        assert means[0].tolist() == [0.0] * 3 + [8.0] + [0.0] * 36
        assert means[1] is None

    run(size, rank_main)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_rows_of_embeddings_go_by_the_sparse_allreduce(size: int) -> None:
    shape = (50, 4)

    def mine(rank: int, step: int) -> tuple[Array, Array]:
        rng = np.random.default_rng([rank, step])
        count = int(rng.integers(0, 9))
        values = rng.standard_normal((count, 4)).astype(np.float32)
        return rng.integers(0, 50, count), values

    def rank_main(comm: Any) -> list[bytes]:
        dense = np.zeros(6, np.float32)
        found = []
        with GradientReducer(comm, [np.zeros(shape, "f4"), dense], sparse=[0]) as it:
            for step in range(STEPS):
                # The last rank has none in the second step.
                missing = step == 1
                if not (missing and comm.rank == size - 1):
                    it.ready(0, mine(comm.rank, step))
                it.ready(1, np.full(6, comm.rank, np.float32))
                total, mean = it.finish()
                assert (mean == (size - 1) / 2).all()
                wanted = np.zeros(shape)
                for rank in range(size - missing):
                    rows, values = mine(rank, step)
                    np.add.at(wanted, rows, values.astype(np.float64) / size)
                if missing and size == 1:
                    assert total is None
                    continue
                assert isinstance(total, SparseVector)
                np.testing.assert_allclose(total.to_dense(), wanted, atol=1e-6)
                found.append(total.to_dense().tobytes())
        return found

    results = run(size, rank_main)
    assert all(result == results[0] for result in results)


def test_arrays_that_cannot_be_written_or_lie_in_another_order() -> None:
    def rank_main(comm: Any) -> None:
        square = np.full((4, 4), comm.rank, np.float32)
        read_only = square.copy()
        read_only.flags.writeable = False
        turned = np.arange(16, dtype=np.float32).reshape(4, 4) + 16 * comm.rank
        given = [read_only, turned.T, np.float32(comm.rank)]
        for options in ({}, {"compress": "bfloat16"}, {"density": 1.0}):
            like = [square, square, np.zeros((), np.float32)]
            with GradientReducer(comm, like, **options) as reducer:
                turned[...] = np.arange(16).reshape(4, 4) + 16 * comm.rank
                means = reducer(given)
            assert (means[0] == 0.5).all()
            assert means[0] is not read_only
            assert (read_only == comm.rank).all()
            assert (turned == np.arange(16).reshape(4, 4) + 8).all()
            assert means[2] == 0.5

    run(2, rank_main)


def test_several_reducers_and_other_operations_at_once() -> None:
    def rank_main(comm: Any) -> None:
        first = GradientReducer(comm, parameters(), bucket_nbytes=100)
        second = GradientReducer(comm, parameters(), op="sum", bucket_nbytes=64)
        for step in range(STEPS):
            order = [(one, i) for one in (first, second) for i in range(len(SHAPES))]
            random.Random(comm.rank + step).shuffle(order)
            for place, (reducer, index) in enumerate(order):
                reducer.ready(index, drawn(comm.rank, step, index))
                if place % 5 == 0:
                    assert comm.allreduce(np.ones(3))[0] == comm.size
            # In another order on each rank: what a rank waits for is under way.
            pair = [first, second] if comm.rank else [second, first]
            sums = {id(reducer): reducer.finish() for reducer in pair}
            for index in range(len(SHAPES)):
                wanted = expected(comm.size, step, index)
                for reducer, factor in ((first, 1), (second, comm.size)):
                    np.testing.assert_allclose(
                        sums[id(reducer)][index], factor * wanted, rtol=1e-4, atol=1e-5
                    )
        first.close()
        second.close()

    run(3, rank_main)


def test_buckets_follow_the_order_that_rank_0_has_seen() -> None:
    def rank_main(comm: Any) -> None:
        x = [np.zeros(4, np.float32) for _ in range(6)]
        with GradientReducer(comm, x, bucket_nbytes=32) as reducer:
            assert reducer.buckets == ((5, 4), (3, 2), (1, 0))
            order = [0, 2, 4, 1, 3] if comm.rank == 0 else [5, 4, 3, 2, 1]
            for index in order:
                reducer.ready(index, x[index])
            reducer.finish()
            assert reducer.buckets == ((0, 2), (4, 1), (3, 5))

    run(2, rank_main)


def test_what_a_step_takes_says_what_is_wrong() -> None:
    def rank_main(comm: Any) -> None:
        x = np.zeros((2, 3), np.float32)
        with GradientReducer(comm, [x, x], bucket_nbytes=8) as reducer:
            with pytest.raises(UsageError, match="there is no such parameter"):
                reducer.ready(2, x)
            with pytest.raises(UsageError, match=r"shape \(3,\).*parameter has \(2, 3"):
                reducer.ready(0, x[0])
            with pytest.raises(UsageError, match=r"float64.*float32"):
                reducer.ready(0, x.astype(np.float64))
            with pytest.raises(UsageError, match="a list; expected an array of shape"):
                reducer.ready(0, [[0.0] * 3] * 2)
            with pytest.raises(UsageError, match="have not been given in step 0"):
                reducer.wait(0)
            reducer.ready(1, x.copy())
            with pytest.raises(UsageError, match="given twice in step 0"):
                reducer.ready(1, x)
            reducer.flush()
            with pytest.raises(UsageError, match="step 0 has not ended"):
                reducer.ready(0, x)
            assert reducer.finish()[0] is None
            with pytest.raises(UsageError, match="3 gradients for 2 parameters"):
                reducer([x] * 3)

    run(2, rank_main)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"op": "max"}, "op='max'"),
        ({"bucket_nbytes": 0}, "bucket_nbytes=0: expected"),
        ({"bucket_nbytes": "4M"}, "bucket_nbytes='4M': expected"),
        ({"compress": "bf16"}, "bfloat16"),
        ({"compress": "none"}, "leave it out"),
        ({"density": 0.0}, "density=0.0: expected"),
        ({"density": 0.5, "compress": "int8"}, "give one of them"),
        ({"sparse": [2]}, "there is no parameter 2"),
        ({"sparse": [1]}, "has no axes"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], said: str) -> None:
    def rank_main(comm: Any) -> None:
        given = [np.zeros(3, np.float32), np.zeros((), np.float32)]
        with pytest.raises(UsageError, match=said):
            GradientReducer(comm, given, **arguments)

    run(1, rank_main)


@pytest.mark.parametrize("what", ["shapes", "arguments"])
def test_ranks_that_differ_hear_of_it_at_once(what: str) -> None:
    def rank_main(comm: Any) -> None:
        last = comm.rank == 1
        shape = 5 if what == "shapes" and last else 4
        op = "sum" if what == "arguments" and last else "avg"
        with pytest.raises(MismatchError, match="rank 1: 1 parameters of"):
            GradientReducer(comm, [np.zeros(shape, np.float32)], op=op)

    run(2, rank_main)


def test_the_bucket_size_is_the_same_on_all_ranks() -> None:
    sizes = run(2, best_bucket_nbytes)
    assert sizes[0] == sizes[1]
    assert sizes[0] in SIZES
    assert run(1, best_bucket_nbytes) == [4 << 20]


def test_gradients_on_devices_stay_there() -> None:
    def rank_main(rank: Rank) -> None:
        comm = rank.comm
        like = [rank.array(np.zeros(n, np.float32)) for n in (5, 300, 1)]
        with pytest.raises(UsageError, match="parameter 0 is on a device"):
            GradientReducer(comm, like, compress="int8")
        with GradientReducer(comm, like, bucket_nbytes=100) as reducer:
            for step in range(2):
                given = [
                    rank.array(np.full(x.shape, comm.rank + step, np.float32))
                    for x in like
                ]
                last = None if comm.rank else given[2]
                means = reducer([given[0], given[1], last])
                rank.stream.synchronize()
                assert means[0] is given[0]
                assert means[1] is given[1]
                assert (means[1].get() == 0.5 + step).all()
                assert (means[2].get() == step / 2).all()

    on_threads(2, rank_main)
