# SPDX-License-Identifier: Apache-2.0
"""Messages between two ranks, and lists of them: send, recv, sendrecv, multi_sendrecv.

The engine runs the calls of every day (``calls/p2p_operation.cpp``). These methods run
all others, and say what is wrong with a call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from commrt import _native
from commrt.arrays.device import place_of
from commrt.arrays.host import HostView, overlap, view_anywhere
from commrt.arrays.places import places_of
from commrt.arrays.plain import as_array
from commrt.device_calls.collectives import DeviceCollectives
from commrt.device_calls.requests import DeviceRequest
from commrt.errors import BufferError_, UsageError
from commrt.group.compare import Comparison
from commrt.group.finite_values import check_finite
from commrt.group.group import Group
from commrt.group.refusals import refuse_messages, telling_peers
from commrt.messages.by_nccl import BACKEND, NcclMessages, check_backend
from commrt.messages.from_anyone import FromAnyone, WaitingMessage, probe
from commrt.messages.lists import WHAT, Message, check_lists, check_tag, places_in
from commrt.messages.on_device import DeviceMessages
from commrt.request import Request
from commrt.vocabulary.checks import check_flag

__all__ = ["Messages"]


class Messages:
    """Sends and receives messages of one group.

    A message that is refused for its arguments takes its place all the same: its peer
    hears of it (``group/refusals.py``).

    Args:
        group: sends and receives arrays on the host.
        devices: does so with arrays on devices.
        comparison: compares the lists of all ranks in check mode.
    """

    def __init__(
        self, group: Group, devices: DeviceCollectives, comparison: Comparison
    ) -> None:
        self.group = group
        self.devices = devices
        self._comparison = comparison

    def send(
        self,
        x: Any,
        dest: int,
        tag: int = 0,
        *,
        nonblocking: bool = False,
        timeout_s: float | None = None,
        stream: Any = None,
    ) -> Request | DeviceRequest | None:
        """Send ``x`` to rank ``dest``; a receive there must ask for the same tag.

        A blocking send returns when ``x`` may be changed. For a message of up to 16 KiB
        that is before the receive has been called, unless ``dest`` holds 3 MiB or more
        of such messages that it has not received; for a longer one it is after. For an
        array on a device ``stream`` waits instead, until the array is on the host.
        """
        self.group.check_going()
        with telling_peers(self.group, sends=[(dest, tag)]):
            nonblocking = check_flag("send", "nonblocking", nonblocking)
            limit = self.group.limit("send", timeout_s)
            buffer, dest, tag = self._sent("send", x, dest, "dest", tag, "tag")
            leaving = [(buffer, dest, tag)]
            on_device = self._on_device("send", leaving, [], None, stream)
        if on_device is not None:
            given: DeviceRequest | None = on_device.run(nonblocking, limit)
            return given
        started: Request | None = self.group.send_bytes(
            buffer.address,
            buffer.nbytes,
            dest,
            tag,
            buffer.owner,
            "send",
            nonblocking,
            limit,
            buffer.dtype.code,
        )
        return started

    def recv(
        self,
        out: Any,
        source: int | None = None,
        tag: int = 0,
        *,
        nonblocking: bool = False,
        timeout_s: float | None = None,
        stream: Any = None,
    ) -> Any:
        """Receive into ``out`` from rank ``source``; return ``out``.

        Without a source it takes the message of whichever rank sends one with this tag;
        the request's ``source`` says which rank that was. Such a nonblocking receive
        takes its message when it is tested or awaited.

        A message shorter than ``out`` fills its beginning; how much came stands in
        the request's ``received_nbytes``, so pass ``nonblocking=True`` where lengths
        vary. A longer message raises TruncationError.
        """
        self.group.check_going()
        with telling_peers(self.group, recvs=[(source, tag)]):
            nonblocking = check_flag("recv", "nonblocking", nonblocking)
            limit = self.group.limit("recv", timeout_s)
            if source is not None:
                coming = self.incoming("recv", out, source, "source", tag, "tag")
                on_device = self._on_device("recv", [], [coming], out, stream)
        if source is None:
            request = self._from_anyone(out, tag, limit, stream)
            return request if nonblocking else request.wait()
        return self._receive(coming, on_device, out, nonblocking, limit)

    def take(
        self,
        out: Any,
        source: int,
        tag: int,
        timeout_s: float | None = None,
        stream: Any = None,
    ) -> Any:
        """Start to receive a message that waits; return a request.

        It stays where it is if the receive is refused: it was meant for any rank's.
        """
        self.group.check_going()
        limit = self.group.limit("recv", timeout_s)
        coming = self.incoming("recv", out, source, "source", tag, "tag")
        on_device = self._on_device("recv", [], [coming], out, stream, has_places=False)
        return self._receive(coming, on_device, out, True, limit)

    def _receive(
        self,
        coming: Message,
        on_device: DeviceMessages | None,
        out: Any,
        nonblocking: bool,
        limit: float,
    ) -> Any:
        if on_device is not None:
            return on_device.run(nonblocking, limit)
        buffer, source, tag = coming
        return self.group.recv_bytes(
            buffer.address,
            buffer.nbytes,
            source,
            tag,
            buffer.owner,
            out,
            "recv",
            nonblocking,
            limit,
            buffer.dtype.code,
        )

    def _from_anyone(self, out: Any, tag: Any, limit: float, stream: Any) -> FromAnyone:
        """Return the receive of whichever rank's message comes first."""
        own = self.group.rank
        buffer, _, number = self.incoming("recv", out, own, "source", tag, "tag")
        place_of("recv", [buffer], stream)

        def receive(source: int) -> Any:
            return self.take(out, source, number, limit, stream)

        return FromAnyone(self.group, "recv", receive, number, limit)

    def probe(
        self,
        source: int | None = None,
        tag: int = 0,
        *,
        nonblocking: bool = False,
        timeout_s: float | None = None,
    ) -> WaitingMessage | None:
        """Return source, tag, nbytes and dtype of a message that waits to be received.

            found = comm.probe(tag=7)
            out = np.empty(found.nbytes, np.uint8).view(found.dtype)
            comm.recv(out, found.source, found.tag)

        It waits until there is one, and leaves it where it is. With ``nonblocking`` it
        does not wait, and returns None where no message has come. Without a source it
        looks at the messages of all ranks.
        """
        self.group.check_going()
        nonblocking = check_flag("probe", "nonblocking", nonblocking)
        limit = self.group.limit("probe", timeout_s)
        number = check_tag("probe", "tag", tag)
        if source is not None:
            source = self.group.check_rank("probe", "source", source)
        return probe(self.group, source, number, None if nonblocking else limit)

    def sendrecv(
        self,
        x: Any,
        dest: int,
        out: Any,
        source: int,
        *,
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
        self.group.check_going()
        # Both sides are checked before either is started.
        with telling_peers(self.group, [(dest, sendtag)], [(source, recvtag)]):
            nonblocking = check_flag("sendrecv", "nonblocking", nonblocking)
            limit = self.group.limit("sendrecv", timeout_s)
            leaving = self._sent("sendrecv", x, dest, "dest", sendtag, "sendtag")
            coming = self.incoming(
                "sendrecv", out, source, "source", recvtag, "recvtag"
            )
            if overlap(leaving[0], coming[0]):
                raise UsageError("sendrecv: out overlaps x; pass separate arrays")
            on_device = self._on_device("sendrecv", [leaving], [coming], out, stream)
        if on_device is not None:
            return on_device.run(nonblocking, limit)
        (sent, dest, sendtag), (got, source, recvtag) = leaving, coming
        return self.group.sendrecv_bytes(
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
            sent.dtype.code,
            got.dtype.code,
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
        self.group.check_going()
        try:
            nonblocking = check_flag("multi_sendrecv", "nonblocking", nonblocking)
            limit = self.group.limit("multi_sendrecv", timeout_s)
            bound = self.listed(sends, recvs, in_place, stream, backend)
        except Exception as error:
            if isinstance(backend, str) and backend == BACKEND:  # all ranks call it
                self._comparison.refuse(WHAT, error, None, meets=True)
            else:
                places = places_in(sends), places_in(recvs)
                refuse_messages(self.group, error, *places)
            raise
        return bound.run(nonblocking, limit)

    def _on_device(
        self,
        what: str,
        sends: list[Message],
        recvs: list[Message],
        result: Any,
        stream: Any,
        *,
        has_places: bool = True,
    ) -> DeviceMessages | None:
        """Return the messages as one operation if their arrays are on a device."""
        if place_of(what, [each[0] for each in (*sends, *recvs)], stream) is None:
            return None
        more = self.group, self.devices, what, sends, recvs, result, stream
        return DeviceMessages(*more, has_places=has_places)

    def on_device(
        self,
        what: str,
        sends: Sequence[Message],
        recvs: Sequence[Message],
        result: Any,
        stream: Any = None,
    ) -> DeviceMessages:
        """Return messages of arrays on a device as one operation."""
        return DeviceMessages(
            self.group, self.devices, what, sends, recvs, result, stream
        )

    def listed(
        self,
        sends: Any,
        recvs: Any,
        in_place: Any,
        stream: Any,
        backend: Any,
        *,
        is_bound: bool = False,
    ) -> _native.PersistentMessages | DeviceMessages | NcclMessages:
        """Return both lists as one operation; an error names the first wrong message.

        Nothing is started, and all messages are checked. ``is_bound`` says that it may
        run more than once: then it looks whether its arrays are where they were.
        """
        by_nccl = check_backend(WHAT, backend)
        lists = check_lists(self.group, sends, recvs, in_place)
        for index, (array, _, _) in enumerate(() if is_bound else lists.leaving):
            check_finite(self.group, WHAT, array, f"sends[{index}]: x")
        if by_nccl:
            lists.refuse_replaced_for_nccl()
            return NcclMessages(
                self.group,
                self.devices,
                self._comparison,
                lists.leaving,
                lists.coming,
                stream,
            )
        if place_of(WHAT, lists.arrays, stream) is not None:
            return self.on_device(
                WHAT, lists.leaving, lists.coming, lists.result, stream
            )
        places = places_of(each.array for each in lists.arrays) if is_bound else None
        return lists.on_host(self.group, places)

    def outgoing(
        self, what: str, x: Any, dest: Any, dest_name: str, tag: Any, tag_name: str
    ) -> tuple[HostView, int, int]:
        """Return the buffer, the peer and the tag, all checked."""
        rank = self.group.check_rank(what, dest_name, dest)
        number = check_tag(what, tag_name, tag)
        array = as_array(x, f"{what}: x")
        return view_anywhere(array, f"{what}: x"), rank, number

    def _sent(
        self, what: str, x: Any, dest: Any, dest_name: str, tag: Any, tag_name: str
    ) -> tuple[HostView, int, int]:
        """Return the same of a message that leaves now, with its values checked."""
        found = self.outgoing(what, x, dest, dest_name, tag, tag_name)
        check_finite(self.group, what, found[0])
        return found

    def incoming(
        self,
        what: str,
        out: Any,
        source: Any,
        source_name: str,
        tag: Any,
        tag_name: str,
    ) -> tuple[HostView, int, int]:
        """Return the buffer to receive into, the peer and the tag, all checked."""
        rank = self.group.check_rank(what, source_name, source)
        number = check_tag(what, tag_name, tag)
        buffer = view_anywhere(out, f"{what}: out")
        if not buffer.writable:
            raise BufferError_(f"{what}: out is read-only: pass a writable array")
        return buffer, rank, number
