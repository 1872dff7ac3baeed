# SPDX-License-Identifier: Apache-2.0
"""Pick the bootstrap that fits the launcher."""

from __future__ import annotations

from typing import TYPE_CHECKING

from commrt import env
from commrt.bootstrap.base import Bootstrap
from commrt.bootstrap.claim import claim_rank
from commrt.bootstrap.directory import DirectoryStore
from commrt.bootstrap.mpi import MpiBootstrap
from commrt.bootstrap.mpi_of_launch import started_mpi
from commrt.bootstrap.single import SingleBootstrap
from commrt.bootstrap.store import StoreBootstrap, slurm_store, torchrun_store
from commrt.launch.detect import LaunchInfo

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["connect"]


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
    if launch.kind == "run":
        folder = env.value("COMMRT_MEETING")
        rendezvous = DirectoryStore(folder or "", launch.size)
        claim_rank(rendezvous, launch)
        return StoreBootstrap(rendezvous, launch.rank, launch.size)
    if launch.kind == "torchrun":
        store = torchrun_store(launch.rank, launch.size, timeout_s)
        claim_rank(store, launch)
        return StoreBootstrap(store, launch.rank, launch.size)
    mpi = started_mpi(launch)
    if mpi is not None:
        return MpiBootstrap(mpi.COMM_WORLD, timeout_s)
    store = slurm_store(launch.rank, launch.size, timeout_s)
    return StoreBootstrap(store, launch.rank, launch.size)
