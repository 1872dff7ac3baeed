# SPDX-License-Identifier: Apache-2.0
"""Wrong counts: an error that names rank and argument, before anything is sent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from started_operations import num_started, past_refusals

from commrt.errors import BufferError_, CommError, MismatchError, UsageError
from commrt.local import run

F = np.float32


def x(number: int) -> Any:
    """Return an array to send."""
    return np.zeros(number, F)


# Each call is wrong on rank 1 of two.
WRONG: list[tuple[str, Callable[[Any], Any], type[CommError], str]] = [
    (
        "missing",
        lambda c: c.allgatherv(x(2)),
        UsageError,
        r"allgatherv, rank 1: pass counts=, a number of elements for each of the 2",
    ),
    (
        "too few",
        lambda c: c.allgatherv(x(2), counts=[2]),
        UsageError,
        r"rank 1: counts has 1 numbers, expected one for each of the 2 ranks",
    ),
    (
        "negative",
        lambda c: c.gatherv(x(2), counts=[3, -2]),
        UsageError,
        r"gatherv, rank 1: counts\[1\]=-2 is negative",
    ),
    (
        "not integers",
        lambda c: c.scatterv(x(2), counts=[1.0, 1.0]),
        UsageError,
        r"scatterv, rank 1: counts=\[1.0, 1.0\] must be 2 integers",
    ),
    (
        "bool",
        lambda c: c.allgatherv(x(1), counts=[True, True]),
        UsageError,
        r"counts=\[True, True\] must be 2 integers",
    ),
    (
        "text",
        lambda c: c.allgatherv(x(1), counts="11"),
        UsageError,
        r"counts='11' must be 2 integers",
    ),
    (
        "a number",
        lambda c: c.allgatherv(x(1), counts=1),
        UsageError,
        r"counts=1 must be 2 integers",
    ),
    (
        "a matrix",
        lambda c: c.allgatherv(x(1), counts=np.ones((2, 1), int)),
        UsageError,
        r"must be 2 integers",
    ),
    (
        "too large",
        lambda c: c.reduce_scatterv(x(1), counts=[2**62, 2**62]),
        UsageError,
        r"counts add up to 9223372036854775808: too many",
    ),
    (
        "block of another length",
        lambda c: c.allgatherv(x(5), counts=[5, 4]),
        UsageError,
        r"allgatherv, rank 1: x has 5 elements \(shape \(5,\)\), but counts\[1\] is 4",
    ),
    (
        "sum that does not fit",
        lambda c: c.reduce_scatterv(x(5), counts=[5, 4]),
        UsageError,
        r"reduce_scatterv, rank 1: x has 5 elements .*, but counts add up to 9",
    ),
    (
        "send counts that do not fit",
        lambda c: c.alltoallv(x(5), send_counts=[5, 4]),
        UsageError,
        r"alltoallv, rank 1: x has 5 elements .*, but send_counts add up to 9",
    ),
    (
        "unequal to itself",
        lambda c: c.alltoallv(x(5), send_counts=[3, 2], recv_counts=[3, 1]),
        UsageError,
        r"rank 1: send_counts\[1\] is 2 and recv_counts\[1\] is 1: what a rank sends",
    ),
    (
        "out without receive counts",
        lambda c: c.alltoallv(x(5), send_counts=[3, 2], out=x(5)),
        UsageError,
        r"alltoallv, rank 1: out= needs recv_counts=",
    ),
    (
        "short output",
        lambda c: c.allgatherv(x(4), counts=[5, 4], out=x(8)),
        UsageError,
        r"allgatherv: out has 8 elements \(shape \(8,\)\), expected 9",
    ),
    (
        "type of the output",
        lambda c: c.allgatherv(x(4), counts=[5, 4], out=np.zeros(9)),
        BufferError_,
        r"out has dtype float64, x has float32",
    ),
    (
        "overlap",
        lambda c: (lambda w: c.allgatherv(w[:4], counts=[5, 4], out=w[1:10]))(x(12)),
        UsageError,
        r"allgatherv: out overlaps x",
    ),
    (
        "in place with other counts",
        lambda c: (
            lambda w: c.alltoallv(w, send_counts=[3, 2], recv_counts=[2, 2], out=w[:4])
        )(x(5)),
        UsageError,
        r"alltoallv: out overlaps x",
    ),
    (
        "no array and no output",
        lambda c: c.scatterv(None, counts=[1, 1]),
        UsageError,
        r"scatterv, rank 1: pass out= where x is None",
    ),
    (
        "output of a receiver",
        lambda c: c.scatterv(None, counts=[1, 2], out=x(3)),
        UsageError,
        r"scatterv, rank 1: out has 3 elements .*, but counts\[1\] is 2",
    ),
]


def _right_calls(comm: Any) -> int:
    """Put plans into the cache that the wrong calls could be taken for."""
    comm.allgatherv(x((5, 4)[comm.rank]), counts=[5, 4], out=x(9))
    comm.reduce_scatterv(x(9), counts=[5, 4], out=x((5, 4)[comm.rank]))
    comm.alltoallv(x(5), send_counts=[3, 2], recv_counts=(3, 2), out=x(5)) if (
        comm.rank == 0
    ) else comm.alltoallv(x(4), send_counts=[2, 2], recv_counts=(2, 2), out=x(4))
    return int(num_started(comm))


def _small_call(comm: Any) -> None:
    comm.allgatherv(x(1), counts=[1, 1])


@pytest.mark.parametrize(
    ("call", "error", "message"), [w[1:] for w in WRONG], ids=[w[0] for w in WRONG]
)
def test_refused_before_anything_is_sent(
    call: Callable[[Any], Any], error: type[CommError], message: str
) -> None:
    def rank_main(comm: Any) -> float:
        before = _right_calls(comm)
        if comm.rank == 1:
            for _ in range(2):
                with pytest.raises(error, match=message):
                    call(comm)
        assert num_started(comm) == before
        return float(past_refusals(lambda: comm.allreduce(np.ones(4, F))).sum())

    assert run(2, rank_main, timeout_s=300) == [8.0] * 2


@pytest.mark.parametrize(
    ("call", "error", "message"), [w[1:] for w in WRONG], ids=[w[0] for w in WRONG]
)
def test_in_check_mode_every_rank_raises_it(
    call: Callable[[Any], Any],
    error: type[CommError],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COMMRT_DEBUG", "check")

    def rank_main(comm: Any) -> str:
        before = _right_calls(comm)
        own = call if comm.rank == 1 else _small_call
        with pytest.raises(error, match=message) as raised:
            own(comm)
        assert num_started(comm) == before
        assert comm.allreduce(np.ones(4, F)).sum() == 8
        return str(raised.value)

    texts = run(2, rank_main, timeout_s=300)
    assert texts[0] == texts[1]


DISAGREE: list[tuple[str, Callable[[Any], Any], str]] = [
    (
        "counts",
        lambda c: c.gatherv(x(2), counts=[2, 2, 2] if c.rank else [2, 2, 3]),
        r"disagree on elements, counts; nothing was sent(.|\n)*counts=2 2 3",
    ),
    (
        "pair",
        lambda c: c.alltoallv(
            x(6), send_counts=[2, 2, 2], recv_counts=[2, 2 - (c.rank == 2), 2]
        ),
        r"alltoallv #0 on local: rank 1 sends 2 elements to rank 2 \(send_counts\[2\]\)"
        r", which expects 1 \(recv_counts\[1\]\); nothing was sent",
    ),
    (
        "exchanged or given",
        lambda c: c.alltoallv(
            x(6), send_counts=[2, 2, 2], recv_counts=[2, 2, 2] if c.rank else None
        ),
        r"disagree on counts(.|\n)*counts=recv_counts exchanged",
    ),
]


@pytest.mark.parametrize(
    ("call", "message"), [d[1:] for d in DISAGREE], ids=[d[0] for d in DISAGREE]
)
def test_check_mode_names_counts_that_differ(
    call: Callable[[Any], Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COMMRT_DEBUG", "check")

    def rank_main(comm: Any) -> str:
        with pytest.raises(MismatchError, match=message) as raised:
            call(comm)
        assert num_started(comm) == 0
        assert comm.allreduce(np.ones(4, F)).sum() == 12
        return str(raised.value)

    texts = run(3, rank_main, timeout_s=300)
    assert texts == [texts[0]] * 3


def test_without_check_mode_a_message_tells_that_counts_differ() -> None:
    def rank_main(comm: Any) -> str:
        if comm.rank == 0:
            comm.allgatherv(x(2), counts=[2, 3])
            return ""
        with pytest.raises(MismatchError) as raised:
            comm.allgatherv(x(3), counts=[1, 3])
        return str(raised.value)

    told = run(2, rank_main, timeout_s=300)[1]
    assert "rank 0 sent a message of another length than the 4 bytes" in told
