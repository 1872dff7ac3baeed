# SPDX-License-Identifier: Apache-2.0
"""Descriptions that check mode compares, and its message; ranks are in tests/ranks."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from commrt.calls.arguments import bind, parse
from commrt.calls.check_mode import (
    _COMPARED,
    _MOST_KEPT,
    _NBYTES,
    Checker,
    Said,
    _message,
    describe,
)
from commrt.errors import UsageError
from commrt.vocabulary.operations import OPERATIONS, operation


def described(coll: str, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Return the description of a call on rank 0 of 2."""
    call = parse(operation(coll), args, kwargs)
    return describe(call, bind(call, 0, 2), "0123456789abcdef")


@pytest.mark.parametrize("spec", OPERATIONS, ids=lambda spec: spec.name)
def test_fields(spec: Any) -> None:
    args = () if spec.x_count == "none" else (np.zeros(4, np.int16),)
    fields = described(spec.name, *args)
    assert fields["operation"] == spec.name
    assert (fields["op"] is None) == (not spec.reduces)
    assert (fields["root"] is None) == (not spec.has_root)
    assert fields["algorithm"] is None
    assert fields["table"] == "0123456789ab"


def test_equal_calls_are_equal_and_nothing_of_one_rank_is_in() -> None:
    x = np.zeros(4)
    first = described("allreduce", x)
    assert first == described("allreduce", np.ones(4), out=np.zeros(4))
    assert first == described("allreduce", x, nonblocking=True, timeout_s=3)
    assert first != described("allreduce", x, params={"chunk": 64})
    assert first != described("allreduce", x, backend="shm")


@pytest.mark.parametrize(
    "name", ["a" * 10_000, "é" * 5000, "\0" * 3000, "\ud800" * 900]
)
def test_any_name_fits(name: str) -> None:
    params = {f"p{i}" * 20: i for i in range(100)}
    fields = described(
        "reduce_scatter", np.zeros(4), name=name, algorithm=name, params=params
    )
    fields |= {"seq": 2**63, "site": "x" * 40 + ":1000000"}
    assert len(json.dumps(fields)) <= _NBYTES
    assert fields["name"] != described("barrier", name=name + "b")["name"]


def test_message_groups_ranks_that_agree() -> None:
    def said(op: str, line: int) -> dict[str, Any]:
        site = f"train.py:{line}"
        return {"operation": "allreduce", "op": op, "seq": 7, "site": site}

    text = _message("world", [said("sum", 3), said("max", 9), said("sum", 3)], ["op"])
    assert text == (
        "allreduce #7 on world: the ranks disagree on op; nothing was sent; "
        "let all ranks make the same call:\n"
        "  ranks 0, 2: op=sum (at train.py:3)\n"
        "  rank 1: op=max (at train.py:9)"
    )


def test_each_field_is_in_the_number() -> None:
    usual = dict.fromkeys(_COMPARED, "a")
    numbers = {Said({**usual, field: "b"}).number for field in _COMPARED}
    assert len(numbers) == len(_COMPARED)
    assert Said(usual).number == Said({**usual}).number
    assert Said(usual).number not in numbers


class Counted:
    """Describes calls, and counts how often it does."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> dict[str, Any]:
        self.count += 1
        return {"operation": f"call {self.count}"}


@pytest.fixture
def checker() -> Checker:
    """Return a checker that describes only, without any ranks."""
    made = Checker.__new__(Checker)
    made._kept = {}
    return made


def test_a_call_is_described_once_for_each_key(checker: Checker) -> None:
    describe = Counted()
    first = checker.said("a", describe)
    assert checker.said("a", describe) is first
    assert checker.said("b", describe) is not first
    assert describe.count == 2


def test_a_call_without_a_key_is_described_each_time(checker: Checker) -> None:
    describe = Counted()
    assert checker.said(None, describe) is not checker.said(None, describe)
    assert describe.count == 2
    assert not checker._kept


def test_an_error_is_not_kept(checker: Checker) -> None:
    def fails() -> dict[str, Any]:
        raise UsageError("wrong")

    with pytest.raises(UsageError, match="wrong"):
        checker.said("a", fails)
    assert checker.said("a", Counted()).fields == {"operation": "call 1"}


def test_no_more_than_so_many_are_kept(checker: Checker) -> None:
    describe = Counted()
    for key in range(3 * _MOST_KEPT):
        checker.said(key, describe)
        assert len(checker._kept) <= _MOST_KEPT
    assert checker.said(key, describe).fields["operation"] == f"call {key + 1}"
