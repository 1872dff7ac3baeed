# SPDX-License-Identifier: Apache-2.0
"""mpi4py as a peer: run by path, in an interpreter that need not have commrt.

``mpiexec -n N python peer_mpi4py.py JOB``. Each call is the one the mpi4py tutorial
shows for arrays (``comm.Allreduce(x, out)``), bound once, outside the clock.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpi4py import MPI

    from commrt.bench import timing_loop
    from commrt.bench.timing_loop import Array, Call, Parts
else:
    import timing_loop  # beside this file

    # This folder must not shadow anything that the library imports.
    del sys.path[0]


class Mpi4pyPeer:
    """Blocking collectives of the world communicator."""

    def __init__(self, comm: MPI.Comm) -> None:
        self._comm = comm
        self.rank = comm.Get_rank()
        self.size = comm.Get_size()
        self.barrier = comm.Barrier

    def gather(self, values: list[float]) -> list[list[float]] | None:
        """Return every rank's values on rank 0, None elsewhere."""
        result: list[list[float]] | None = self._comm.gather(values, root=0)
        return result

    def agree(self, value: float) -> float:
        """Return rank 0's value on every rank."""
        return float(self._comm.bcast(value, root=0))

    def bind(self, coll: str, x: Array, out: Array | None, root: int) -> Call:
        """Return a call of ``coll``; without ``out`` it works in place."""
        return self._bound(coll, x, out, root)

    def bind_outstanding(self, coll: str, parts: Parts, root: int) -> Call:
        """Return a call that submits ``coll`` for all parts, then waits for all."""
        from mpi4py import MPI

        submits: list[Any] = [
            self._bound(coll, *part, root, nonblocking=True) for part in parts
        ]
        wait_all = MPI.Request.Waitall
        return lambda: wait_all([submit() for submit in submits])

    def _counts(self, array: Array | None) -> list[int]:
        whole = 0 if array is None else array.size
        return [whole // self.size] * self.size

    def _bound(
        self,
        coll: str,
        x: Array,
        out: Array | None,
        root: int,
        *,
        nonblocking: bool = False,
    ) -> Call:
        from mpi4py import MPI

        def method(name: str) -> Any:
            return getattr(self._comm, f"I{name.lower()}" if nonblocking else name)

        if coll == "multi_sendrecv":
            return self._messages(x, out, MPI.Request.Waitall)
        if coll == "send_recv":
            return self._there_and_back(x, out)
        at_root = self.rank == root
        source: Any = x if out is not None else MPI.IN_PLACE
        target: Any = out if out is not None else x
        if coll == "reduce":
            source = source if at_root else x
            target = target if at_root else None
        # Vector operations, with blocks of one length.
        xs, outs = ([array, self._counts(array)] for array in (x, target))
        calls: dict[str, Call] = {
            "allreduce": partial(method("Allreduce"), source, target),
            "reduce": partial(method("Reduce"), source, target, MPI.SUM, root),
            "bcast": partial(method("Bcast"), x, root),
            "allgather": partial(method("Allgather"), x, out),
            "reduce_scatter": partial(method("Reduce_scatter_block"), x, out),
            "alltoall": partial(method("Alltoall"), source, target),
            "gather": partial(method("Gather"), x, out if at_root else None, root),
            "scatter": partial(method("Scatter"), x if at_root else None, out, root),
            "barrier": method("Barrier"),
            "scan": partial(method("Scan"), source, target),
            "exscan": partial(method("Exscan"), source, target),
            "allgatherv": partial(method("Allgatherv"), x, outs),
            "alltoallv": partial(method("Alltoallv"), xs, outs),
            "gatherv": partial(method("Gatherv"), x, outs if at_root else None, root),
            "scatterv": partial(method("Scatterv"), xs if at_root else None, out, root),
            "reduce_scatterv": partial(method("Reduce_scatter"), x, out, xs[1]),
        }
        return calls[coll]

    def _there_and_back(self, x: Array, out: Array | None) -> Call:
        """Return a call that sends a message to the last rank and gets it back."""
        comm, last = self._comm, self.size - 1

        def root() -> None:
            comm.Send(x, last)
            comm.Recv(out, last)

        def other() -> None:
            comm.Recv(out, 0)
            comm.Send(out, 0)

        return {0: root, last: other}.get(self.rank, lambda: None)

    def _messages(self, x: Array, out: Array | None, wait_all: Any) -> Call:
        """Return a call that exchanges a block with every rank, as messages."""
        assert out is not None
        block = x.size // self.size
        starts: list[Any] = []
        # MPI matches receives that are posted first without keeping the message.
        for start, array in ((self._comm.Irecv, out), (self._comm.Isend, x)):
            for rank in range(self.size):
                part = array[rank * block : (rank + 1) * block]
                starts.append(partial(start, part, rank))
        return lambda: wait_all([start() for start in starts])


def connect() -> tuple[Mpi4pyPeer, dict[str, Any]]:
    """Start MPI; return the peer and what to record about the library."""
    import mpi4py
    import numpy
    from mpi4py import MPI

    about = {
        "library": timing_loop.library_name(MPI.Get_library_version()),
        "versions": {"mpi4py": mpi4py.__version__, "numpy": numpy.__version__},
    }
    return Mpi4pyPeer(MPI.COMM_WORLD), about


if __name__ == "__main__":
    timing_loop.work(sys.argv[1], connect)
