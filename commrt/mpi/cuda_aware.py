# SPDX-License-Identifier: Apache-2.0
"""True if the MPI library takes CUDA memory, asked at run time.

A library that does not reads a device's address as a host's, and crashes. Its build
says little: a build with CUDA may run where its transports have none. So nothing is
assumed, and only a library that says yes is given device memory.
"""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from typing import Any

from commrt.mpi import library as libmpi

__all__ = ["Awareness", "mpi_takes_cuda"]

_CUDA = 0
"""MPIX_GPU_SUPPORT_CUDA of MPICH and what derives from it."""
_KINDS = "mpi_memory_alloc_kinds"


@dataclass(frozen=True)
class Awareness:
    """The answer of the library."""

    proved: bool
    """True if it takes CUDA memory."""
    why: str
    """The question and the answer, in words."""


def mpi_takes_cuda() -> Awareness:
    """Ask the loaded MPI library, which is started if it is not yet.

    Any of these is enough: ``MPIX_GPU_query_support`` (MPICH), its elder
    ``MPIX_Query_cuda_support`` (Open MPI), or ``cuda`` among MPI 4.1's memory kinds.
    """
    mpi = libmpi.load()
    library = ctypes.CDLL(mpi.__file__, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    info = mpi.COMM_WORLD.Get_info()
    try:
        kinds: str | None = info.Get(_KINDS)
    finally:
        info.Free()
    return _weigh(library, kinds)


def _weigh(library: Any, kinds: str | None) -> Awareness:
    """Return the answer of the library's functions and the info together."""
    said = []
    for name, ask in (
        ("MPIX_GPU_query_support", _gpu_query),
        ("MPIX_Query_cuda_support", _cuda_query),
    ):
        answer = ask(getattr(library, name, None))
        if answer is not None:
            said.append(f"{name}() says {'yes' if answer else 'no'}")
        if answer:
            return Awareness(True, said[-1])
    if kinds is not None:
        said.append(f"{_KINDS} is {kinds!r}")
        # As in "system,mpi,cuda:device:managed".
        if any(kind.split(":")[0].strip() == "cuda" for kind in kinds.split(",")):
            return Awareness(True, said[-1])
    return Awareness(False, "; ".join(said) or "the library cannot be asked")


def _gpu_query(function: Any) -> bool | None:
    if function is None:
        return None
    supported = ctypes.c_int(0)
    if function(ctypes.c_int(_CUDA), ctypes.byref(supported)) != 0:
        return None
    return supported.value == 1


def _cuda_query(function: Any) -> bool | None:
    return None if function is None else int(function()) == 1
