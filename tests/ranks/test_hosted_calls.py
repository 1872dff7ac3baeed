# SPDX-License-Identifier: Apache-2.0
"""Sparse sums and compressed collectives on device arrays: as on the host's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from staged_ranks import Rank, on_threads

from commrt.devices import DeviceArray
from commrt.errors import BufferError_, UsageError
from commrt.request import wait_all
from commrt.sparse.vector import SparseVector


def drawn(rank: int, seed: int, length: int = 500) -> tuple[Any, Any]:
    """Indices and values of a sparse vector."""
    rng = np.random.default_rng((seed, rank))
    indices = np.flatnonzero(rng.random(length) < 0.05 * (rank + 1)).astype(np.int32)
    return indices, rng.integers(1, 9, indices.size).astype("f4")


def same(got: Any, want: Any) -> bool:
    """Whether what is on the device is what the host has."""
    if isinstance(want, SparseVector):
        return (
            got.shape == want.shape
            and got.indices.dtype == want.indices.dtype
            and np.array_equal(got.indices.get(), want.indices)
            and np.array_equal(got.values.get(), want.values)
        )
    return got.shape == want.shape and np.array_equal(got.get(), want)


@pytest.mark.parametrize("result", ["sparse", "dense", "auto"])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_sparse_sums_are_the_hosts(size: int, result: str, seed: int) -> None:
    def main(rank: Rank) -> None:
        comm = rank.comm
        indices, values = drawn(rank.rank, seed)
        want = comm.sparse_allreduce((indices, values, (500,)), result=result)
        x = rank.array(indices), rank.array(values), (500,)
        got = comm.sparse_allreduce(x, result=result)
        assert same(got, want)
        request = comm.sparse_allreduce(
            SparseVector(*x), result=result, nonblocking=True
        )
        assert same(request.wait(stream=rank.stream), want)
        assert request.synchronize() is request.wait()
        assert request.test()
        bound = comm.plan.sparse_allreduce(x, result=result)
        assert same(bound(), want)
        out = DeviceArray(rank.device, 500, "f4")
        dense = comm.sparse_allreduce((indices, values, (500,)), result="dense")
        assert comm.sparse_allreduce(x, out=out) is out
        assert np.array_equal(out.get(), dense)
        rank.arrays.append(out)

    on_threads(size, main)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_largest_elements_are_the_hosts(size: int, seed: int) -> None:
    def main(rank: Rank) -> None:
        comm = rank.comm
        rng = np.random.default_rng((seed, rank.rank))
        gradient = rng.normal(size=(20, 30)).astype("f4")
        owed = np.zeros((20, 30), "f4")
        x, residual = rank.array(gradient), rank.array(owed)
        for _ in range(3):
            want = comm.topk_allreduce(gradient, 25, residual=owed)
            got = comm.topk_allreduce(x, 25, residual=residual)
            assert same(got, want)
            assert np.array_equal(residual.get(), owed)
            rank.stream.synchronize()

    on_threads(size, main)


@pytest.mark.parametrize("compress", ["float16", "bfloat16", "int8"])
def test_compressed_calls_are_the_hosts(compress: str, seed: int) -> None:
    def main(rank: Rank) -> None:
        comm = rank.comm
        rng = np.random.default_rng((seed, rank.rank))
        gradient = rng.normal(size=700).astype("f4")
        owed = np.zeros(700, "f4")
        x, residual = rank.array(gradient), rank.array(owed)
        want = comm.allreduce(
            gradient, out=np.empty(700, "f4"), compress=compress, residual=owed
        )
        out = rank.array(np.zeros(700, "f4"))
        how: dict[str, Any] = {"compress": compress, "residual": residual}
        assert comm.allreduce(x, out=out, **how) is out
        assert np.array_equal(out.get(), want)
        assert np.array_equal(residual.get(), owed)
        want = comm.allreduce(gradient.copy(), compress=compress)
        step = comm.plan.allreduce(x, compress=compress)
        assert step() is x  # in place
        assert np.array_equal(x.get(), want)
        swapped = comm.alltoall(gradient.copy(), compress=compress)
        x.put(gradient)
        requests = [comm.alltoall(x, compress=compress, nonblocking=True)]
        assert wait_all(requests) == [x]
        assert np.array_equal(x.get(), swapped)

    on_threads(2, main)


def test_wrong_hosted_calls_are_refused() -> None:
    def main(rank: Rank) -> None:
        comm = rank.comm
        indices, values = drawn(rank.rank, 1)
        x = rank.array(indices), rank.array(values), (500,)
        with pytest.raises(UsageError, match=r"out is in host memory, and others"):
            comm.sparse_allreduce(x, out=np.zeros(500, "f4"))
        with pytest.raises(UsageError, match=r"unknown result='wet'"):
            comm.sparse_allreduce(x, result="wet")
        sealed = DeviceArray(rank.device, 500, "f4", readonly=True)
        rank.arrays.append(sealed)
        with pytest.raises(BufferError_, match=r"out is read-only"):
            comm.sparse_allreduce(x, out=sealed)
        with pytest.raises(UsageError, match=r"unknown compress='tiny'"):
            comm.allreduce(x[1], compress="tiny")
        with pytest.raises(UsageError, match=r"k=-1 must be an integer"):
            comm.topk_allreduce(x[1], -1)

    on_threads(2, main)
