# SPDX-License-Identifier: Apache-2.0
"""MPI as the launcher has started it, or the answer that it has not.

``srun`` starts ranks with MPI, by one of its plugins, or without. It depends on the
site which one is the default, and on the library which one it understands. Without it
each rank starts a world of its own; then the ranks meet in a store, as Slurm says where
rank 0 is.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from commrt import env
from commrt.errors import BackendError, UsageError
from commrt.launch.detect import (
    LaunchInfo,
    check_mpi_library,
    check_mpi_size,
    slurm_step,
)
from commrt.mpi import library

__all__ = ["started_mpi"]


def started_mpi(launch: LaunchInfo) -> Any | None:
    """Return ``mpi4py.MPI``, initialised, with all ranks of ``launch`` in its world.

    Collective. None where they are to meet in Slurm's store: srun started them, torch
    is there, and MPI is not, or has worlds of one, or COMMRT_LAUNCH=slurm asks for it.
    Otherwise BackendError without an MPI, UsageError if it has another number of ranks.
    """
    can_meet = slurm_step(launch) is not None and find_spec("torch") is not None
    if can_meet and env.read_str("COMMRT_LAUNCH") == "slurm":
        return None
    try:
        check_mpi_library(launch, library.library_name(library.imported()))
        mpi = library.load()
        check_mpi_size(launch, mpi.COMM_WORLD.Get_size(), library.library_name(mpi))
    except (BackendError, UsageError):
        if not can_meet:
            raise
        return None
    return mpi
