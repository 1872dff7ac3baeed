# SPDX-License-Identifier: Apache-2.0
"""Sparse sums and compressed collectives on device arrays: as on the host's."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from staged_ranks import Rank, on_threads

from commrt.comm import core_of
from commrt.devices import DeviceArray
from commrt.errors import (
    BufferError_,
    CommError,
    MismatchError,
    TimeoutError_,
    UsageError,
)
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


def test_wrong_host_work_calls_are_refused() -> None:
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


def test_what_is_wrong_with_contents_is_said_by_the_request() -> None:
    def main(rank: Rank) -> str:
        comm = rank.comm
        indices = np.array([5, 3] if rank.rank else [3, 5], np.int32)
        x = rank.array(indices), rank.array(np.ones(2, "f4")), (10,)
        out = rank.array(np.zeros(10, "f4"))
        request = comm.sparse_allreduce(x, out=out, nonblocking=True)
        with suppress(CommError):  # it may have failed by now
            request.wait()
        rank.stream.synchronize()  # it is let go
        with pytest.raises(CommError) as failed:
            request.synchronize()
        with pytest.raises(CommError) as again:
            request.wait()
        assert again.value is failed.value
        right = rank.array(np.array([3, 5], np.int32)), x[1], (10,)
        comm.sparse_allreduce(right, out=out)
        rank.stream.synchronize()
        assert comm.allreduce(np.ones(1))[0] == 2  # others go on
        return f"{type(failed.value).__name__}: {failed.value}"

    said = on_threads(2, main)
    assert said[1].startswith("UsageError")
    assert "not sorted: indices[0] is 5, indices[1] is 3" in said[1]
    assert said[0].startswith("RefusedError")


def test_a_blocking_call_that_failed_is_told_by_the_next() -> None:
    def main(rank: Rank) -> None:
        indices = np.array([5, 3], np.int32)
        x = rank.array(indices), rank.array(np.ones(2, "f4")), (10,)
        out = rank.array(np.zeros(10, "f4"))
        assert rank.comm.sparse_allreduce(x, out=out) is out
        rank.stream.synchronize()
        with pytest.raises(CommError, match=r"not sorted"):
            rank.comm.allreduce(np.ones(1))

    on_threads(1, main)


def test_ranks_that_differ_are_told_and_go_on() -> None:
    def main(rank: Rank) -> None:
        comm = rank.comm
        length = 20 + rank.rank
        values = rank.array(np.ones(2, "f4"))
        x = rank.array(np.array([0, 3], np.int32)), values, (length,)
        requests = [
            comm.sparse_allreduce(x, result=form, nonblocking=True)
            for form in ("dense", "sparse")
        ]
        with suppress(MismatchError):
            rank.arrays.append(requests[0].wait())
        rank.stream.synchronize()
        with pytest.raises(MismatchError, match=r"shape"):
            requests[0].synchronize()
        with pytest.raises(MismatchError, match=r"shape"):
            requests[1].wait()
        same = *x[:2], (30,)
        got = comm.sparse_allreduce(same, result="dense")
        rank.arrays.append(got)
        assert got.get().tolist() == [2, 0, 0, 2, *[0] * 26]

    on_threads(2, main)


def test_a_rank_that_does_not_come_is_an_error_in_time() -> None:
    def main(rank: Rank) -> None:
        comm = rank.comm
        x = rank.array(np.ones(8, "f4"))
        comm.allreduce(x, compress="float16")  # the ranks meet for the first one
        rank.stream.synchronize()
        if rank.rank:
            return
        request = comm.allreduce(x, compress="float16", nonblocking=True, timeout_s=0.1)
        request.wait()
        rank.stream.synchronize()  # let go, when the time is over
        with pytest.raises(TimeoutError_, match=r"not complete within 0.1 s"):
            request.synchronize()
        with pytest.raises(CommError):
            comm.allreduce(x)

    on_threads(2, main)


def test_without_a_thread_requests_do_the_work(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setenv("COMMRT_PROGRESS", "off")

    def main(rank: Rank) -> None:
        comm = rank.comm
        x = rank.array(np.full(50, rank.rank + 1, "f4"))
        request = comm.allreduce(x, compress="float16", nonblocking=True)
        while not request.test():
            pass
        assert request.wait() is x
        assert x.get().tolist() == [3] * 50
        indices, values = drawn(rank.rank, seed)
        entries = rank.array(indices), rank.array(values), (500,)
        want = comm.sparse_allreduce((indices, values, (500,)), result="sparse")
        late = comm.sparse_allreduce(entries, result="sparse", nonblocking=True)
        assert same(late.synchronize(), want)
        out = rank.array(np.zeros(500, "f4"))
        request = comm.sparse_allreduce(entries, out=out, nonblocking=True)
        assert request.synchronize() is out
        assert np.array_equal(out.get(), want.to_dense())
        assert not core_of(comm).devices.host_jobs._threads

    on_threads(2, main)


def test_a_report_of_a_sum_of_device_arrays_is_the_communicators() -> None:
    def main(rank: Rank) -> None:
        comm = rank.comm
        x = rank.array(np.array([1], np.int32)), rank.array(np.ones(1, "f4")), (9,)
        assert comm.sparse_report is None
        comm.sparse_allreduce(x, result="sparse")  # returns when it has ended
        assert comm.sparse_report.counts == (1,)
        host = np.array([1, 2], np.int32), np.ones(2, "f4"), (9,)
        comm.sparse_allreduce(host)
        assert comm.sparse_report.counts == (2,)

    on_threads(1, main)
