# SPDX-License-Identifier: Apache-2.0
"""Descriptions that check mode compares, and its message; ranks are in tests/ranks."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from commrt.calls.arguments import bind, parse
from commrt.calls.check_mode import _NBYTES, _message, describe
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
