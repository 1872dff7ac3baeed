# SPDX-License-Identifier: Apache-2.0
"""End the whole job when one rank leaves with an exception.

Otherwise the other ranks wait for it until their deadline. COMMRT_ABORT_ON_EXCEPTION=0
switches this off.
"""

from __future__ import annotations

import os
import sys
import threading
from types import TracebackType
from typing import TYPE_CHECKING, NoReturn

from commrt import _native, env
from commrt.mpi import library

if TYPE_CHECKING:
    from mpi4py import MPI

    from commrt.job.world import World

__all__ = ["end_job", "install_excepthook", "limit_finalize"]

_LONGEST_S = 10.0
"""Seconds that MPI may need to end this process. It may wait, or spin, for hosts that
cannot be reached any more."""


def end_job(world: World, code: int) -> NoReturn:
    """End every rank of the job with exit status ``code``.

    Under MPI by MPI_Abort; elsewhere this process ends at once, which launchers such
    as torchrun take as the failure of the job.
    """
    _end(world.mpi, code)


def _end(mpi: MPI.Intracomm | None, code: int) -> NoReturn:
    _show_what_is_kept()
    sys.stdout.flush()
    sys.stderr.flush()
    if mpi is not None:
        _limit("MPI_Abort", "", code)
        _native.mpi_abort(library.handle(mpi), code)
    os._exit(code)


def limit_finalize(world: World) -> None:
    """See that this process ends, though its operations missed their deadline.

    Ranks may be out of reach then, and MPI_Finalize waits for all of them.
    """
    if world.mpi is not None:
        why = ", and operations that missed their deadline are in flight"
        _limit("MPI_Finalize", why, 1)


def _limit(function: str, why: str, code: int) -> None:
    _native.limit_end(
        _LONGEST_S,
        code,
        f"commrt: {function} did not end this process within {_LONGEST_S:g} s{why}: "
        f"other hosts may be out of reach; it ends with status {code}\n",
    )


def _show_what_is_kept() -> None:
    """Write what another hook keeps of stderr, and would show after this one.

    torch.distributed's does so, to put the rank before each line.
    """
    kept = getattr(sys.stderr, "getvalue", None)
    if kept is not None and sys.__stderr__ is not None:
        sys.__stderr__.write(kept())
        sys.__stderr__.flush()


def install_excepthook(world: World) -> None:
    """Make an uncaught exception of the main thread end the job."""
    if (
        world.size == 1
        or world.in_process
        or not env.read_bool("COMMRT_ABORT_ON_EXCEPTION")
    ):
        return
    previous = sys.excepthook
    owner = os.getpid()
    rank, mpi = world.rank, world.mpi  # not the world, which another one may replace

    def hook(
        kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        previous(kind, error, traceback)
        if (
            os.getpid() != owner
            or threading.current_thread() is not threading.main_thread()
        ):
            return
        code = 130 if issubclass(kind, KeyboardInterrupt) else 1
        sys.stderr.write(
            f"commrt: rank {rank} ended with {kind.__name__}; aborting the job\n"
        )
        _end(mpi, code)

    sys.excepthook = hook
