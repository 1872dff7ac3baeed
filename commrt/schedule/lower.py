# SPDX-License-Identifier: Apache-2.0
"""Lowering: from a schedule's program to the engine's instructions.

    value = inputs[0] ⊕ inputs[1] ⊕ …;  every output = value

The steps are read once, in order. On the way

- a copy is only noted; reads of its destination read its source instead, and what is
  left of it at the end becomes a further output of the instruction that made the value;
- a receive and receive-and-reduces into one block join into one instruction with many
  inputs, in rank order, the local contribution at its own rank's place;
- a send becomes a further output of the instruction that wrote its block, or of an
  earlier send of the same block, so one payload serves all receivers.

Then local outputs that nobody reads are dropped (of a ring's partial sums only the
messages remain), and dependencies are inferred afresh from what is left.

Messages keep the numbers that the program's order gives them, whatever instruction
carries them. Fusing never makes an instruction wait for something that could wait for
it: inputs join only while nothing has read the result or overwritten the other inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from commrt import _native
from commrt.errors import ScheduleError
from commrt.schedule.ir import RankProgram, Schedule, Space
from commrt.schedule.space_tables import space_table

__all__ = ["LOCAL", "MESSAGE", "Lowered", "lower"]

LOCAL, MESSAGE = 0, 1
"""Kinds of inputs and outputs."""

Entry = tuple[int, int, int, int]
"""kind, then space, lo, hi or peer, k, 0."""
Table = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Lowered:
    """The engine's form of one rank's program: docs/internals/schedules.md."""

    rank: int
    spaces: tuple[Space, ...]
    """Spaces of the program; scratch that fusion made superfluous has length 0."""
    inputs: Table
    input_ptr: Table
    outputs: Table
    output_ptr: Table
    deps: Table
    dep_ptr: Table
    messages_in: dict[int, int]
    """Messages per fragment from each peer."""
    messages_out: dict[int, int]
    """Messages per fragment to each peer."""
    num_publishes: int
    """Instructions with at least one message output."""

    def __len__(self) -> int:
        return len(self.dep_ptr) - 1

    def inputs_of(self, index: int) -> list[Entry]:
        """Return the inputs of instruction ``index``."""
        return _rows(self.inputs, self.input_ptr, index)

    def outputs_of(self, index: int) -> list[Entry]:
        """Return the outputs of instruction ``index``."""
        return _rows(self.outputs, self.output_ptr, index)

    def deps_of(self, index: int) -> list[int]:
        """Return the instructions that instruction ``index`` waits for."""
        found: list[int] = self.deps[
            self.dep_ptr[index] : self.dep_ptr[index + 1]
        ].tolist()
        return found


def _rows(table: Table, ptr: Table, index: int) -> list[Entry]:
    return [tuple(row) for row in table[ptr[index] : ptr[index + 1]].tolist()]


def lower(
    schedule: Schedule | RankProgram,
    rank: int | None = None,
    can_fuse: Callable[[int], bool] = lambda peer: True,
) -> Lowered:
    """Return the engine's form of the program of ``rank``.

    Args:
        schedule: a schedule, or the program of one rank.
        rank: whose program; may be left out for a program.
        can_fuse: whether sends to a peer may be outputs of other instructions
            (shared memory) or must be instructions of their own (MPI).
    """
    if isinstance(schedule, RankProgram):
        program = schedule
    elif rank is None:
        raise ScheduleError(
            "lower: a schedule has a program for each rank; pass rank=, to say which "
            "rank's"
        )
    else:
        program = schedule.program(rank)
    peers = program.steps.columns.peers()
    fuses = bytearray(1 + max(peers, default=0))
    for peer in peers:
        fuses[peer] = bool(can_fuse(peer))
    try:
        found = _native.lower_steps(
            program.steps.columns,
            space_table(program.spaces),
            program.rank,
            bytes(fuses),
        )
    except _native.ScheduleFaultError as fault:
        kind, (_, index), _ = fault.args
        if kind == "itself":
            where = program.describe_step(index)
            raise ScheduleError(f"{where}: a message to itself; use copy") from None
        raise ScheduleError(
            f"rank {program.rank} step {index} is malformed; expected one that "
            f"verify() lets pass"
        ) from None
    inputs, input_ptr, outputs, output_ptr, deps, dep_ptr = found[:6]
    messages_in, messages_out, used, num_publishes = found[6:]
    return Lowered(
        rank=program.rank,
        spaces=_without_unused(program.spaces, tuple(used)),
        inputs=inputs,
        input_ptr=input_ptr,
        outputs=outputs,
        output_ptr=output_ptr,
        deps=deps,
        dep_ptr=dep_ptr,
        messages_in=dict(messages_in),
        messages_out=dict(messages_out),
        num_publishes=num_publishes,
    )


@lru_cache(maxsize=256)
def _without_unused(
    spaces: tuple[Space, ...], used: tuple[int, ...]
) -> tuple[Space, ...]:
    """Return the spaces, scratch that is not used without a length; ranks share it."""
    return tuple(
        space if space.kind != "tmp" or is_used else replace(space, scale=(0, 1))
        for space, is_used in zip(spaces, used, strict=True)
    )
