# SPDX-License-Identifier: Apache-2.0
"""The table of operations, and everything that is made from it."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import commrt
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
)
from commrt.vocabulary.operations import (
    COLLECTIVES,
    OPERATIONS,
    OTHERS,
    ROWS,
    OpSpec,
    names_of,
    operation,
    other_call,
    rule_nbytes,
)
from commrt.vocabulary.reduction_names import reduce_op
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
        reduce_op("*")
    for wrong in (None, 3, ["sum"]):
        with pytest.raises(UsageError, match="unknown reduction"):
            reduce_op(wrong)


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
        (10**400, "float64", "factor is an integer of 1329 bits, too large"),
    ],
)
def test_factors_that_the_type_cannot_hold(
    factor: float, dtype: str, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        check_factor(factor, dtype_by_name(dtype))


ALL_FACTS = {
    "input_on root": {"bcast", "scatter", "scatterv"},
    "empty": {"barrier"},
    "by pair": {"alltoall", "alltoallv"},
    "not blocked": {
        *("allreduce", "reduce", "bcast", "barrier", "scan", "exscan"),
    },
    "reduces to all": {"allreduce"},
    "fuses": {"allreduce"},
    "waits for the root": {"bcast", "scatter", "scatterv"},
    "only the root waits": {"reduce", "gather", "gatherv"},
    "waits for contributors": {"scan", "exscan"},
    "combines some": {"scan", "exscan"},
    "no NCCL": {"scan", "exscan"},
    "no MPI": set(),
}
"""The facts that code asks for, of the operations that it once asked for by name."""
ASKED_BY_NAME = OPERATIONS[:16]


def test_derived_facts_are_those_of_these_operations() -> None:
    def having(has: Callable[[OpSpec], bool]) -> set[str]:
        return {spec.name for spec in ASKED_BY_NAME if has(spec)}

    assert {
        "input_on root": having(lambda spec: spec.input_on == "root"),
        "empty": having(lambda spec: spec.is_empty),
        "by pair": having(lambda spec: spec.by_pair),
        "not blocked": having(lambda spec: not spec.is_blocked),
        "reduces to all": having(lambda spec: spec.reduces_to_all),
        "fuses": having(lambda spec: spec.fuses),
        "waits for the root": having(lambda spec: spec.waits_for == "root"),
        "only the root waits": having(lambda spec: spec.waits_for == "root waits"),
        "waits for contributors": having(lambda spec: spec.waits_for == "contributors"),
        "combines some": having(lambda spec: spec.combines_some),
        "no NCCL": having(lambda spec: spec.nccl == "none"),
        "no MPI": having(lambda spec: not spec.mpi),
    } == ALL_FACTS


@pytest.mark.parametrize(
    ("coll", "rank", "contributors"),
    [
        ("allreduce", 2, [0, 1, 2, 3, 4]),
        ("reduce_scatter", 4, [0, 1, 2, 3, 4]),
        ("scan", 2, [0, 1, 2]),
        ("exscan", 2, [0, 1]),
        ("exscan", 0, []),
    ],
)
def test_contributors(coll: str, rank: int, contributors: list[int]) -> None:
    assert list(operation(coll).contributors(rank, 5)) == contributors


def test_names_of_kinds() -> None:
    assert names_of("collective") == COLLECTIVES
    assert names_of("message") == ("send", "recv", "sendrecv", "multi_sendrecv")
    assert names_of("sparse") == ("sparse_allreduce", "topk_allreduce")
    assert names_of("boxes") == ("redistribute",)
    assert set(names_of("neighbors")) == {
        *("halo_exchange", "halo_reduce", "neighbor_allgather", "neighbor_alltoall"),
        *("neighbor_allgatherv", "neighbor_alltoallv"),
    }
    assert len({row.name for row in ROWS}) == len(ROWS)


@pytest.mark.parametrize("row", OTHERS, ids=lambda row: row.name)
def test_every_other_row_is_a_method_that_traces_and_ranges_know(row: Any) -> None:
    from commrt.comm import CartCommunicator
    from commrt.trace import methods, nvtx

    owner = CartCommunicator if row.kind == "neighbors" else Communicator
    planned_only = row.name.startswith("halo_") and not hasattr(owner, row.name)
    assert planned_only or callable(getattr(owner, row.name))
    assert row.name in nvtx._NAMES
    assert methods._METHODS[row.name][0] == row.reads
    assert row.doc.endswith(".")


def test_names_in_the_engine_are_those_of_the_table() -> None:
    native = Path(commrt.__file__).parent / "native"
    text = (native / "engine" / "call_mark.cpp").read_text()
    rows = re.findall(r'\{(\d+), "(\w+)", (\w+), (\w+)\}', text)
    named = {int(code): name for code, name, _, _ in rows}
    plans = {each.code: each.name for each in OTHERS if each.code >= 80}
    del plans[other_call("multi_sendrecv").code]
    assert named == {each.code: each.name for each in OPERATIONS} | plans
    for code, _, reduces, has_root in rows[: len(OPERATIONS)]:
        spec = OPERATIONS[int(code)]
        assert (reduces, has_root) == (
            str(spec.reduces).lower(),
            str(spec.has_root).lower(),
        )
    quoted = re.search(r"kNumDTypes> names = \{(.*?)\};", text, re.S)
    assert quoted is not None
    assert re.findall(r'"(\w+)"', quoted[1]) == [each.name for each in DTYPES]
    quoted = re.search(r"kNumRedOps> names = \{(.*?)\};", text, re.S)
    assert quoted is not None
    assert re.findall(r'"(\w+)"', quoted[1]) == [each.name.lower() for each in ReduceOp]


def test_codes_in_the_engine_are_those_of_the_table() -> None:
    native = Path(commrt.__file__).parent / "native"
    text = (native / "engine" / "mpi_steps.cpp").read_text()
    listed = re.search(r"kFunctions\[\] = \{(.*?)\};", text, re.S)
    assert listed is not None
    functions = re.findall(r'"MPI_I(\w+)"', listed[1])
    by_code = [spec.mpi for spec in OPERATIONS]
    assert functions == by_code[: len(functions)]
    assert not any(by_code[len(functions) :])
    text = (native / "engine" / "collective_codes.hpp").read_text()
    known = {name: int(code) for name, code in re.findall(r"k(\w+) = (\d+)", text)}
    assert known == {
        spec.name.title().replace("_", ""): spec.code
        for spec in OPERATIONS[: len(functions)]
    }
    text = (native / "nccl" / "nccl_comm.hpp").read_text()
    listed = re.search(r"enum class NcclColl : int \{(.*?)\};", text, re.S)
    assert listed is not None
    codes = {name: int(code) for name, code in re.findall(r"(\w+) = (\d+)", listed[1])}
    assert codes == {
        spec.name.title().replace("_", ""): spec.code
        for spec in OPERATIONS
        if spec.nccl not in ("none", "allreduce")
    }
