# SPDX-License-Identifier: Apache-2.0
"""The calls that collective benchmarks can measure: operations and lists of messages.

``multi_sendrecv`` is measured as an alltoall is: every rank sends a block to every
rank, itself included, and checks what came by the same rule. ``send_recv`` is a message
from the first rank to the last one, and back: the first checks that it has got what it
sent.
"""

from __future__ import annotations

from dataclasses import replace

from commrt.vocabulary.operations import OPERATIONS, OpSpec, operation

__all__ = ["MEASURED", "MESSAGES", "MULTI", "THERE_AND_BACK", "bench_operation"]

MULTI = replace(
    operation("alltoall"),
    name="multi_sendrecv",
    title="Multi-Sendrecv",
    doc="Send a block to every rank and receive one from each, as lists of messages.",
    in_place=False,
    vector_of="alltoall",
    nccl="none",
)
THERE_AND_BACK = replace(
    operation("reduce"),
    name="send_recv",
    title="Send and Receive",
    doc="Send a message from the first rank to the last one, and back.",
    reduces=False,
    in_place=False,
    input_on="root",
    has_root=False,
    nccl="none",
)
MESSAGES = {spec.name: spec for spec in (MULTI, THERE_AND_BACK)}
"""Calls of messages, which no schedule has."""
MEASURED = (*OPERATIONS, MULTI)
"""Calls of which each has a benchmark; that of messages there and back is latency."""


def bench_operation(name: str) -> OpSpec:
    """Return the operation of that name, or raise UsageError with a suggestion."""
    return MESSAGES[name] if name in MESSAGES else operation(name)
