# SPDX-License-Identifier: Apache-2.0
"""Persistent plans: ``comm.plan.allreduce(x, ...)`` plans once and runs many times."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from commrt.calls.bound_call import Binder, Binders, Planned
from commrt.errors import suggest
from commrt.trace.bound import follow_bound
from commrt.trace.traced import Traced
from commrt.vocabulary.operations import COLLECTIVES

if TYPE_CHECKING:
    from commrt.boxes.layouts import Layout

__all__ = ["Plans"]


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

    def __init__(self, comm: Traced, binders: Binders, held: object) -> None:
        """Plan the calls of ``comm``, each by the binder that its feature registers.

        ``held`` is what the program has of the communicator, by which logs know it.
        """
        self._comm, self._binders, self._held = comm, binders, held

    def __getattr__(self, name: str) -> Binder:
        if name not in COLLECTIVES:
            raise AttributeError(f"no collective {name!r}{suggest(name, COLLECTIVES)}")
        return partial(self._bind, name)

    def _bind(self, name: str, /, *args: Any, **kwargs: Any) -> Planned:
        """Return a bound call whose runs a log may have."""
        bound = self._binders[name](*args, **kwargs)
        follow_bound(self._held, self._comm, bound, name, args, kwargs)
        return bound

    def __dir__(self) -> list[str]:
        return list(self._binders)

    def send(self, x: Any, dest: int, tag: int = 0) -> Planned:
        """Return the communicator's call of this name, bound to its array.

        Each run sends what ``x`` holds then. Making one is local, and the peer need not
        have one: its message meets an ordinary receive.
        """
        return self._bind("send", x, dest=dest, tag=tag)

    def recv(self, out: Any, source: int, tag: int = 0) -> Planned:
        """Return the communicator's call of this name, bound to its array; as send."""
        return self._bind("recv", out, source=source, tag=tag)

    def sendrecv(
        self,
        x: Any,
        dest: int,
        out: Any,
        source: int,
        *,
        sendtag: int = 0,
        recvtag: int = 0,
    ) -> Planned:
        """Return the communicator's call of this name, bound to its arrays; as send."""
        return self._bind(
            "sendrecv",
            x,
            dest=dest,
            out=out,
            source=source,
            sendtag=sendtag,
            recvtag=recvtag,
        )

    def sparse_allreduce(
        self,
        x: Any,
        *,
        result: str = "auto",
        out: Any = None,
        algorithm: str | None = None,
    ) -> Planned:
        """Return the communicator's call of this name, bound to its arguments.

        Each run sums what the arrays of ``x`` hold then, new indices too, of which
        there are as many. They are checked at each run, and the algorithm is chosen
        then. Without ``out`` each run returns a new result. Making one is local, in
        check mode collective.
        """
        return self._bind(
            "sparse_allreduce", x, result=result, out=out, algorithm=algorithm
        )

    def topk_allreduce(self, x: Any, k: int, *, residual: Any = None) -> Planned:
        """Return the communicator's call of this name, bound to its arguments.

        Each run reads what ``x`` and ``residual`` hold then, and returns a new result.
        Making one is local, in check mode collective.
        """
        return self._bind("topk_allreduce", x, k, residual=residual)

    def multi_sendrecv(
        self,
        *,
        sends: Sequence[tuple[Any, ...]] = (),
        recvs: Sequence[tuple[Any, ...]] = (),
        in_place: bool = False,
        backend: str | None = None,
    ) -> Planned:
        """Return the communicator's call of this name, bound to its arrays.

        Making one is local, and the peers need not have one: each message meets an
        ordinary one, but with ``backend="nccl"`` those of the same collective call.
        """
        return self._bind(
            "multi_sendrecv",
            sends=_copied(sends),
            recvs=_copied(recvs),
            in_place=in_place,
            backend=backend,
        )

    def redistribute(
        self, x: Any, source: Layout, target: Layout, *, out: Any = None
    ) -> Planned:
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
        return self._bind("redistribute", x, source, target, out=out)


def _copied(listed: Any) -> Any:
    """Return a list of messages that the caller cannot change; a log reads it later."""
    return tuple(listed) if isinstance(listed, list) else listed
