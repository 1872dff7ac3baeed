# SPDX-License-Identifier: Apache-2.0
"""Run the program of a newcomer that ranks of MPI have started.

``comm.grow(count)`` starts ``main``. MPI waits there until each newcomer has started
MPI, for ever if one does not. So that comes first, and the program after it, which may
fail.
"""

from __future__ import annotations

import os
import sys

from commrt import env
from commrt.bootstrap.mpi_newcomers import Guest, become_guest, end_where_mpi_cannot
from commrt.errors import CommError
from commrt.launch.python_program import run_program

__all__ = ["main"]


def main() -> None:
    """Hear which program is to run, and run it."""
    place = become_guest()
    try:
        order = place.order(env.read_float("COMMRT_TIMEOUT_S"))
        os.environ.update(order.variables)
        run_program(order.program)
    except CommError as error:
        _end_if_refused(place, error)
        raise
    finally:
        why = sys.exc_info()[1]
        told = "" if why is None else f" by {type(why).__name__}: {why}"
        place.leave(f"its program ended{told} before it called commrt.init()")


def _end_if_refused(place: Guest, error: CommError) -> None:
    """End this process with status 0 where the ranks go on without it.

    A launcher would end the job of a process that fails.
    """
    if error is place.refusal:
        sys.stderr.write(f"{error}\n")
        end_where_mpi_cannot()
        raise SystemExit(0)
