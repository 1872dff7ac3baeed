# SPDX-License-Identifier: Apache-2.0
"""Rank, size and rendezvous where MPI's or Slurm's launcher started the processes.

torchrun tells its processes all of it in variables (RANK, WORLD_SIZE, MASTER_ADDR,
MASTER_PORT), and ``init_process_group`` without ``init_method`` asks for exactly these.
Under mpiexec and srun they are not there, and torch would raise an error. Then rank 0
hosts the store, and tells the others by MPI where.
"""

from __future__ import annotations

import importlib
import os
import socket
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import parse_qsl, urlparse

from commrt import _libmpi
from commrt.errors import BackendError
from commrt.launch import LaunchInfo, check_mpi_library, check_mpi_size, detect

__all__ = ["serve_launchers", "take_mpi"]

_SCHEME = "env"
_MET: list[Any] = []
"""mpi4py's communicator by which the ranks of a default group to come have met."""
Handler = Callable[..., Iterator[tuple[Any, int, int]]]


def serve_launchers() -> None:
    """Let ``env://``, torch's default, also know what MPI's launchers say."""
    # torch.distributed has a function of the module's name.
    rendezvous = importlib.import_module("torch.distributed.rendezvous")
    handlers: dict[str, Handler] = rendezvous._rendezvous_handlers
    given = handlers.get(_SCHEME)
    if given is not None and not isinstance(given, _Rendezvous):
        handlers[_SCHEME] = _Rendezvous(given)


class _Rendezvous:
    """torch's own ``env://``, unless its variables are missing and MPI's are there."""

    def __init__(self, own: Handler) -> None:
        self._own = own

    def __call__(self, url: str, **kwargs: Any) -> Iterator[tuple[Any, int, int]]:
        """Yield store, rank and size, as torch's handlers do."""
        launch = _launched_by_mpi(url)
        if launch is None:
            return self._own(url, **kwargs)
        return _meet_by_mpi(launch, kwargs.get("timeout"))


def _launched_by_mpi(url: str) -> LaunchInfo | None:
    """Return who started the ranks, if it was MPI and nothing says anything else."""
    said = {name for name, _ in parse_qsl(urlparse(url).query)}
    variables = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    if said or any(os.environ.get(name) for name in variables):
        return None
    launch = detect()
    return launch if launch.kind in ("mpi", "slurm") else None


def _meet_by_mpi(launch: LaunchInfo, timeout: Any) -> Iterator[tuple[Any, int, int]]:
    from torch.distributed import TCPStore, default_pg_timeout

    try:
        check_mpi_library(launch, _libmpi.library_name(_libmpi.imported()))
        mpi = _libmpi.load()
    except BackendError as error:
        raise BackendError(
            f"{launch.source} started {launch.size} ranks, which meet by MPI: {error}; "
            f"or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT for every rank"
        ) from error
    comm = mpi.COMM_WORLD
    check_mpi_size(launch, comm.Get_size(), _libmpi.library_name(mpi))
    rank, size = comm.Get_rank(), comm.Get_size()
    limit = default_pg_timeout if timeout is None else timeout
    store = None
    where = ("", 0)
    if rank == 0:
        host = socket.gethostname()
        store = TCPStore(host, 0, size, True, limit, wait_for_workers=False)
        where = (host, store.port)
    host, port = comm.bcast(where, root=0)
    if store is None:
        store = TCPStore(host, port, size, False, limit, wait_for_workers=False)
    _MET[:] = [comm]
    yield store, rank, size


def take_mpi(rank: int, size: int) -> Any:
    """Return mpi4py's communicator of the ranks of a new default group, once.

    None where they have not met by MPI.
    """
    comm = _MET.pop() if _MET else None
    fits = comm is not None and (comm.Get_rank(), comm.Get_size()) == (rank, size)
    return comm if fits else None
