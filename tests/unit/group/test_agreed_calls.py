# SPDX-License-Identifier: Apache-2.0
"""The sum by which ranks see whether their calls fit."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from commrt.group.agreed_calls import AgreedCalls, SharedFact, fact_number


class OneOf:
    """One of several ranks, which adds what the others have said."""

    def __init__(self, others: int) -> None:
        self.others, self.said = others, 0

    def allreduce(self, x: Any, *, op: str, name: str, timeout_s: float) -> None:
        assert (op, name, timeout_s) == ("sum", "a call", 5)
        self.said = int(x[0])
        x[0] = (self.said + self.others) % 2**64


def fit(facts: list[list[SharedFact]]) -> list[bool]:
    """Return what each rank finds, given the facts of all."""
    alone = [OneOf(0) for _ in facts]
    for rank, mine in zip(alone, facts, strict=True):
        AgreedCalls(rank).fit("a call", mine, 5)
    total = sum(rank.said for rank in alone)
    return [
        AgreedCalls(OneOf(total - rank.said)).fit("a call", mine, 5)
        for rank, mine in zip(alone, facts, strict=True)
    ]


SIZES = st.integers(1, 9)


def shared(values: list[Any]) -> list[SharedFact]:
    """Return a fact of all ranks, as each knows it."""
    return [
        SharedFact(fact_number(repr(value)), len(values), rank == 0)
        for rank, value in enumerate(values)
    ]


@given(SIZES, st.text(), st.data())
def test_equal_facts_fit_and_a_single_other_one_does_not(
    size: int, text: str, data: st.DataObject
) -> None:
    same = [[each] for each in shared([text] * size)]
    assert fit(same) == [True] * size
    if size > 1:
        values = [text] * size
        values[data.draw(st.integers(0, size - 1))] = f"{text}!"
        assert fit([[each] for each in shared(values)]) == [False] * size


@given(SIZES, st.lists(st.integers(0, 3), min_size=9, max_size=9))
def test_any_difference_is_seen(size: int, drawn: list[int]) -> None:
    values = drawn[:size]
    expected = len({*values}) == 1
    assert fit([[each] for each in shared(values)]) == [expected] * size


@given(
    st.integers(1, 4),
    st.integers(1, 4),
    st.lists(st.integers(0, 1), min_size=16, max_size=16),
    st.lists(st.integers(0, 1), min_size=16, max_size=16),
)
def test_facts_of_rows_and_columns_are_told_apart(
    rows: int, columns: int, across: list[int], along: list[int]
) -> None:
    """Each row shares one fact, and each column another one."""
    facts, fits = [], True
    for rank in range(rows * columns):
        row, column = divmod(rank, columns)
        facts.append(
            [
                SharedFact(
                    fact_number(("row", row, across[rank])), columns, not column
                ),
                SharedFact(fact_number(column, [along[rank]]), rows, not row),
            ]
        )
        fits &= across[rank] == across[row * columns] and along[rank] == along[column]
    assert fit(facts) == [fits] * len(facts)
