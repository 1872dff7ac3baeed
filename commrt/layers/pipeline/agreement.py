# SPDX-License-Identifier: Apache-2.0
"""Agreement of a pipeline's ranks: all go on together, or raise an error together.

An error has its type and text on the rank that raised it. The other ranks raise
RefusedError with both in its text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from commrt.comm import Communicator
from commrt.errors import RefusedError

__all__ = ["Numbers", "gathered", "meet", "raise_told"]

Numbers: TypeAlias = npt.NDArray[np.int64]

_TEXT_NBYTES = 1024
"""Bytes of an error's name and text that other ranks are told."""


def gathered(comm: Communicator, numbers: Sequence[int]) -> Numbers:
    """Return the numbers of all ranks, (ranks, numbers); collective.

    Bytes: an ``allgather`` of 8 for each number.
    """
    said = np.array(numbers, np.int64)
    if comm.size == 1:
        return said[None]
    every = np.empty((comm.size, len(said)), np.int64)
    comm.allgather(said, out=every)
    return every


def raise_told(
    comm: Communicator, what: str, error: Exception | None, first: int
) -> None:
    """Raise an error on all ranks, its own on the rank that has one; collective.

    Args:
        comm: the ranks.
        what: the call, for errors.
        error: this rank's, if it has one.
        first: the lowest rank with an error, of which the others are told.

    Bytes: a ``bcast`` of 1024.
    """
    text = np.zeros(_TEXT_NBYTES, np.uint8)
    if comm.rank == first:
        said = _text_of(error).encode(errors="backslashreplace")[:_TEXT_NBYTES]
        text[: len(said)] = np.frombuffer(said, np.uint8)
    if comm.size > 1:
        comm.bcast(text, root=first)
    if error is not None:
        raise error
    found = text.tobytes().rstrip(b"\0").decode(errors="ignore")
    raise RefusedError(
        f"{what} on {comm.name}: rank {first} raised {found}; so the call happened on "
        f"no rank, and may be made again"
    )


def _text_of(error: Exception | None) -> str:
    """Return an error's type and text; those of a program may have none."""
    name = type(error).__name__
    try:
        return f"{name}: {error}"
    except Exception as wrong:  # noqa: BLE001  the other ranks wait for the text
        return f"{name}, whose text could not be made: {type(wrong).__name__}"


def meet(
    comm: Communicator, what: str, error: Exception | None, numbers: Sequence[int]
) -> Numbers:
    """Return the numbers of all ranks, unless one has an error; collective.

    Raises this rank's error; without one of its own, RefusedError where another rank
    has one. Bytes: an ``allgather`` of 8 for each number, and of 8 more.
    """
    every = gathered(comm, [error is not None, *numbers])
    wrong = np.flatnonzero(every[:, 0])
    if len(wrong):
        raise_told(comm, what, error, int(wrong[0]))
    return every[:, 1:]
