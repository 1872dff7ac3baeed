# SPDX-License-Identifier: Apache-2.0
"""Messages to and from arrays on devices, through pinned host memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from commrt.arrays.device import as_stream, current_stream_of, place_of
from commrt.device_calls.collectives import DeviceCollectives
from commrt.device_calls.requests import DeviceMessageRequest
from commrt.group.finite_values import check_finite_on_stream
from commrt.group.group import Group
from commrt.group.refusals import Place, telling_peers
from commrt.messages.lists import Message

__all__ = ["DeviceMessages"]


class DeviceMessages:
    """Messages that are one operation, bound to their arrays."""

    def __init__(
        self,
        group: Group,
        devices: DeviceCollectives,
        what: str,
        sends: Sequence[Message],
        recvs: Sequence[Message],
        result: Any,
        stream: Any = None,
        *,
        has_places: bool = True,
    ) -> None:
        """Bind them; ``has_places``: others hear of it where they are refused."""
        self._group, self._devices = group, devices
        self._has_places = has_places
        self._what = what
        self.arrays = [each for each, _, _ in (*sends, *recvs)]
        """All arrays, those that leave first."""
        self.sends, self.recvs = list(sends), list(recvs)
        self._result = result
        self._stream = stream
        self._sends, self._recvs = _rows(sends), _rows(recvs)
        self._peers = tuple(peer for _, peer, _ in recvs)
        self._keep = tuple(each.owner for each in self.arrays)
        self._on = place_of(what, self.arrays)
        devices.messages(self._on)

    def run(self, nonblocking: bool, timeout_s: float | None = None) -> Any:
        """Start it; return a request, or let the stream wait and return the output."""
        group, device = self._group, self._on
        group.check_going()
        limit = group.timeout_s if timeout_s is None else timeout_s
        first = self.arrays[0].array
        sends, recvs = (self.sends, self.recvs) if self._has_places else ([], [])
        with telling_peers(group, _places(sends), _places(recvs)):
            if self._stream is None:
                stream = current_stream_of(first, device)
            else:
                stream = as_stream(self._stream, device, self._what)
            for array in self.arrays[: len(self._sends)]:
                check_finite_on_stream(group, self._what, array, self._stream)
        devices = self._devices
        devices.order_exported(device, stream, self.arrays)
        messages = devices.messages(device)
        started = devices.launch(
            lambda: messages.start(
                self._sends, self._recvs, stream, not nonblocking, self._keep, limit
            )
        )
        request = DeviceMessageRequest(
            group,
            started,
            self._result,
            self._what,
            limit,
            device,
            stream,
            first,
            peers=self._peers,
        )
        if nonblocking:
            return request
        request.be_quiet()
        return self._result


def _places(messages: Sequence[Message]) -> list[Place]:
    return [(peer, tag) for _, peer, tag in messages]


def _rows(messages: Sequence[Message]) -> list[tuple[int, int, int, int, int]]:
    return [
        (each.address, each.nbytes, peer, tag, each.dtype.code)
        for each, peer, tag in messages
    ]
