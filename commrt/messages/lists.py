# SPDX-License-Identifier: Apache-2.0
"""Lists of messages that are one operation, checked before any of them starts."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from commrt import _native
from commrt.arrays.host import HostView, view_anywhere
from commrt.arrays.plain import as_array
from commrt.errors import BufferError_, UsageError, shown
from commrt.group.group import Group
from commrt.group.refusals import Place
from commrt.vocabulary.checks import LARGEST_TAG, as_integer, check_flag

__all__ = ["WHAT", "Lists", "Message", "check_lists", "check_tag", "places_in"]

WHAT = "multi_sendrecv"
Message = tuple[HostView, int, int]
"""The buffer, the peer, the tag."""


@dataclass(frozen=True)
class Lists:
    """Messages of one call, checked."""

    leaving: list[Message]
    coming: list[Message]
    replaced: set[int]
    """Sends whose memory a receive of the same call overwrites."""

    @property
    def arrays(self) -> list[HostView]:
        """All arrays, those that leave first."""
        return [array for array, _, _ in (*self.leaving, *self.coming)]

    @property
    def result(self) -> tuple[Any, ...]:
        """The arrays received into, as the caller passed them."""
        return tuple(array.array for array, _, _ in self.coming)

    def refuse_replaced_for_nccl(self) -> None:
        """Raise UsageError where NCCL would write to memory that it still reads."""
        if self.replaced:
            raise UsageError(
                f"{WHAT}: sends[{min(self.replaced)}] is received into, too, and NCCL "
                f"reads while it writes: pass separate arrays, or leave backend out"
            )

    def on_host(
        self, group: Group, places: _native.Places | None = None
    ) -> _native.PersistentMessages:
        """Return the engine's call of these messages; it looks where ``places`` are."""
        return _native.PersistentMessages(
            group,
            _rows(self.leaving, self.replaced),
            _rows(self.coming, set()),
            tuple(array.owner for array, _, _ in self.leaving),
            tuple(array.owner for array, _, _ in self.coming),
            self.result,
            WHAT,
            places,
        )


def check_lists(group: Group, sends: Any, recvs: Any, in_place: Any) -> Lists:
    """Return the messages of both lists; an error names the first that is wrong."""
    in_place = check_flag(WHAT, "in_place", in_place)
    leaving = _messages(group, "sends", "dest", sends)
    coming = _messages(group, "recvs", "source", recvs)
    for index, (buffer, _, _) in enumerate(coming):
        if not buffer.writable:
            raise BufferError_(
                f"{WHAT}: recvs[{index}]: out is read-only: pass a writable array"
            )
    replaced = _replaced([m[0] for m in leaving], [m[0] for m in coming], in_place)
    return Lists(leaving, coming, replaced)


def places_in(given: Any) -> list[Place]:
    """Return peers and tags of a list as the program passed it, where it has such."""
    if not isinstance(given, list | tuple):
        return []
    found = []
    for item in given:
        if isinstance(item, list | tuple) and len(item) in (2, 3):
            found.append((item[1], item[2] if len(item) == 3 else 0))
    return found


def check_tag(what: str, argument: str, tag: Any) -> int:
    """Return a message's tag, or raise UsageError."""
    found = as_integer(tag)
    if found is None or not 0 <= found <= LARGEST_TAG:
        raise UsageError(
            f"{what}: {argument}={shown(tag)} must be an integer in 0..{LARGEST_TAG}"
        )
    return found


def _rows(
    messages: Sequence[Message], replaced: set[int]
) -> list[tuple[int, int, int, int, int, bool]]:
    return [
        (
            *(buffer.address, buffer.nbytes, peer, tag),
            *(buffer.dtype.code, index in replaced),
        )
        for index, (buffer, peer, tag) in enumerate(messages)
    ]


def _messages(group: Group, argument: str, peer_name: str, given: Any) -> list[Message]:
    array_name = "x" if peer_name == "dest" else "out"
    form = f"({array_name}, {peer_name}) or ({array_name}, {peer_name}, tag)"
    if not isinstance(given, list | tuple):
        raise UsageError(f"{WHAT}: {argument}={shown(given)} must be a list of {form}")
    found = []
    for index, item in enumerate(given):
        what = f"{WHAT}: {argument}[{index}]"
        if not isinstance(item, list | tuple) or len(item) not in (2, 3):
            raise UsageError(f"{what} is a {_kind(item)}, expected {form}")
        rank = group.check_rank(what, peer_name, item[1])
        tag = check_tag(what, "tag", item[2] if len(item) == 3 else 0)
        array, named = item[0], f"{what}: {array_name}"
        if peer_name == "dest":
            array = as_array(array, named)
        found.append((view_anywhere(array, named), rank, tag))
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
                f"{WHAT}: recvs[{max(a, b)}]: out overlaps that of "
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
                f"{WHAT}: recvs[{written[at]}]: out overlaps x of sends[{index}]; "
                f"{allowed}"
            )
        found.add(index)
    return found
