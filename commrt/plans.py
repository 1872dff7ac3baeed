# SPDX-License-Identifier: Apache-2.0
"""Persistent plans: ``comm.plan.allreduce(x, ...)`` plans once and runs many times."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from commrt import _native
from commrt.boxes.device_plans import BoundBoxes
from commrt.boxes.redistribution import Redistributions
from commrt.calls.bound_call import BoundCall
from commrt.calls.collectives import Collectives
from commrt.device_calls.collectives import BoundDeviceCall
from commrt.device_calls.host_collectives import BoundHostCall
from commrt.errors import suggest
from commrt.group.group import Group
from commrt.messages.bound import (
    bind_messages,
    bind_recv,
    bind_send,
    bind_sendrecv,
)
from commrt.messages.by_nccl import NcclMessages
from commrt.messages.point_to_point import Messages
from commrt.sparse.bound import bind_sparse, bind_topk
from commrt.sparse.sums import SparseSums
from commrt.trace.bound import follow_bound
from commrt.trace.traced import Traced
from commrt.vocabulary.operations import COLLECTIVES, names_of

if TYPE_CHECKING:
    from commrt.boxes.layouts import Layout
    from commrt.compression.compressed import CompressedCall

__all__ = ["PlannedServices", "Plans"]

_Bound: TypeAlias = (
    "_native.PersistentCall | CompressedCall | BoundDeviceCall | BoundHostCall"
)
_PLANNED = names_of("collective", "message", "sparse", "boxes")
"""Plans among neighbours are those of grids and graphs (``grids/plans.py``)."""


@dataclass(frozen=True)
class PlannedServices:
    """The parts of a communicator whose calls can be bound to their arrays."""

    group: Group
    """The ranks."""
    collectives: Collectives
    messages: Messages
    sparse: SparseSums
    redistributions: Redistributions


class Plans:
    """Has a method per collective that returns a call bound to its arrays.

        step = comm.plan.allreduce(grad, algorithm="shm/ring")
        for _ in range(100):
            ...
            step()                    # or: request = step.start()

    The arguments are those of the communicator's method, without ``nonblocking`` and
    ``timeout_s``. Making one is local; running one is collective. The arrays stay the
    same: write new values into them between runs. Making one is collective, too, in
    check mode, where the ranks are compared then, and where ``mpi/native`` is asked for
    by name for the first time on a communicator that has no MPI communicator yet.
    """

    def __init__(self, comm: Traced, services: PlannedServices) -> None:
        self._comm, self._services = comm, services

    def __getattr__(self, name: str) -> Callable[..., _Bound]:
        if name not in COLLECTIVES:
            raise AttributeError(f"no collective {name!r}{suggest(name, COLLECTIVES)}")
        return partial(self._followed, name)

    def _followed(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Return a bound call whose runs a log may have."""
        made = self._services.collectives.bound(name, args, kwargs)
        return follow_bound(self._comm, made, name, args, **kwargs)

    def __dir__(self) -> list[str]:
        return [*_PLANNED]

    def send(self, x: Any, *, dest: int, tag: int = 0) -> BoundCall:
        """Return the communicator's call of this name, bound to its array.

        Each run sends what ``x`` holds then. Making one is local, and the peer need not
        have one: its message meets an ordinary receive.
        """
        bound = bind_send(self._services.messages, x, dest, tag)
        follow_bound(self._comm, bound, "send", (x,), dest=dest, tag=tag)
        return bound

    def recv(self, out: Any, *, source: int, tag: int = 0) -> BoundCall:
        """Return the communicator's call of this name, bound to its array; as send."""
        bound = bind_recv(self._services.messages, out, source, tag)
        follow_bound(self._comm, bound, "recv", (out,), source=source, tag=tag)
        return bound

    def sendrecv(
        self,
        x: Any,
        *,
        dest: int,
        out: Any,
        source: int,
        sendtag: int = 0,
        recvtag: int = 0,
    ) -> BoundCall:
        """Return the communicator's call of this name, bound to its arrays; as send."""
        comm, given = self._comm, (x, dest, out, source, sendtag, recvtag)
        bound = bind_sendrecv(self._services.messages, *given)
        names = ("dest", "out", "source", "sendtag", "recvtag")
        more = dict(zip(names, given[1:], strict=True))
        follow_bound(comm, bound, "sendrecv", (x,), **more)
        return bound

    def sparse_allreduce(
        self,
        x: Any,
        *,
        result: str = "auto",
        out: Any = None,
        algorithm: str | None = None,
    ) -> BoundCall:
        """Return the communicator's call of this name, bound to its arguments.

        Each run sums what the arrays of ``x`` hold then, new indices too, of which
        there are as many. They are checked at each run, and the algorithm is chosen
        then. Without ``out`` each run returns a new result. Making one is local, in
        check mode collective.
        """
        bound = bind_sparse(
            self._services.group, self._services.sparse, x, result, out, algorithm
        )
        follow_bound(self._comm, bound, "sparse_allreduce", (x,))
        return bound

    def topk_allreduce(self, x: Any, k: int, *, residual: Any = None) -> BoundCall:
        """Return the communicator's call of this name, bound to its arguments.

        Each run reads what ``x`` and ``residual`` hold then, and returns a new result.
        Making one is local, in check mode collective.
        """
        bound = bind_topk(self._services.group, self._services.sparse, x, k, residual)
        follow_bound(self._comm, bound, "topk_allreduce", (x, k))
        return bound

    def multi_sendrecv(
        self,
        *,
        sends: Sequence[tuple[Any, ...]] = (),
        recvs: Sequence[tuple[Any, ...]] = (),
        in_place: bool = False,
        backend: str | None = None,
    ) -> _native.PersistentMessages | BoundCall | NcclMessages:
        """Return the communicator's call of this name, bound to its arrays.

        Making one is local, and the peers need not have one: each message meets an
        ordinary one, but with ``backend="nccl"`` those of the same collective call.
        """
        bound = bind_messages(self._services.messages, sends, recvs, in_place, backend)
        given = {"sends": tuple(sends), "recvs": tuple(recvs)}
        follow_bound(self._comm, bound, "multi_sendrecv", (), **given)
        return bound

    def redistribute(
        self, x: Any, source: Layout, target: Layout, *, out: Any = None
    ) -> _native.PersistentCall | BoundBoxes:
        """Return a call that moves an array from one distribution to another.

            rows = commrt.Layout((1000, 800), (comm.size,), (commrt.Block(0), None))
            columns = commrt.Layout((1000, 800), (comm.size,), (None, commrt.Block(0)))
            turn = comm.plan.redistribute(mine, rows, columns)
            local = turn()                    # or: request = turn.start()

        Collective: the ranks compare their layouts.

        Args:
            x: this rank's part, with any strides, of shape
                ``source.local_shape(comm.rank)``.
            source: how the array is distributed.
            target: how it shall be; of the same shape, and of any grid of these ranks.
            out: where this rank's part of that goes, with any strides; without it a
                numpy array is allocated.

        Raises:
            UsageError: an argument is wrong here; nothing was said. In check mode it is
                raised on all ranks.
            MismatchError: the ranks do not agree; on all of them.
        """
        comm = self._comm
        made = self._services.redistributions.bound(x, source, target, out)
        follow_bound(comm, made, "redistribute", (x, source, target))
        return made
