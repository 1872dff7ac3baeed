# SPDX-License-Identifier: Apache-2.0
"""The calls that collective benchmarks can measure: operations and lists of messages.

``multi_sendrecv`` is measured as an alltoall is: every rank sends a block to every
rank, itself included, and checks what came by the same rule.
"""

from __future__ import annotations

from dataclasses import replace

from commrt.vocabulary.operations import OPERATIONS, OpSpec, operation

__all__ = ["MEASURED", "MULTI", "bench_operation"]

MULTI = replace(
    operation("alltoall"),
    name="multi_sendrecv",
    title="Multi-Sendrecv",
    doc="Send a block to every rank and receive one from each, as lists of messages.",
    in_place=False,
    vector_of="alltoall",
    nccl="none",
)
MEASURED = (*OPERATIONS, MULTI)


def bench_operation(name: str) -> OpSpec:
    """Return the operation of that name, or raise UsageError with a suggestion."""
    return MULTI if name == MULTI.name else operation(name)
