# SPDX-License-Identifier: Apache-2.0
"""ULFM, MPI's user-level failure mitigation: whether this MPI has it, and its words.

With it a job survives the death of some of its ranks, and MPI says which have failed
("Post-failure recovery of MPI communication capability", Bland et al., 2013). Open MPI
5 has it where its launcher was told so: ``mpiexec --with-ft ulfm``.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from commrt.mpi import library

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = [
    "Beside",
    "FailedRanks",
    "Survival",
    "failure_table",
    "finalize_without_fence",
    "is_failure",
    "places_in",
    "survival",
]

_IS_ON = "ompi_ftmpi_enabled"
"""Open MPI's variable for whether it survives failures."""
_NO_FENCE = "ompi_async_mpi_finalize"
"""Open MPI's variable for whether MPI_Finalize leaves out its last meeting."""
_BETWEEN_S = 0.01
_GET_FAILED = "MPIX_Comm_get_failed"
_FUNCTIONS = (
    "MPI_Comm_group",
    "MPI_Group_free",
    "MPI_Group_size",
    "MPI_Group_translate_ranks",
)
_ERRORS = ("ERR_PROC_FAILED", "ERR_PROC_FAILED_PENDING", "ERR_REVOKED")
_CONSTANTS = ("ANY_SOURCE", "ANY_TAG", *_ERRORS)
_TAG = 1
"""Of no message: to look for one lets MPI hear of failures."""


@dataclass(frozen=True)
class Survival:
    """Whether the job survives the death of a rank, and why."""

    can: bool
    why: str


def survival() -> Survival:
    """Return whether ranks can go on after one has died; initialises MPI."""
    mpi = library.load()
    name = library.library_name(mpi)
    if not name.startswith("Open MPI"):
        return Survival(
            False,
            f"{name} ends the job with the first rank that dies: start it by Open MPI "
            f"5 and mpiexec --with-ft ulfm, or by commrt.run --keep-going on one node",
        )
    if not hasattr(mpi.Comm, "Get_failed"):
        return Survival(False, "mpi4py has no ULFM: install mpi4py 4 or newer")
    is_on = library.flag_of(_IS_ON)
    if is_on is None or not is_on.value:
        return Survival(
            False,
            "the launcher ends the job with the first rank that dies: start it by "
            "mpiexec --with-ft ulfm",
        )
    return Survival(True, f"{name} with ULFM")


def finalize_without_fence() -> None:
    """Let MPI_Finalize leave out the meeting by which it waits for ranks that died.

    The launcher may wait there for a dead rank, for ever (Open MPI 5.0.11, in one of
    six programs that had lost a rank). The ranks that live have met before, by an
    agreement. All ranks of a job must do this, or none.
    """
    fence = library.flag_of(_NO_FENCE)
    if fence is not None:
        fence.value = True


def is_failure(mpi: Any, error: Exception) -> bool:
    """Return whether MPI refused a call since a process has failed."""
    codes = [getattr(mpi, name, None) for name in _ERRORS]
    return isinstance(error, mpi.Exception) and error.Get_error_class() in codes


def failure_table() -> dict[str, int]:
    """Return what the engine needs to ask MPI which ranks have failed."""
    mpi, functions = library.load(), library.mpi_table()
    constants = {name: int(getattr(mpi, name)) & 0xFFFF_FFFF for name in _CONSTANTS}
    return {
        **{name: functions[name] for name in _FUNCTIONS},
        **constants,
        _GET_FAILED: library.address_of(_GET_FAILED),
        "COMM_SELF": library.handle(mpi.COMM_SELF),
    }


class FailedRanks:
    """The ranks of a communicator that have failed, as MPI knows.

    Args:
        comm: the communicator; None where MPI does not survive failures.
    """

    def __init__(self, comm: MPI.Intracomm | None) -> None:
        self._comm = comm
        self._known: frozenset[int] = frozenset()
        self._next_s = 0.0

    def ranks(self, *, anew: bool = False) -> frozenset[int]:
        """Ask MPI, unless that was done just now; return ranks of the communicator."""
        now = time.monotonic()
        comm = self._comm
        if comm is None or (now < self._next_s and not anew):
            return self._known
        self._next_s = now + _BETWEEN_S
        mpi = library.load()
        mpi.COMM_SELF.Iprobe(tag=_TAG)
        failed = comm.Get_failed()
        if failed.size > len(self._known):
            whole = comm.Get_group()
            found = mpi.Group.Translate_ranks(failed, [*range(failed.size)], whole)
            whole.Free()
            self._known = frozenset(found)
        failed.Free()
        return self._known

    def acknowledge(self) -> None:
        """Let receives from any rank go on without those that have failed."""
        if self._comm is not None:
            self._comm.Ack_failed()


class Beside:
    """A call of MPI that may block, in a thread of its own.

    MPI makes no communicator of some ranks, nor one without those that have failed,
    without blocking.

    Args:
        call: what may block.
        by_thread: whether a thread may call MPI beside this one (THREAD_MULTIPLE);
            else the call is made here, and blocks.
    """

    def __init__(self, call: Callable[[], Any], *, by_thread: bool) -> None:
        self._call = call
        self._made: list[Any] = []
        self._errors: list[Exception] = []
        self._thread: threading.Thread | None = None
        if by_thread:
            self._thread = threading.Thread(
                target=self._run, name="commrt-mpi", daemon=True
            )
            self._thread.start()
        else:
            self._run()

    def _run(self) -> None:
        try:
            self._made.append(self._call())
        except Exception as error:  # noqa: BLE001 - for the caller
            self._errors.append(error)

    def is_done(self) -> bool:
        """Return whether it has ended."""
        return bool(self._made or self._errors)

    def result(self) -> Any:
        """Return its result, or raise its error; it has ended."""
        if self._thread is not None:
            self._thread.join()
        if self._errors:
            raise self._errors[0]
        return self._made[0]


def places_in(
    mpi: Any, of: MPI.Intracomm, ranks: Sequence[int], to: MPI.Intracomm
) -> list[int | None]:
    """Return the rank in ``to`` of each of these ranks of ``of``; None: it has none."""
    before, after = of.Get_group(), to.Get_group()
    found = mpi.Group.Translate_ranks(before, [*ranks], after)
    before.Free()
    after.Free()
    return [None if rank == mpi.UNDEFINED else rank for rank in found]
