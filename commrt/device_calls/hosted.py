# SPDX-License-Identifier: Apache-2.0
"""Calls on device arrays whose work is the host's: sparse sums and compression.

How long their results are, or what is kept of them, is known on the host alone. So the
arrays are copied to the host first, for which the call blocks until the caller's stream
has come to it; the host's call runs on the copies; and ``wait()`` blocks until that is
done, gives the device what came of it, and lets a stream wait for that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from commrt.arrays.device import as_stream, current_stream_of, is_on_device
from commrt.arrays.host import HostView, empty_like_array, numpy_type, view_anywhere
from commrt.device_calls.messages import place_of
from commrt.errors import UsageError

if TYPE_CHECKING:
    from commrt.comm import Communicator

Rebuild = Callable[[Any, Callable[[Any], Any]], Any]
"""The result on the device, given the host's and what puts an array there."""

__all__ = ["HostCopies", "HostedRequest", "holds_device_arrays", "run_hosted"]


def _as_it_is(found: Any, put: Callable[[Any], Any]) -> Any:
    return put(found)


class HostCopies:
    """Copies between a device and the host that the host waits for; see ``staging``."""

    def __init__(self, device: Any) -> None:
        self._device = device
        self._stream = device.stream_create(0)
        self._ready, self._copied = device.event_create(), device.event_create()
        self._pinned, self._room = 0, 0

    def fetch(self, views: Sequence[HostView], stream: int) -> list[Any]:
        """Return copies of arrays as they are once ``stream`` has come here."""
        device = self._device
        self._follow(stream)
        found = []
        for each in views:
            kept = np.empty(each.shape, numpy_type(each))
            if each.nbytes:
                room = self._memory(each.nbytes)
                device.memcpy_async(room, each.address, each.nbytes, self._stream)
                device.stream_synchronize(self._stream)
                raw = device.read(room, each.nbytes)
                kept.reshape(-1).view(np.uint8)[:] = np.frombuffer(raw, np.uint8)
            kept.flags.writeable = each.writable
            found.append(kept)
        return found

    def store(self, target: HostView, values: Any, stream: int) -> None:
        """Copy values to an array behind ``stream``, which waits for it."""
        device = self._device
        if not target.nbytes:
            return
        room = self._memory(target.nbytes)
        device.write(room, np.ascontiguousarray(values).tobytes())
        self._follow(stream)
        device.memcpy_async(target.address, room, target.nbytes, self._stream)
        device.event_record(self._copied, self._stream)
        device.stream_wait_event(stream, self._copied)

    def wait_in(self, stream: int) -> None:
        """Let a stream wait for what was stored so far."""
        self._device.stream_wait_event(stream, self._copied)

    def synchronize(self) -> None:
        """Block the host until that is done."""
        self._device.stream_synchronize(self._stream)

    def _follow(self, stream: int) -> None:
        self._device.event_record(self._ready, stream)
        self._device.stream_wait_event(self._stream, self._ready)

    def _memory(self, nbytes: int) -> int:
        """Return pinned memory that nothing uses any more."""
        self._device.stream_synchronize(self._stream)
        if nbytes > self._room:
            if self._pinned:
                self._device.pinned_free(self._pinned)
            self._room = max(2 * self._room, nbytes)
            self._pinned = self._device.pinned_alloc(self._room)
        return self._pinned

    def close(self) -> None:
        """Give streams, events and memory back; idempotent."""
        device, self._device = self._device, None
        if device is None:
            return
        device.stream_destroy(self._stream)
        device.event_destroy(self._ready)
        device.event_destroy(self._copied)
        if self._pinned:
            device.pinned_free(self._pinned)


@dataclass(frozen=True)
class _Pair:
    """An array on a device, and its copy on the host."""

    given: HostView
    copy: Any


def holds_device_arrays(*arguments: Any) -> bool:
    """Return whether any of a call's arguments is, or consists of, device arrays."""
    return any(
        holds_device_arrays(*each)
        if isinstance(each, tuple | list)
        else is_on_device(each)
        for each in arguments
        if each is not None and not isinstance(each, str | int | float | np.ndarray)
    )


def run_hosted(
    comm: Communicator,
    what: str,
    arguments: dict[str, Any],
    call: Callable[..., Any],
    *,
    written: Sequence[str] = (),
    rebuild: Rebuild = _as_it_is,
    nonblocking: bool = False,
    stream: Any = None,
) -> Any:
    """Run a call of the host on copies of its arrays.

    Args:
        comm: the communicator.
        what: the operation.
        arguments: its arguments by name; device arrays among them are copied.
        call: starts the host's call, given the arguments and ``nonblocking=True``.
        written: names of arguments that it writes to, besides its result.
        rebuild: makes the result of that of the host, given what puts an array of it
            on the device.
        nonblocking: return the request.
        stream: that the call is ordered by; the current one by itself.
    """
    comm._check_usable()
    arrays: dict[str, HostView] = {}
    plain = {
        name: _seen(f"{what}: {name}", given, arrays)
        for name, given in arguments.items()
    }
    views = list({id(each.array): each for each in arrays.values()}.values())
    device = place_of(what, views)
    _check_apart(what, views)
    first = views[0].array
    if stream is None:
        handle = current_stream_of(first, device)
    else:
        handle = as_stream(stream, device, what)
    staging = comm._staging
    staging.stager(device).refuse_capture(handle)
    staging.order_exported(device, handle, views)
    copies = staging.copies(device).fetch(views, handle)
    pairs = [_Pair(*pair) for pair in zip(views, copies, strict=True)]
    request = call(**{name: _swapped(each, pairs) for name, each in plain.items()})
    back = [p for name in written for p in pairs if p.given.array is arguments[name]]
    hosted = HostedRequest(comm, request, device, pairs, back, rebuild)
    return hosted if nonblocking else hosted.wait(stream=handle)


def _seen(what: str, given: Any, arrays: dict[str, HostView]) -> Any:
    """Return an argument, with its device arrays noted."""
    if isinstance(given, tuple | list):
        parts = [_seen(f"{what}[{i}]", each, arrays) for i, each in enumerate(given)]
        return tuple(parts)
    if given is None or isinstance(given, int):
        return given
    if not is_on_device(given):
        raise UsageError(
            f"{what} is in host memory, and others of its arrays are on a device; pass "
            f"arrays of one place"
        )
    arrays[what] = view_anywhere(given, what)
    return given


def _swapped(given: Any, pairs: Sequence[_Pair]) -> Any:
    """Return an argument with copies in the place of device arrays."""
    if isinstance(given, tuple):
        return tuple(_swapped(each, pairs) for each in given)
    for pair in pairs:
        if pair.given.array is given:
            return pair.copy
    return given


def _check_apart(what: str, views: Sequence[HostView]) -> None:
    for index, one in enumerate(views):
        for other in views[:index]:
            low, high = one.address, one.address + one.nbytes
            if low < other.address + other.nbytes and other.address < high:
                raise UsageError(
                    f"{what}: two of its arrays overlap: pass separate ones, or the "
                    f"very same"
                )


class HostedRequest:
    """One started call whose work is the host's; has the methods of ``Request``."""

    received_nbytes = -1
    source = -1

    def __init__(
        self,
        comm: Communicator,
        request: Any,
        device: Any,
        pairs: Sequence[_Pair],
        back: Sequence[_Pair],
        rebuild: Rebuild,
    ) -> None:
        self._comm = comm
        self._request = request
        self._on = device
        self._pairs, self._back, self._rebuild = pairs, back, rebuild
        self._like = pairs[-1].given
        self._given = False
        self._result: Any = None

    def wait(self, *, stream: Any = None, timeout_s: float | None = None) -> Any:
        """Block the host until its part is done, then let a stream wait for the rest.

        Returns the output; raises the operation's error.
        """
        what = self.operation
        array = self._like.array
        if stream is None:
            handle = current_stream_of(array, self._on)
        else:
            handle = as_stream(stream, self._on, what)
        found = self._request.wait(timeout_s=timeout_s)
        staging = self._comm._staging
        staging.stager(self._on).refuse_capture(handle)
        if not self._given:
            copies = staging.copies(self._on)
            for pair in self._back:
                copies.store(pair.given, pair.copy, handle)
            self._result = self._rebuild(
                found, lambda array: self._output(array, copies, handle)
            )
            self._given = True
        else:
            staging.copies(self._on).wait_in(handle)
        return self._result

    def synchronize(self, *, timeout_s: float | None = None) -> Any:
        """Block the host until the operation is complete; return the output."""
        result = self.wait(timeout_s=timeout_s)
        self._comm._staging.copies(self._on).synchronize()
        return result

    def test(self) -> bool:
        """Run a little progress; True once the host's part is done."""
        done: bool = self._request.test()
        return done

    @property
    def done(self) -> bool:
        """Whether the host's part has ended, without progress."""
        return bool(self._request.done)

    @property
    def operation(self) -> str:
        """Name of the operation."""
        return str(self._request.operation)

    @property
    def timeout_s(self) -> float:
        """Default limit of its waits, in seconds."""
        return float(self._request.timeout_s)

    def _output(self, found: Any, copies: HostCopies, stream: int) -> Any:
        """Return an array that the host's call returned, on the device."""
        for pair in self._pairs:
            if pair.copy is found:
                if pair not in self._back:
                    copies.store(pair.given, found, stream)
                return pair.given.array
        made = empty_like_array(self._like, found.shape, found.dtype.name)
        copies.store(view_anywhere(made, "the result"), found, stream)
        return made

    def __repr__(self) -> str:
        return f"<commrt.HostedRequest by {self._request!r}>"

    def __bool__(self) -> bool:
        raise TypeError(
            f"the truth of a request is not its completion: call test() or wait() on "
            f"{self!r}"
        )
