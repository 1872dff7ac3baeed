# SPDX-License-Identifier: Apache-2.0
"""Device memory by NCCL: what it can do as commrt promises it, by rule.

What it cannot do is left to ``staged``, on all ranks alike: whether NCCL is there is
agreed by the ranks (``backends/nccl/attached.py``), and the rest follows from the call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from commrt import _native, nccl
from commrt.backends.base import Availability, Capabilities
from commrt.backends.shm import schedule_candidates
from commrt.errors import BackendError
from commrt.nccl.abilities import (
    NCCL_REDUCTIONS,
    NCCL_TYPES,
    nccl_count,
    scalar_bytes,
    support,
)
from commrt.planning.spec import PlanSpec
from commrt.planning.stream_programs import nccl_program
from commrt.select.facts import Candidate, Query
from commrt.vocabulary.dtypes import ReduceOp, dtype_by_name, is_known, reduce_op
from commrt.vocabulary.operations import OpSpec

__all__ = ["NATIVE", "NcclBackend", "why_no_schedules", "why_refused"]

NAME = "nccl"
NATIVE = Candidate(NAME, "native")
_UINT8 = NCCL_TYPES["uint8"]


class NcclBackend:
    """Arrays on GPUs, by NVIDIA's library."""

    name = NAME
    capabilities = Capabilities(
        devices=("cuda",),
        native=True,
        limits="stream-ordered; where all ranks have it, and a GPU each; native runs "
        "what NCCL itself does, schedules all else, with kernels of commrt's",
    )

    def availability(self) -> Availability:
        """Whether this process has a driver, a GPU and a library."""
        why = nccl.why_missing()
        reason = why or str(nccl.library())
        return Availability(self.name, why is None, reason, self.capabilities)

    def candidates(self, comm: Any, query: Query) -> Sequence[Candidate]:
        """Return NCCL's own, where it does it as commrt promises it, and schedules."""
        if query.device != "cuda":
            return ()
        found = [NATIVE] if why_refused(comm, query) is None else []
        if why_no_schedules(comm, query) is None:
            found += schedule_candidates(comm, query, NAME)
        return found

    def plan(self, comm: Any, spec: PlanSpec) -> Any:
        """Return the plan of this rank."""
        facts = comm.nccl_facts
        if facts.why:
            raise BackendError(f"{spec.candidate} on {comm.name}: {facts.why}")
        if spec.candidate.algorithm != NATIVE.algorithm:
            if facts.no_kernels:
                raise BackendError(
                    f"{spec.candidate} on {comm.name}: {facts.no_kernels}"
                )
            return _scheduled(spec, comm.rank, comm.size, comm.facts.layout)
        return _planned(spec, comm.size, facts.version)


def why_refused(comm: Any, query: Query) -> str | None:
    """Return why NCCL does not run ``query`` on ``comm``, equal on all ranks."""
    facts = comm.nccl_facts
    if facts.why:
        return str(facts.why)
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


def why_no_schedules(comm: Any, query: Query) -> str | None:
    """Return why schedules do not run on NCCL here, equal on all ranks."""
    facts = comm.nccl_facts
    if facts.why or facts.no_kernels:
        return str(facts.why or facts.no_kernels)
    if query.op is not None and not is_known(query.op):
        return "kernels know no reduction of yours"
    return None


def _scheduled(
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
    )


def _planned(spec: PlanSpec, size: int, version: int) -> _native.NcclPlan:
    """Return a plan by the rules of ``NcclOperations``."""
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
