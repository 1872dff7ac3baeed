# SPDX-License-Identifier: Apache-2.0
"""Device memory over memory of peers: every schedule, by kernels and flags alone.

The ranks agree whether they can share memory of their devices (``attached.py``); the
rest follows from the call. Unasked it runs where ranks share a device and NCCL does not
run: then ``direct``, in one shot or in two.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from commrt import _native
from commrt.backends.base import Availability, Capabilities
from commrt.backends.ipc.programs import peer_program
from commrt.backends.shm import schedule_candidates
from commrt.devices.cuda import why_no_card
from commrt.errors import BackendError
from commrt.planning.prediction import full_nbytes
from commrt.planning.spec import PlanSpec
from commrt.select.facts import Candidate, CommFacts, Query
from commrt.vocabulary.dtypes import is_known
from commrt.vocabulary.operations import OPERATIONS, operation

__all__ = ["DIRECT", "IpcBackend", "predicted_us", "why_refused"]

NAME = "ipc"
DIRECT = Candidate(NAME, "direct")
_FLAG_US = 5.0
_BYTES_PER_US = 2e6
"""A flag's way from one rank's stream to another's, and what one device's memory moves;
round numbers, not measured. They place one shot before two: up to 2.5 MB on 2 ranks,
300 KB on 4, 60 KB on 8."""


class IpcBackend:
    """Arrays on GPUs, over memory that processes have opened of each other's."""

    name = NAME
    capabilities = Capabilities(
        devices=("cuda",),
        operations=tuple(spec.name for spec in OPERATIONS if spec.rule_bytes != "any"),
        limits="stream-ordered; ranks that are processes of one node, with kernels and "
        "stream memory operations; no alltoallv",
    )

    def availability(self) -> Availability:
        """Whether this process has a GPU; whether the ranks can share it they try."""
        why = why_no_card()
        reason = why or "CUDA IPC between processes of a node, tried at the first call"
        return Availability(self.name, why is None, reason, self.capabilities)

    def candidates(self, comm: Any, query: Query) -> Sequence[Candidate]:
        """Return every schedule, where the ranks can share memory."""
        if query.device != "cuda" or why_refused(comm, query) is not None:
            return ()
        return tuple(schedule_candidates(comm, query, NAME))

    def plan(self, comm: Any, spec: PlanSpec) -> _native.PeerPlan:
        """Return the plan of this rank."""
        facts = comm.ipc_facts
        if facts.why:
            raise BackendError(f"{spec.candidate} on {comm.name}: {facts.why}")
        made = peer_program(
            spec, comm.rank, comm.size, comm.facts.layout, comm.ipc_half_nbytes
        )
        item = spec.dtype.itemsize
        return _native.peer_plan(
            made.program,
            scratch_nbytes=made.scratch_nbytes,
            in_nbytes=spec.in_elements * item,
            out_nbytes=spec.out_elements * item,
            in_place=spec.op.in_place,
            coll=spec.op.code,
            root=spec.root,
            elements=spec.num_elements,
            element_type=spec.dtype.code,
            reduction=int(spec.reduction),
        )


def why_refused(comm: Any, query: Query) -> str | None:
    """Return why memory of peers does not serve ``query``, equal on all ranks."""
    facts = comm.ipc_facts
    if facts.why:
        return str(facts.why)
    if query.op is not None and not is_known(query.op):
        return "kernels know no reduction of yours"
    if operation(query.coll).rule_bytes == "any":
        return "no rank knows where others publish, as none knows the others' counts"
    return None


def predicted_us(facts: CommFacts, query: Query, candidate: Candidate) -> float:
    """Return what ``direct`` takes where all ranks share a device; ``inf`` for others.

    One shot waits for peers once, and every rank reads all vectors; two shots wait
    twice, and a rank reads its block of all, then the others' blocks once. A kernel
    combines two operands: it reads both and writes one of them.
    """
    if candidate.algorithm != DIRECT.algorithm:
        return math.inf
    shots = candidate.params.get("shots", 2)
    size, nbytes = facts.size, full_nbytes(query, facts.size)
    passes = 3 * (size - 1) + 6 if shots == 1 else 7
    waits = 1 if shots == 1 else 2
    return waits * _FLAG_US + size * passes * nbytes / _BYTES_PER_US
