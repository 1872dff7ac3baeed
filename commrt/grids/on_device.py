# SPDX-License-Identifier: Apache-2.0
"""Collectives among neighbours on arrays on devices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from commrt import _native
from commrt.arrays.device import as_stream, current_stream_of
from commrt.arrays.host import HostView
from commrt.arrays.places import places_of
from commrt.backends.base import Attached
from commrt.device_calls.collectives import DeviceCollectives
from commrt.device_calls.requests import DeviceRequest
from commrt.group.group import Group
from commrt.schedule.boxes import Move

__all__ = ["BoundNeighbors", "carried_neighbors", "staged_neighbors"]

_ALIGNED = 64
_X, _OUT = 0, 1


class Around(Protocol):
    """The neighbours of a rank, as neighbors.Neighborhood."""

    @property
    def sources(self) -> Sequence[int | None]:
        """Whom it receives from; None where there is nobody."""
        ...

    @property
    def destinations(self) -> Sequence[int | None]:
        """Whom it sends to."""
        ...


class Call(Protocol):
    """One call's arrays, as neighbors knows them."""

    @property
    def what(self) -> str:
        """The operation."""
        ...

    @property
    def x(self) -> HostView:
        """The array that is sent."""
        ...

    @property
    def out(self) -> HostView:
        """The array that receives."""
        ...

    @property
    def result(self) -> Any:
        """The value that the call returns."""
        ...

    @property
    def sends(self) -> Sequence[tuple[int, int]]:
        """Begin and end in x of each destination's block."""
        ...

    @property
    def moves(self) -> Sequence[Move]:
        """The blocks of a call."""
        ...

    @property
    def receives(self) -> Sequence[tuple[int, int]]:
        """Begin and end in out of each source's block."""
        ...


def staged_neighbors(around: Around, call: Call, plan: Any) -> _native.StagedPlan:
    """Return the staged plan around the host's plan of boxes.

    Blocks that nobody sends do not go back, so they stay as they are.
    """
    itemsize = call.x.dtype.itemsize
    there = zip(around.destinations, call.sends, strict=True)
    leaving = max((high for peer, (_, high) in there if peer is not None), default=0)
    leaving *= itemsize
    at = -(-leaving // _ALIGNED) * _ALIGNED
    back: list[tuple[int, int, int, int, int]] = []
    for peer, (low, high) in zip(around.sources, call.receives, strict=True):
        start, nbytes = low * itemsize, (high - low) * itemsize
        if peer is None:
            continue
        if back and back[-1][1] + back[-1][3] == start:
            nbytes, start = nbytes + back[-1][3], back[-1][1]
            back.pop()
        back.append((_OUT, start, 0, nbytes, at + start))
    part = _native.StagedPart(
        plan, [(_X, 0, 0, leaving, 0)], back, out_at=at, table=[0, at]
    )
    return _native.staged_plan([part], 1, at + call.out.nbytes)


def carried_neighbors(carrier: Attached, call: Call, coll: int) -> Any:
    """Return a carrier's plan: blocks go from x to out, and none is packed."""
    itemsize = call.x.dtype.itemsize
    messages: list[tuple[bool, int, int, int, int]] = []
    copies: list[tuple[int, int, int, int, int]] = []
    # Both ranks give a message the same number, and list them in that order.
    for move in sorted(call.moves, key=lambda move: (move.peer or 0, move.number)):
        box = move.source or move.target
        assert box is not None
        low, nbytes = box.start[0] * itemsize, box.count * itemsize
        if move.peer is not None:
            sends = move.source is not None
            messages.append((sends, _X if sends else _OUT, low, nbytes, move.peer))
        elif move.target is not None:
            there = move.target.start[0] * itemsize
            copies.append((_X, low, _OUT, there, nbytes))
    phase = carrier.boxes_phase(messages=messages, copies=copies, packs=[], unpacks=[])
    return carrier.boxes_plan(
        call.what,
        [phase],
        coll=coll,
        in_nbytes=call.x.nbytes,
        out_nbytes=call.out.nbytes,
        elements=call.x.count,
        element_type=call.x.dtype.code,
    )


class BoundNeighbors:
    """A collective among neighbours bound to its arrays; call it, or ``start()`` it."""

    def __init__(
        self,
        group: Group,
        devices: DeviceCollectives,
        plan: Any,
        call: Call,
        look: Callable[[], None],
    ) -> None:
        """``look`` raises where the values must not leave."""
        self._look = look
        self._group, self._devices = group, devices
        self._plan, self._call = plan, call
        self.operation = call.what
        self._places = places_of([call.x.array, call.out.array])

    @property
    def label(self) -> str:
        """The name of what moves the blocks."""
        return f"{self._plan.backend}/direct"

    def __call__(self) -> Any:
        """Run it; the current stream waits for it. Return its output."""
        return self._run(False)

    def start(self) -> Any:
        """Start it and return its request."""
        return self._run(True)

    def _run(self, nonblocking: bool) -> Any:
        self._group.check_usable()
        self._group.check_places(self._places, self.operation)
        self._group.check_bound(self._look)
        return self.run(nonblocking, self._group.timeout_s)

    def run(self, nonblocking: bool, timeout_s: float, stream: Any = None) -> Any:
        """Start it; return a request, or let the stream wait and return the output."""
        devices, call = self._devices, self._call
        self._group.check_usable()
        devices.cut_buckets()
        device, x, out = call.x.on, call.x, call.out
        if stream is None:
            handle = current_stream_of(x.array, device)
        else:
            handle = as_stream(stream, device, call.what)
        devices.order_exported(device, handle, [x, out])
        runner = devices.runner(device, self._plan)
        keep = x.owner, out.owner
        started = devices.launch(
            lambda: runner.start_arrays(
                self._plan,
                [x.address, out.address],
                handle,
                not nonblocking,
                keep,
                timeout_s,
            )
        )
        request = DeviceRequest(
            *(self._group, started, call.result, call.what),
            *(timeout_s, device, handle, x.array),
        )
        if nonblocking:
            return request
        request.be_quiet()
        return call.result
