# SPDX-License-Identifier: Apache-2.0
"""MPI communicators that commrt makes for the library's own collectives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from commrt.bootstrap.base import Bootstrap
from commrt.bootstrap.lending import Lender
from commrt.errors import BackendError

__all__ = ["NativeComms"]

_LIMIT = 1024
"""MPI communicators that commrt makes at most: half of what MPICH has, the rest is the
program's."""


class NativeComms(Lender):
    """MPI's communicators.

    Args:
        mpi: commrt's own mpi4py communicator over all ranks, or None without MPI.
        bootstrap: lets the ranks agree.
        refusal: what ``mpi`` raises where it has no more communicators.
        limit: how many to make at most.
    """

    def __init__(
        self,
        mpi: Any,
        bootstrap: Bootstrap,
        refusal: type[Exception],
        limit: int = _LIMIT,
    ) -> None:
        super().__init__(bootstrap, limit)
        self._mpi = mpi
        self._refusal = refusal

    def create(self, ranks: Sequence[int], tag: int) -> Any:
        """Return a new mpi4py communicator; collective over ``ranks``, which are here.

        Raises BackendError where the library refuses.
        """
        group = self._mpi.Get_group()
        some = group.Incl(list(ranks))
        group.Free()
        try:
            return self._mpi.Create_group(some, tag=tag)
        except self._refusal as error:
            raise BackendError(
                f"MPI makes no communicator of ranks {list(ranks)}: {error}; if it has "
                f"no more of them, free() those that are not needed"
            ) from error
        finally:
            some.Free()

    def _create(
        self, ranks: tuple[int, ...], number: int, tag: int, timeout_s: float
    ) -> Any:
        return self.create(ranks, tag)
