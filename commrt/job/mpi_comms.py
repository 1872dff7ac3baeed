# SPDX-License-Identifier: Apache-2.0
"""MPI communicators that commrt makes for the library's own collectives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from commrt.bootstrap.base import Bootstrap, poll_until, with_heed
from commrt.bootstrap.lending import Lender
from commrt.errors import BackendError, TimeoutError_
from commrt.mpi.ulfm import Beside

__all__ = ["NativeComms"]

_LIMIT = 1024
"""MPI communicators that commrt makes at most: half of what MPICH has, the rest is the
program's."""


class NativeComms(Lender):
    """MPI's communicators.

    Args:
        mpi: commrt's own mpi4py communicator, which has all ranks.
        bootstrap: lets the ranks agree.
        refusal: what ``mpi`` raises where it has no more communicators.
        limit: how many to make at most.
        places: for each rank, its rank in ``mpi``; None: the same.
        why_none: returns why MPI makes none now; empty: it does.
        by_thread: whether threads may call MPI at the same time.
    """

    def __init__(
        self,
        mpi: Any,
        bootstrap: Bootstrap,
        refusal: type[Exception],
        limit: int = _LIMIT,
        *,
        places: Sequence[int] | None = None,
        why_none: Callable[[], str] | None = None,
        by_thread: bool = False,
    ) -> None:
        super().__init__(bootstrap, limit)
        self._mpi, self._bootstrap = mpi, bootstrap
        self._refusal = refusal
        self._places, self._ask, self._by_thread = places, why_none, by_thread

    def create(self, ranks: Sequence[int], tag: int, timeout_s: float) -> Any:
        """Return a new mpi4py communicator; collective over ``ranks``, which are here.

        Raises BackendError where the library refuses, or a rank of the job has failed.
        """
        if why := self._why_none():
            raise self._none(ranks, why)
        at = self._places
        group = self._mpi.Get_group()
        some = group.Incl([rank if at is None else at[rank] for rank in ranks])
        group.Free()
        call = Beside(
            lambda: self._mpi.Create_group(some, tag=tag), by_thread=self._by_thread
        )

        def heed() -> None:
            if why := self._why_none():
                raise self._none(ranks, why)

        idle = with_heed(self._bootstrap.idle, heed)
        if not poll_until(call.is_done, timeout_s, idle):
            raise TimeoutError_(
                f"MPI has made no communicator of ranks {list(ranks)} within "
                f"{timeout_s:g} s: one of them does not come, or is stopped"
            )
        try:
            return call.result()
        except self._refusal as error:
            why = "if it has no more of them, free() those that are not needed"
            raise self._none(ranks, f"{error}; {why}") from error
        finally:
            some.Free()

    def _none(self, ranks: Sequence[int], why: str) -> BackendError:
        return BackendError(f"MPI makes no communicator of ranks {list(ranks)}: {why}")

    def _why_none(self) -> str:
        return "" if self._ask is None else self._ask()

    def _create(
        self, ranks: tuple[int, ...], number: int, tag: int, timeout_s: float
    ) -> Any:
        return self.create(ranks, tag, timeout_s)
