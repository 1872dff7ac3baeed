# SPDX-License-Identifier: Apache-2.0
"""COMMRT_NAN_CHECK and comm.nan_check: NaN and infinity are found before they leave."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from ml_dtypes import bfloat16

from commrt.comm import Communicator
from commrt.errors import CommError, NotFiniteError, RefusedError, UsageError
from commrt.local import run


def bad(comm: Communicator, size: int, rank: int, dtype: Any = "float32") -> Any:
    """Return this rank's array; that of ``rank`` has infinity behind NaN."""
    x = np.ones(size, dtype)
    if comm.rank == rank:
        x[size // 2], x[-1] = np.nan, np.inf
        x[size // 2] = np.nan
    return x


def each_error(
    size: int, call: Callable[[Communicator, int], Any], repeats: int = 2
) -> list[list[str]]:
    """Return each rank's errors of a call that rank 1 makes with NaN, some times.

    All ranks must be in step after each of them.
    """

    def program(comm: Communicator) -> list[str]:
        comm.nan_check = True
        assert comm.nan_check
        said = []
        for _ in range(repeats):
            try:
                call(comm, 1)
            except CommError as error:
                said.append(f"{type(error).__name__}: {error}")
            total = comm.allreduce(np.ones(3))
            assert total.tolist() == [comm.size] * 3
        return said

    return run(size, program)


COLLECTIVES: dict[str, Callable[[Communicator, Any], Any]] = {
    "allreduce": lambda comm, x: comm.allreduce(x),
    "reduce": lambda comm, x: comm.reduce(x, root=0),
    "allgather": lambda comm, x: comm.allgather(x),
    "alltoall": lambda comm, x: comm.alltoall(np.repeat(x, comm.size)),
    "reduce_scatter": lambda comm, x: comm.reduce_scatter(np.repeat(x, comm.size)),
    "bcast": lambda comm, x: comm.bcast(x, root=1),
    "gather": lambda comm, x: comm.gather(x, root=0),
    "scan": lambda comm, x: comm.scan(x),
    "allgatherv": lambda comm, x: comm.allgatherv(x, counts=[x.size] * comm.size),
    "nonblocking": lambda comm, x: comm.allreduce(x, nonblocking=True).wait(),
    "out of place": lambda comm, x: comm.allreduce(x, out=np.empty_like(x)),
    "by name": lambda comm, x: comm.allreduce(x, algorithm="ring"),
    "a bound call": lambda comm, x: comm.plan.allreduce(x)(),
}


@pytest.mark.parametrize("name", COLLECTIVES)
@pytest.mark.parametrize("size", [2, 3, 5])
def test_it_names_rank_operation_and_index_and_the_others_hear_of_it(
    name: str, size: int
) -> None:
    def call(comm: Communicator, rank: int) -> Any:
        return COLLECTIVES[name](comm, bad(comm, 7, rank))

    errors = each_error(size, call)
    factor = size if name in ("alltoall", "reduce_scatter") else 1
    index = 3 * factor
    for rank, said in enumerate(errors):
        kind = "NotFiniteError" if rank == 1 else "RefusedError"
        # A rank that does not need the refused one may have had its result.
        assert all(text.startswith(kind) for text in said), said
        if rank == 1:
            assert len(said) == 2
            assert f"rank 1: x has NaN at element {index} of {7 * factor}" in said[0]
        elif said:
            assert f"x has NaN at element {index}" in said[0]
    assert name in ("reduce", "gather", "scan") or all(errors)


@pytest.mark.parametrize(
    "dtype", ["float16", bfloat16, "float32", "float64", "complex64", "complex128"]
)
def test_all_types_of_numbers_that_can_be_infinite(dtype: Any) -> None:
    def call(comm: Communicator, rank: int) -> Any:
        return comm.allreduce(bad(comm, 9, rank, dtype))

    errors = each_error(2, call)
    assert "element 4 of 9" in errors[1][0]


def test_what_is_only_received_is_not_looked_at() -> None:
    def program(comm: Communicator) -> None:
        comm.nan_check = True
        x = np.full(5, np.nan if comm.rank else 1.0)
        for _ in range(2):  # the second time by the dispatcher
            x[:] = np.nan if comm.rank else 1.0
            assert comm.bcast(x, root=0).tolist() == [1.0] * 5
        out = np.full(5, np.nan)
        assert comm.allreduce(np.ones(5), out=out).tolist() == [2.0] * 5

    run(2, program)


@pytest.mark.parametrize("checked", [False, True])
def test_the_variable_and_the_attribute(
    checked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COMMRT_NAN_CHECK", "1" if checked else "0")

    def program(comm: Communicator) -> list[bool]:
        found = [comm.nan_check]
        for wanted in (checked, not checked):
            comm.nan_check = wanted
            said = ""
            try:
                comm.allreduce(np.full(2, np.inf))
            except NotFiniteError as error:
                said = str(error)
            found.append("x has infinity at element 0 of 2" in said)
        with pytest.raises(UsageError, match="nan_check"):
            comm.nan_check = "yes"  # type: ignore[assignment]
        return found

    assert run(1, program) == [[checked, checked, not checked]]


def test_messages_buckets_and_numbers() -> None:
    def program(comm: Communicator) -> None:
        comm.nan_check = True
        x = np.array([1.0, 2.0, np.nan])
        other, out = 1 - comm.rank, np.empty(3)
        with pytest.raises(NotFiniteError, match="x has NaN at element 2 of 3"):
            comm.send(x, dest=other)
        with pytest.raises(NotFiniteError, match="sendrecv on"):
            comm.sendrecv(x, dest=other, out=out, source=other)
        with pytest.raises(NotFiniteError, match=r"sends\[1\]: x has NaN"):
            comm.multi_sendrecv(
                sends=[(np.ones(3), other), (x, other)], recvs=[(out, other)]
            )
        bound = comm.plan.send(x, dest=other)
        several = comm.plan.multi_sendrecv(sends=[(x, other)], recvs=[(out, other)])
        for call in (bound, several):
            with pytest.raises(NotFiniteError, match="has NaN at element 2"):
                call()
        for _ in range(3):  # six messages were refused, and three receives
            with pytest.raises(RefusedError, match="has NaN at element 2 of 3"):
                comm.recv(out, source=other)
        x[2] = 3.0  # it is looked at in each run
        leaving = bound.start()
        comm.recv(out, source=other)
        leaving.wait()
        with pytest.raises(NotFiniteError, match="allreduce on"):
            comm.allreduce(float("nan"))
        assert comm.allreduce(1.0) == comm.size
        arrays = [np.ones(4), np.full(4, np.inf)]
        with comm.fused():
            first = comm.allreduce(arrays[0], nonblocking=True)
            with pytest.raises(NotFiniteError, match="x has infinity at element 0"):
                comm.allreduce(arrays[1], nonblocking=True)
        with pytest.raises(RefusedError, match="x has infinity at element 0"):
            first.wait()

    run(2, program)


def test_in_check_mode_all_ranks_raise_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMMRT_DEBUG", "check")
    errors = each_error(3, lambda comm, rank: comm.allreduce(bad(comm, 5, rank)))
    for said in errors:
        assert len(said) == 2
        assert "rank 1: x has NaN at element 2 of 5" in said[0]


SPARSE: dict[str, Callable[[Communicator, Any], Any]] = {
    "sparse": lambda comm, x: comm.sparse_allreduce(
        (np.arange(x.size), x, (2 * x.size,))
    ),
    "topk": lambda comm, x: comm.topk_allreduce(x, 2),
    "planned": lambda comm, x: comm.plan.topk_allreduce(x, 2)(),
}


@pytest.mark.parametrize("name", SPARSE)
def test_sparse_sums_are_looked_at(name: str) -> None:
    def call(comm: Communicator, rank: int) -> Any:
        return SPARSE[name](comm, bad(comm, 7, rank))

    for rank, said in enumerate(each_error(3, call)):
        kind = "NotFiniteError" if rank == 1 else "RefusedError"
        assert [each.split(":")[0] for each in said] == [kind] * 2
        assert all("NaN at element 3 of 7" in each for each in said)
