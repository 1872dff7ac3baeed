# SPDX-License-Identifier: Apache-2.0
"""Collectives over memory of peers: every schedule, by kernels and flags alone.

The ranks agree whether they can share memory of their devices (``attached.py``); the
rest follows from the call. Unasked it runs where ranks share a device and NCCL does not
run: then ``direct``, in one shot or in two.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from commrt.planning.prediction import full_nbytes
from commrt.select.facts import Candidate, CommFacts, Query
from commrt.vocabulary.operations import operation
from commrt.vocabulary.reduction_names import is_known

__all__ = ["DIRECT", "NAME", "IpcFacts", "predicted_us", "why_refused"]

NAME = "ipc"
DIRECT = Candidate(NAME, "direct")
_FLAG_US = 5.0
_BYTES_PER_US = 2e6
"""A flag's way from one rank's stream to another's, and what one device's memory moves;
round numbers, not measured. They place one shot before two: up to 2.5 MB on 2 ranks,
300 KB on 4, 60 KB on 8."""


@dataclass(frozen=True)
class IpcFacts:
    """The facts about memory of peers; once agreed, equal on all ranks."""

    why: str
    """Reason why it cannot be used; empty if it can."""
    shares_device: bool = False
    """True if any two ranks are on one device."""


def why_refused(facts: IpcFacts, query: Query) -> str | None:
    """Return why memory of peers does not serve ``query``, equal on all ranks."""
    if facts.why:
        return facts.why
    if query.op is not None and not is_known(query.op):
        return "kernels know no reduction of yours"
    if operation(query.coll).rule_bytes == "any":
        return "no rank knows where others publish, as none knows the others' counts"
    return None


def predicted_us(facts: CommFacts, query: Query, candidate: Candidate) -> float:
    """Return the time of ``direct`` if all ranks share a device; ``inf`` for others.

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
