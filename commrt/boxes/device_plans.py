# SPDX-License-Identifier: Apache-2.0
"""Boxes of arrays on a device, moved between ranks: halo exchange and redistribution.

All boxes that leave are packed into one buffer on the device by one launch. Where all
ranks have NCCL, it moves parts of the buffer to the other ranks, as one group. Else the
buffer goes to the host as a whole, the host's engine moves its parts, and what comes
goes to the device as a whole. One launch unpacks it, or combines it with what is there.
Where what is sent may have to arrive first, as in a halo exchange dimension
by dimension, that is done once for each phase, the next one behind the one before.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any

from commrt import _native
from commrt.arrays.device import as_stream, current_stream_of
from commrt.arrays.places import places_of
from commrt.backends.base import Attached
from commrt.boxes.host_plans import ArrayLayout, box_template
from commrt.boxes.strided import StridedArray
from commrt.boxes.words import words_of_moves
from commrt.device_calls.collectives import DeviceCollectives
from commrt.device_calls.requests import DeviceRequest
from commrt.devices.arrays import give_back
from commrt.errors import CommError, KernelsMissingError
from commrt.group.group import Group
from commrt.kernels.boxes import (
    MOST_ARRAYS,
    BoxKind,
    BoxTable,
    combine_table,
    move_table,
)
from commrt.schedule.boxes import Box, Move
from commrt.vocabulary.dtypes import DTYPES, ReduceOp

__all__ = ["BoundBoxes", "DeviceBoxes"]

_ALIGNED = 64
_OWN_NBYTES = 2048
"""Python's objects of a plan."""
_DEVICE_SHARE = 256
"""Bytes of the device that count as one: a limit of 1 MiB is one of 256 MiB there."""
_BYTE = next(dtype for dtype in DTYPES if dtype.name == "uint8")


@dataclass(frozen=True)
class _Chunk:
    """Boxes that one launch packs or unpacks."""

    arrays: tuple[int, ...]
    """The call's numbers of the launch's arrays."""
    boxes: tuple[Box, ...]
    """Boxes of the launch's arrays."""
    at: int
    """Its first byte in the buffer."""


@dataclass(frozen=True)
class _Side:
    """The boxes that one phase packs or unpacks."""

    chunks: list[_Chunk]
    places: list[tuple[int, int]]
    """Begin and end in the buffer, for each box of the call."""
    nbytes: int


def _side(boxes: Sequence[Box], layouts: Sequence[ArrayLayout], by_type: bool) -> _Side:
    """Lay boxes out in a buffer: those of long elements first, so all are aligned."""
    groups: list[list[int]] = []
    for array in sorted(
        {box.array for box in boxes},
        key=lambda array: (-layouts[array].dtype.itemsize, layouts[array].dtype.code),
    ):
        last = groups[-1] if groups else None
        same = last is not None and (
            not by_type or layouts[last[0]].dtype is layouts[array].dtype
        )
        if last is not None and same and len(last) < MOST_ARRAYS:
            last.append(array)
        else:
            groups.append([array])
    places = [(0, 0)] * len(boxes)
    chunks, at = [], 0
    for arrays in groups:
        start = at
        held = []
        for number, array in enumerate(arrays):
            for index, box in enumerate(boxes):
                if box.array != array:
                    continue
                end = at + box.count * layouts[array].dtype.itemsize
                places[index], at = (at, end), end
                held.append(replace(box, array=number))
        chunks.append(_Chunk(tuple(arrays), tuple(held), start))
        at = -(-at // _ALIGNED) * _ALIGNED
    return _Side(chunks, places, at)


class DeviceBoxes:
    """The plan of a call that moves boxes, with what it keeps on the device."""

    def __init__(
        self,
        group: Group,
        devices: DeviceCollectives,
        device: Any,
        moves: Sequence[Move],
        layouts: Sequence[ArrayLayout],
        *,
        phases: int,
        what: str,
        coll: int,
        label: str,
        reduction: ReduceOp | None = None,
        facts: int = 0,
    ) -> None:
        """Plan the moves of one rank; collective, as the first plan asks for NCCL.

        ``facts`` is a number of what the ranks have to agree on, which messages carry.
        ``phases`` says in how many steps the ranks move boxes, one after the other and
        the same on all of them; 1 where what is sent is there from the start, whatever
        the moves say.
        """
        why = getattr(device, "why_no_kernels", None)
        if why is not None:
            raise KernelsMissingError(f"boxes are packed by a kernel: {why}")
        carrier = devices.box_carrier(device, what, 0, group.timeout_s)
        self.label = f"{devices.name_of(carrier)}/{label.partition('/')[2]}"
        self._group, self._devices, self._device = group, devices, device
        self._layouts, self._reduction = layouts, reduction
        self._offsets: list[int] = []
        """Offsets at which each launch's part begins, from the start of the send
        buffer."""
        self._memory: list[int] = []
        self._device_nbytes = 0
        devices.memory.add(self)
        if carrier is None:
            devices.stager(device)
        moves = [each for each in moves if prod(each.shape)]
        steps = [
            [each for each in moves if phases == 1 or each.phase == phase]
            for phase in range(phases)
        ]
        sides = [
            (
                _side([m.source for m in step if m.source], layouts, False),
                _side(
                    [m.target for m in step if m.target], layouts, reduction is not None
                ),
            )
            for step in steps
        ]
        leaving = max(sent.nbytes for sent, _ in sides)
        coming = max(taken.nbytes for _, taken in sides)
        self._coming_at = -(-leaving // _ALIGNED) * _ALIGNED
        tables: list[tuple[BoxTable, int]] = []
        table_nbytes = 0
        for sent, taken in sides:
            for side, packs in ((sent, True), (taken, False)):
                for chunk in side.chunks:
                    table = self._table(chunk, packs)
                    tables.append((table, table_nbytes))
                    table_nbytes += -(-len(table.content) // _ALIGNED) * _ALIGNED
        self._buffer = self._alloc(self._coming_at + coming)
        table_at = self._filled(tables, table_nbytes)
        placed = iter([(table, table_at + at) for table, at in tables])
        self._words = partial(
            words_of_moves,
            *(what, devices.name_of(carrier)),
            [
                list(_in_buffers(step, sent, taken))
                for step, (sent, taken) in zip(steps, sides, strict=True)
            ],
            coll=coll,
            dtype=_BYTE,
            reduction=reduction,
            facts=facts,
        )
        self.plan: Any
        self._staged: _native.StagedPlan | None = None
        """The plan, if the boxes go through pinned memory."""
        self._agreeing: _native.StagedPlan | None = None
        """The same plan, whose runs compare the ranks' calls; None until it is made."""
        if carrier is not None:
            self.plan = carrier.boxes_plan(
                what,
                [
                    self._phase(carrier, step, sent, taken, placed)
                    for step, (sent, taken) in zip(steps, sides, strict=True)
                ],
                coll=coll,
                reduction=int(ReduceOp.SUM if reduction is None else reduction),
                facts=facts,
            )
            self.plan.words = self._words()
            return
        parts = [
            self._part(step, sent, taken, placed, coll, label, facts)
            for step, (sent, taken) in zip(steps, sides, strict=True)
        ]
        longest = max(_pinned(sent) + taken.nbytes for sent, taken in sides)
        self._staged = _native.staged_plan(parts, phases, longest, serial=phases > 1)
        self.plan = self._staged
        self.plan.words = self._words()

    @property
    def nbytes(self) -> int:
        """Bytes that it counts for where plans are kept.

        Memory of the device counts for a little of its bytes: there is much of it.
        """
        plans = {id(each): each for each in (self.plan, self._agreeing) if each}
        own = sum(each.nbytes for each in plans.values())
        return own + _OWN_NBYTES + self._device_nbytes // _DEVICE_SHARE

    def agree_on(self, runs: _native.Plan, words: list[int], names: list[str]) -> None:
        """Say what the ranks compare in calls that ``run`` is told have to."""
        if self._staged is not None:
            self._agreeing = self._staged.agreeing(runs, words, names)
            self._agreeing.words = self._words(compared=len(words))

    def _table(self, chunk: _Chunk, packs: bool) -> BoxTable:
        strides = [self._layouts[array].strides for array in chunk.arrays]
        sizes = [self._layouts[array].dtype.itemsize for array in chunk.arrays]
        combines = self._reduction is not None and not packs
        make = combine_table if combines else move_table
        return make(chunk.boxes, strides, sizes)

    def _part(
        self,
        step: Sequence[Move],
        sent: _Side,
        taken: _Side,
        tables: Any,
        coll: int,
        label: str,
        facts: int,
    ) -> _native.StagedPart:
        """Return one phase: what is launched and copied, and what the host runs."""
        packs, unpacks = self._launches(sent, taken, tables)
        moves = list(_in_buffers(step, sent, taken))
        template = box_template(
            *(self._group, moves, [(_BYTE, 1)] * 2),
            coll=coll,
            label=label,
            facts=facts,
        )
        return _native.StagedPart(
            template.plan(self._group, [], [1, 1]),
            [(self._number(0), 0, 0, sent.nbytes, 0)],
            [(self._number(self._coming_at), 0, 0, taken.nbytes, _pinned(sent))],
            table=[0, _pinned(sent)],
            packs=packs,
            unpacks=unpacks,
        )

    def _launches(
        self, sent: _Side, taken: _Side, tables: Any
    ) -> tuple[list[_native.StagedLaunch], list[_native.StagedLaunch]]:
        packs = [
            self._launch(BoxKind.PACK, each, 0, next(tables)) for each in sent.chunks
        ]
        kind = BoxKind.UNPACK if self._reduction is None else BoxKind.COMBINE
        unpacks = [
            self._launch(kind, each, self._coming_at, next(tables))
            for each in taken.chunks
        ]
        return packs, unpacks

    def _phase(
        self,
        carrier: Attached,
        step: Sequence[Move],
        sent: _Side,
        taken: _Side,
        tables: Any,
    ) -> Any:
        """Return one phase of a carrier: launches, and the messages between them."""
        packs, unpacks = self._launches(sent, taken, tables)
        moves = list(_in_buffers(step, sent, taken))
        leaves, comes = self._number(0), self._number(self._coming_at)
        messages, copies = [], []
        # Both ranks give a message the same number, and list them in that order.
        for move in sorted(moves, key=lambda move: (move.peer or 0, move.number)):
            source, target = move.source, move.target
            if source is not None and target is not None:
                copies.append(
                    (leaves, source.start[0], comes, target.start[0], source.count)
                )
            elif source is not None:
                messages.append(
                    (True, leaves, source.start[0], source.count, move.peer)
                )
            elif target is not None:
                messages.append(
                    (False, comes, target.start[0], target.count, move.peer)
                )
        return carrier.boxes_phase(
            messages=messages, copies=copies, packs=packs, unpacks=unpacks
        )

    def _launch(
        self, kind: BoxKind, chunk: _Chunk, base: int, placed: tuple[BoxTable, int]
    ) -> _native.StagedLaunch:
        table, address = placed
        dtype = self._layouts[chunk.arrays[0]].dtype
        op = ReduceOp.SUM if self._reduction is None else self._reduction
        return _native.StagedLaunch(
            kind=int(kind),
            op=int(op),
            dtype=dtype.code,
            buffer=self._number(base + chunk.at),
            buffer_nbytes=table.nbytes,
            arrays=list(chunk.arrays),
            table=address,
            table_nbytes=len(table.content),
            terms_at=table.terms_at,
            num_boxes=table.num_boxes,
            units=table.units,
        )

    def _number(self, offset: int) -> int:
        """Return the call's number of an array that is a part of the buffer."""
        if offset not in self._offsets:
            self._offsets.append(offset)
        return len(self._layouts) + self._offsets.index(offset)

    # -- memory ------------------------------------------------------------------

    def _alloc(self, nbytes: int) -> int:
        address: int = self._device.alloc(max(1, nbytes))
        self._memory.append(address)
        self._device_nbytes += nbytes
        return address

    def _filled(self, tables: Sequence[tuple[BoxTable, int]], nbytes: int) -> int:
        """Return the address of all tables on the device."""
        if not tables:
            return 0
        content = bytearray(nbytes)
        for table, at in tables:
            content[at : at + len(table.content)] = table.content
        address = self._alloc(nbytes)
        self._devices.uploads(self._device).copy(address, bytes(content))
        return address

    def close(self) -> None:
        """Give its memory back, which waits for the device; idempotent."""
        memory, self._memory = self._memory, []
        for address in memory:
            give_back(self._device, address)

    def __del__(self) -> None:
        if sys.is_finalizing():
            return
        # A device that failed or is gone has taken its memory along.
        with suppress(CommError, AttributeError):
            self.close()

    # -- running -----------------------------------------------------------------

    def run(
        self,
        arrays: Sequence[StridedArray],
        result: Any,
        what: str,
        nonblocking: bool,
        timeout_s: float,
        stream: Any = None,
        *,
        agrees: bool = False,
    ) -> Any:
        """Start it on arrays laid out as planned; return the request, or the result.

        ``agrees`` says whether the ranks compare on the way what they have passed.
        """
        devices, device = self._devices, self._device
        devices.cut_buckets()
        first = arrays[0].array
        if stream is None:
            handle = current_stream_of(first, device)
        else:
            handle = as_stream(stream, device, what)
        devices.order_exported(device, handle, arrays)
        addresses = [each.address for each in arrays]
        addresses += [self._buffer + offset for offset in self._offsets]
        keep = (self, *(each.owner for each in arrays))
        plan = self._agreeing if agrees and self._agreeing is not None else self.plan
        runner = devices.runner(device, plan)
        started = devices.launch(
            lambda: runner.start_arrays(
                plan, addresses, handle, not nonblocking, keep, timeout_s
            )
        )
        request = DeviceRequest(
            self._group, started, result, what, timeout_s, device, handle, first
        )
        if nonblocking:
            return request
        request.be_quiet()
        return result


class BoundBoxes:
    """A plan of boxes bound to its arrays; call it, or ``start()`` it."""

    def __init__(
        self,
        group: Group,
        boxes: DeviceBoxes,
        arrays: Sequence[StridedArray],
        result: Any,
        what: str,
        look: Callable[[], None],
    ) -> None:
        """``look`` raises where the values must not leave."""
        self._look = look
        self._group, self._boxes, self._arrays = group, boxes, arrays
        self._result, self.operation = result, what
        self._places = places_of(array.array for array in arrays)

    @property
    def label(self) -> str:
        """The name of what moves the boxes."""
        return self._boxes.label

    def __call__(self) -> Any:
        """Run it; the current stream waits for it. Return its output."""
        return self._run(False)

    def start(self) -> Any:
        """Start it and return its request."""
        return self._run(True)

    def _run(self, nonblocking: bool) -> Any:
        group = self._group
        group.check_usable()
        group.check_places(self._places, self.operation)
        group.check_bound(self._look)
        return self._boxes.run(
            self._arrays, self._result, self.operation, nonblocking, group.timeout_s
        )


def _pinned(sent: _Side) -> int:
    """Return the place in pinned memory at which incoming boxes begin."""
    return -(-sent.nbytes // _ALIGNED) * _ALIGNED


def _in_buffers(step: Sequence[Move], sent: _Side, taken: _Side) -> Any:
    """Yield the moves of a phase between parts of the two buffers, in bytes."""
    sources, targets = iter(sent.places), iter(taken.places)
    for move in step:
        source = target = None
        if move.source is not None:
            low, high = next(sources)
            source = Box(0, (low,), (high,))
        if move.target is not None:
            low, high = next(targets)
            target = Box(1, (low,), (high,))
        yield Move(0, move.number, move.peer, source, target)
