# SPDX-License-Identifier: Apache-2.0
"""Collectives of the MPI library: which keep commrt's rules, and their plans."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from commrt import _native
from commrt.errors import BackendError
from commrt.mpi import library
from commrt.planning.host_plans import check_params
from commrt.planning.spec import PlanSpec, Ranks
from commrt.planning.templates import call_shape
from commrt.select.facts import Candidate, Query
from commrt.vocabulary.dtypes import DTYPES, ReduceOp, dtype_by_name
from commrt.vocabulary.operations import operation
from commrt.vocabulary.reduction_names import is_known

__all__ = ["NATIVE", "attach_library", "library_plan", "library_template", "why_not"]

NATIVE = Candidate("mpi", "native")

_INT_MAX = 2**31 - 1
_constants = lru_cache(maxsize=1)(library.mpi_constants)
_ORDERED = frozenset({ReduceOp.MIN, ReduceOp.MAX})
_ARITHMETIC = frozenset({ReduceOp.SUM, ReduceOp.PROD})
_LOGICAL = frozenset({ReduceOp.LAND, ReduceOp.LOR, ReduceOp.LXOR})
_BITWISE = frozenset({ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR})
_INTEGER = _ORDERED | _ARITHMETIC | _LOGICAL | _BITWISE
# MPI 3.1, section 5.9.2; commrt allows more, such as min of bool.
_DEFINED_BY_MPI = {
    "bool": _LOGICAL,
    "int": _INTEGER,
    "uint": _INTEGER,
    "float": _ORDERED | _ARITHMETIC,
    "complex": _ARITHMETIC,
}


def attach_library(comm: _native.Group, handle: int) -> None:
    """Let the engine make calls that this rank has refused, where others began them.

    ``handle``: the MPI communicator's for the library's own collectives.
    """
    constants = _constants()
    types = {each.code: f"dtype:{each.name}" for each in DTYPES}
    reductions = {int(each): f"op:{each.name.lower()}" for each in ReduceOp}

    def handles(names: dict[int, str]) -> list[int]:
        found = (names.get(code, "") for code in range(max(names) + 1))
        return [constants.get(name, 0) for name in found]

    _native.attach_library(
        comm,
        comm=handle,
        byte=constants["BYTE"],
        types=handles(types),
        reductions=handles(reductions),
    )


def library_template(
    comm: Ranks, spec: PlanSpec, handle: Callable[[], int]
) -> _native.PlanTemplate:
    """Return what makes the plans of the library's own collective on host memory.

    ``handle`` returns the MPI communicator's, which may have to be made for it.
    """
    assert isinstance(comm, _native.Group), "the engine runs plans of its own groups"
    check_params(spec.op.name, "native", comm.size, spec.candidate.params)
    constants = _constants()
    # MPI moves bytes; a reduction needs the element type and the operation.
    datatype, reduction = constants["BYTE"], 0
    if spec.op.reduces:
        datatype = constants[f"dtype:{spec.dtype.name}"]
        reduction = constants[f"op:{spec.reduction.name.lower()}"]
    made = handle()
    attach_library(comm, made)
    return _native.make_native_template(
        comm,
        call_shape(comm, spec),
        datatype=datatype,
        op=reduction,
        comm=made,
        unit=1 if spec.op.reduces else spec.dtype.itemsize,
        is_blocked=spec.op.is_blocked,
    )


def library_plan(
    comm: Ranks, template: _native.PlanTemplate, spec: PlanSpec
) -> _native.Plan:
    """Return the plan for the lengths of ``spec``."""
    assert isinstance(comm, _native.Group), "the engine runs plans of its own groups"
    flat = [count for counts in spec.counts for count in counts]
    plan = template.plan(comm, spec.num_elements, flat)
    if plan is None:
        raise BackendError(
            f"{spec.op.name} of {spec.num_elements} {spec.dtype.name}: the MPI "
            f"library's own collectives count in 32 bits; use a schedule"
        )
    return plan


def why_not(query: Query, size: int) -> str | None:
    """Return why the library's own collective would not keep commrt's rules."""
    if not operation(query.coll).mpi:
        return f"MPI has no {query.coll}"
    constants = _constants()
    dtype = dtype_by_name(query.dtype)
    # Data that only moves is counted in bytes.
    unit = 1 if query.op is None else dtype.itemsize
    # Blocks of different lengths are counted together.
    blocks = size if operation(query.coll).count_arguments else 1
    if blocks * query.nbytes // unit > _INT_MAX:
        return "the library counts in 32 bits"
    if query.op is None:
        return None
    if query.order != "any":
        return "the library combines in any order"
    if not is_known(query.op):
        return "knows no reduction of yours"
    reduction = ReduceOp[query.op.upper()]
    if reduction in _ORDERED and dtype.kind == "float":
        return "libraries differ in what the least and the largest of NaN are"
    if dtype.is_short_float:
        return "short floats would be rounded at every step"
    if reduction not in _DEFINED_BY_MPI[dtype.kind]:
        return f"MPI defines no {query.op} of {dtype.name}"
    if dtype.itemsize < 4 and reduction in _ARITHMETIC:
        # Open MPI's vectorised sums of short integers.
        return "sums of short integers saturate instead of wrapping"
    is_prefix = operation(query.coll).combines_some
    if is_prefix and reduction in _LOGICAL and dtype.kind != "bool":
        # It would not be 0 or 1.
        return "the first rank's contribution would come as it is"
    for constant in (f"op:{query.op}", f"dtype:{dtype.name}"):
        if constant not in constants:
            return f"the library has no {constant.partition(':')[2]}"
    return None
