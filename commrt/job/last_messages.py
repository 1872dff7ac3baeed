# SPDX-License-Identifier: Apache-2.0
"""Takes the last messages of other nodes before MPI ends.

While ranks wait, they tell ranks of other nodes what they wait for. Such advice may
come when its receiver makes no call any more. MPI says that no message may be left when
it ends, and MPICH prints a warning for each one. So the ranks meet at their end, and
sum how many packets each of them was sent. Then each takes those that it lacks.

The sums go up and down a binomial tree: two messages for each rank. It is none of MPI's
collectives, which could meet one that a rank has left. Ranks that do not come within a
short time are not waited for: a lost piece of advice does no harm.

Where other connections carry packets, MPI may still have messages of the bootstrap's.
Then the ranks meet before these connections end: a rank that leaves tells by them.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np

from commrt import _native
from commrt.bootstrap.base import poll_until
from commrt.errors import CommError
from commrt.mpi import library, tags

if TYPE_CHECKING:
    from mpi4py import MPI
    from numpy.typing import NDArray

    from commrt.job.world import World

__all__ = ["take_last_messages"]

_TAG = 6
"""Of the sums, on commrt's own MPI communicator."""


def take_last_messages(world: World, limit_s: float) -> bool:
    """Take what other nodes have sent; return whether nothing is left.

    Collective, for ranks that end. It is to be called when nothing makes progress any
    more, and does nothing where the ranks share one node or ranks have died.
    """
    comm, liveness = world.mpi_of_all, world.liveness
    if comm is None or len(world.nodes) < 2 or liveness is None:
        return True
    mpi = library.load()
    is_relayed = world.relay is not None
    # A rank that has died does not come. One that tells by a relay that it leaves does.

    def is_any_lost() -> bool:
        return not is_relayed and liveness.native.look()

    if mpi.Is_finalized() or is_any_lost():
        return False
    deadline = time.monotonic() + limit_s
    sent, taken = [0] * comm.Get_size(), 0
    if not is_relayed:
        sent = _native.far_packets_sent(comm.Get_size())
        taken = _native.far_packets_taken()
    try:
        sums = _Sums(mpi, comm, sent)
        poll_until(lambda: sums.step() or is_any_lost(), limit_s)
        due = int(sums.total[comm.Get_rank()]) if sums.has_total else 0
        left_s = deadline - time.monotonic()
        rest = _Rest(mpi, comm, due - taken)
        return poll_until(rest.step, left_s) and sums.has_total
    except (mpi.Exception, CommError):  # its ranks cannot reach each other any more
        return False


class _Sums:
    """The sum of a vector over all ranks, by a tree; ``step`` until it is True."""

    def __init__(self, mpi: Any, comm: MPI.Intracomm, mine: list[int]) -> None:
        self._mpi, self._comm = mpi, comm
        self.total: NDArray[np.int64] = np.array(mine, np.int64)
        rank, size = comm.Get_rank(), comm.Get_size()
        lowest = rank & -rank or size
        spans = (1 << power for power in range(size.bit_length()))
        self._children = [rank + n for n in spans if n < lowest and rank + n < size]
        self._parent = rank - lowest if rank else None
        self._awaited = [*self._children]
        self._requests: list[Any] = []
        self._has_told = False
        self.has_total = False

    def step(self) -> bool:
        """Go on; return whether this rank has the total, and all has left."""
        while self._awaited and (said := self._said_by(self._awaited[-1])) is not None:
            self.total += said
            self._awaited.pop()
        if self._awaited:
            return False
        if not self._has_told and self._parent is not None:
            self._has_told = True
            self._send(self._parent)
        if not self.has_total:
            if self._parent is not None:
                said = self._said_by(self._parent)
                if said is None:
                    return False
                self.total = said
            self.has_total = True
            for child in self._children:
                self._send(child)
        return bool(self._mpi.Request.Testall(self._requests))

    def _send(self, rank: int) -> None:
        kept = self.total.copy()  # mpi4py's request holds it
        self._requests.append(self._comm.Isend(kept, dest=rank, tag=_TAG))

    def _said_by(self, rank: int) -> NDArray[np.int64] | None:
        message = self._comm.Improbe(source=rank, tag=_TAG)
        if message is None:
            return None
        said = np.empty_like(self.total)
        message.Recv(said)  # it is here, and short
        return said


class _Rest:
    """Messages that nobody has asked for; ``step`` until it is True."""

    def __init__(self, mpi: Any, comm: MPI.Intracomm, left: int) -> None:
        self._mpi, self._comm = mpi, comm
        self._left = left
        self._receiving: list[Any] = []

    def step(self) -> bool:
        """Take what is there; return whether all packets that were due have come."""
        status = self._mpi.Status()
        while (message := self._comm.Improbe(status=status)) is not None:
            buffer = bytearray(status.Get_count(self._mpi.BYTE))
            self._receiving.append(message.Irecv([buffer, self._mpi.BYTE]))
            self._left -= tags.is_packet(status.Get_tag())
        return bool(self._mpi.Request.Testall(self._receiving)) and self._left <= 0
