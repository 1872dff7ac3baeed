# SPDX-License-Identifier: Apache-2.0
"""MPI communicators over one group's ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from commrt import _native
from commrt.bootstrap.lending import Lease
from commrt.errors import BackendError
from commrt.group.group import Group
from commrt.mpi import library, tags

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["NativeMpi"]


class NativeMpi:
    """The MPI communicators over one group's ranks.

    Args:
        group: the ranks.
        mpi_comm: an mpi4py communicator of these ranks where nobody else runs
            collectives; None where there is none yet.
    """

    def __init__(self, group: Group, mpi_comm: MPI.Intracomm | None = None) -> None:
        self._group = group
        self._comm = mpi_comm
        self._lease: Lease | None = None
        self._for_caller: Any = None

    @property
    def is_there(self) -> bool:
        """True if the library's own collectives have a communicator."""
        return self._comm is not None

    def handle(self) -> int:
        """Return the handle of the communicator for the library's own collectives.

        Where unasked calls may need it, it was made with the group. Otherwise it is
        made for the first call that asks for it by name, which is then collective even
        if it is nonblocking.
        """
        group = self._group
        if not self.ensure(group.timeout_s):
            raise BackendError(
                f"{group.name}: no MPI communicator can be had for the library's "
                f"own collectives: it has no more of them, commrt has made as many as "
                f"it takes, or a rank of the job has died; free() communicators that "
                f"are not needed, shrink() the one of all ranks after a death, or use "
                f"a schedule"
            )
        return library.handle(self._comm)

    def ensure(self, timeout_s: float) -> bool:
        """Return whether there is one, and make it where there was none; collective."""
        if self._comm is None:
            self.lease(timeout_s)
        return self._comm is not None

    def lease(self, timeout_s: float) -> None:
        """Get one for the library's own collectives, if there is one; collective."""
        group = self._group
        lender = group.world.native_comms
        if lender is None or group.size == 1:
            return
        tag = tags.for_library(group.identity)
        ranks = group.world_ranks
        self._lease = lender.lend(ranks, group.identity, tag, timeout_s)
        self._comm = None if self._lease is None else self._lease.lent

    def give_back(self) -> None:
        """Let other groups of the same ranks have it, unless this one failed."""
        _native.end_stand_ins(self._group)
        lender = self._group.world.native_comms
        if lender is not None and self._lease is not None and not self._group.failure:
            lender.give_back(self._lease)
        self._lease = self._comm = None

    def for_caller(self) -> Any:
        """Return mpi4py's communicator for the program; see ``Communicator.mpi``."""
        group, world = self._group, self._group.world
        if world.native_comms is None:
            return None
        everybody = tuple(range(world.size))
        if group.world_ranks == everybody and world.mpi_comm is not None:
            return world.mpi_comm
        if self._for_caller is None:
            key = f"comm{group.identity}/mpi"
            tag = tags.for_caller(group.identity)
            with group.making():
                world.meet(group.world_ranks, key, group.timeout_s)
                self._for_caller = world.native_comms.create(
                    group.world_ranks, tag, group.timeout_s
                )
        return self._for_caller
