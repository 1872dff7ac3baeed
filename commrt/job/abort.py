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

__all__ = ["end_job", "install_excepthook"]


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
        _native.mpi_abort(library.handle(mpi), code)
    os._exit(code)


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
