# SPDX-License-Identifier: Apache-2.0
"""torch's point-to-point calls: all are asynchronous; torch waits for their Work."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from commrt import _native
from commrt.errors import TimeoutError_
from commrt.torch.calls import Calls
from commrt.torch.operands import given, movable, target
from commrt.torch.options import one
from commrt.torch.profiling import profiled
from commrt.torch.work import CommrtWork
from commrt.vocabulary.limits import deadline_after

if TYPE_CHECKING:
    from commrt.core import Core

__all__ = ["FromAnyone", "Messages"]


class Messages:
    """The point-to-point methods of a process group."""

    calls: Calls

    def send(self, tensors: Any, dst_rank: int, tag: int = 0) -> CommrtWork | None:
        """Send a tensor to a rank of the group."""
        x = given(one("send", tensors), "send: tensor")
        calls = self.calls
        with calls.raising(), profiled("send"):
            request = calls.comm.send(
                movable(x), dest=dst_rank, tag=tag, nonblocking=True
            )
        return calls.end(request, False, [x], None)

    def recv(self, tensors: Any, src_rank: int, tag: int = 0) -> CommrtWork | None:
        """Receive a tensor from a rank of the group."""
        x = given(one("recv", tensors), "recv: tensor")
        out, back = target(x)
        calls = self.calls
        with calls.raising(), profiled("recv"):
            request = calls.comm.recv(out, source=src_rank, tag=tag, nonblocking=True)
        return calls.end(request, False, [x], back)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> CommrtWork | None:
        """Receive a tensor from whichever rank sends one."""
        x = given(one("recv_anysource", tensors), "recv: tensor")
        out, back = target(x)
        calls = self.calls
        comm = calls.comm

        def receive(source: int) -> Any:
            with profiled("recv"):
                return comm.recv(out, source=source, tag=tag, nonblocking=True)

        with calls.raising():
            request = FromAnyone(comm, receive, tag)
        return calls.end(request, False, [x], back)


class FromAnyone:
    """A receive from any rank; has the methods of a request that a Work uses.

    commrt's receives name their source. So this one looks whose message waits, and
    receives that one.
    """

    def __init__(self, comm: Core, receive: Callable[[int], Any], tag: int) -> None:
        """Begin to look.

        Args:
            comm: whose messages.
            receive: starts to receive from a rank; returns a request.
            tag: of the message.
        """
        self._comm = comm
        self._start = receive
        self._tag = tag
        self._receive: Any = None
        self._lock = threading.Lock()
        self._begin()

    @property
    def source(self) -> int:
        """The rank that sent it; -1 until one has."""
        return -1 if self._receive is None else int(self._receive.source)

    def test(self) -> bool:
        """Run a little progress; True once complete."""
        return self._begin() and bool(self._receive.test())

    def wait(self, *, timeout_s: float | None = None) -> Any:
        """Return the tensor once a message has come."""
        limit = self._comm.timeout_s if timeout_s is None else timeout_s
        deadline = deadline_after(limit)
        backoff = _native.Backoff(self._comm.world.engine)
        while not self._begin():
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise self._late(limit)
            if self._comm.is_relayed:
                backoff.rest(left_s)  # threads of this process carry the message
            else:
                backoff.pause(left_s)
        left_s = max(1e-3, deadline - time.monotonic())
        return self._receive.wait(timeout_s=left_s)

    @property
    def timeout_s(self) -> float:
        """Default limit of its waits, in seconds."""
        return self._comm.timeout_s

    def raise_if_late(self, limit_s: float) -> None:
        """Raise what a wait that began so long ago would raise, unless it has ended."""
        if not self._begin():
            raise self._late(limit_s)
        self._receive.raise_if_late(limit_s)

    def _late(self, limit_s: float) -> TimeoutError_:
        return TimeoutError_(
            f"recv_anysource on {self._comm.name}, rank {self._comm.rank}: no rank has "
            f"sent a message with tag {self._tag} within {limit_s:g} s"
        )

    def _begin(self) -> bool:
        """Begin to receive if there is a message; True once that has happened."""
        with self._lock:  # a future's thread looks, too
            if self._receive is None:
                comm = self._comm
                comm.check_usable()
                comm.world.engine.step()
                # Start at the next rank, so that no rank's messages always come first.
                source = comm.waiting_source(self._tag, (comm.rank + 1) % comm.size)
                if source < 0:
                    return False
                self._receive = self._start(source)
        return True
