# SPDX-License-Identifier: Apache-2.0
"""Messages bound to their arrays: checked once, sent any number of times."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from commrt import _native
from commrt.arrays.device import place_of
from commrt.arrays.host import HostView, overlap
from commrt.arrays.places import places_of
from commrt.calls.bound_call import Binders, BoundCall
from commrt.errors import UsageError
from commrt.group.finite_values import check_finite
from commrt.messages.lists import WHAT, Message
from commrt.messages.on_device import DeviceMessages
from commrt.messages.point_to_point import Messages

__all__ = ["message_binders"]

_MESSAGES = "messages"
_STAGED = "staged/messages"


def message_binders(messages: Messages) -> Binders:
    """Return the binders of the kinds of messages, by name."""
    return {
        "send": partial(_bind_send, messages),
        "recv": partial(_bind_recv, messages),
        "sendrecv": partial(_bind_sendrecv, messages),
        "multi_sendrecv": partial(_bind_messages, messages),
    }


def _checked(
    what: str, arrays: Sequence[HostView], run: Callable[[bool], Any]
) -> Callable[[bool], Any]:
    """Return ``run``, which raises UsageError where an array has other memory."""
    places = places_of(each.array for each in arrays)

    def checked(nonblocking: bool) -> Any:
        places.check(what)
        return run(nonblocking)

    return checked


def _on_device(
    messages: Messages,
    what: str,
    sends: list[Message],
    recvs: list[Message],
    result: Any,
) -> BoundCall | None:
    """Return the call where its arrays are on a device."""
    arrays = [each for each, _, _ in (*sends, *recvs)]
    if place_of(what, arrays) is None:
        return None
    bound = messages.on_device(what, sends, recvs, result)
    return BoundCall(what, _STAGED, _checked(what, arrays, bound.run))


def _bind_messages(
    messages: Messages, *, sends: Any, recvs: Any, in_place: Any, backend: Any
) -> _native.PersistentMessages | BoundCall:
    """Return all of both lists as one operation."""
    messages.group.check_usable()
    bound = messages.listed(sends, recvs, in_place, None, backend, is_bound=True)
    if isinstance(bound, _native.PersistentMessages):
        return bound
    label = _STAGED if isinstance(bound, DeviceMessages) else bound.label
    return BoundCall(WHAT, label, _checked(WHAT, bound.arrays, bound.run))


def _bind_send(messages: Messages, x: Any, *, dest: Any, tag: Any) -> BoundCall:
    """Return the send of what ``x`` holds at each run."""
    what = "send"
    messages.group.check_usable()
    sent, rank, number = messages.outgoing(what, x, dest, "dest", tag, "tag")
    on_device = _on_device(messages, what, [(sent, rank, number)], [], None)
    if on_device is not None:
        return on_device
    to = sent.address, sent.nbytes, rank, number, sent.owner, what

    def run(nonblocking: bool) -> Any:
        messages.group.check_usable()
        check_finite(messages.group, what, sent)
        limit = messages.group.timeout_s
        return messages.group.send_bytes(*to, nonblocking, limit, sent.dtype.code)

    return BoundCall(what, _MESSAGES, _checked(what, [sent], run))


def _bind_recv(messages: Messages, out: Any, *, source: Any, tag: Any) -> BoundCall:
    """Return the receive into ``out``."""
    what = "recv"
    messages.group.check_usable()
    got, rank, number = messages.incoming(what, out, source, "source", tag, "tag")
    on_device = _on_device(messages, what, [], [(got, rank, number)], out)
    if on_device is not None:
        return on_device
    place = got.address, got.nbytes, rank, number, got.owner, out, what

    def run(nonblocking: bool) -> Any:
        messages.group.check_usable()
        limit = messages.group.timeout_s
        return messages.group.recv_bytes(*place, nonblocking, limit, got.dtype.code)

    return BoundCall(what, _MESSAGES, _checked(what, [got], run))


def _bind_sendrecv(
    messages: Messages,
    x: Any,
    *,
    dest: Any,
    out: Any,
    source: Any,
    sendtag: Any,
    recvtag: Any,
) -> BoundCall:
    """Return both, as one operation."""
    what = "sendrecv"
    messages.group.check_usable()
    sent, to, first = messages.outgoing(what, x, dest, "dest", sendtag, "sendtag")
    got, of, second = messages.incoming(what, out, source, "source", recvtag, "recvtag")
    if overlap(sent, got):
        raise UsageError(f"{what}: out overlaps x; pass separate arrays")
    on_device = _on_device(
        messages, what, [(sent, to, first)], [(got, of, second)], out
    )
    if on_device is not None:
        return on_device
    leaving = sent.address, sent.nbytes, to, first
    coming = got.address, got.nbytes, of, second

    def run(nonblocking: bool) -> Any:
        messages.group.check_usable()
        check_finite(messages.group, what, sent)
        owners = sent.owner, got.owner
        limit, types = messages.group.timeout_s, (sent.dtype.code, got.dtype.code)
        return messages.group.sendrecv_bytes(
            *leaving, *coming, *owners, out, what, nonblocking, limit, *types
        )

    return BoundCall(what, _MESSAGES, _checked(what, [sent, got], run))
