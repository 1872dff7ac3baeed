# SPDX-License-Identifier: Apache-2.0
"""Sparse sums of arrays whose elements 64 bits cannot number, and of coordinates."""

from __future__ import annotations

import itertools
from math import prod
from typing import Any

import numpy as np
import pytest

import commrt
from commrt.errors import BufferError_, MismatchError, UsageError
from commrt.local import run

Array = Any
Shape = tuple[int, ...]
ALGORITHMS = (None, "recursive_doubling", "split", "ring", "two_level_ring")
"""All that need no dense range."""
NARROW: tuple[Shape, ...] = (
    *((0, 5), (1, 1), (7, 3), (4, 1, 6), (2**31,), (1, 2**31), (2**31, 2)),
    *((3_000_000_000, 3_000_000_000), (2**62, 1), (1, 2**63 - 1), (2**63 - 1,)),
    # 2**63 - 1
    *((7, 1317624576693539401), (7, 7, 188232082384791343)),
)
WIDE: tuple[Shape, ...] = (
    *((2, 2**62), (2**62, 2), (2**31, 2**32), (2, 2**31, 2**31)),  # 2**63
    (3, 3074457345618258603),  # 2**63 + 1
    *((2**32, 2**32), (4, 2**62), (2**16,) * 4),  # 2**64
    *((2**62, 2**62), (2**62, 2**62, 4), (5, 2**60, 11, 3, 2**40), (2**15,) * 8),
)


def places(shape: Shape, count: int, *seed: int) -> Array:
    """Return so many sorted columns of coordinates, edges of the array among them."""
    rng = np.random.default_rng(seed)
    if not prod(shape):
        return np.empty((len(shape), 0), np.int64)
    found = {
        tuple(int(rng.integers(0, length)) for length in shape) for _ in range(count)
    }
    # Neighbours, of which ranks have the same ones, and both ends.
    for i in range(count // 4):
        found.add(tuple(min(i, length - 1) for length in shape))
        found.add(tuple(max(0, length - 1 - i) for length in shape))
    chosen = sorted(found)[: max(count, 0)] if count < 4 else sorted(found)
    return np.array(chosen, np.int64).reshape(len(chosen), len(shape)).T.copy()


def reference(parts: list[tuple[Array, Array]]) -> dict[tuple[int, ...], Any]:
    """Return the sums of all entries, by their coordinates as numbers of Python."""
    total: dict[tuple[int, ...], Any] = {}
    for indices, values in parts:
        for column, value in zip(indices.T.tolist(), values, strict=True):
            at = tuple(column)
            total[at] = value if at not in total else total[at] + value
    return dict(sorted(total.items()))


def wrong(result: Any, want: dict[tuple[int, ...], Any], shape: Shape) -> str | None:
    columns = [tuple(column) for column in result.indices.T.tolist()]
    if result.indices.shape != (len(shape), len(want)) or result.shape != shape:
        return f"{result}: {result.indices.shape}, expected {len(want)} columns"
    if result.indices.dtype != np.int64 or columns != list(want):
        return f"columns {columns[:5]} of {result.indices.dtype}, {list(want)[:5]}"
    if not np.array_equal(
        result.values, np.array([*want.values()], result.values.dtype)
    ):
        return f"values {result.values[:5]}, {[*want.values()][:5]}"
    return None


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
def test_the_sum_is_exact_whatever_the_shape(size: int) -> None:
    cases = list(itertools.product((*NARROW, *WIDE), (0, 1, 3, 40), ALGORITHMS))
    mine = cases if size == 3 else cases[size::5]

    def parts_of(shape: Shape, count: int) -> list[tuple[Array, Array]]:
        parts = []
        for rank in range(size):
            # Ranks have unequal numbers of entries, one of them perhaps none.
            indices = places(shape, count * (rank % 3), len(shape), count, rank)
            values = np.arange(1.0, 1 + indices.shape[1]) * (rank + 1)
            parts.append((indices, values))
        return parts

    def body(comm: commrt.Communicator) -> list[str]:
        found = []
        for shape, count, algorithm in mine:
            parts = parts_of(shape, count)
            indices, values = parts[comm.rank]
            got = comm.sparse_allreduce(
                (indices, values, shape), result="sparse", algorithm=algorithm
            )
            text = wrong(got, reference(parts), shape)
            if text is not None:
                found.append(f"{shape}, {count}, {algorithm}: {text}")
        return found

    assert run(size, body) == [[]] * size


@pytest.mark.parametrize("dtype", ["float16", "int8", "uint32", "bool", "complex128"])
def test_values_of_every_kind(dtype: str) -> None:
    shape = (2**40, 2**40)

    def body(comm: commrt.Communicator) -> list[bool]:
        indices = np.array([[0, 5, 2**40 - 1], [comm.rank, 7, 2**40 - 1]], np.int64)
        values = np.array([1, 1, 0], dtype)
        found = []
        for algorithm in ALGORITHMS:
            got = comm.sparse_allreduce((indices, values, shape), algorithm=algorithm)
            own = [[0, rank] for rank in range(comm.size)]
            want = [*own, [5, 7], [2**40 - 1, 2**40 - 1]]
            found.append(got.indices.T.tolist() == want)
            sums = [1] * comm.size + [1 if dtype == "bool" else comm.size, 0]
            found.append(np.array_equal(got.values, np.array(sums, dtype)))
        return found

    assert run(3, body) == [[True] * 10] * 3


def test_many_entries_go_every_way() -> None:
    """More than fit into the ranks' shared memory; in order; nonblocking; planned."""
    shape = (2**50, 2**50)

    def entries(rank: int, count: int) -> tuple[Array, Array]:
        at = np.arange(count, dtype=np.int64) * (2 + rank)
        return np.stack([at, at[::-1].copy() % 2**50]), np.ones(count)

    def body(comm: commrt.Communicator) -> list[Any]:
        found: list[Any] = []
        for count in (1, 3_000, 400_000):
            indices, values = entries(comm.rank, count)
            every = [comm.sparse_allreduce((indices, values, shape), algorithm=a)
                     for a in ALGORITHMS]  # fmt: skip
            later = comm.sparse_allreduce((indices, values, shape), nonblocking=True)
            plan = comm.plan.sparse_allreduce((indices, values, shape))
            every += [later.wait(), plan()]
            first = every[0]
            found += [
                np.array_equal(first.indices, other.indices)
                and np.array_equal(first.values, other.values)
                for other in every
            ]
            found.append(float(first.values.sum()) == count * comm.size)
            order = np.lexsort(first.indices[::-1])
            found.append(np.array_equal(order, np.arange(first.nnz)))
        return found

    assert run(3, body) == [[True] * 27] * 3


def test_coordinates_give_what_positions_give() -> None:
    def body(comm: commrt.Communicator) -> bool:
        shape = (4, 5, 6)
        flat = np.array([comm.rank, 17, 119])
        indices = np.stack(np.unravel_index(flat, shape))
        values = np.array([1.0, 2.0, 3.0], np.float32)
        named = comm.sparse_allreduce((indices, values, shape), result="sparse")
        placed = comm.sparse_allreduce((flat, values, shape), result="sparse")
        dense = comm.sparse_allreduce((indices, values, shape), result="dense")
        short = comm.sparse_allreduce(
            (indices.astype(np.int32), values, shape), result="sparse"
        )
        given = commrt.SparseVector(indices, values, shape)
        again = comm.sparse_allreduce(given, result="dense")
        return all(
            [
                np.array_equal(named.indices, placed.coordinates),
                np.array_equal(named.coordinates, short.indices),
                placed.indices.shape == (named.nnz,),
                np.array_equal(named.to_dense(), placed.to_dense()),
                np.array_equal(dense, named.to_dense()),
                np.array_equal(dense, again),
            ]
        )

    assert run(2, body) == [True, True]


WIDE_SHAPE = (2**32, 2**32)
GOOD = np.array([[1, 1, 2], [0, 4, 3]], np.int64)
WRONG: dict[str, tuple[Any, dict[str, Any], type[Exception], str]] = {
    "outside": ((np.array([[1, 2], [0, 2**32]]), np.ones(2), WIDE_SHAPE), {},
                UsageError, r"indices\[1, 1\] is 4294967296, out of range"),
    "negative": ((np.array([[-1, 2], [0, 3]]), np.ones(2), WIDE_SHAPE), {},
                 UsageError, r"indices\[0, 0\] is -1, out of range"),
    "wraps": ((np.array([[0, 2], [3, 3]]), np.ones(2), (4, 3)), {},
              UsageError, r"indices\[1, 0\] is 3, out of range"),
    "unsorted": ((GOOD[:, ::-1].copy(), np.ones(3), WIDE_SHAPE), {},
                 UsageError, r"not sorted: indices\[:, 0\] is \(2, 3\)"),
    "twice": ((GOOD[:, [0, 1, 1]].copy(), np.ones(3), WIDE_SHAPE), {},
              UsageError, r"indices\[:, 1\] and indices\[:, 2\] are both \(1, 4\)"),
    "unsorted, narrow": ((GOOD[:, ::-1].copy(), np.ones(3), (5, 5)), {},
                         UsageError, r"not sorted: indices\[:, 0\] is \(2, 3\)"),
    "rows": ((GOOD, np.ones(3), (2**32, 2**32, 2)), {},
             UsageError, r"a row for each of the 3 dimensions"),
    "values": ((GOOD, np.ones(2), WIDE_SHAPE), {}, UsageError, "3 indices, but 2"),
    "positions": ((np.array([1, 2]), np.ones(2), WIDE_SHAPE), {},
                  UsageError, r"more than int64 can number; pass indices of shape"),
    "type": ((GOOD.astype(float), np.ones(3), WIDE_SHAPE), {},
             BufferError_, "expected int32 or int64"),
    "axes": ((GOOD.reshape(2, 3, 1), np.ones(3), WIDE_SHAPE), {},
             UsageError, "indices has shape"),
    "dense": ((GOOD, np.ones(3), WIDE_SHAPE), {"result": "dense"},
              UsageError, "more than any array can hold.*leave out result"),
    "out": ((GOOD, np.ones(3), WIDE_SHAPE), {"out": np.zeros(3)},
            UsageError, "more than any array can hold.*leave out out"),
    "split_dense": ((GOOD, np.ones(3), WIDE_SHAPE), {"algorithm": "split_dense"},
                    UsageError, "has a dense sum"),
    "dense, numbered": ((np.array([1]), np.ones(1), (3 * 10**9, 3 * 10**9)),
                        {"result": "dense"}, UsageError, "more than any array can"),
    "split_dense, numbered": ((np.array([1]), np.ones(1), 2**62),
                              {"algorithm": "split_dense"}, UsageError, "dense sum"),
    "too many": ((GOOD, np.ones(3), (2**63 - 1, 2**63 - 1, 3)), {},
                 UsageError, r"2\*\*126 in all"),
    "too long": ((GOOD[:1], np.ones(3), (2**63,)), {}, UsageError, r"2\*\*63 - 1 each"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_argument_is_an_error_and_nothing_is_sent(name: str) -> None:
    x, how, error, text = WRONG[name]

    def body(comm: commrt.Communicator) -> list[list[int]]:
        with pytest.raises(error, match=text):
            comm.sparse_allreduce(x, **how)
        found: list[list[int]] = comm.sparse_allreduce(
            (GOOD, np.ones(3), WIDE_SHAPE)
        ).indices.tolist()
        return found

    assert run(2, body) == [GOOD.tolist()] * 2


def test_ranks_that_disagree_raise_the_same_error() -> None:
    def body(comm: commrt.Communicator) -> str:
        shape = WIDE_SHAPE if comm.rank == 0 else (2**32, 2**31)
        with pytest.raises(MismatchError) as raised:
            comm.sparse_allreduce((GOOD, np.ones(3), shape))
        return str(raised.value)

    first, second = run(2, body)
    assert first == second
    assert "index type=by dimension" not in first
    assert "shape=(4294967296, 4294967296)" in first


def test_what_a_vector_of_coordinates_knows() -> None:
    vector = commrt.SparseVector(GOOD, np.ones(3), WIDE_SHAPE)
    assert vector.nnz == 3
    assert vector.coordinates is GOOD
    with pytest.raises(UsageError, match="more than any array can hold"):
        vector.to_dense()
    with pytest.raises(BufferError_, match="SparseVector: indices"):
        commrt.SparseVector(GOOD, np.ones(3), (2**32, 2**32, 2))
    with pytest.raises(UsageError, match="3 indices, but 2 values"):
        commrt.SparseVector(GOOD, np.ones(2), WIDE_SHAPE)
    small = commrt.SparseVector(GOOD, np.array([1.0, 2.0, 3.0]), (3, 5))
    want = np.zeros((3, 5))
    want[tuple(GOOD)] = [1, 2, 3]
    assert np.array_equal(small.to_dense(), want)
    alone = commrt.SparseVector(np.array([4]), np.ones(1), ())
    assert alone.coordinates.shape == (0, 1)


class Coo:
    """An array as scipy's are."""

    def __init__(self, coords: Any, data: Any, shape: Shape) -> None:
        self.coords, self.data, self.shape = coords, data, shape

    def tocoo(self) -> Coo:
        return self


def test_arrays_as_scipy_has_them() -> None:
    def body(comm: commrt.Communicator) -> list[Any]:
        rows, columns = GOOD
        wide = comm.sparse_allreduce(Coo((rows, columns), np.ones(3), WIDE_SHAPE))
        narrow = comm.sparse_allreduce(
            Coo((rows, columns), np.ones(3), (3, 5)), result="sparse"
        )
        with pytest.raises(UsageError, match=r"indices\[1, 1\] is 4, out of range"):
            comm.sparse_allreduce(Coo((rows, columns), np.ones(3), (3, 4)))
        return [wide.indices.tolist(), narrow.indices.tolist()]

    assert run(2, body) == [[GOOD.tolist(), [5, 9, 13]]] * 2
