# SPDX-License-Identifier: Apache-2.0
"""What programs write for a reduction: words, functions, objects of other libraries."""

from __future__ import annotations

import builtins
import operator
from typing import Any

import numpy as np
import pytest

import commrt
from commrt.errors import UsageError
from commrt.vocabulary.dtypes import ReduceOp
from commrt.vocabulary.reduction_names import reduce_op, reduction_word

WORDS = {
    "SUM": "sum",
    "Add": "sum",
    "mean": "avg",
    "average": "avg",
    "PRODUCT": "prod",
    "multiply": "prod",
    "maximum": "max",
    "amin": "min",
    "logical_or": "lor",
    "bitwise_xor": "bxor",
    "PREMUL_SUM": "premul_sum",
}
FUNCTIONS = {
    "sum": (builtins.sum, np.add, np.sum, operator.add),
    "prod": (np.multiply, np.prod, operator.mul),
    "max": (builtins.max, np.maximum, np.max),
    "min": (builtins.min, np.minimum, np.min),
    "avg": (np.mean, np.average),
    "land": (np.logical_and, builtins.all, np.all),
    "lor": (np.logical_or, builtins.any),
    "lxor": (np.logical_xor,),
    "band": (np.bitwise_and, operator.and_),
    "bor": (np.bitwise_or,),
    "bxor": (np.bitwise_xor, operator.xor),
}


class Hostile:
    """Raises whatever it is asked."""

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("compared")

    def __hash__(self) -> int:
        raise RuntimeError("hashed")

    def __repr__(self) -> str:
        raise RuntimeError("shown")


@pytest.mark.parametrize("op", ReduceOp)
def test_own_names_in_any_case(op: ReduceOp) -> None:
    assert reduce_op(op.name) is reduce_op(op.name.lower()) is op
    assert reduction_word(op.name) == op.name.lower()


@pytest.mark.parametrize("word", WORDS)
def test_words_of_other_libraries(word: str) -> None:
    assert reduction_word(word) == WORDS[word]


@pytest.mark.parametrize("word", FUNCTIONS)
def test_functions(word: str) -> None:
    assert [reduction_word(each) for each in FUNCTIONS[word]] == [word] * len(
        FUNCTIONS[word]
    )


def test_functions_that_are_near_one_are_none() -> None:
    """np.fmax leaves NaN out; np.subtract does not commute."""
    for near in (np.fmax, np.fmin, np.nansum, np.subtract, np.hypot, len, max.__call__):
        with pytest.raises(UsageError, match=r"passed as commrt\.reduction\(fn\)"):
            reduce_op(near)


@pytest.mark.parametrize("wrong", [None, 3, 0.5, b"sum", ["sum"], Hostile(), int])
def test_all_else_is_refused(wrong: Any) -> None:
    with pytest.raises(UsageError, match=r"unknown reduction.*Known: avg, band"):
        reduce_op(wrong)


def test_reductions_of_torch() -> None:
    dist = pytest.importorskip("torch.distributed")
    import torch

    kinds = dist.ReduceOp
    assert reduction_word(kinds.SUM) == "sum"
    assert reduction_word(kinds.PRODUCT) == "prod"
    assert reduction_word(kinds.AVG) == "avg"
    assert reduction_word(kinds(kinds.MAX)) == "max"
    assert reduction_word(kinds.PREMUL_SUM) == "premul_sum"
    assert reduction_word(torch.maximum) == "max"
    assert reduction_word(torch.add) == "sum"
    with pytest.raises(UsageError, match="pass op='premul_sum' and factor="):
        reduce_op(dist._make_nccl_premul_sum(2.0))


def test_a_reduction_of_the_users_own_stays_what_it_is() -> None:
    own = commrt.reduction(np.fmax, commutative=True)
    assert reduction_word(own) is own
