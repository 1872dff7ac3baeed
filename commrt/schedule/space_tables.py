# SPDX-License-Identifier: Apache-2.0
"""Spaces in the form that the native code reads, and the lengths of their blocks."""

from __future__ import annotations

from fractions import Fraction
from functools import lru_cache

from commrt import _native
from commrt.schedule.dependencies import locations
from commrt.schedule.ir import Space

__all__ = ["block_width", "space_table"]

_KINDS = {"in": 0, "out": 1, "tmp": 2}
_SPLITS = ("even", "counts", "boxes", "dyn")


def block_width(space: Space, multiple: int) -> Fraction | None:
    """Return the length of a block per element of N/multiple; None if irregular."""
    if space.split != "even":
        return None
    return Fraction(space.scale[0] * multiple, space.scale[1] * max(space.nblk, 1))


@lru_cache(maxsize=4096)
def space_table(spaces: tuple[Space, ...], multiple: int = 1) -> _native.SpaceTable:
    """Return the spaces of a rank; ``multiple`` as ``full_multiple`` has it."""
    rows = []
    for first, space in zip(locations(spaces), spaces, strict=True):
        width = block_width(space, multiple)
        shared = space.alias is not None and space.nblk == spaces[0].nblk
        num, den = (0, 0) if width is None else (width.numerator, width.denominator)
        split, lengths = _SPLITS.index(space.split), space.counts or space.cap or ()
        rows.append(
            (_KINDS[space.kind], space.nblk, first, shared, num, den, split, lengths)
        )
    return _native.SpaceTable(rows)
