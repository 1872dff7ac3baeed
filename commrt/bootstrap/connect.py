# SPDX-License-Identifier: Apache-2.0
"""Pick the bootstrap that fits the launcher."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from commrt import _libmpi, env
from commrt.bootstrap.base import Bootstrap
from commrt.bootstrap.directory import DirectoryStore
from commrt.bootstrap.mpi import MpiBootstrap
from commrt.bootstrap.single import SingleBootstrap
from commrt.bootstrap.store import StoreBootstrap, slurm_store, torchrun_store
from commrt.launch.detect import LaunchInfo, check_mpi_library, check_mpi_size

__all__ = ["connect"]


def connect(launch: LaunchInfo, mpi_comm: Any = None) -> Bootstrap:
    """Return the bootstrap for ``launch``, or for an mpi4py communicator if given.

    Collective over the ranks it connects. Raises UsageError where the launcher
    belongs to another MPI than mpi4py's, BackendError where mpi4py, libmpi or torch
    is missing. Under torchrun and commrt.run mpi4py is not imported.
    """
    timeout_s = env.read_float("COMMRT_TIMEOUT_S")
    if mpi_comm is not None:
        return MpiBootstrap(mpi_comm, timeout_s)
    if launch.kind == "single":
        return SingleBootstrap()
    if launch.kind == "run":
        folder = env.given("COMMRT_MEETING")
        meeting = DirectoryStore(folder or "", launch.size)
        return StoreBootstrap(meeting, launch.rank, launch.size)
    if launch.kind == "torchrun":
        store = torchrun_store(launch.rank, launch.size, timeout_s)
        return StoreBootstrap(store, launch.rank, launch.size)
    if launch.kind == "slurm" and not find_spec("mpi4py") and find_spec("torch"):
        # srun starts ranks with MPI or without; without it they meet in a store.
        store = slurm_store(launch.rank, launch.size, timeout_s)
        return StoreBootstrap(store, launch.rank, launch.size)
    check_mpi_library(launch, _libmpi.library_name(_libmpi.imported()))
    mpi = _libmpi.load()
    check_mpi_size(launch, mpi.COMM_WORLD.Get_size(), _libmpi.library_name(mpi))
    return MpiBootstrap(mpi.COMM_WORLD, timeout_s)
