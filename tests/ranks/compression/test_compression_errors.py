# SPDX-License-Identifier: Apache-2.0
"""Compressed collectives: wrong calls, and ranks that do not agree."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from started_operations import num_started, past_refusals

from commrt.errors import BufferError_, MismatchError, RevokedError, UsageError
from commrt.local import run
from commrt.vocabulary.reductions import reduction

Array = np.ndarray[Any, Any]

F = np.float32


def ones(count: int = 6, dtype: Any = F) -> Array:
    return np.ones(count, dtype)


def frozen(count: int) -> Array:
    x = np.zeros(count, F)
    x.flags.writeable = False
    return x


X = ones()
WRONG: list[tuple[Callable[[Any], Any], type[Exception], str]] = [
    (
        lambda c: c.allreduce(ones(), compress="fp16"),
        UsageError,
        "allreduce: unknown compress='fp16'; did you mean 'float16'.*bfloat16, float16",
    ),
    (lambda c: c.allreduce(ones(), compress=16), UsageError, "expected a name"),
    (
        lambda c: c.allreduce(ones(6, np.int32), compress="int8"),
        BufferError_,
        "compress='int8': x has dtype int32, expected float32 or float64",
    ),
    (
        lambda c: c.alltoall(ones(6, np.float16), compress="int8"),
        BufferError_,
        "x has dtype float16",
    ),
    (
        lambda c: c.allreduce(ones(), op="max", compress="int8"),
        UsageError,
        "op='max' cannot be reduced from compressed parts, expected op='sum' or",
    ),
    (
        lambda c: c.allreduce(ones(), op=reduction(np.maximum), compress="int8"),
        UsageError,
        "a reduction of your own cannot be reduced",
    ),
    (
        lambda c: c.allreduce(ones(), compress="int8", algorithm="ring"),
        UsageError,
        "algorithm is for what is not compressed; leave it out",
    ),
    (
        lambda c: c.allreduce(ones(12)[::2], compress="int8"),
        BufferError_,
        "not C-contiguous",
    ),
    (
        lambda c: c.allreduce(ones(), residual=np.zeros(6, F)),
        UsageError,
        "residual= keeps what compression loses: give compress=",
    ),
    (
        lambda c: c.allreduce(ones(), compress="int8", residual=np.zeros(5, F)),
        UsageError,
        "residual has 5 elements of float32, x has 6 of float32",
    ),
    (
        lambda c: c.allreduce(ones(), compress="int8", residual=np.zeros(6)),
        UsageError,
        "residual has 6 elements of float64",
    ),
    (
        lambda c: c.allreduce(ones(), compress="int8", residual=frozen(6)),
        BufferError_,
        "residual is read-only",
    ),
    (
        lambda c: c.allreduce(X, compress="int8", residual=X),
        UsageError,
        "residual overlaps x",
    ),
    (
        lambda c: c.allreduce(ones(), out=X, compress="int8", residual=X),
        UsageError,
        "residual overlaps out",
    ),
    (
        lambda c: c.allreduce(ones(), compress="int8", residual=[0.0] * 6),
        BufferError_,
        "allreduce: residual is a list",
    ),
    (
        lambda c: c.bcast(ones(), compress="int8"),
        TypeError,
        r"bcast\(\) has no argument 'compress'",
    ),
    (
        lambda c: c.allreduce(ones(), compres="int8"),
        TypeError,
        "did you mean 'compress'",
    ),
]


@pytest.mark.parametrize("number", range(len(WRONG)))
@pytest.mark.parametrize("checked", [False, True])
def test_a_wrong_call_is_an_error_before_anything_is_sent(
    number: int, checked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    call, kind, message = WRONG[number]
    if checked:
        monkeypatch.setenv("COMMRT_DEBUG", "check")

    def rank_main(comm: Any) -> None:
        before = num_started(comm)
        # In check mode it is every rank's.
        if comm.rank == 0 or checked:
            own = kind if comm.rank == 0 or issubclass(kind, UsageError) else UsageError
            with pytest.raises(own, match=message):
                (call if comm.rank == 0 else lambda c: c.barrier())(comm)
        assert num_started(comm) == before
        total = past_refusals(lambda: comm.allreduce(ones(), compress="float16"))
        assert (total == 2).all()

    run(2, rank_main)


def test_none_is_exact() -> None:
    def rank_main(comm: Any) -> None:
        x = np.full(5, 1 / 3, F)
        assert np.array_equal(comm.allreduce(x.copy(), compress="none"), 2 * x)
        got = comm.alltoall(np.arange(6), compress=None)
        assert got.size == 6

    run(2, rank_main)


# -- ranks that disagree ---------------------------------------------------------

DISAGREE: list[tuple[Callable[[Any], Any], Callable[[Any], Any], str]] = [
    (
        lambda c: c.allreduce(ones(), compress="float16"),
        lambda c: c.allreduce(ones(), compress="bfloat16"),
        "disagree on compress",
    ),
    (
        lambda c: c.allreduce(ones(), compress="int8"),
        lambda c: c.allreduce(ones(), op="avg", compress="int8"),
        "disagree on op",
    ),
    (
        lambda c: c.allreduce(ones(), compress="int8"),
        lambda c: c.allreduce(ones(7), compress="int8"),
        "disagree on elements",
    ),
    (
        lambda c: c.allreduce(ones(), compress="int8"),
        lambda c: c.allreduce(ones(6, np.float64), compress="int8"),
        "disagree on dtype",
    ),
    (
        lambda c: c.allreduce(ones(), compress="int8"),
        lambda c: c.alltoall(ones(), compress="int8"),
        "disagree on operation",
    ),
]


@pytest.mark.parametrize("number", range(len(DISAGREE)))
@pytest.mark.parametrize("checked", [False, True])
def test_ranks_that_disagree_all_get_an_error(
    number: int, checked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual, odd, message = DISAGREE[number]
    if checked:
        monkeypatch.setenv("COMMRT_DEBUG", "check")

    def rank_main(comm: Any) -> None:
        comm.allreduce(ones(), compress="int8")
        with pytest.raises(MismatchError, match=message):
            (odd if comm.rank == 1 else usual)(comm)
        assert (comm.allreduce(ones(), compress="float16") == 3).all()
        comm.barrier()

    run(3, rank_main)


def test_a_mismatch_leaves_arrays_as_they_were() -> None:
    def rank_main(comm: Any) -> None:
        x, out, residual = ones(100), np.full(100, 7, F), np.full(100, 0.1, F)
        name = "bfloat16" if comm.rank else "float16"
        with pytest.raises(MismatchError, match="are as they were"):
            comm.allreduce(x, out=out, compress=name, residual=residual)
        assert (x == 1).all()
        assert (out == 7).all()
        assert (residual == F(0.1)).all()

    run(2, rank_main)


def test_other_lengths_on_the_wire_are_an_error_not_numbers() -> None:
    def rank_main(comm: Any) -> str:
        x = ones(5000)
        name = "float16" if comm.rank else "int8"
        with pytest.raises((MismatchError, RevokedError)) as raised:
            comm.allreduce(x, compress=name)
        assert (x == 1).all()
        return type(raised.value).__name__

    assert "MismatchError" in run(2, rank_main)


def test_check_mode_names_who_compresses_and_who_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COMMRT_DEBUG", "check")

    def rank_main(comm: Any) -> str:
        more = {"compress": "int8"} if comm.rank else {}
        with pytest.raises(MismatchError, match="disagree on compress") as raised:
            comm.allreduce(ones(), **more)
        assert (comm.allreduce(ones()) == 2).all()
        return str(raised.value)

    one, other = run(2, rank_main)
    assert one == other
    assert "compress=int8" in one
