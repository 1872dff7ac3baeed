# SPDX-License-Identifier: Apache-2.0
"""Other ways for a staged call to cross pinned memory, for the tuner to try."""

from __future__ import annotations

from dataclasses import replace

from commrt.backends.staged.collectives import (
    COPIES,
    KERNEL,
    NAME,
    PIECE,
    PIECE_NBYTES,
)
from commrt.select.facts import Candidate

__all__ = ["copy_variants", "piece_variants"]

_PIECES = (1 << 18, 1 << 22, 1 << 24)
"""Bytes of the pieces of a staged call that are tried beside its default."""
_BY_KERNEL_NBYTES = 16 << 10
"""Most bytes for which kernels are tried instead of copy engines: these take longer to
begin, and move more at once."""


def piece_variants(candidate: Candidate, full_nbytes: int) -> list[Candidate]:
    """Return a staged ``candidate`` with pieces of other lengths.

    Left out is what would run the same: pieces that hold the whole vector, where those
    of the default hold it, too. For other backends there is none.
    """
    if candidate.backend != NAME or PIECE in candidate.params:
        return []
    found, longest = [], PIECE_NBYTES
    for nbytes in _PIECES:
        if nbytes < min(full_nbytes, PIECE_NBYTES) or longest < full_nbytes:
            params = {**candidate.params, PIECE: nbytes}
            found.append(Candidate(candidate.backend, candidate.algorithm, params))
            longest = max(longest, nbytes)
    return found


def copy_variants(candidate: Candidate, full_nbytes: int) -> list[Candidate]:
    """Return a staged ``candidate`` whose short copies kernels do."""
    if candidate.backend != NAME or full_nbytes > _BY_KERNEL_NBYTES:
        return []
    params = {**candidate.params, COPIES: KERNEL}
    return [] if params == candidate.params else [replace(candidate, params=params)]
