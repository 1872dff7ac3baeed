# SPDX-License-Identifier: Apache-2.0
"""JAX's arrays in host memory, which never change: results are new arrays of numpy.

There is no JAX here; ``make test-client-jax`` has it. What commrt asks of its arrays is
the name of their module, DLPack's device, and numpy's protocol.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from commrt.errors import BufferError_
from commrt.layers.data import GradientReducer
from commrt.local import run


class Frozen:
    """An array as JAX has them on CPUs."""

    def __init__(self, values: Any, dtype: Any = np.float32) -> None:
        self.held = np.array(values, dtype)
        self.held.flags.writeable = False
        self.shape, self.dtype = self.held.shape, self.held.dtype

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        return self.held


Frozen.__module__ = "jaxlib._jax"


@pytest.mark.parametrize("dtype", ["float32", "bool", "int64", "bfloat16"])
@pytest.mark.parametrize("shape", [(), (0, 3), (1,), (7,), (3, 257)])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_an_allreduce_returns_a_new_array(
    size: int, shape: tuple[int, ...], dtype: str
) -> None:
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    values = [np.full(shape, rank, kind) for rank in range(size)]

    def rank_main(comm: Any) -> list[bool]:
        x = Frozen(values[comm.rank], kind)
        found = comm.allreduce(x)
        later = comm.allreduce(x, nonblocking=True).wait()
        want = np.full(shape, sum(range(size)), kind)
        return [
            type(found) is np.ndarray and found.flags.writeable,
            found.dtype == kind and found.shape == shape,
            np.array_equal(found, want) and np.array_equal(later, want),
            np.array_equal(x.held, values[comm.rank]),
        ]

    assert run(size, rank_main) == [[True] * 4] * size


def test_operations_that_would_work_in_place_make_new_arrays() -> None:
    def rank_main(comm: Any) -> list[bool]:
        x = Frozen(np.arange(6) + comm.rank)
        plain = np.array(x.held)
        ranks = [plain - comm.rank + other for other in range(3)]
        told = comm.bcast(x, root=1)
        total = comm.reduce(x, root=2)
        moved = [each[2 * comm.rank : 2 * comm.rank + 2] for each in ranks]
        prefix = comm.exscan(x)
        return [
            np.array_equal(np.asarray(told), ranks[1]),
            (told is x) == (comm.rank == 1),
            total is None if comm.rank != 2 else np.array_equal(total, sum(ranks)),
            np.array_equal(comm.scan(x), sum(ranks[: comm.rank + 1])),
            np.array_equal(prefix, sum(ranks[: comm.rank]) if comm.rank else plain),
            np.array_equal(comm.alltoall(x), np.concatenate(moved)),
            np.array_equal(comm.allgather(x), ranks),
            np.array_equal(comm.reduce_scatter(x), sum(moved)),
            np.array_equal(x.held, plain),
        ]

    assert run(3, rank_main) == [[True] * 9] * 3


def test_nothing_is_put_into_one() -> None:
    def rank_main(comm: Any) -> None:
        out = Frozen(np.zeros(4))
        with pytest.raises(BufferError_, match="read-only"):
            comm.allreduce(np.ones(4, np.float32), out=out)
        with pytest.raises(BufferError_, match="read-only"):
            comm.bcast(np.ones(4, np.float32), out=out)
        assert not out.held.any()

    run(2, rank_main)


def test_gradients_are_summed_into_new_arrays() -> None:
    def rank_main(comm: Any) -> list[bool]:
        shapes = [(3, 5), (), (257,), (0,)]
        given = [Frozen(np.full(shape, comm.rank + 1.0)) for shape in shapes]
        with GradientReducer(comm, given, op="sum", bucket_nbytes=100) as reducer:
            sums = [reducer(given), reducer(given)]
        return [
            type(one) is np.ndarray and np.array_equal(one, np.full(shape, 3.0))
            for step in sums
            for one, shape in zip(step, shapes, strict=True)
        ] + [bool((each.held == comm.rank + 1).all()) for each in given]

    assert run(2, rank_main) == [[True] * 12] * 2
