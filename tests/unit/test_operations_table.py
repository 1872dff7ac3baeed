# SPDX-License-Identifier: Apache-2.0
"""The table of operations, and everything that is made from it."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from commrt import _native, algorithms
from commrt.comm import Communicator
from commrt.errors import UsageError, suggest
from commrt.vocabulary.dtypes import (
    DTYPES,
    ReduceOp,
    check_factor,
    check_reduction,
    dtype_by_name,
    engine_factor,
    reduce_op,
)
from commrt.vocabulary.operations import COLLECTIVES, OPERATIONS, operation, rule_nbytes
from commrt.vocabulary.signatures import Operations, docstring, signature


@pytest.mark.parametrize("spec", OPERATIONS, ids=lambda spec: spec.name)
def test_methods_signatures_and_docs_come_from_the_table(spec: Any) -> None:
    method = getattr(Communicator, spec.name)
    assert isinstance(method, _native.Operation)
    assert method.__name__ == spec.name
    assert method.__doc__ == docstring(spec)
    assert signature(spec) in method.__doc__
    parameters = list(inspect.signature(getattr(Operations, spec.name)).parameters)
    written = signature(spec).partition("(")[2].rstrip(")").split(", ")
    names = [part.partition("=")[0] for part in written if part != "*"]
    assert parameters == ["self", *names]


def test_codes_are_positions() -> None:
    assert [spec.code for spec in OPERATIONS] == list(range(len(OPERATIONS)))
    assert [dtype.code for dtype in DTYPES] == list(range(len(DTYPES)))


@pytest.mark.parametrize("coll", COLLECTIVES)
def test_every_operation_has_a_latency_and_a_bandwidth_algorithm(coll: str) -> None:
    found = [algorithms.get(coll, name) for name in algorithms.names(coll)]
    assert any(one.latency for one in found)
    assert coll == "barrier" or any(one.bandwidth for one in found)


@pytest.mark.parametrize(
    ("coll", "bytes_of_rule"),
    [
        ("allreduce", 1200),
        ("reduce", 1200),
        ("bcast", 1200),
        ("reduce_scatter", 1200),
        ("allgather", 300),
        ("gather", 300),
        ("scatter", 300),
        ("alltoall", 300),
        ("barrier", 0),
        ("scan", 1200),
        ("exscan", 1200),
        ("allgatherv", 300),
        ("gatherv", 300),
        ("scatterv", 300),
        ("reduce_scatterv", 1200),
        ("alltoallv", 0),
    ],
)
def test_bytes_that_select_a_rule(coll: str, bytes_of_rule: int) -> None:
    assert rule_nbytes(coll, 1200, 4) == bytes_of_rule


def test_unknown_names_suggest() -> None:
    with pytest.raises(UsageError, match="did you mean 'reduce_scatter'"):
        operation("reduce-scatter")
    with pytest.raises(UsageError, match="did you mean 'bfloat16'"):
        dtype_by_name("bfloat")
    with pytest.raises(UsageError, match="did you mean 'prod'"):
        reduce_op("product")
    for wrong in (None, 3, ["sum"]):
        with pytest.raises(UsageError, match="unknown reduction"):
            reduce_op(wrong)  # type: ignore[arg-type]


def test_names_without_a_near_one_are_listed_in_a_sentence_of_their_own() -> None:
    with pytest.raises(UsageError, match=r"^unknown dtype 'words'\. Known: bfloat16, "):
        dtype_by_name("words")
    assert suggest("anything", ()) == ""


def test_legal_pairs_are_those_of_the_contract() -> None:
    illegal = set()
    for dtype in DTYPES:
        for op in ReduceOp:
            try:
                check_reduction(op, dtype)
            except UsageError:
                illegal.add((dtype.kind, op.name.lower()))
    bitwise = {(k, op) for k in ("float", "complex") for op in ("band", "bor", "bxor")}
    ordered = {("complex", "min"), ("complex", "max")}
    scaled = {("bool", "avg"), ("bool", "premul_sum")}
    assert illegal == bitwise | ordered | scaled


@pytest.mark.parametrize(
    ("factor", "dtype"),
    [(2**63 - 1, "int64"), (-(2**63), "int64"), (2**64 - 1, "uint64"), (-128, "int8")],
)
def test_the_engine_gets_every_bit_of_an_integer_factor(
    factor: int, dtype: str
) -> None:
    check_factor(factor, dtype_by_name(dtype))
    _, integer = engine_factor(factor, dtype_by_name(dtype))
    assert -(2**63) <= integer < 2**63
    assert (integer - factor) % 2**64 == 0


@pytest.mark.parametrize(
    ("factor", "dtype", "message"),
    [
        (128, "int8", r"factor=128 does not fit into int8: expected -128\.\.127"),
        (-1, "uint16", r"factor=-1 does not fit into uint16: expected 0\.\.65535"),
        (2.0, "int32", "factor=2.0 must be an integer for int32.*cast the array"),
        (10**400, "float64", "factor is an integer of 401 digits, too large"),
    ],
)
def test_factors_that_the_type_cannot_hold(
    factor: float, dtype: str, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        check_factor(factor, dtype_by_name(dtype))
