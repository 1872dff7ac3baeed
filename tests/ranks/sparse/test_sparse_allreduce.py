# SPDX-License-Identifier: Apache-2.0
"""Sparse allreduce on ranks that are threads: exact, whatever runs."""

from __future__ import annotations

import itertools
import random
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from started_operations import past_refusals

import commrt
from commrt.errors import BufferError_, MismatchError, UsageError
from commrt.local import run
from commrt.request import wait_all
from commrt.sparse.cost import ALGORITHMS

Array = Any
LENGTHS = (0, 1, 5, 1000)
PATTERNS = (
    "none",
    "one entry",
    "all",
    "drawn",
    "identical",
    "disjoint",
    "one rank dense",
    "half dense",
)
TYPES = (
    "float16",
    "float32",
    "float64",
    "int8",
    "int64",
    "uint32",
    "bool",
    "complex64",
)
LIMIT_S = 300


def present(pattern: str, rank: int, size: int, length: int) -> Array:
    """Return which elements a rank has."""
    rng = np.random.default_rng((rank, length))
    at = np.arange(length)
    if pattern == "none":
        return np.zeros(length, bool)
    if pattern == "one entry":
        return at == (7 * rank) % max(1, length)
    if pattern == "all":
        return np.ones(length, bool)
    if pattern == "drawn":
        return rng.random(length) < 0.05
    if pattern == "identical":
        return at % 9 == 2
    if pattern == "disjoint":
        return at % (11 * size) == rank
    if pattern == "one rank dense":
        return np.full(length, rank == size - 1)
    return (at < length // 2) | (rng.random(length) < 0.01)


def contribution(
    pattern: str, rank: int, size: int, length: int, dtype: str, index: str
) -> tuple[Array, Array]:
    """Return indices and values; sums of so small integers are exact."""
    where = np.flatnonzero(present(pattern, rank, size, length)).astype(index)
    rng = np.random.default_rng((rank, length, 1))
    low = 0 if dtype.startswith(("uint", "bool")) else -4
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
    return where, rng.integers(low, 5, len(where)).astype(kind)


def reference(parts: list[tuple[Array, Array]], length: int) -> tuple[Array, Array]:
    """Return the dense sum in its own type, and which elements are there."""
    dtype = parts[0][1].dtype
    total = np.zeros(length, np.complex128 if dtype.kind == "c" else np.float64)
    there = np.zeros(length, bool)
    for indices, values in parts:
        total[indices] += values.astype(total.dtype)
        there[indices] = True
    if dtype.kind == "b":  # the sum of bools is or
        return total != 0, there
    return total.astype(dtype), there


def wrong_result(result: Any, want: Array, there: Array) -> str | None:
    """Return what is wrong with an output."""
    if not isinstance(result, commrt.SparseVector):
        return None if np.array_equal(result, want) else "the dense values differ"
    indices = np.asarray(result.indices)
    if (np.diff(indices) <= 0).any():
        return "indices are not sorted"
    if not there[indices].all() or want[np.setdiff1d(there.nonzero(), indices)].any():
        return "the indices are not those of the union"
    same = np.array_equal(result.values, want[indices])
    return None if same else "the values differ"


@pytest.mark.parametrize("size", range(1, 9))
@pytest.mark.parametrize("algorithm", [None, *ALGORITHMS])
def test_the_sum_is_exact(size: int, algorithm: str | None, seed: int) -> None:
    cases = list(
        itertools.product(
            PATTERNS, LENGTHS, TYPES, ("int32", "int64"), ("auto", "sparse", "dense")
        )
    )
    if algorithm == "split_dense":
        cases = [case for case in cases if case[-1] != "sparse"]
    chosen = random.Random(f"{seed} {algorithm} {size}").sample(cases, 25)

    def rank_main(comm: Any) -> list[str]:
        wrong = []
        for case in chosen:
            pattern, length, dtype, index, form = case
            parts = [
                contribution(pattern, rank, size, length, dtype, index)
                for rank in range(size)
            ]
            mine = parts[comm.rank]
            before = [each.copy() for each in mine]
            result = comm.sparse_allreduce(
                (*mine, length), result=form, algorithm=algorithm
            )
            verdict = wrong_result(result, *reference(parts, length))
            if form != "auto":
                is_sparse = isinstance(result, commrt.SparseVector)
                if is_sparse != (form == "sparse"):
                    verdict = f"returned a {type(result).__name__}"
            if any((now != old).any() for now, old in zip(mine, before, strict=True)):
                verdict = "changed its input"
            if verdict:
                wrong.append(f"{verdict}: {case}")
        return wrong

    assert run(size, rank_main, timeout_s=LIMIT_S) == [[]] * size


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_bfloat16_rounds_each_sum_of_two(algorithm: str) -> None:
    def rank_main(comm: Any) -> bool:
        parts = [
            contribution("drawn", r, 3, 1000, "bfloat16", "int32") for r in range(3)
        ]
        got = comm.sparse_allreduce(
            (*parts[comm.rank], 1000), algorithm=algorithm, result="dense"
        )
        want, _ = reference(parts, 1000)
        return bool(got.dtype == ml_dtypes.bfloat16 and (got == want).all())

    assert run(3, rank_main, timeout_s=LIMIT_S) == [True] * 3


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_all_ranks_have_the_same_bits_and_format(algorithm: str) -> None:
    def rank_main(comm: Any) -> list[Any]:
        rng = np.random.default_rng(comm.rank)
        said = []
        for fill in (0.01, 0.2, 0.24, 0.26, 0.6):
            indices = np.flatnonzero(rng.random(4000) < fill)
            values = rng.standard_normal(len(indices)).astype(np.float32)
            got = comm.sparse_allreduce((indices, values, 4000), algorithm=algorithm)
            if isinstance(got, commrt.SparseVector):
                said += [got.indices.tobytes(), got.values.tobytes()]
            else:
                said.append(got.tobytes())
        return said

    for size in (3, 4):
        results = run(size, rank_main, timeout_s=LIMIT_S)
        assert all(result == results[0] for result in results)


def test_a_segment_becomes_dense_by_the_fill_it_meets() -> None:
    def rank_main(comm: Any) -> list[Any]:
        # The lower half is full on every rank, the upper half nearly empty.
        indices = np.concatenate([np.arange(500), [700 + comm.rank]]).astype(np.int32)
        values = np.ones(len(indices), np.float32)
        comm.sparse_allreduce(
            (indices, values, 1000), algorithm="ring", result="sparse"
        )
        sums = comm.sparse_report.phases[:3]
        dense = [phase["dense"] for phase in sums]
        comm.sparse_allreduce((indices[-1:], values[-1:], 1000), algorithm="ring")
        return [dense, sum(phase["dense"] for phase in comm.sparse_report.phases)]

    found = run(4, rank_main, timeout_s=LIMIT_S)
    assert [none for _, none in found] == [0] * 4
    # The first message of a ring is what a rank has itself; sums come from then on.
    # Two of the four ranges fill up, and each is passed on twice as a sum.
    assert sum(sum(dense) for dense, _ in found) == 4
    assert all(dense[0] == 0 for dense, _ in found)


def test_result_keeps_shape_and_fills_out() -> None:
    def rank_main(comm: Any) -> bool:
        out = np.full((3, 4), 9.0)
        indices, values = np.array([1, 6 + comm.rank]), np.array([1.0, 2.0])
        given = comm.sparse_allreduce((indices, values, (3, 4)), out=out)
        sparse = comm.sparse_allreduce((indices, values, (3, 4)), result="sparse")
        assert given is out
        assert sparse.shape == (3, 4)
        assert out.tolist() == [[0, 2, 0, 0], [0, 0, 2, 2], [0, 0, 0, 0]]
        return bool((sparse.to_dense() == out).all())

    assert run(2, rank_main, timeout_s=LIMIT_S) == [True, True]


class Coo:
    """What scipy's arrays look like."""

    def __init__(self, dense: Array) -> None:
        self.shape = dense.shape
        self.row, self.col = dense.nonzero()
        self.data = dense[self.row, self.col]

    def tocoo(self) -> Coo:
        """Return itself."""
        return self


def test_arrays_of_other_libraries_are_known_by_what_they_have() -> None:
    def rank_main(comm: Any) -> bool:
        whole = np.zeros((4, 5))
        whole[comm.rank, 1:3] = 1.0
        whole[3, 4] = comm.rank
        total = comm.sparse_allreduce(Coo(whole))
        vector = comm.sparse_allreduce(
            commrt.SparseVector(total.indices, total.values, total.shape)
        )
        want = np.zeros((4, 5))
        want[:2, 1:3], want[3, 4] = 1.0, 1.0
        assert (total.to_dense() == want).all()
        return bool((vector.to_dense() == 2 * want).all())

    assert run(2, rank_main, timeout_s=LIMIT_S) == [True, True]


def test_many_in_flight_beside_the_users_own_messages(seed: int) -> None:
    def rank_main(comm: Any) -> list[float]:
        peer = (comm.rank + 1) % comm.size
        requests, sums = [], []
        for number in range(12):
            indices = np.arange(comm.rank, 600, 3 + number)
            values = np.ones(len(indices))
            algorithm = ALGORITHMS[number % len(ALGORITHMS)]
            requests.append(
                comm.sparse_allreduce(
                    (indices, values, 700),
                    result="dense",
                    algorithm=algorithm,
                    nonblocking=True,
                )
            )
            comm.send(np.full(3, number), dest=peer, tag=number)
            sums.append(comm.allreduce(np.ones(5), nonblocking=True))
        order = list(range(12))
        random.Random(seed + comm.rank).shuffle(order)
        for number in order:
            while not requests[number].test():
                for each in requests:
                    each.test()
        assert all(request.done for request in requests)
        outs = wait_all([*requests, *sums])
        got = np.zeros(3, int)
        for number in range(12):
            comm.recv(got, source=(comm.rank - 1) % comm.size, tag=number)
            assert (got == number).all()
        assert all((out == comm.size).all() for out in outs[12:])
        return [float(out.sum()) for out in outs[:12]]

    want = [
        float(sum(len(range(rank, 600, 3 + number)) for rank in range(3)))
        for number in range(12)
    ]
    assert run(3, rank_main, timeout_s=LIMIT_S) == [want] * 3


def bad(indices: Any, values: Any = None, shape: Any = 10, **how: Any) -> Any:
    """Return a call with these arguments."""
    given = np.asarray(indices)
    if given.dtype == np.int64 and not isinstance(indices, np.ndarray):
        given = given.astype(np.int32)
    numbers = np.ones(len(given), np.float32) if values is None else values
    return lambda comm: comm.sparse_allreduce((given, numbers, shape), **how)


WRONG = [
    (bad([3, 1]), r"not sorted: indices\[0\] is 3, indices\[1\] is 1"),
    (bad([1, 3, 3]), r"indices\[1\] and indices\[2\] are both 3"),
    (bad([1, 10]), r"indices\[1\] is 10, out of range for shape=\(10,\)"),
    (bad([-1, 3]), r"indices\[0\] is -1, out of range"),
    (bad([1, 2], np.ones(3, np.float32)), "2 indices, but 3 values"),
    (bad(np.array([1.0])), "indices has dtype float64; expected int32 or int64"),
    (bad(np.array([1], np.uint32)), "indices has dtype uint32"),
    (bad([1], np.array(["a"])), "values has dtype"),
    (bad([1], shape=-3), "shape=-3 must be a number of elements"),
    (bad([1], shape=2**32), "more than int32 indices can name"),
    (bad([1], result="coo"), r"unknown result='coo'.*Known: auto, dense, sparse"),
    (bad([1], algorithm="rings"), "did you mean 'ring'"),
    (bad([1], algorithm="split_dense", result="sparse"), "has a dense sum"),
    (bad([1], out=np.ones(9, np.float32)), r"out has 9 elements"),
    (bad([1], out=np.ones(10)), "out has dtype float64, the values have float32"),
    (bad([1], nonblocking=1), "nonblocking=1 must be True or False"),
    (lambda comm: comm.sparse_allreduce(np.ones(3)), "expected a SparseVector"),
    (lambda comm: comm.topk_allreduce(np.ones(3), 4), r"k=4 must be .* 0\.\.3"),
    (lambda comm: comm.topk_allreduce(np.ones(3, complex), 1), "have no largest"),
    (
        lambda comm: comm.topk_allreduce(np.ones(3), 1, residual=np.ones(4)),
        "residual has 4 elements of float64, x has 3",
    ),
]


def test_a_wrong_argument_is_that_ranks_own_error_and_nothing_is_sent() -> None:
    def rank_main(comm: Any) -> float:
        if comm.rank == 1:  # alone: had it sent anything, what follows would break
            for call, said in WRONG:
                with pytest.raises((UsageError, BufferError_), match=said):
                    call(comm)
        x = np.array([1]), np.ones(1), 4
        total = past_refusals(lambda: comm.sparse_allreduce(x, result="dense"))
        return float(total[1])

    assert run(3, rank_main, timeout_s=LIMIT_S) == [3.0] * 3


@pytest.mark.parametrize(
    ("usual", "odd", "said"),
    [
        (bad([1]), bad([1], shape=11), r"shape=\(10,\)\n.*\n  rank 2: shape=\(11,\)"),
        (bad([1]), bad([1], shape=(2, 5)), r"rank 2: shape=\(2, 5\)"),
        (bad([1]), bad([1], np.ones(1)), "values' dtype=float64"),
        (bad([1]), bad(np.array([1])), "index type=int64"),
        (bad([1]), bad([1], result="dense"), "result=dense"),
        (bad([1]), bad([1], algorithm="ring"), "algorithm=ring"),
        (
            lambda comm: comm.topk_allreduce(np.ones(9), 2),
            lambda comm: comm.topk_allreduce(np.ones(9), 3),
            "k=3",
        ),
        (
            bad([1]),
            lambda comm: comm.topk_allreduce(np.ones(10, np.float32), 1),
            r"operation, .*:\n  rank 0: operation=sparse_allreduce, .*\n.*\n"
            r"  rank 2: operation=topk_allreduce, ",
        ),
    ],
)
def test_ranks_that_disagree_raise_the_same_error_and_go_on(
    usual: Any, odd: Any, said: str
) -> None:
    def rank_main(comm: Any) -> list[Any]:
        with pytest.raises(MismatchError, match=said) as raised:
            (odd if comm.rank == 2 else usual)(comm)
        total = comm.sparse_allreduce((np.array([1]), np.ones(1), 4), result="dense")
        return [str(raised.value), float(total[1])]

    results = run(3, rank_main, timeout_s=LIMIT_S)
    assert results == [results[0]] * 3
    assert results[0][1] == 3.0
    assert "no entries were sent" in results[0][0]


def test_check_mode_raises_a_wrong_argument_on_every_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COMMRT_DEBUG", "check")

    def rank_main(comm: Any) -> list[str]:
        said = []
        for call in (bad([3, 1]), bad([4, 4]), bad([99])):
            with pytest.raises(UsageError, match="nothing was sent") as raised:
                (call if comm.rank == 1 else bad([1, 2]))(comm)
            said.append(str(raised.value))
        mix = bad([1]) if comm.rank else lambda comm: comm.allreduce(np.ones(3))
        with pytest.raises(MismatchError, match="operation=sparse_allreduce") as mixed:
            mix(comm)
        assert bad([1])(comm).nnz == 1
        return [*said, str(mixed.value)]

    results = run(3, rank_main, timeout_s=LIMIT_S)
    assert results == [results[0]] * 3
    assert "sparse_allreduce, rank 1: indices are not sorted" in results[0][0]


def test_free_waits_for_no_sparse_operation() -> None:
    def rank_main(comm: Any) -> str:
        own = comm.dup()
        request = own.sparse_allreduce((np.array([1]), np.ones(1), 4), nonblocking=True)
        text = ""
        if not request.done:
            with pytest.raises(UsageError, match="1 sparse operations have not ended"):
                own.free()
        request.wait()
        assert repr(request).endswith(f"rank {comm.rank}: done>")
        with pytest.raises(TypeError, match="not its completion"):
            bool(request)
        comm.barrier()
        own.free()
        return text

    assert run(2, rank_main, timeout_s=LIMIT_S) == ["", ""]


def largest_of(x: Array, k: int) -> Array:
    order = np.lexsort((np.arange(x.size), -np.abs(x.astype(np.float64))))
    kept = np.zeros_like(x)
    kept[order[:k]] = x[order[:k]]
    return kept


@pytest.mark.parametrize("dtype", ["float32", "float16", "int64", "int8"])
@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
def test_topk_is_the_largest_of_the_sum_and_loses_nothing(
    size: int, dtype: str
) -> None:
    length = 400
    rng = np.random.default_rng(size)
    xs = [rng.integers(-9, 10, length).astype(dtype) for _ in range(size)]

    def rank_main(comm: Any) -> list[Any]:
        found = []
        for k in (0, 1, 30, length):
            residual = np.zeros(length, dtype)
            for _ in range(3):
                result = comm.topk_allreduce(xs[comm.rank], k, residual=residual)
                found.append([result.to_dense(), residual.copy(), result.nnz <= k])
        return found

    results = run(size, rank_main, timeout_s=LIMIT_S)
    at = 0
    for k in (0, 1, 30, length):
        owed = [np.zeros(length, dtype) for _ in xs]
        for _ in range(3):
            had = [x + rest for x, rest in zip(xs, owed, strict=True)]
            locals_ = [largest_of(each, k) for each in had]
            there = np.array([_positions(each, k) for each in had]).any(axis=0)
            want = _largest_there(sum(locals_).astype(dtype), there, k)
            for rank in range(size):
                result, rest, few = results[rank][at]
                assert few
                np.testing.assert_array_equal(result, want)
                owed[rank] = rest
            total = want.astype(np.int64) + sum(rest.astype(np.int64) for rest in owed)
            np.testing.assert_array_equal(
                total, sum(each.astype(np.int64) for each in had)
            )
            at += 1


def _positions(x: Array, k: int) -> Array:
    order = np.lexsort((np.arange(x.size), -np.abs(x.astype(np.float64))))
    there = np.zeros(x.size, bool)
    there[order[:k]] = True
    return there


def _largest_there(total: Array, there: Array, k: int) -> Array:
    at = np.flatnonzero(there)
    kept = np.zeros_like(total)
    chosen = at[np.flatnonzero(_positions(total[at], min(k, at.size)))]
    kept[chosen] = total[chosen]
    return kept
