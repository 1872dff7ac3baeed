# SPDX-License-Identifier: Apache-2.0
"""Rank, size and rendezvous where another launcher than torchrun started the processes.

torchrun tells its processes all of it in variables (RANK, WORLD_SIZE, MASTER_ADDR,
MASTER_PORT), and ``init_process_group`` without ``init_method`` asks for exactly these.
Under mpiexec and srun they are not there, and torch would raise an error.

- mpiexec: rank 0 hosts the store, and tells the others by MPI where.
- srun: rank 0 hosts the store, and the others know where from Slurm's variables alone.
  Where srun has started MPI, too (``srun --mpi=pmi2``), they meet as under mpiexec.
- either with one rank: the store is this process's own.
- commrt.run: torch's variables are set; the ranks meet in its folder, as no port has to
  be free there.

The variables that programs read beside that (LOCAL_RANK and so on) are set, too.
"""

from __future__ import annotations

import importlib
import os
import socket
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any
from urllib.parse import parse_qsl, urlparse

from commrt import env
from commrt.bootstrap.launcher_store import store_of_run
from commrt.bootstrap.mpi_of_launch import started_mpi
from commrt.bootstrap.store import slurm_store
from commrt.errors import BackendError, UsageError
from commrt.launch.detect import LaunchInfo, detect, slurm_step, started_alone
from commrt.launch.slurm import tasks_on_node
from commrt.vocabulary.limits import NO_LIMIT_S, as_timedelta, timedelta_seconds

__all__ = ["serve_launchers", "take_mpi"]

_SCHEME = "env"
_BY_ADDRESS = "tcp"
_MET: list[Any] = []
"""mpi4py's communicator by which the ranks of a default group to come have met."""
Handler = Callable[..., Iterator[tuple[Any, int, int]]]
_LOCAL = (
    ("LOCAL_RANK", ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID")),
    ("LOCAL_WORLD_SIZE", ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")),
)
"""torch's names, and what launchers call it."""


def serve_launchers() -> None:
    """Let ``env://``, torch's default, also know what other launchers say."""
    # torch.distributed has a function of the module's name.
    rendezvous = importlib.import_module("torch.distributed.rendezvous")
    handlers: dict[str, Handler] = rendezvous._rendezvous_handlers
    given = handlers.get(_SCHEME)
    if given is not None and not isinstance(given, _Rendezvous):
        handlers[_SCHEME] = _Rendezvous(given)
    by_address = handlers.get(_BY_ADDRESS)
    if by_address is not None and not isinstance(by_address, _Capped):
        handlers[_BY_ADDRESS] = _Capped(by_address)


class _Capped:
    """torch's own rendezvous, with limits that its store can count."""

    def __init__(self, own: Handler) -> None:
        self._own = own

    def __call__(self, url: str, **kwargs: Any) -> Iterator[tuple[Any, int, int]]:
        """Yield store, rank and size, as torch's handlers do."""
        return self._own(url, **_countable(kwargs))


def _countable(options: dict[str, Any]) -> dict[str, Any]:
    limit = options.get("timeout")
    if not isinstance(limit, timedelta):
        return options
    return {**options, "timeout": min(limit, as_timedelta(NO_LIMIT_S))}


class _Rendezvous:
    """torch's own ``env://``, unless its variables are missing and a launcher's are."""

    def __init__(self, own: Handler) -> None:
        self._own = own
        self._count = 0
        """Number of rendezvous so far; the same on all ranks."""
        self._told: dict[str, str] = {}
        """Variables that were set here."""

    def __call__(self, url: str, **kwargs: Any) -> Iterator[tuple[Any, int, int]]:
        """Yield store, rank and size, as torch's handlers do."""
        launch = self._launched(url)
        limit = kwargs.get("timeout")
        if launch is None:
            return self._own(url, **_countable(kwargs))
        if limit is None:
            from torch.distributed import default_pg_timeout

            limit = default_pg_timeout
        self._count += 1
        return self._meet(launch, timedelta_seconds(limit))

    def _launched(self, url: str) -> LaunchInfo | None:
        """Return the launcher of the ranks, if it is one that is served here."""
        said = {name for name, _ in parse_qsl(urlparse(url).query)}
        if said & {"rank", "world_size"}:
            return None
        launch = detect()
        if launch.is_child:
            raise UsageError(
                f"init_process_group: this process is no rank of the job: "
                f"{launch.source}. Start the processes of a group with a launcher "
                f"(torchrun, python -m commrt.run), or pass init_method, rank and "
                f"world_size"
            )
        if launch.kind == "run":
            return launch
        told = any(
            os.environ.get(name) not in (None, "", self._told.get(name))
            for name in ("RANK", "WORLD_SIZE")
        )
        served = launch.kind in ("mpi", "slurm") or (
            launch.kind == "single" and started_alone()
        )
        return launch if served and not told else None

    def _meet(
        self, launch: LaunchInfo, limit_s: float
    ) -> Iterator[tuple[Any, int, int]]:
        from torch.distributed import HashStore, PrefixStore

        if launch.kind == "run":
            folder = env.value("COMMRT_MEETING") or ""
            store = store_of_run(folder, launch.size, launch.rank)
            yield store.for_torch(f"groups-{self._count}"), launch.rank, launch.size
            return
        rank, size = launch.rank, launch.size
        mpi = _mpi_of(launch) if launch.kind == "mpi" else None
        if launch.kind == "single":
            store = HashStore()
        elif mpi is None:
            store = slurm_store(rank, size, limit_s)
        else:
            store, rank, size = _by_mpi(mpi, as_timedelta(limit_s))
        self._tell(launch, rank, size)
        yield PrefixStore(f"groups-{self._count}", store), rank, size

    def _tell(self, launch: LaunchInfo, rank: int, size: int) -> None:
        """Set the variables that programs read, where nobody has."""
        found = {"RANK": str(rank), "WORLD_SIZE": str(size)}
        for name, theirs in _LOCAL:
            values = [os.environ[one] for one in theirs if os.environ.get(one)]
            if values:
                found[name] = values[0]
        on_node = tasks_on_node(os.environ) if slurm_step(launch) else None
        if on_node is not None:
            found["LOCAL_WORLD_SIZE"] = on_node
        if size == 1:
            found |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        for name, value in found.items():
            if not os.environ.get(name) or name in self._told:
                os.environ[name] = self._told[name] = value


def _mpi_of(launch: LaunchInfo) -> Any | None:
    """Return the MPI by which ranks meet; None where they meet as Slurm says."""
    try:
        return started_mpi(launch)
    except BackendError as error:
        raise BackendError(
            f"{launch.source} started {launch.size} ranks, which meet by MPI: {error}; "
            f"or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT for every rank"
        ) from error


def _by_mpi(mpi: Any, limit: timedelta) -> tuple[Any, int, int]:
    """Return a store that rank 0 hosts, rank and size; collective over MPI's ranks."""
    from torch.distributed import TCPStore

    comm = mpi.COMM_WORLD
    rank, size = comm.Get_rank(), comm.Get_size()
    store = None
    where = ("", 0)
    if rank == 0:
        host, port = _own_address()
        store = TCPStore(host, port, size, True, limit, wait_for_workers=False)
        where = (host, store.port)
    host, port = comm.bcast(where, root=0)
    if store is None:
        store = TCPStore(host, port, size, False, limit, wait_for_workers=False)
    _MET[:] = [comm]
    return store, rank, size


def take_mpi(rank: int, size: int) -> Any:
    """Return mpi4py's communicator of the ranks of a new default group, once.

    None where they have not met by MPI.
    """
    comm = _MET.pop() if _MET else None
    fits = comm is not None and (comm.Get_rank(), comm.Get_size()) == (rank, size)
    return comm if fits else None


def _own_address() -> tuple[str, int]:
    """Return the address of rank 0's store: MASTER_ADDR and MASTER_PORT, if set."""
    host = os.environ.get("MASTER_ADDR") or socket.gethostname()
    return host, int(os.environ.get("MASTER_PORT") or 0)
