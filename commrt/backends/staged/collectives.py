# SPDX-License-Identifier: Apache-2.0
"""Candidates of staged calls: through pinned host memory and a host backend.

A candidate ``staged/ring`` runs the host's ``ring``. A call is cut into pieces, so that
one is copied to the host while another is combined there and a third is on its way
back; ``piece`` is their length in bytes (``pieces.py``). With ``copies="kernel"``
kernels copy to pinned memory and back, and no copy engines.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from commrt.errors import UsageError, shown
from commrt.select.facts import Candidate, Query
from commrt.vocabulary.operations import operation

__all__ = [
    "COPIES",
    "ENGINE",
    "KERNEL",
    "NAME",
    "PIECE",
    "PIECE_NBYTES",
    "check_copies",
    "check_piece",
    "is_cut",
    "on_host",
    "piece_nbytes",
]

PIECE, COPIES = "piece", "copies"
"""The parameters of staging itself; the others are those of the host's candidate."""
PIECE_NBYTES = 2 << 20
"""Length of pieces that the host combines: two ranks that shared an H200 were fastest
with it, or within 2 %, from 4 MiB on. Longer ones leave the host's caches."""
_ALONE = ((4, 4 << 20), (16, 16 << 20))
"""A rank alone only copies, and each piece costs its caller some 20 us: that many
pieces, of so many bytes at most; of the two rules the one with longer pieces. On an
H200 16 MiB were fastest in pieces of 2 to 4 MiB, 256 MiB in pieces of 12 to 16."""
ENGINE, KERNEL = "engine", "kernel"
"""Unit of the device that copies. Each rank may choose for itself: its peers see only
what the host sends."""
NAME = "staged"


def check_piece(value: Any) -> int:
    """Return the length of pieces in bytes; UsageError for what is none."""
    if type(value) is not int or not 1 <= value <= 1 << 40:
        raise UsageError(
            f"parameter {PIECE}={shown(value)} must be a number of bytes, an integer "
            "from 1"
        )
    return value


def piece_nbytes(nbytes: int, num_ranks: int) -> int:
    """Return the length of pieces of a call that names none, the same on all ranks."""
    if num_ranks > 1:
        return PIECE_NBYTES
    return max(PIECE_NBYTES, *(min(nbytes // number, most) for number, most in _ALONE))


def check_copies(value: Any) -> bool:
    """Return whether kernels copy; UsageError for what is no such choice."""
    if value not in (ENGINE, KERNEL):
        raise UsageError(
            f"parameter {COPIES}={shown(value)} must be {ENGINE!r}, for the device's "
            f"copy engines, or {KERNEL!r}"
        )
    return bool(value == KERNEL)


def on_host(query: Query, candidate: Candidate) -> tuple[Query, Candidate]:
    """Return what the host runs for a staged candidate; others stay what they are.

    The name of its backend stays, which the host's algorithms do not depend on.
    """
    if candidate.backend != NAME:
        return query, candidate
    own = PIECE, COPIES
    params = {name: v for name, v in candidate.params.items() if name not in own}
    piece = candidate.params.get(PIECE, PIECE_NBYTES)
    nbytes = query.nbytes
    if is_cut(query.coll) and isinstance(piece, int):
        nbytes = min(nbytes, piece)
    host = replace(query, device="host", nbytes=nbytes)
    return host, Candidate(NAME, candidate.algorithm, params)


def is_cut(coll: str) -> bool:
    """Return whether an operation's elements do not depend on each other."""
    spec = operation(coll)
    return spec.out_count == "same" and spec.rule_bytes == "whole"
