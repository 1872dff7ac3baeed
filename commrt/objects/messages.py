# SPDX-License-Identifier: Apache-2.0
"""Messages of one object: a first one with its head, then one for each large array.

Their tags are below zero, where no message of an array is. So ``recv`` never gets an
object, and ``recv_object`` nothing else.
"""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt

from commrt import _native
from commrt.errors import (
    CommError,
    MemoryError_,
    MismatchError,
    ObjectError,
    RefusedError,
    UsageError,
    shown,
)
from commrt.group.group import Group
from commrt.group.stepped import SteppedRequest, Steps
from commrt.messages.from_anyone import WaitingMessage, probe
from commrt.objects.packing import Packed, Refusal, memory_for_large, pack, unpack
from commrt.vocabulary.checks import as_integer
from commrt.vocabulary.limits import deadline_after

__all__ = ["IN_STEP", "ObjectMessages", "check_object_tag"]

IN_STEP = (MemoryError_, MismatchError, ObjectError, UsageError)
"""Errors of a call with objects after which its ranks can make the next one."""

_FIRST_TAG = -16
"""The tag of objects with tag 0; the next ones are below."""
_MOST_TAG = 2**31 - 17
_NO_OBJECT = np.array([-1])
"""What stands before the reason, in the place of the number of an object's parts."""
_NO_MEMORY = np.array([-2])
"""That number where the sender has no memory to pickle the object."""
Bytes = npt.NDArray[np.uint8]


class ObjectMessages:
    """Sends and receives objects of one group."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._sending = threading.Lock()
        self._receiving = threading.Lock()
        self._unfinished: SteppedRequest | None = None
        self._kept: dict[tuple[int, int], Bytes] = {}
        """Heads of objects for whose large arrays there was no memory, by source and
        tag: the next receive goes on with them."""

    def send(self, x: Any, dest: int, tag: int, limit_s: float) -> SteppedRequest:
        """Start to send an object; the receiver is told if it cannot be pickled."""
        found = pack(x)
        number = _FIRST_TAG - tag
        what = f"send_object to rank {dest}, tag {tag}, on {self._group.name}"
        with self._sending:  # so that no other thread's messages come in between
            requests = self._start(found, dest, number, limit_s)
        if isinstance(found, Refusal):
            for request in requests:
                request.be_quiet()
            kind: type[CommError] = MemoryError_ if found.for_memory else UsageError
            raise kind(f"{what}: {found.text}; rank {dest} is told") from found.cause

        def steps() -> Steps[None]:
            yield requests

        return SteppedRequest(steps(), what, "send_object", limit_s, _nothing)

    def _start(
        self, found: Packed | Refusal, dest: int, tag: int, limit_s: float
    ) -> list[_native.Request]:
        if isinstance(found, Refusal):
            mark = _NO_MEMORY if found.for_memory else _NO_OBJECT
            arrays = [np.concatenate([mark.view(np.uint8), found.head])]
        else:
            arrays = [found.head, *found.large]
        return [
            self._group.send_bytes(
                *(each.ctypes.data, each.nbytes, dest, tag, each, "send_object"),
                True,
                limit_s,
            )
            for each in arrays
        ]

    def recv(self, source: int | None, tag: int, limit_s: float) -> tuple[Any, int]:
        """Return an object and who sent it, once one has come."""
        group, number = self._group, _FIRST_TAG - tag
        deadline, left_s = deadline_after(limit_s), limit_s
        while True:
            if self._kept_from(source, number) is None:
                probe(
                    *(group, source, number, left_s),
                    what="recv_object",
                    written_tag=tag,
                )
            left_s = max(1e-3, deadline - time.monotonic())
            with self._receiving:
                if self._unfinished is not None:
                    with suppress(*IN_STEP):  # which its own call has raised
                        self._unfinished.wait(timeout_s=left_s)
                found = self._kept_from(source, number)
                if found is None:  # large arrays of a kept one must not pass for heads
                    found = probe(group, source, number, None)
                if found is not None:  # else another thread has taken it
                    return self._take(found, tag, left_s), found.source

    def _kept_from(self, source: int | None, tag: int) -> WaitingMessage | None:
        """Return the message of a kept head that a receive asks for."""
        for (rank, kept_tag), head in [*self._kept.items()]:
            if kept_tag == tag and source in (None, rank):
                return WaitingMessage(rank, tag, head.nbytes, "")
        return None

    def _take(self, found: WaitingMessage, tag: int, limit_s: float) -> Any:
        where = f"from rank {found.source}, tag {tag}, on {self._group.name}"
        what = f"recv_object {where}"
        self._unfinished = SteppedRequest(
            self._steps(found, what, limit_s), what, "recv_object", limit_s, _nothing
        )
        try:
            return self._unfinished.wait()
        finally:
            if self._unfinished.done:
                self._unfinished = None

    def _steps(self, found: WaitingMessage, what: str, limit_s: float) -> Steps[Any]:
        def coming(array: Bytes) -> _native.Request:
            where = array.ctypes.data, array.nbytes, found.source, found.tag
            owners = array, array, "recv_object"
            request: _native.Request = self._group.recv_bytes(
                *where, *owners, True, limit_s
            )
            return request

        key = found.source, found.tag
        head = self._kept.pop(key, None)
        try:
            if head is None:
                head = np.empty(found.nbytes, np.uint8)
                yield [coming(head)]
                _raise_reason(head, what, found.source)
            large = memory_for_large(head)
        except MemoryError as error:
            if head is not None:
                self._kept[key] = head
            raise MemoryError_(
                f"{what}: there is no memory for the object that comes ({error}); it "
                f"can still be received: free memory, and call recv_object again"
            ) from error
        yield [coming(each) for each in large]
        return unpack(what, head, large)


def _raise_reason(head: Bytes, what: str, source: int) -> None:
    """Raise the reason for which the sender has sent no object, if it says one."""
    mark = head[: _NO_OBJECT.nbytes].view(np.int64)[0]
    if mark in (_NO_OBJECT[0], _NO_MEMORY[0]):
        text = bytes(head[_NO_OBJECT.nbytes :]).decode(errors="replace")
        kind = UsageError if mark == _NO_OBJECT[0] else RefusedError
        raise kind(f"{what}: {text} on rank {source}")


def check_object_tag(what: str, tag: Any) -> int:
    """Return the tag of an object, or raise UsageError."""
    found = as_integer(tag)
    if found is None or not 0 <= found <= _MOST_TAG:
        raise UsageError(
            f"{what}: tag={shown(tag)} must be an integer in 0..{_MOST_TAG}"
        )
    return found


def _nothing(_: BaseException | None) -> None:
    """Do nothing at the end of an operation."""
