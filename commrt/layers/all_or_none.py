# SPDX-License-Identifier: Apache-2.0
"""Calls that happen on all ranks or on none: ranks tell each other of errors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from commrt.comm import Communicator
from commrt.errors import CommError, RefusedError, RevokedError, UsageError
from commrt.group.agreed_calls import fact_number

__all__ = ["check_equal", "check_same", "exchange", "meet", "number_of"]

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

    Raises what ``exchange`` returns. Bytes: an ``allgather`` of 8 for each number, and
    of 8 more.
    """
    every, raised = exchange(comm, what, error, numbers, hint)
    if raised is not None:
        raise raised
    return every


def exchange(
    comm: Communicator,
    what: str,
    error: BaseException | None,
    numbers: Sequence[int],
    hint: str = "",
) -> tuple[npt.NDArray[np.int64], BaseException | None]:
    """Return the numbers of all ranks, and the error to raise; collective.

    For calls that have to clean up before they raise, in a way that depends on what
    all ranks say. Arguments and bytes are those of ``meet``.

    The error is this rank's; without one of its own, a RefusedError where another rank
    has one, and None where no rank has any. A RevokedError gives way to the error of a
    rank that has another one: it follows from that. Raises errors of communication;
    this rank's error goes before them.
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
        return every[:, 1:], error
    wrong = first or [*np.flatnonzero(every[:, 0])]
    if not wrong:
        return every[:, 1:], None
    refused = RefusedError(
        f"{what} on {comm.name}: rank {wrong[0]} raised an error, so the call "
        f"happened on no rank; the error on rank {wrong[0]} says why{hint}"
    )
    refused.__cause__ = error
    return every[:, 1:], refused


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


def check_same(what: str, values: Sequence[Any], name: str) -> None:
    """Raise UsageError unless all ranks have the value of rank 0."""
    others = [0] * len(values)
    check_equal(what, values, others, name, "give the same ones on all ranks")
