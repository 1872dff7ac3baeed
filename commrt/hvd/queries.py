# SPDX-License-Identifier: Apache-2.0
"""Queries of what is there: MPI, gloo, NCCL, CUDA. Horovod's scripts ask them."""

from __future__ import annotations

import importlib.util
from typing import Any, NoReturn

import torch
import torch.distributed

from commrt.errors import UsageError
from commrt.hvd.current import current
from commrt.nccl import libnccl

__all__ = [
    "ccl_built",
    "cuda_built",
    "ddl_built",
    "gloo_built",
    "gloo_enabled",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rocm_built",
    "start_timeline",
    "stop_timeline",
]


def mpi_built() -> bool:
    """Return whether mpi4py is installed."""
    return importlib.util.find_spec("mpi4py") is not None


def mpi_enabled() -> bool:
    """Return whether this job runs over MPI."""
    return current().comm.mpi_library is not None


def mpi_threads_supported() -> bool:
    """Return whether MPI takes calls from several threads at once."""
    if not mpi_enabled():
        return False
    from mpi4py import MPI

    return bool(MPI.Query_thread() == MPI.THREAD_MULTIPLE)


def gloo_built() -> bool:
    """Return whether torch has gloo."""
    return bool(torch.distributed.is_gloo_available())


def gloo_enabled() -> bool:
    """Return whether this job runs without MPI, where ranks meet as for gloo."""
    return gloo_built() and not mpi_enabled()


def nccl_built() -> int:
    """Return the version of NCCL that commrt would use, such as 22703; 0: none."""
    if libnccl.why_missing() is not None:
        return 0
    return int(libnccl.library().version)


def cuda_built() -> bool:
    """Return whether torch was built for CUDA."""
    return torch.version.cuda is not None


def rocm_built() -> bool:
    """Return False: commrt has no devices of AMD."""
    return False


def ddl_built() -> bool:
    """Return False: commrt does not use IBM's library."""
    return False


def ccl_built() -> bool:
    """Return False: commrt does not use Intel's library."""
    return False


def start_timeline(*_: Any, **__: Any) -> NoReturn:
    """Raise UsageError, which says how commrt logs calls."""
    raise UsageError(
        "hvd.start_timeline: commrt writes no timelines of Horovod's. Set COMMRT_TRACE "
        "to a folder, and read it with python -m commrt trace; or use "
        "commrt.trace.record() in the program"
    )


def stop_timeline() -> NoReturn:
    """Raise UsageError, as ``start_timeline`` does."""
    start_timeline()
