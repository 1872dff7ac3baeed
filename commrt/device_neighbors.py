# SPDX-License-Identifier: Apache-2.0
"""Collectives among neighbours on arrays on devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from commrt import _native
from commrt.arrays import HostView
from commrt.device_arrays import as_stream, current_stream_of
from commrt.device_requests import DeviceRequest

if TYPE_CHECKING:
    from commrt.comm import Communicator

__all__ = ["BoundNeighbors", "staged_neighbors"]

_ALIGNED = 64
_X, _OUT = 0, 1


class Around(Protocol):
    """Who is beside a rank, as neighbors.Neighborhood."""

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
        """What is sent."""
        ...

    @property
    def out(self) -> HostView:
        """Where what comes goes."""
        ...

    @property
    def result(self) -> Any:
        """What the call returns."""
        ...

    @property
    def sends(self) -> Sequence[tuple[int, int]]:
        """For each destination, where its block begins and ends in x."""
        ...

    @property
    def receives(self) -> Sequence[tuple[int, int]]:
        """For each source, where its block begins and ends in out."""
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
    return _native.StagedPlan([part], 1, at + call.out.nbytes)


class BoundNeighbors:
    """A collective among neighbours bound to its arrays; call it, or ``start()`` it."""

    label = "staged/direct"
    """What runs it."""

    def __init__(
        self, comm: Communicator, plan: _native.StagedPlan, call: Call
    ) -> None:
        self._comm, self._plan, self._call = comm, plan, call
        self.operation = call.what

    def __call__(self) -> Any:
        """Run it; the current stream waits for it. Return its output."""
        return self.run(False, self._comm.timeout_s)

    def start(self) -> Any:
        """Start it and return its request."""
        return self.run(True, self._comm.timeout_s)

    def run(self, nonblocking: bool, timeout_s: float, stream: Any = None) -> Any:
        """Start it; return a request, or let the stream wait and return the output."""
        comm, call = self._comm, self._call
        comm._check_usable()
        device, x, out = call.x.on, call.x, call.out
        if stream is None:
            handle = current_stream_of(x.array, device)
        else:
            handle = as_stream(stream, device, call.what)
        staging = comm._staging
        staging.order_exported(device, handle, [x, out])
        stager = staging.stager(device)
        keep = x.owner, out.owner
        started = staging.given(
            lambda: stager.start_arrays(
                self._plan,
                [x.address, out.address],
                handle,
                not nonblocking,
                keep,
                timeout_s,
            )
        )
        request = DeviceRequest(
            comm, started, call.result, call.what, timeout_s, device, handle, x.array
        )
        if nonblocking:
            return request
        request.be_quiet()
        return call.result
