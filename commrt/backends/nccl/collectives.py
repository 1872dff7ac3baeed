# SPDX-License-Identifier: Apache-2.0
"""Collectives by NCCL: which it runs as commrt promises them, and their plans.

Other backends do the calls that NCCL cannot do, on all ranks alike: the ranks agree
whether NCCL is there (``attached.py``), and the rest follows from the call.
"""

from __future__ import annotations

from dataclasses import dataclass

from commrt import _native
from commrt.nccl.abilities import (
    NCCL_REDUCTIONS,
    NCCL_TYPES,
    nccl_count,
    scalar_bytes,
    support,
)
from commrt.nccl.features import NEWEST_KNOWN
from commrt.planning.compared import common_length, facts_of
from commrt.planning.spec import PlanSpec
from commrt.planning.stream_programs import nccl_program
from commrt.select.facts import Candidate, Query
from commrt.vocabulary.dtypes import ReduceOp, dtype_by_name
from commrt.vocabulary.operations import OpSpec
from commrt.vocabulary.reduction_names import is_known, reduce_op

__all__ = [
    "NAME",
    "NATIVE",
    "NcclFacts",
    "library_plan",
    "schedule_plan",
    "why_no_schedules",
    "why_refused",
]

NAME = "nccl"
NATIVE = Candidate(NAME, "native")
_UINT8 = NCCL_TYPES["uint8"]


@dataclass(frozen=True)
class NcclFacts:
    """The facts about NCCL; once agreed, equal on all ranks."""

    why: str
    """Reason why NCCL cannot be used; empty if it can."""
    version: int = NEWEST_KNOWN
    """Number of the version, as ``ncclGetVersion`` returns it."""
    capability: int | None = None
    """The least compute capability, 90 for 9.0; None: any."""
    no_kernels: str = ""
    """Reason why commrt's own kernels cannot run between NCCL's; empty if they can."""


def why_refused(facts: NcclFacts, query: Query) -> str | None:
    """Return why NCCL does not run ``query`` itself."""
    if facts.why:
        return facts.why
    if query.op is not None and not is_known(query.op):
        return "knows no reduction of yours"
    found = support(
        query.coll,
        dtype_by_name(query.dtype),
        None if query.op is None else reduce_op(query.op),
        facts.version,
        capability=facts.capability,
    )
    return found.reason if found.how == "refused" else None


def why_no_schedules(facts: NcclFacts, query: Query) -> str | None:
    """Return why schedules do not run on NCCL here, equal on all ranks."""
    if facts.why or facts.no_kernels:
        return facts.why or facts.no_kernels
    if query.op is not None and not is_known(query.op):
        return "kernels know no reduction of yours"
    return None


def schedule_plan(
    spec: PlanSpec, rank: int, size: int, nodes: tuple[int, ...]
) -> _native.NcclPlan:
    """Return the plan of a schedule in rounds."""
    made = nccl_program(spec, rank, size, nodes)
    item = spec.dtype.itemsize
    return _native.nccl_program_plan(
        spec.op.name,
        made.program,
        coll=spec.op.code,
        scratch_nbytes=made.scratch_nbytes,
        in_nbytes=spec.in_elements * item,
        out_nbytes=spec.out_elements * item,
        in_place=spec.op.in_place,
        root=spec.root,
        elements=spec.num_elements,
        element_type=spec.dtype.code,
        reduction=int(spec.reduction),
        facts=facts_of(spec),
        length=common_length(spec),
    )


def library_plan(spec: PlanSpec, size: int, version: int) -> _native.NcclPlan:
    """Return the plan of NCCL's own collective, by the rules of ``NcclOperations``."""
    op, dtype = spec.op, spec.dtype
    nccl_type, nccl_op, factor = _UINT8, 0, b""
    per_element, itemsize = dtype.itemsize, 1  # what only moves is bytes
    if op.reduces:
        nccl_type, nccl_op = NCCL_TYPES[dtype.name], NCCL_REDUCTIONS[spec.reduction]
        per_element = nccl_count(dtype, 1)
        itemsize = dtype.itemsize // per_element
        if spec.reduction is ReduceOp.PREMUL_SUM:
            factor, nccl_op = scalar_bytes(op.name, spec.factor, dtype), 0
    counts = _counts(spec, size, version)
    sent = [per_element * count for count in counts[0]] if counts else []
    received = [per_element * count for count in counts[-1]] if counts else []
    return _native.nccl_plan(
        op.name,
        coll=op.code,
        is_barrier=op.x_count == "none",
        is_counted=bool(counts),
        needs_copy=op.by_pair and size > 1,  # NCCL does not exchange in place
        count=per_element * _count(op, spec.num_elements, size),
        send_counts=sent,
        recv_counts=received,
        itemsize=itemsize,
        dtype=nccl_type,
        op=nccl_op,
        root=spec.root,
        factor=factor,
        in_nbytes=spec.in_elements * dtype.itemsize,
        elements=spec.num_elements,
        element_type=dtype.code,
        reduction=int(spec.reduction),
        facts=facts_of(spec),
        length=common_length(spec),
    )


def _count(op: OpSpec, elements: int, size: int) -> int:
    """Return the count that NCCL takes: of a block where blocks are equal."""
    return (
        elements // size
        if op.rule_bytes in ("block", "pair") or (op.out_count == "div_size")
        else elements
    )


def _counts(spec: PlanSpec, size: int, version: int) -> tuple[tuple[int, ...], ...]:
    """Return counts per rank, where it is composed of messages or of blocks."""
    if spec.counts:
        return spec.counts
    name = spec.op.name
    if (
        spec.op.nccl != "pairs"
        or support(name, spec.dtype, None, version).how == "native"
    ):
        return ()
    return ((spec.num_elements // size,) * size,)
