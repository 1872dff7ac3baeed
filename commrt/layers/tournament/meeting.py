# SPDX-License-Identifier: Apache-2.0
"""A meeting of all ranks, which go on together or raise an error together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from commrt.comm import Communicator
from commrt.errors import CommError, RefusedError, RevokedError, UsageError
from commrt.group.agreed_calls import fact_number

__all__ = ["check_equal", "meet", "number_of"]

_IS_WELL, _IS_WRONG, _FOLLOWS = range(3)
"""A rank has no error; has one; has one that another rank's may have caused."""

_POSITIVE = (1 << 63) - 1
"""Keeps a number of 64 bits within int64."""


def number_of(fact: object) -> int:
    """Return a number of int64 that is equal on ranks where the fact's ``repr`` is."""
    return fact_number(fact) & _POSITIVE


def meet(
    comm: Communicator,
    what: str,
    error: BaseException | None,
    numbers: Sequence[int],
    hint: str = "",
) -> npt.NDArray[np.int64]:
    """Return the numbers of all ranks, (ranks, numbers); collective.

    Args:
        comm: the ranks.
        what: the call, for errors.
        error: this rank's; None: it has none.
        numbers: as many on all ranks.
        hint: what a program may do about another rank's error.

    Raises this rank's error; without one of its own, RefusedError where another rank
    has one. A RevokedError gives way to the error of a rank that has another one: it
    follows from that. Bytes: an ``allgather`` of 8 for each number, and of 8 more.
    """
    kind = _FOLLOWS if isinstance(error, RevokedError) else _IS_WRONG
    said = np.array([_IS_WELL if error is None else kind, *numbers], np.int64)
    every = said[None]
    if comm.size > 1:
        every = np.empty((comm.size, len(said)), np.int64)
        try:
            comm.allgather(said, out=every)
        except CommError as lost:
            if error is None:
                raise
            raise error from lost
    first = [*np.flatnonzero(every[:, 0] == _IS_WRONG)]
    if error is not None and (kind == _IS_WRONG or not first):
        raise error
    wrong = first or [*np.flatnonzero(every[:, 0])]
    if wrong:
        raise RefusedError(
            f"{what} on {comm.name}: rank {wrong[0]} raised an error, so the call "
            f"happened on no rank; the error on rank {wrong[0]} says why{hint}"
        ) from error
    return every[:, 1:]


def check_equal(
    what: str, values: Sequence[Any], others: Sequence[Any], name: str, advice: str
) -> None:
    """Raise UsageError unless each rank's value is the one that it must equal.

    Args:
        what: the call, for errors.
        values: of each rank.
        others: for each rank, the rank whose value it must have.
        name: of the values.
        advice: to the program's author.
    """
    for rank, other in enumerate(others):
        if values[rank] != values[other]:
            raise UsageError(
                f"{what}: the {name} of rank {rank} differ from those of rank {other}; "
                f"{advice}"
            )
