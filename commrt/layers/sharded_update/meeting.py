# SPDX-License-Identifier: Apache-2.0
"""A meeting of all ranks before a step, which they make together or not at all."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from commrt.comm import Communicator
from commrt.errors import RefusedError, UsageError
from commrt.group.agreed_calls import fact_number

__all__ = ["end_together", "meet"]

_ERROR, _FACT, _FLAGS = 0, 1, 17
"""The first bytes of a message: an error's, those of a fact, and of parameters."""
_FAILED = 2
"""Says that a rank has an error; 1: it has news."""


def meet(
    comm: Communicator | None,
    what: str,
    error: Exception | None,
    fact: str,
    flags: Sequence[bool] = (),
) -> list[bool]:
    """Return which flags are set on any rank; collective.

    Args:
        comm: the ranks; None: one rank.
        what: the call, for errors.
        error: this rank's; None: it has none.
        fact: a text that must be equal on all ranks.
        flags: as many on all ranks.

    Raises this rank's error; RefusedError where another rank has one, and UsageError
    where texts differ. Bytes: an ``allreduce`` of 17 and one for each flag.
    """
    if comm is None:
        if error is not None:
            raise error
        return [*flags]
    said = np.empty(_FLAGS + len(flags), np.uint8)
    number = np.frombuffer(np.uint64(fact_number(fact)).tobytes(), np.uint8)
    # The largest byte and the largest complement add up to 255 where all are equal.
    said[_FACT : _FACT + 8], said[_FACT + 8 : _FLAGS] = number, 255 - number
    said[_ERROR], said[_FLAGS:] = error is not None, flags
    mine = said.copy()
    comm.allreduce(said, op="max")
    if error is not None:
        raise error
    if said[_ERROR]:
        raise RefusedError(
            f"{what} on {comm.name}: another rank raised an error, so the call "
            f"happened on no rank; that rank's error says why"
        )
    if (said[_FACT:_FLAGS] + mine[_FACT:_FLAGS][_COMPLEMENTS] != 255).any():
        raise UsageError(_difference(what, comm.allgather_object(fact)))
    return [bool(flag) for flag in said[_FLAGS:]]


_COMPLEMENTS = np.r_[8:16, 0:8]
"""For each byte of a fact the place of its complement, and the other way round."""


def end_together(
    comm: Communicator | None, what: str, error: Exception | None, has_news: bool
) -> bool:
    """Return whether any rank has news; raise an error of any; collective.

    Raises this rank's error, or RefusedError where another one has one. Bytes: an
    ``allreduce`` of 1.
    """
    said = np.array([_FAILED if error is not None else has_news], np.uint8)
    if comm is not None:
        comm.allreduce(said, op="max")
    if error is not None:
        raise error
    if said[0] == _FAILED:
        raise RefusedError(
            f"{what}: the optimizer of another rank raised an error, so the parameters "
            f"of its part are as that has left them; that rank's error says why. Load "
            f"a state before you go on"
        )
    return bool(said[0])


def _difference(what: str, facts: Sequence[str]) -> str:
    rank = next(rank for rank, fact in enumerate(facts) if fact != facts[0])
    mine, other = facts[0], facts[rank]
    at = next(
        (
            at
            for at, pair in enumerate(zip(mine, other, strict=False))
            if len({*pair}) > 1
        ),
        min(len(mine), len(other)),
    )
    low = max(0, at - 40)
    return (
        f"{what}: rank {rank} has …{other[low : at + 40]}…, and rank 0 has "
        f"…{mine[low : at + 40]}…; pass the same on all ranks"
    )
