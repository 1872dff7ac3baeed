# SPDX-License-Identifier: Apache-2.0
"""Rows travel to chosen ranks and answers back; wrong rows are refused by all ranks."""

from __future__ import annotations

import functools
import operator
from typing import Any

import numpy as np
import pytest
from recorded import logs_of
from science_cases import cut_of

import commrt.trace
from commrt.errors import UsageError
from commrt.local import run
from commrt.science.row_route import RowRoute
from commrt.science.rows import agreed_rows, as_rows, as_values


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_answers_come_back_to_the_rows_that_they_are_for(size: int, seed: int) -> None:
    def main(comm: Any) -> None:
        rng = np.random.default_rng([seed, comm.rank])
        number = int(rng.integers(0, 9))
        ranks = rng.integers(0, size, number)
        rows = np.column_stack([np.full(number, comm.rank), np.arange(number)])
        route = RowRoute(comm, ranks)
        came = route.there(rows.astype(np.float64))
        np.testing.assert_array_equal(came[:, 0], route.sources)
        answers = np.column_stack([came, np.full(len(came), comm.rank)])
        for _ in range(2):
            back = route.back(answers)
            np.testing.assert_array_equal(back, np.column_stack([rows, ranks]))

    run(size, main)


def test_ids_are_numbers_in_the_order_of_ranks() -> None:
    pieces = cut_of(20, 4)

    def main(comm: Any) -> tuple[list[int], int]:
        rows = np.zeros((20, 3))[pieces[comm.rank]]
        _, _, cut = agreed_rows("test", comm, lambda: ((rows,), "same"))
        return cut.ids.tolist(), cut.total

    found = run(4, main)
    assert functools.reduce(operator.iadd, (ids for ids, _ in found), []) == [
        *range(20)
    ]
    assert {total for _, total in found} == {20}


def refused_by_all(
    size: int, rows_of: Any, settings_of: Any = lambda _: 0
) -> list[str]:
    """Return the messages of all ranks; each has sent 32 bytes and no more."""

    def main(comm: Any) -> str:
        def check() -> tuple[tuple[Any, ...], object]:
            return (as_rows("call", rows_of(comm.rank)),), settings_of(comm.rank)

        with pytest.raises(UsageError) as raised:
            agreed_rows("call", comm, check)
        return str(raised.value)

    with commrt.trace.record() as recording:
        found = run(size, main)
    assert len(recording.logs()) == size
    for log in logs_of(recording):
        assert [(call.op, call.nbytes) for call in log.operations] == [
            ("allgather", 32 * size)
        ]
    return found


class Unreadable:
    """No array, as a tensor with a gradient."""

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise RuntimeError("call detach() first")


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (np.zeros(3), "shape"),
        (np.zeros((3, 2), complex), "complex"),
        (np.full((1, 2), np.nan), "NaN"),
        (np.full((1, 2), -1e101), "overflow"),
        ([[1.0], [2.0, 3.0]], "no array"),
        ("rows", "shape"),
        (None, "shape"),
        (Unreadable(), "no array"),
    ],
)
def test_all_ranks_refuse_what_is_wrong_on_one(wrong: Any, says: str) -> None:
    right = np.zeros((3, 2))
    first, second, third = refused_by_all(3, lambda r: wrong if r == 1 else right)
    assert says in second
    assert first == third
    assert "rank 1 refused" in first


@pytest.mark.parametrize("fails", ["check", "repr"])
def test_another_error_on_one_rank_leaves_no_rank_waiting(fails: str) -> None:
    class Unwritable:
        def __repr__(self) -> str:
            raise ZeroDivisionError

    def main(comm: Any) -> str:
        def check() -> tuple[tuple[Any, ...], object]:
            if comm.rank == 1 and fails == "check":
                raise ZeroDivisionError
            return (np.zeros((1, 2)),), Unwritable() if comm.rank == 1 else "same"

        expected = ZeroDivisionError if comm.rank == 1 else UsageError
        with pytest.raises(expected) as raised:
            agreed_rows("call", comm, check)
        comm.barrier()
        return str(raised.value)

    first, _, third = run(3, main)
    assert first == third
    assert "rank 1 refused" in first


def test_all_ranks_refuse_different_columns() -> None:
    found = refused_by_all(3, lambda rank: np.zeros((0, 2 + rank // 2)))
    assert len({*found}) == 1
    assert "columns of x of rank 2 are not those of rank 0 (3 and 2)" in found[0]


def test_all_ranks_refuse_different_settings() -> None:
    rows = np.zeros((1, 2))
    found = refused_by_all(2, lambda _: rows, lambda rank: ("seed", rank))
    assert len({*found}) == 1
    assert "settings of rank 1 are not those of rank 0" in found[0]


def test_values_are_one_for_each_row() -> None:
    assert as_values("call", [1, 2], 2).dtype == np.float64
    with pytest.raises(UsageError, match="2 values, and x 3 rows"):
        as_values("call", [1.0, 2.0], 3)
    with pytest.raises(UsageError, match="NaN"):
        as_values("call", [np.inf], 1)
