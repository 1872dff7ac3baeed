# SPDX-License-Identifier: Apache-2.0
"""Lists of messages that are one operation: what a multi_sendrecv is given, checked.

Nothing is started here. All of both lists is checked before anything is.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from commrt import _native
from commrt.arrays.device import place_of
from commrt.arrays.host import HostView, view_anywhere
from commrt.errors import BufferError_, UsageError
from commrt.messages.by_nccl import NcclMessages, check_backend
from commrt.messages.on_device import DeviceMessages
from commrt.vocabulary.checks import as_integer, check_flag

if TYPE_CHECKING:
    from commrt.group.group import Guarded

__all__ = ["bind_lists", "check_tag"]

_MAX_TAG = 2**31 - 1
_WHAT = "multi_sendrecv"
_Message = tuple[HostView, int, int]
"""The buffer, the peer, the tag."""


def bind_lists(
    comm: Guarded,
    sends: Any,
    recvs: Any,
    in_place: Any,
    stream: Any = None,
    backend: Any = None,
) -> _native.PersistentMessages | DeviceMessages | NcclMessages:
    """Return the call that sends and receives all of these; an error names the first
    message that is wrong."""
    by_nccl = check_backend(_WHAT, backend)
    in_place = check_flag(_WHAT, "in_place", in_place)
    leaving = _messages(comm, "sends", "dest", sends)
    coming = _messages(comm, "recvs", "source", recvs)
    for index, (buffer, _, _) in enumerate(coming):
        if not buffer.writable:
            raise BufferError_(
                f"{_WHAT}: recvs[{index}]: out is read-only: pass a writable array"
            )
    replaced = _replaced([m[0] for m in leaving], [m[0] for m in coming], in_place)
    whole: Any = comm
    if by_nccl:
        if replaced:
            raise UsageError(
                f"{_WHAT}: sends[{min(replaced)}] is received into, too, and NCCL "
                f"reads while it writes: pass separate arrays, or leave backend out"
            )
        return NcclMessages(whole, leaving, coming, stream)
    result = tuple(buffer.array for buffer, _, _ in coming)
    everything = [buffer for buffer, _, _ in (*leaving, *coming)]
    if place_of(_WHAT, everything, stream) is not None:
        return DeviceMessages(whole, _WHAT, leaving, coming, result, stream)
    return _native.PersistentMessages(
        comm,
        _rows(leaving, replaced),
        _rows(coming, set()),
        tuple(buffer.owner for buffer, _, _ in leaving),
        tuple(buffer.owner for buffer, _, _ in coming),
        result,
        _WHAT,
    )


def check_tag(what: str, argument: str, tag: Any) -> int:
    """Return a message's tag, or raise UsageError."""
    found = as_integer(tag)
    if found is None or not 0 <= found <= _MAX_TAG:
        raise UsageError(
            f"{what}: {argument}={tag!r} must be an integer in 0..{_MAX_TAG}"
        )
    return found


def _rows(
    messages: Sequence[_Message], replaced: set[int]
) -> list[tuple[int, int, int, int, bool]]:
    return [
        (buffer.address, buffer.nbytes, peer, tag, index in replaced)
        for index, (buffer, peer, tag) in enumerate(messages)
    ]


def _messages(
    comm: Guarded, argument: str, peer_name: str, given: Any
) -> list[_Message]:
    array_name = "x" if peer_name == "dest" else "out"
    form = f"({array_name}, {peer_name}) or ({array_name}, {peer_name}, tag)"
    if not isinstance(given, list | tuple):
        raise UsageError(f"{_WHAT}: {argument}={given!r} must be a list of {form}")
    found = []
    for index, item in enumerate(given):
        what = f"{_WHAT}: {argument}[{index}]"
        if not isinstance(item, list | tuple) or len(item) not in (2, 3):
            raise UsageError(f"{what} is a {_kind(item)}, expected {form}")
        rank = comm.check_rank(what, peer_name, item[1])
        tag = check_tag(what, "tag", item[2] if len(item) == 3 else 0)
        found.append((view_anywhere(item[0], f"{what}: {array_name}"), rank, tag))
    return found


def _kind(item: Any) -> str:
    name = type(item).__name__
    return f"{name} of {len(item)}" if isinstance(item, list | tuple) else name


def _end(buffer: HostView) -> int:
    return buffer.address + buffer.nbytes


def _replaced(
    leaving: Sequence[HostView], coming: Sequence[HostView], in_place: bool
) -> set[int]:
    """Return which sends share all of their memory with a receive; UsageError where
    memory is written twice, or read and written otherwise."""
    written = sorted(
        (index for index, buffer in enumerate(coming) if buffer.nbytes),
        key=lambda index: coming[index].address,
    )
    for a, b in pairwise(written):
        if coming[b].address < _end(coming[a]):
            raise UsageError(
                f"{_WHAT}: recvs[{max(a, b)}]: out overlaps that of "
                f"recvs[{min(a, b)}]; pass separate arrays"
            )
    ends = [_end(coming[index]) for index in written]
    found = set()
    for index, buffer in enumerate(leaving):
        at = bisect_right(ends, buffer.address)
        if not buffer.nbytes or at == len(ends):
            continue
        other = coming[written[at]]
        if other.address >= _end(buffer):
            continue
        same = (other.address, other.nbytes) == (buffer.address, buffer.nbytes)
        if not (same and in_place):
            allowed = (
                "in place they must be the same memory"
                if in_place
                else (
                    "pass separate arrays, or in_place=True where what is received "
                    "shall replace what was sent"
                )
            )
            raise UsageError(
                f"{_WHAT}: recvs[{written[at]}]: out overlaps x of sends[{index}]; "
                f"{allowed}"
            )
        found.add(index)
    return found
