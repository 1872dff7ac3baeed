# SPDX-License-Identifier: Apache-2.0
"""Processes that MPI starts for a running job (MPI_Comm_spawn)."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from commrt.mpi import library

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["finalize_without_disconnect", "spawn", "why_unreachable"]

_NUM_DYNAMIC = "ompi_comm_num_dyncomm"
"""Open MPI's count of communicators that have ranks of several starts."""
_TRANSPORTS = "OMPI_MCA_btl"
"""Names what carries Open MPI's messages; ``mpiexec --mca btl`` sets it."""
_OF_ONE_START = {"self", "sm", "vader"}
_NEVER = -(2**30)
_INFO = {
    # Newcomers come beside ranks that have a core each, or in the place of one that
    # has died, of which the launcher may not know.
    "map_by": ":OVERSUBSCRIBE",
    "bind_to": "none",
}
"""Open MPI's options of the placement; other libraries know no such keys."""


def spawn(comm: MPI.Intracomm, arguments: Sequence[str], count: int) -> MPI.Intercomm:
    """Return a communicator with ``count`` new processes of this Python.

    Collective over ``comm``. Blocks until each of them has started MPI; it never ends
    where one of them does not. So these have to do that first.

    Args:
        comm: the ranks that start them.
        arguments: Python's, on its rank 0.
        count: how many.
    """
    mpi: Any = library.load()
    info = mpi.Info.Create()
    info.Set("wdir", os.getcwd())
    if library.library_name(mpi).startswith("Open MPI"):
        for key, value in _INFO.items():
            info.Set(key, value)
    try:
        made = comm.Spawn(sys.executable, [*arguments], count, info=info, root=0)
    finally:
        info.Free()
    made.Set_errhandler(mpi.ERRORS_RETURN)
    return made


def why_unreachable() -> str:
    """Return why ranks cannot reach processes of another start; empty: they may.

    Open MPI's shared memory connects the ranks of one start only.
    """
    mpi = library.load()
    named = os.environ.get(_TRANSPORTS, "")
    is_ours = library.library_name(mpi).startswith("Open MPI")
    if not is_ours or not named or {*named.split(",")} - _OF_ONE_START:
        return ""
    return (
        f"{_TRANSPORTS}={named} leaves Open MPI no way to reach processes that start "
        f"later, since its shared memory connects those of one start only: add tcp"
    )


def finalize_without_disconnect() -> None:
    """Let MPI_Finalize part from processes of other starts without a meeting.

    Open MPI exchanges messages there with each rank of such communicators, where there
    are two of them. It waits for those that have ended, and it fails (5.0.11: a
    segmentation fault) where it needs a connection to one that has left.
    """
    count = library.number_of(_NUM_DYNAMIC)
    if count is not None:
        count.value = _NEVER
