# SPDX-License-Identifier: Apache-2.0
"""Pick the bootstrap that fits the launcher."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from commrt import env
from commrt.bootstrap.base import Bootstrap
from commrt.bootstrap.claim import claim_rank
from commrt.bootstrap.launcher_store import store_of_run
from commrt.bootstrap.mpi import MpiBootstrap
from commrt.bootstrap.mpi_newcomers import guest_here
from commrt.bootstrap.mpi_of_launch import started_mpi
from commrt.bootstrap.newcomers import ask_to_join
from commrt.bootstrap.single import SingleBootstrap
from commrt.bootstrap.store import StoreBootstrap, slurm_store, torchrun_store
from commrt.errors import UsageError
from commrt.launch.detect import LaunchInfo

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["ask_for_place", "connect"]

_NEVER_HOSTS = -1
"""A rank that leaves the store of torch to others."""


def connect(launch: LaunchInfo, mpi_comm: MPI.Intracomm | None = None) -> Bootstrap:
    """Return the bootstrap for ``launch``, or for an mpi4py communicator if given.

    Collective over the ranks it connects. Raises UsageError where the launcher
    belongs to another MPI than mpi4py's, BackendError where mpi4py, libmpi or torch
    is missing. Under torchrun and commrt.run mpi4py is not imported. Ranks of srun
    whose MPI does not know of the others meet in a store of torch.

    Raises UsageError where another process already is this rank, and still runs.
    """
    timeout_s = env.read_float("COMMRT_TIMEOUT_S")
    if mpi_comm is not None:
        return MpiBootstrap(mpi_comm, timeout_s)
    if launch.kind == "single":
        return SingleBootstrap()
    if launch.kind in ("run", "torchrun"):
        store = _store_of(launch, launch.rank, timeout_s)
        claim_rank(store, launch)
        return StoreBootstrap(store, launch.rank, launch.size)
    mpi = started_mpi(launch)
    if mpi is not None:
        return MpiBootstrap(mpi.COMM_WORLD, timeout_s)
    store = slurm_store(launch.rank, launch.size, timeout_s)
    return StoreBootstrap(store, launch.rank, launch.size)


def ask_for_place(
    launch: LaunchInfo, facts: Mapping[str, Any], timeout_s: float
) -> tuple[Bootstrap, str]:
    """Wait until ranks of a running job take this process in; return how it meets them.

    And the words of their invitation. ``facts`` are those of this process; ``process``
    among them says where it can be found.
    """
    guest = guest_here()
    if guest is not None:
        return guest.join(facts, timeout_s)
    if launch.kind not in ("run", "torchrun"):
        raise UsageError(
            f"COMMRT_JOIN=1 means that this process joins a running job, and "
            f"{launch.source} names none that takes in others: start it with the "
            f"variables of a job of python -m commrt.run or torchrun, or unset it. "
            f"(Ranks of MPI start such processes themselves: comm.grow(1))"
        )
    store = _store_of(launch, _NEVER_HOSTS, timeout_s)
    said = ask_to_join(store, facts["process"], timeout_s)
    return StoreBootstrap(store, said.rank, said.size, said.prefix), said.words


def _store_of(launch: LaunchInfo, rank: int, timeout_s: float) -> Any:
    if launch.kind == "run":
        return store_of_run(env.value("COMMRT_MEETING") or "", launch.size, rank)
    return torchrun_store(rank, launch.size, timeout_s)
