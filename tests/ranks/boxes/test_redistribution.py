# SPDX-License-Identifier: Apache-2.0
"""Redistribution between any two layouts, on ranks as threads, against numpy."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from layout_cases import move_drawn, part
from started_operations import num_started, past_refusals

import commrt.boxes.host_plans as box_plans
from commrt import Block, Cyclic, Layout
from commrt.errors import BufferError_, MismatchError, UsageError
from commrt.local import run

SIZES = range(1, 13)


def _all_right(size: int, seed: str, cases: int) -> None:
    def rank_main(comm: Any) -> int:
        rng = random.Random(seed)
        return sum(move_drawn(comm, rng) for _ in range(cases))

    assert sum(run(size, rank_main, timeout_s=300)) > 0


@pytest.mark.parametrize("size", SIZES)
def test_drawn_layouts_agree_with_numpy(size: int, seed: int) -> None:
    _all_right(size, f"layouts {size} {seed}", 10)


@pytest.mark.parametrize("size", [2, 4, 7])
def test_many_short_messages_and_few_slots(
    size: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(box_plans, "LIMIT_NBYTES", 300)
    monkeypatch.setattr(box_plans, "_SLOTS_NBYTES", 0)
    monkeypatch.setattr(box_plans.TransportParams, "most_inline", lambda *_: 48)
    _all_right(size, f"short {size} {seed}", 6)


@pytest.mark.full
@pytest.mark.parametrize("size", SIZES)
def test_hundreds_of_layouts_agree_with_numpy(size: int, seed: int) -> None:
    for turn in range(10):
        _all_right(size, f"full layouts {size} {seed} {turn}", 25)


def test_a_long_array_is_transposed_between_ranks() -> None:
    shape = (700, 900)
    rows = Layout(shape, (4,), (Block(0), None))
    columns = Layout(shape, (4,), (None, Cyclic(0, 5)))
    whole = np.arange(700 * 900, dtype=np.float64).reshape(shape)

    def rank_main(comm: Any) -> bool:
        mine = np.ascontiguousarray(part(whole, rows, comm.rank))
        turned = comm.plan.redistribute(mine, rows, columns)()
        back = comm.plan.redistribute(turned, columns, rows)()
        right = part(whole, columns, comm.rank)
        return bool(np.array_equal(turned, right) and np.array_equal(back, mine))

    assert run(4, rank_main, timeout_s=300) == [True] * 4


ROWS = Layout((4, 6), (2,), (Block(0), None))
COLUMNS = Layout((4, 6), (2,), (None, Block(0)))
X = np.zeros((2, 6))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda p: p.redistribute(np.zeros((3, 6)), ROWS, COLUMNS),
            UsageError,
            r"rank 1: x has shape \(3, 6\), expected \(2, 6\) by its layout",
        ),
        (
            lambda p: p.redistribute(X, ROWS, COLUMNS, out=np.zeros((4, 2))),
            UsageError,
            r"rank 1: out has shape \(4, 2\), expected \(4, 3\) by its layout",
        ),
        (
            lambda p: p.redistribute(X, ROWS, COLUMNS, out=np.zeros((4, 3), "f")),
            BufferError_,
            "out has dtype float32, x has float64",
        ),
        (
            lambda p: p.redistribute(
                X, ROWS, COLUMNS, out=np.broadcast_to(0.0, (4, 3))
            ),
            BufferError_,
            "read-only",
        ),
        (
            lambda p: p.redistribute(X, ROWS, ROWS, out=X),
            UsageError,
            "out overlaps redistribute, rank 1: x",
        ),
        (lambda p: p.redistribute(X, "rows", ROWS), UsageError, "must be a commrt.Lay"),
        (
            lambda p: p.redistribute(X, Layout((2, 6), (1,), (None, None)), ROWS),
            UsageError,
            "with 1 places, expected 2, one for each rank",
        ),
        (
            lambda p: p.redistribute(X, ROWS, Layout((4, 5), (2,), (None, None))),
            UsageError,
            "layouts of the same array",
        ),
        (lambda p: p.redistribute([1.0], ROWS, COLUMNS), BufferError_, "x is a list"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_said(
    call: Any, error: type[Exception], message: str
) -> None:
    def rank_main(comm: Any) -> bool:
        before = num_started(comm)
        if comm.rank == 1:
            with pytest.raises(error, match=message):
                call(comm.plan)
        assert num_started(comm) == before
        x = np.full((2, 6), comm.rank)
        got = past_refusals(lambda: comm.plan.redistribute(x, ROWS, COLUMNS))()
        return bool(got.tolist() == [[0] * 3] * 2 + [[1] * 3] * 2)

    assert run(2, rank_main, timeout_s=300) == [True, True]


def test_ranks_that_differ_all_get_the_same_error() -> None:
    def rank_main(comm: Any) -> str:
        target = ROWS if comm.rank else COLUMNS
        with pytest.raises(MismatchError, match="the ranks disagree") as raised:
            comm.plan.redistribute(X.copy(), ROWS, target)
        assert num_started(comm) == 0
        return str(raised.value)

    first, second = run(2, rank_main, timeout_s=300)
    assert first == second
    assert "rank 1: source=Layout" in first
