# SPDX-License-Identifier: Apache-2.0
"""Calls bound to their arguments that have no plan of the engine: messages and sparse
sums.

They have the methods of the engine's persistent calls. What they are given is checked
when they are made; a sparse vector once more at every run, as its indices may be new.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from commrt import _native
from commrt.arrays.device import place_of
from commrt.arrays.host import HostView, overlap
from commrt.device_calls.host_work import holds_device_arrays
from commrt.errors import UsageError
from commrt.messages.by_nccl import NcclMessages
from commrt.messages.lists import bind_lists
from commrt.messages.on_device import DeviceMessages
from commrt.sparse.vector import parts_on_device

if TYPE_CHECKING:
    from commrt.messages.point_to_point import PointToPoint
    from commrt.sparse.methods import SparseMethods

__all__ = [
    "BoundCall",
    "bind_messages",
    "bind_recv",
    "bind_send",
    "bind_sendrecv",
    "bind_sparse",
    "bind_topk",
]


@dataclass(frozen=True, eq=False)
class BoundCall:
    """An operation bound to its arguments; call it, or start() it."""

    operation: str
    """Its name."""
    label: str
    """What runs it."""
    run: Callable[[bool], Any]
    """Starts it; the argument says whether it is nonblocking."""

    def __call__(self) -> Any:
        """Run the operation and return its output."""
        return self.run(False)

    def start(self) -> Any:
        """Start the operation and return its request; wait before starting again."""
        return self.run(True)

    def __repr__(self) -> str:
        return f"<commrt.BoundCall {self.operation} by {self.label}>"


_MESSAGES = "messages"
_STAGED = "staged/messages"


def _on_device(
    comm: Any,
    what: str,
    sends: list[tuple[HostView, int, int]],
    recvs: list[tuple[HostView, int, int]],
    result: Any,
) -> BoundCall | None:
    """Return the call where its arrays are on a device."""
    arrays = [each for each, _, _ in (*sends, *recvs)]
    if place_of(what, arrays) is None:
        return None
    bound = DeviceMessages(comm, what, sends, recvs, result)
    return BoundCall(what, _STAGED, bound.run)


def bind_messages(
    comm: Any, sends: Any, recvs: Any, in_place: Any, backend: Any = None
) -> _native.PersistentMessages | BoundCall | NcclMessages:
    """Return all of both lists as one operation."""
    comm.check_usable()
    bound = bind_lists(comm, sends, recvs, in_place, backend=backend)
    if isinstance(bound, DeviceMessages):
        return BoundCall("multi_sendrecv", _STAGED, bound.run)
    return bound


def bind_send(comm: PointToPoint, x: Any, dest: Any, tag: Any) -> BoundCall:
    """Return the send of what ``x`` holds at each run."""
    what = "send"
    comm.check_usable()
    sent, rank, number = comm._outgoing(what, x, dest, "dest", tag, "tag")
    on_device = _on_device(comm, what, [(sent, rank, number)], [], None)
    if on_device is not None:
        return on_device
    to = sent.address, sent.nbytes, rank, number, sent.owner, what

    def run(nonblocking: bool) -> Any:
        comm.check_usable()
        return comm.send_bytes(*to, nonblocking, comm.timeout_s)

    return BoundCall(what, _MESSAGES, run)


def bind_recv(comm: PointToPoint, out: Any, source: Any, tag: Any) -> BoundCall:
    """Return the receive into ``out``."""
    what = "recv"
    comm.check_usable()
    got, rank, number = comm._incoming(what, out, source, "source", tag, "tag")
    on_device = _on_device(comm, what, [], [(got, rank, number)], out)
    if on_device is not None:
        return on_device
    place = got.address, got.nbytes, rank, number, got.owner, out, what

    def run(nonblocking: bool) -> Any:
        comm.check_usable()
        return comm.recv_bytes(*place, nonblocking, comm.timeout_s)

    return BoundCall(what, _MESSAGES, run)


def bind_sendrecv(
    comm: PointToPoint,
    x: Any,
    dest: Any,
    out: Any,
    source: Any,
    sendtag: Any,
    recvtag: Any,
) -> BoundCall:
    """Return both, as one operation."""
    what = "sendrecv"
    comm.check_usable()
    sent, to, first = comm._outgoing(what, x, dest, "dest", sendtag, "sendtag")
    got, of, second = comm._incoming(what, out, source, "source", recvtag, "recvtag")
    if overlap(sent, got):
        raise UsageError(f"{what}: out overlaps x; pass separate arrays")
    on_device = _on_device(comm, what, [(sent, to, first)], [(got, of, second)], out)
    if on_device is not None:
        return on_device
    leaving = sent.address, sent.nbytes, to, first
    coming = got.address, got.nbytes, of, second

    def run(nonblocking: bool) -> Any:
        comm.check_usable()
        owners = sent.owner, got.owner
        return comm.sendrecv_bytes(
            *leaving, *coming, *owners, out, what, nonblocking, comm.timeout_s
        )

    return BoundCall(what, _MESSAGES, run)


def bind_sparse(
    comm: SparseMethods, x: Any, result: Any, out: Any, algorithm: Any
) -> BoundCall:
    """Return the sum of what ``x`` holds at each run."""
    comm.check_usable()
    if parts_on_device("sparse_allreduce", x) is None and not holds_device_arrays(out):
        comm._check_sparse(x, result, out, algorithm, False, comm.timeout_s)

    def run(nonblocking: bool) -> Any:
        return comm.sparse_allreduce(
            x, result=result, out=out, algorithm=algorithm, nonblocking=nonblocking
        )

    label = f"sparse/{algorithm or 'by fill'}"
    return BoundCall("sparse_allreduce", label, run)


def bind_topk(comm: SparseMethods, x: Any, k: Any, residual: Any) -> BoundCall:
    """Return the largest elements of what ``x`` and ``residual`` hold at each run."""
    comm.check_usable()
    if not holds_device_arrays(x, residual):
        comm._check_topk(x, k, residual, False, comm.timeout_s)

    def run(nonblocking: bool) -> Any:
        return comm.topk_allreduce(x, k, residual=residual, nonblocking=nonblocking)

    return BoundCall("topk_allreduce", "sparse/topk", run)
