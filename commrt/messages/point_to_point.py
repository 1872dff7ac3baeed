# SPDX-License-Identifier: Apache-2.0
"""Messages between two ranks, and lists of them: send, recv, sendrecv, multi_sendrecv.

What stands here runs for calls that ``calls/p2p_operation.cpp`` does not recognise at
a glance, and says what is wrong with a call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from commrt import _native
from commrt.arrays.device import place_of
from commrt.arrays.host import HostView, overlap, view_anywhere
from commrt.device_calls.requests import DeviceRequest
from commrt.errors import BufferError_, UsageError
from commrt.group.group import Guarded
from commrt.messages.by_nccl import NcclMessages
from commrt.messages.lists import bind_lists, check_tag
from commrt.messages.on_device import DeviceMessages
from commrt.request import Request
from commrt.vocabulary.checks import check_flag, check_timeout

__all__ = ["PointToPoint"]


class PointToPoint(Guarded):
    """The point-to-point methods of a communicator."""

    def send(
        self,
        x: Any,
        *,
        dest: int,
        tag: int = 0,
        nonblocking: bool = False,
        timeout_s: float | None = None,
        stream: Any = None,
    ) -> Request | DeviceRequest | None:
        """Send ``x`` to rank ``dest``; a receive there must ask for the same tag.

        A blocking send returns when ``x`` may be changed. For a message of up to 16 KiB
        that is before the receive has been called, unless ``dest`` holds 3 MiB or more
        of such messages that it has not received; for a longer one it is after. Of an
        array on a device it is for ``stream`` to wait, until the array is on the host.
        """
        self.check_usable()
        nonblocking = check_flag("send", "nonblocking", nonblocking)
        limit = self.limit("send", timeout_s)
        buffer, dest, tag = self._outgoing("send", x, dest, "dest", tag, "tag")
        if place_of("send", [buffer], stream) is not None:
            leaving = [(buffer, dest, tag)]
            given: DeviceRequest | None = self._on_device(
                "send", leaving, [], None, stream, nonblocking, limit
            )
            return given
        started: Request | None = self.send_bytes(
            buffer.address,
            buffer.nbytes,
            dest,
            tag,
            buffer.owner,
            "send",
            nonblocking,
            limit,
        )
        return started

    def recv(
        self,
        out: Any,
        *,
        source: int,
        tag: int = 0,
        nonblocking: bool = False,
        timeout_s: float | None = None,
        stream: Any = None,
    ) -> Any:
        """Receive into ``out`` from rank ``source``; return ``out``.

        A message shorter than ``out`` fills its beginning; how much came stands in
        the request's ``received_nbytes``, so pass ``nonblocking=True`` where lengths
        vary. A longer message raises TruncationError.
        """
        self.check_usable()
        nonblocking = check_flag("recv", "nonblocking", nonblocking)
        limit = self.limit("recv", timeout_s)
        buffer, source, tag = self._incoming("recv", out, source, "source", tag, "tag")
        if place_of("recv", [buffer], stream) is not None:
            coming = [(buffer, source, tag)]
            return self._on_device("recv", [], coming, out, stream, nonblocking, limit)
        return self.recv_bytes(
            buffer.address,
            buffer.nbytes,
            source,
            tag,
            buffer.owner,
            out,
            "recv",
            nonblocking,
            limit,
        )

    def sendrecv(
        self,
        x: Any,
        *,
        dest: int,
        out: Any,
        source: int,
        sendtag: int = 0,
        recvtag: int = 0,
        nonblocking: bool = False,
        timeout_s: float | None = None,
        stream: Any = None,
    ) -> Any:
        """Send ``x`` to ``dest`` and receive ``out`` from ``source``; return ``out``.

        The two arrays must not overlap. It ends, nonblocking as one request, when both
        messages have; an error says which of them failed, or that both did.
        """
        self.check_usable()
        nonblocking = check_flag("sendrecv", "nonblocking", nonblocking)
        limit = self.limit("sendrecv", timeout_s)
        # Both sides are checked before either is started.
        sent, dest, sendtag = self._outgoing(
            "sendrecv", x, dest, "dest", sendtag, "sendtag"
        )
        got, source, recvtag = self._incoming(
            "sendrecv", out, source, "source", recvtag, "recvtag"
        )
        if overlap(sent, got):
            raise UsageError("sendrecv: out overlaps x; pass separate arrays")
        if place_of("sendrecv", [sent, got], stream) is not None:
            leaving, coming = [(sent, dest, sendtag)], [(got, source, recvtag)]
            return self._on_device(
                "sendrecv", leaving, coming, out, stream, nonblocking, limit
            )
        return self.sendrecv_bytes(
            sent.address,
            sent.nbytes,
            dest,
            sendtag,
            got.address,
            got.nbytes,
            source,
            recvtag,
            sent.owner,
            got.owner,
            out,
            "sendrecv",
            nonblocking,
            limit,
        )

    def multi_sendrecv(
        self,
        *,
        sends: Sequence[tuple[Any, ...]] = (),
        recvs: Sequence[tuple[Any, ...]] = (),
        in_place: bool = False,
        nonblocking: bool = False,
        timeout_s: float | None = None,
        stream: Any = None,
        backend: str | None = None,
    ) -> Any:
        """Send and receive any number of messages as one operation.

            left, right = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
            comm.multi_sendrecv(
                sends=[(a, left), (b, right, 7)], recvs=[(c, left, 7), (d, right)]
            )

        Any order of the lists is free of deadlock. Each message is an ordinary one: it
        meets a ``send``, ``recv``, ``sendrecv`` or ``multi_sendrecv`` of its peer, and
        messages of one peer and tag keep the order of the list. It ends, nonblocking as
        one request, when all messages have; an error says which of them failed.

        Args:
            sends: a list of (x, dest) or (x, dest, tag); arrays may overlap.
            recvs: a list of (out, source) or (out, source, tag); no two overlap.
            in_place: a receive may go to the very memory that a send leaves from: what
                comes replaces what went. A message that has to wait is copied for it.
            backend: ``"nccl"`` makes one group of NCCL's sends and receives of it, of
                arrays on devices. Then it is a collective: all ranks make the call at
                the same place, with lists that may be empty, and messages meet within
                it, the k-th to a rank the k-th from it there, of equal lengths,
                without tags.

        Returns:
            The arrays received into, in the order of ``recvs``. A request says by
            ``each_received_nbytes`` how much came.
        """
        self.check_usable()
        nonblocking = check_flag("multi_sendrecv", "nonblocking", nonblocking)
        limit = self.limit("multi_sendrecv", timeout_s)
        bound = bind_lists(self, sends, recvs, in_place, stream, backend)
        if isinstance(bound, DeviceMessages | NcclMessages):
            return bound.run(nonblocking, limit)
        return bound.run(nonblocking, limit)

    def _on_device(
        self,
        what: str,
        sends: list[tuple[HostView, int, int]],
        recvs: list[tuple[HostView, int, int]],
        result: Any,
        stream: Any,
        nonblocking: bool,
        limit: float,
    ) -> Any:
        whole: Any = self  # a communicator
        bound = DeviceMessages(whole, what, sends, recvs, result, stream)
        return bound.run(nonblocking, limit)

    def limit(self, what: str, timeout_s: float | None) -> float:
        return self.timeout_s if timeout_s is None else check_timeout(what, timeout_s)

    def _outgoing(
        self, what: str, x: Any, dest: Any, dest_name: str, tag: Any, tag_name: str
    ) -> tuple[HostView, int, int]:
        """Return the buffer, the peer and the tag, all checked."""
        rank = self.check_rank(what, dest_name, dest)
        number = check_tag(what, tag_name, tag)
        return view_anywhere(x, f"{what}: x"), rank, number

    def _incoming(
        self,
        what: str,
        out: Any,
        source: Any,
        source_name: str,
        tag: Any,
        tag_name: str,
    ) -> tuple[HostView, int, int]:
        rank = self.check_rank(what, source_name, source)
        number = check_tag(what, tag_name, tag)
        buffer = view_anywhere(out, f"{what}: out")
        if not buffer.writable:
            raise BufferError_(f"{what}: out is read-only: pass a writable array")
        return buffer, rank, number


def _install_methods() -> None:
    """Put a native method in front of each: it takes the calls of every day."""
    for kind, name in enumerate(("send", "recv", "sendrecv", "multi_sendrecv")):
        function = getattr(PointToPoint, name)
        method = _native.make_message_method(name, kind, function)
        setattr(PointToPoint, name, method)


_install_methods()
