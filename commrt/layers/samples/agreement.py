# SPDX-License-Identifier: Apache-2.0
"""Ranks compare what must be alike before samples move, so that all refuse together."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

from commrt.comm import Communicator
from commrt.errors import UsageError
from commrt.group.agreed_calls import fact_number

__all__ = ["agreed"]

T = TypeVar("T")

_POSITIVE = (1 << 63) - 1
"""Keeps a number of 64 bits within int64."""


def agreed(
    what: str, comm: Communicator, check: Callable[[], tuple[T, int, Sequence[str]]]
) -> tuple[T, tuple[int, ...]]:
    """Return the result of ``check``, and the numbers of all ranks; collective.

    Args:
        what: the call, for errors.
        comm: the ranks.
        check: looks at this rank's arguments. It returns a result, which stays here; a
            number, which may differ between ranks; and texts, which must be equal on
            all ranks. Where the arguments are wrong, it raises an error.

    Where one rank's ``check`` raises an error, that rank raises it, and all others
    raise UsageError. Where texts differ, all ranks raise UsageError. Bytes: an
    ``allgather`` of 24 for each rank. Texts are sent, as objects, only where they
    differ.
    """
    result: T | None = None
    refusal: Exception | None = None
    texts: Sequence[str] = ()
    said = np.array([1, 0, 0], np.int64)
    try:
        result, number, texts = check()
        said[:] = 0, number, fact_number([*texts]) & _POSITIVE
    except Exception as error:  # noqa: BLE001  the others wait to hear of it
        refusal = error
    every = said[None]
    if comm.size > 1:
        every = np.empty((comm.size, 3), np.int64)
        comm.allgather(said, out=every)
    if refusal is not None:
        raise refusal
    wrong = np.flatnonzero(every[:, 0])
    if len(wrong):
        raise UsageError(
            f"{what}: rank {wrong[0]} refused its arguments, so no rank goes on; the "
            f"error on rank {wrong[0]} says why"
        )
    if (every[:, 2] != every[0, 2]).any():
        raise UsageError(_difference(what, comm.allgather_object([*texts])))
    assert result is not None
    return result, tuple(every[:, 1].tolist())


def _difference(what: str, texts: Sequence[Sequence[str]]) -> str:
    first = texts[0]
    rank, other = next(each for each in enumerate(texts) if each[1] != first)
    pairs = itertools.zip_longest(first, other, fillvalue="nothing more")
    mine, theirs = next(pair for pair in pairs if pair[0] != pair[1])
    return (
        f"{what}: rank {rank} has {theirs}, and rank 0 has {mine}; pass the same on "
        f"all ranks"
    )
