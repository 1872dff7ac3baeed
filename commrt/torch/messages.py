# SPDX-License-Identifier: Apache-2.0
"""torch's point-to-point calls: all are asynchronous; torch waits for their Work."""

from __future__ import annotations

from typing import Any

from commrt.messages.from_anyone import FromAnyone
from commrt.torch.calls import Calls
from commrt.torch.operands import given, movable, target
from commrt.torch.options import one
from commrt.torch.profiling import profiled
from commrt.torch.refused_messages import telling_peers_of_batch
from commrt.torch.work import CommrtWork

__all__ = ["Messages"]


class Messages:
    """The point-to-point methods of a process group."""

    calls: Calls

    def send(self, tensors: Any, dst_rank: int, tag: int = 0) -> CommrtWork | None:
        """Send a tensor to a rank of the group."""
        calls = self.calls
        here = [(dst_rank, tag)]
        with calls.raising(), telling_peers_of_batch(calls.comm, sends=here):
            x = given(one("send", tensors), "send: tensor")
            moved = movable(x)
            with profiled("send"):
                request = calls.comm.send(
                    moved, dest=dst_rank, tag=tag, nonblocking=True
                )
        return calls.end(request, False, [x], None)

    def recv(self, tensors: Any, src_rank: int, tag: int = 0) -> CommrtWork | None:
        """Receive a tensor from a rank of the group."""
        calls = self.calls
        here = [(src_rank, tag)]
        with calls.raising(), telling_peers_of_batch(calls.comm, recvs=here):
            x = given(one("recv", tensors), "recv: tensor")
            out, back = target(x)
            with profiled("recv"):
                request = calls.comm.recv(
                    out, source=src_rank, tag=tag, nonblocking=True
                )
        return calls.end(request, False, [x], back)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> CommrtWork | None:
        """Receive a tensor from whichever rank sends one."""
        x = given(one("recv_anysource", tensors), "recv: tensor")
        out, back = target(x)
        calls = self.calls
        calls.refuse_estimate("recv")
        comm = calls.comm

        def receive(source: int) -> Any:
            with profiled("recv"):
                return comm.messages.take(out, source, tag)

        with calls.raising():
            request = FromAnyone(comm, "recv_anysource", receive, tag)
        return calls.end(request, False, [x], back)
