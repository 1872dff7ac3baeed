# SPDX-License-Identifier: Apache-2.0
"""Calls that move boxes on devices, as a rank makes them that has refused its own.

The others say which messages they exchange with it, and it exchanges as many, of memory
that nobody reads (``device_calls/refused_calls.py``).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from commrt import _native
from commrt.boxes.compared import ComparedBoxes
from commrt.boxes.host_plans import box_template
from commrt.device_calls.collectives import DeviceCollectives
from commrt.device_calls.refused_calls import zeros
from commrt.device_calls.requests import DeviceRequest
from commrt.devices.arrays import DeviceStream
from commrt.group.group import Group
from commrt.schedule.boxes import Box, Move
from commrt.vocabulary.dtypes import DTYPES, DType

__all__ = ["BoxStandIns"]

_ALIGNED = 64
_SENT, _TAKEN = 0, 1
_TYPES = {dtype.code: dtype for dtype in DTYPES}


@dataclass(frozen=True)
class _Said:
    """A rank's words of its call (``DeviceBoxes.words``)."""

    what: str
    backend: str
    coll: int
    dtype: int
    reduction: int
    facts: int
    stated: bool
    compared: int
    """Facts that the ranks compare on the way."""
    phases: Sequence[Sequence[tuple[int, int, bool, int]]]
    """Messages of each phase: the other rank, number, whether it leaves, elements."""


class BoxStandIns:
    """Makes calls of one communicator that this rank has refused."""

    def __init__(
        self, group: Group, devices: DeviceCollectives, compared: ComparedBoxes
    ) -> None:
        self._group, self._devices, self._compared = group, devices, compared

    def make(
        self, device: Any, stream: DeviceStream, said: Mapping[int, str]
    ) -> DeviceRequest:
        """Start the call that others describe, by rank; return its request."""
        group = self._group
        words = {rank: _Said(*json.loads(text)[1:]) for rank, text in said.items()}
        first = next(iter(words.values()))
        phases = [self._moves(words, phase) for phase in range(len(first.phases))]
        dtype = _TYPES[first.dtype]
        nbytes = [
            dtype.itemsize * max(_length(moves, side) for moves in phases)
            for side in (_SENT, _TAKEN)
        ]
        arrays = [zeros(device, each, stream) for each in nbytes]
        if first.backend == _native.StagedPlan.backend:
            plan = self._staged(first, phases, dtype, nbytes)
        else:
            plan = self._carried(first, phases, dtype)
        runner = self._devices.runner(device, plan)
        started = self._devices.launch(
            lambda: runner.start_arrays(
                plan,
                [each.address for each in arrays],
                stream.handle,
                False,
                tuple(arrays),
                group.timeout_s,
            )
        )
        return DeviceRequest(
            *(group, started, None, first.what, group.timeout_s),
            *(device, stream.handle, None),
        )

    def _moves(self, words: Mapping[int, _Said], phase: int) -> list[Move]:
        """Return this rank's moves of a phase: what others send comes here."""
        moves, at = [], [0, 0]
        for rank, said in words.items():
            for peer, number, leaves, count in said.phases[phase]:
                if peer != self._group.rank:
                    continue
                side = _TAKEN if leaves else _SENT
                box = Box(side, (at[side],), (at[side] + count,))
                at[side] += count
                ends = (None, box) if leaves else (box, None)
                moves.append(Move(0, number, rank, *ends))
        return moves

    def _staged(
        self,
        said: _Said,
        phases: Sequence[Sequence[Move]],
        dtype: DType,
        nbytes: Sequence[int],
    ) -> _native.StagedPlan:
        behind = -(-nbytes[_SENT] // _ALIGNED) * _ALIGNED
        parts = []
        for moves in phases:
            template = box_template(
                *(self._group, moves, [(dtype, 1)] * 2),
                coll=said.coll,
                label="boxes/direct",
                stated=said.stated,
                facts=said.facts,
            )
            parts.append(
                _native.StagedPart(
                    template.plan(self._group, [], [dtype.itemsize] * 2),
                    [(_SENT, 0, 0, nbytes[_SENT], 0)],
                    [(_TAKEN, 0, 0, nbytes[_TAKEN], behind)],
                    table=[0, behind],
                )
            )
        plan = _native.staged_plan(
            parts, len(parts), behind + nbytes[_TAKEN], serial=len(parts) > 1
        )
        if not said.compared:
            return plan
        unknown = {str(number): None for number in range(said.compared)}
        return plan.agreeing(*self._compared.agreement(unknown))

    def _carried(
        self, said: _Said, phases: Sequence[Sequence[Move]], dtype: DType
    ) -> Any:
        carrier = self._devices.attached[said.backend]
        made = []
        for moves in phases:
            messages = []
            for move in sorted(moves, key=lambda move: (move.peer or 0, move.number)):
                box = move.source or move.target
                assert box is not None
                assert move.peer is not None
                low, nbytes = (n * dtype.itemsize for n in (box.start[0], box.count))
                leaves = move.source is not None
                messages.append((leaves, box.array, low, nbytes, move.peer))
            made.append(
                carrier.boxes_phase(messages=messages, copies=[], packs=[], unpacks=[])
            )
        facts = {"reduction": said.reduction, "facts": said.facts}
        return carrier.boxes_plan(said.what, made, coll=said.coll, **facts)


def _length(moves: Sequence[Move], side: int) -> int:
    """Return the elements of the boxes on one side."""
    boxes = [move.target if side == _TAKEN else move.source for move in moves]
    return sum(box.count for box in boxes if box is not None)
