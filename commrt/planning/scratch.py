# SPDX-License-Identifier: Apache-2.0
"""Places in scratch memory for what is needed from one step of a program to another."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["ALIGNMENT_NBYTES", "Area", "Scratch"]

ALIGNMENT_NBYTES = 256
"""Alignment of the memory that devices allocate."""


class Area(NamedTuple):
    """A place, and the steps in which it is used."""

    offset: int
    nbytes: int
    first: int
    last: int


class Scratch:
    """Places, of which those that are needed at the same time do not overlap."""

    def __init__(self) -> None:
        self.nbytes = 0
        """Bytes of all memory here."""
        self._kept = 0
        self._areas: list[Area] = []

    def keep(self, nbytes: int) -> int:
        """Return the offset of memory for the whole program; before any ``take``."""
        offset = self._kept
        self._kept += _rounded(nbytes)
        self.nbytes = max(self.nbytes, self._kept)
        return offset

    def take(self, nbytes: int, first: int, last: int) -> Area:
        """Return the first place that is free from step ``first`` to ``last``."""
        wanted = _rounded(nbytes)
        offset = self._kept
        busy = [a for a in self._areas if a.first <= last and first <= a.last]
        for area in sorted(busy):
            if offset + wanted <= area.offset:
                break
            offset = max(offset, area.offset + area.nbytes)
        made = Area(offset, wanted, first, last)
        self._areas.append(made)
        self.nbytes = max(self.nbytes, offset + wanted)
        return made


def _rounded(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT_NBYTES) * ALIGNMENT_NBYTES
