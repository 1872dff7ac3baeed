# SPDX-License-Identifier: Apache-2.0
"""A group in check mode: its calls are compared, as torch made them, before they run.

commrt compares elements, types and whatever else its own calls have. Here come shapes,
lists of tensors and torch's names, which it never sees. Whatever is wrong with a call
then, on one rank or between ranks, is the same error on every rank.

A message has two ends only, and its sender may be elsewhere when it is received. So
a description of the tensor goes with it, and the receiver compares.
"""

from __future__ import annotations

import contextlib
import inspect
import json
from collections.abc import Callable
from contextvars import ContextVar
from datetime import timedelta
from functools import wraps
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from commrt._native import Request, has_memory
from commrt.calls.channel import Channel
from commrt.calls.check_mode import shortened
from commrt.errors import (
    CommError,
    MismatchError,
    TruncationError,
    UsageError,
)
from commrt.group.call_site import call_site
from commrt.messages.from_anyone import FromAnyone
from commrt.torch.described import DESCRIBED, key_of, tensor_in_words
from commrt.torch.errors import as_torch_error
from commrt.torch.group_methods import Collectives
from commrt.torch.messages import Messages
from commrt.torch.operands import given, movable, target
from commrt.torch.options import one
from commrt.torch.refused_messages import telling_peers_of_batch
from commrt.torch.work import CommrtWork, seconds, wait_for

if TYPE_CHECKING:
    from commrt.core import Core

__all__ = ["CheckedCalls"]

_IS_PART: ContextVar[bool] = ContextVar("commrt.torch.checked", default=False)
"""True if a call is part of one that has been compared."""
_HEADER_NBYTES = 256
_TENSORS = ("tensors", "outputs", "inputs", "output", "input")
"""Arguments of collectives that hold tensors."""


def _compared(name: str) -> Any:
    """Return a collective that compares its calls across ranks."""
    method = getattr(Collectives, name)
    bind = _binding(method)

    @wraps(method)
    def compared(self: CheckedCalls, *args: Any, **more: Any) -> Any:
        if _IS_PART.get():
            return method(self, *args, **more)
        called = bind(self, args, more)
        token = _IS_PART.set(True)
        try:
            return self._compared(name, called, method)
        finally:
            _IS_PART.reset(token)

    return compared


def _binding(method: Any) -> Callable[[Any, Any, dict[str, Any]], dict[str, Any]]:
    """Return a function that returns a call's arguments by their names.

    ``inspect`` takes ten times as long, so it has only the calls with keywords and
    the wrong ones.
    """
    signature = inspect.signature(method)
    names = tuple(signature.parameters)[1:]
    needed = tuple(
        each
        for each in names
        if signature.parameters[each].default is inspect.Parameter.empty
    )

    def bind(self: Any, args: Any, more: dict[str, Any]) -> dict[str, Any]:
        if not more and len(needed) <= len(args) <= len(names):
            return dict(zip(names, args, strict=False))
        called = signature.bind(self, *args, **more).arguments
        del called["self"]
        return called

    return bind


class CheckedCalls(Collectives, Messages):
    """A group's methods where its ranks compare their calls."""

    def _compared(
        self, name: str, called: dict[str, Any], method: Callable[..., Any]
    ) -> Any:
        comm, limit = self.calls.comm, _limit(called)
        checker = comm.checker
        assert checker is not None

        def fields() -> dict[str, Any]:
            return {
                key: shortened(value) if isinstance(value, str) else value
                for key, value in DESCRIBED[name](called).compared().items()
            }

        def in_words() -> list[str]:
            return DESCRIBED[name](called).call()

        try:
            try:
                comm.check_usable()
                _take_memory(name, called)
                said = checker.said(key_of(name, called), fields)
                checker.compare_said(said, limit, in_words)
            except UsageError as error:
                comm.comparison.tell(name, error, limit)
                raise
        except CommError:
            with self.calls.raising():
                raise
        try:
            return method(self, **called)
        except MismatchError as error:
            raise as_torch_error(checker.with_calls(error, in_words())) from error
        except UsageError as error:
            with self.calls.raising():
                comm.comparison.tell(said.fields["operation"], error, limit)
            raise

    # -- messages ----------------------------------------------------------------

    def send(self, tensors: Any, dst_rank: int, tag: int = 0) -> CommrtWork | None:
        """Send a tensor, and what it is."""
        calls, channel = self.calls, self._channel
        with calls.raising():
            with telling_peers_of_batch(calls.comm, channel, sends=[(dst_rank, tag)]):
                x = given(one("send", tensors), "send: tensor")
                header, moved = _header(x), movable(x)
                data = calls.comm.send(moved, dest=dst_rank, tag=tag, nonblocking=True)
            said = channel.send_bytes(
                header.ctypes.data,
                header.nbytes,
                dst_rank,
                tag,
                header,
                "send",
                True,
                channel.timeout_s,
            )
        return calls.end(_Sent(data, said), False, [x], None)

    def recv(self, tensors: Any, src_rank: int, tag: int = 0) -> CommrtWork | None:
        """Receive a tensor, if it is what the sender sends."""
        calls, channel = self.calls, self._channel
        with calls.raising():
            with telling_peers_of_batch(calls.comm, channel, recvs=[(src_rank, tag)]):
                x = given(one("recv", tensors), "recv: tensor")
                out, back = target(x)
                data = calls.comm.recv(out, source=src_rank, tag=tag, nonblocking=True)
            request = _Received(channel, calls.comm, x, data, src_rank, tag)
        return calls.end(request, False, [x], back)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> CommrtWork | None:
        """Receive a tensor from whichever rank sends one, if it is the same there."""
        x = given(one("recv_anysource", tensors), "recv: tensor")
        out, back = target(x)
        calls, channel, site = self.calls, self._channel, call_site()

        def receive(source: int) -> _Received:
            data = calls.comm.messages.take(out, source, tag)
            return _Received(channel, calls.comm, x, data, source, tag, site)

        with calls.raising():
            request = FromAnyone(calls.comm, "recv_anysource", receive, tag)
        return calls.end(request, False, [x], back)

    @property
    def _channel(self) -> Channel:
        checker = self.calls.comm.checker
        assert checker is not None
        return checker.channel


for _name in DESCRIBED:
    setattr(CheckedCalls, _name, _compared(_name))


def _take_memory(name: str, called: dict[str, Any]) -> None:
    """Replace the tensors among a call's arguments by those that have their memory."""
    for argument, value in called.items():
        if argument in _TENSORS and not _are_plain(value):
            called[argument] = _memory_of(value, f"{name}: {argument}")


def _are_plain(value: Any) -> bool:
    """Return whether a tensor, or each of a list, has its memory itself."""
    return all(map(has_memory, value)) if type(value) is list else has_memory(value)


def _memory_of(value: Any, what: str) -> Any:
    if isinstance(value, list | tuple):
        return [_memory_of(each, f"{what}[{i}]") for i, each in enumerate(value)]
    return value if value is None else given(value, what)


def _limit(called: Any) -> float | None:
    """Return a call's own limit in seconds, None where it has none."""
    timeout = called.get("timeout")
    if timeout is None:
        timeout = getattr(called.get("opts", called.get("root")), "timeout", None)
    return seconds(timeout) if isinstance(timeout, timedelta) else None


# -- messages with a description -------------------------------------------------


def _quiet(*requests: Any) -> None:
    """Let requests be dropped, as torch's own code does."""
    for request in requests:
        if type(request) is Request:
            request.be_quiet()


def _header(x: torch.Tensor) -> np.ndarray[Any, Any]:
    said = {
        "like": _likeness(x),
        "words": shortened(tensor_in_words(x)),
        "site": call_site(),
    }
    text = json.dumps(said).encode()
    header = np.zeros(_HEADER_NBYTES, np.uint8)
    header[: len(text)] = np.frombuffer(text, np.uint8)
    return header


def _likeness(x: torch.Tensor) -> str:
    """Return the facts that both ends must share: type and elements, not shape."""
    return f"{x.dtype} {x.numel()}"


class _Sent:
    """A message and its description, as one request."""

    def __init__(self, *requests: Any) -> None:
        self._requests = requests
        _quiet(*requests)

    def test(self) -> bool:
        return all([request.test() for request in self._requests])

    def wait(self, *, timeout_s: float | None = None) -> None:
        for request in self._requests:
            wait_for(request, timeout_s)

    @property
    def timeout_s(self) -> float:
        """Default limit of its waits, in seconds."""
        return float(max(request.timeout_s for request in self._requests))

    def raise_if_late(self, limit_s: float) -> None:
        """Raise what a wait that began so long ago would raise, unless it has ended."""
        for request in self._requests:
            request.raise_if_late(limit_s)


_SAID_BETTER = (MismatchError, TruncationError)
"""Errors of the engine that the description says better, which comes besides."""


class _Received:
    """A message that is received and compared with its description, as a request."""

    def __init__(
        self,
        channel: Channel,
        comm: Core,
        x: torch.Tensor,
        data: Any,
        source: int,
        tag: int,
        site: str | None = None,
    ) -> None:
        """Receive the description of what the request ``data`` receives into ``x``."""
        self._what = f"recv on {comm.name}, rank {comm.rank}"
        self._x = x
        self._said = np.empty(_HEADER_NBYTES, np.uint8)
        self._tag = tag
        self._site = site or call_site()
        self._data = data
        said = self._said
        self._words = channel.recv_bytes(
            said.ctypes.data,
            said.nbytes,
            source,
            tag,
            said,
            said,
            "recv",
            True,
            channel.timeout_s,
        )
        _quiet(self._data, self._words)

    @property
    def source(self) -> int:
        """The rank that sent the message."""
        return int(self._data.source)

    def test(self) -> bool:
        """Run a little progress; True once both have come."""
        if not (self._words.test() and self._has_come()):
            return False
        self._compare()
        return True

    def _has_come(self) -> bool:
        try:
            return bool(self._data.test())
        except _SAID_BETTER:
            return True

    def wait(self, *, timeout_s: float | None = None) -> None:
        """Return once both have come and fit."""
        with contextlib.suppress(*_SAID_BETTER):
            wait_for(self._data, timeout_s)
        self._words.wait(timeout_s=timeout_s)
        self._compare()

    @property
    def timeout_s(self) -> float:
        """Default limit of its waits, in seconds."""
        return float(max(self._data.timeout_s, self._words.timeout_s))

    def raise_if_late(self, limit_s: float) -> None:
        """Raise what a wait that began so long ago would raise, unless it has ended."""
        for request in (self._data, self._words):
            request.raise_if_late(limit_s)

    def _compare(self) -> None:
        said = json.loads(self._said.tobytes().rstrip(b"\0"))
        if said["like"] != _likeness(self._x):
            raise MismatchError(
                f"{self._what}: rank {self.source} sends {said['words']} with tag "
                f"{self._tag} (at {said['site']}), and it is received into "
                f"{tensor_in_words(self._x)} (at {self._site}): both need the same "
                f"type and number of elements"
            )
