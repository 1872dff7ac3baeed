# SPDX-License-Identifier: Apache-2.0
"""Messages bound to their arrays: checked once, sent any number of times."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from commrt import _native
from commrt.arrays.device import place_of
from commrt.arrays.host import overlap
from commrt.arrays.places import places_of
from commrt.calls.bound_call import Binders, BoundCall
from commrt.errors import UsageError
from commrt.group.finite_values import check_finite
from commrt.group.group import Group
from commrt.group.refusals import telling_peers
from commrt.messages.by_nccl import NcclMessages
from commrt.messages.lists import WHAT, Message
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
    group: Group,
    what: str,
    sends: Sequence[Message],
    recvs: Sequence[Message],
    run: Callable[[bool], Any],
) -> Callable[[bool], Any]:
    """Return ``run``, which raises UsageError where an array has other memory."""
    places = places_of(each.array for each, _, _ in (*sends, *recvs))
    leaving = [(peer, tag) for _, peer, tag in sends]
    coming = [(peer, tag) for _, peer, tag in recvs]

    def checked(nonblocking: bool) -> Any:
        group.check_going()
        with telling_peers(group, leaving, coming):
            places.check(what)
            for array, _, _ in sends:
                check_finite(group, what, array)
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
    if place_of(what, [each for each, _, _ in (*sends, *recvs)]) is None:
        return None
    bound = messages.on_device(what, sends, recvs, result)
    checked = _checked(messages.group, what, sends, recvs, bound.run)
    return BoundCall(what, _STAGED, checked)


def _bind_messages(
    messages: Messages, *, sends: Any, recvs: Any, in_place: Any, backend: Any
) -> _native.PersistentMessages | BoundCall:
    """Return all of both lists as one operation."""
    messages.group.check_going()
    bound = messages.listed(sends, recvs, in_place, None, backend, is_bound=True)
    if isinstance(bound, _native.PersistentMessages):
        return bound
    if isinstance(bound, NcclMessages):
        return bound.bound()
    checked = _checked(messages.group, WHAT, bound.sends, bound.recvs, bound.run)
    return BoundCall(WHAT, _STAGED, checked)


def _bind_send(messages: Messages, x: Any, *, dest: Any, tag: Any) -> BoundCall:
    """Return the send of what ``x`` holds at each run."""
    what, group = "send", messages.group
    group.check_going()
    leaving = messages.outgoing(what, x, dest, "dest", tag, "tag")
    on_device = _on_device(messages, what, [leaving], [], None)
    if on_device is not None:
        return on_device
    sent, rank, number = leaving
    to = sent.address, sent.nbytes, rank, number, sent.owner, what

    def run(nonblocking: bool) -> Any:
        return group.send_bytes(*to, nonblocking, group.timeout_s, sent.dtype.code)

    return BoundCall(what, _MESSAGES, _checked(group, what, [leaving], [], run))


def _bind_recv(messages: Messages, out: Any, *, source: Any, tag: Any) -> BoundCall:
    """Return the receive into ``out``."""
    what, group = "recv", messages.group
    group.check_going()
    coming = messages.incoming(what, out, source, "source", tag, "tag")
    on_device = _on_device(messages, what, [], [coming], out)
    if on_device is not None:
        return on_device
    got, rank, number = coming
    place = got.address, got.nbytes, rank, number, got.owner, out, what

    def run(nonblocking: bool) -> Any:
        return group.recv_bytes(*place, nonblocking, group.timeout_s, got.dtype.code)

    return BoundCall(what, _MESSAGES, _checked(group, what, [], [coming], run))


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
    what, group = "sendrecv", messages.group
    group.check_going()
    leaving = messages.outgoing(what, x, dest, "dest", sendtag, "sendtag")
    coming = messages.incoming(what, out, source, "source", recvtag, "recvtag")
    (sent, to, first), (got, of, second) = leaving, coming
    if overlap(sent, got):
        raise UsageError(f"{what}: out overlaps x; pass separate arrays")
    on_device = _on_device(messages, what, [leaving], [coming], out)
    if on_device is not None:
        return on_device
    parts = (sent.address, sent.nbytes, to, first, got.address, got.nbytes, of, second)
    types = sent.dtype.code, got.dtype.code

    def run(nonblocking: bool) -> Any:
        owners, limit = (sent.owner, got.owner), group.timeout_s
        return group.sendrecv_bytes(
            *parts, *owners, out, what, nonblocking, limit, *types
        )

    return BoundCall(what, _MESSAGES, _checked(group, what, [leaving], [coming], run))
