# SPDX-License-Identifier: Apache-2.0
"""Samples of one rank in memory, with room for those that come.

Records 0 to n - 1 are the rank's samples. As many as may leave at once have room behind
them. Samples that leave are copied there, side by side in the order of a message, and
can be read until they have left. Then the last places before the room are cleared:
samples from there go to where others have left. So what comes has its places side by
side, too, and is received into them, without a copy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from commrt.layers.samples.columns import Bytes, Column, Columns
from commrt.layers.samples.draws import Ints

__all__ = ["Records"]

_COPIED_NBYTES = 1 << 20
"""Moved at once within the records, by way of a copy of so many bytes."""


class Records:
    """The samples of a rank.

    Args:
        columns: the arrays of a sample.
        arrays: by the columns' names; they are copied.
        num_samples: of this rank.
        room: samples that leave at once, at most.
    """

    def __init__(
        self, columns: Columns, arrays: Mapping[str, Any], num_samples: int, room: int
    ) -> None:
        self.columns = columns
        self.num_samples = num_samples
        self.is_whole = True
        """False while samples move, until the caller has taken their new places."""
        self._offsets = columns.offsets
        self._rows: Bytes = np.empty((num_samples + room, columns.nbytes), np.uint8)
        for column in columns.columns:
            at = self._offsets[column.name]
            into = self._rows[:num_samples, at : at + column.nbytes]
            into[:] = column.as_bytes(arrays[column.name])

    @property
    def nbytes(self) -> int:
        """Bytes of all records, those of the room included."""
        return self._rows.nbytes

    def read(self, places: Ints) -> dict[str, Any]:
        """Return new arrays of the samples at some places, in their order."""
        return self.read_parts(places, (len(places),))[0]

    def read_parts(self, places: Ints, ends: Sequence[int]) -> list[dict[str, Any]]:
        """Return the same in parts, each of the places up to one of ``ends``."""
        found: list[dict[str, Any]] = [{} for _ in ends]
        for column in self.columns.columns:
            parts = column.parts(self._bytes_of(column, places), ends)
            for into, part in zip(found, parts, strict=True):
                into[column.name] = part
        return found

    def _bytes_of(self, column: Column, places: Ints) -> Bytes:
        """Return the bytes (places, nbytes) of one column, copied once."""
        if len(self.columns.columns) == 1:
            return self._rows.take(places, axis=0, mode="clip")
        if column.nbytes == 0 or not len(places):
            return np.empty((len(places), column.nbytes), np.uint8)
        # One element for each row: numpy copies it whole, and reads only this column.
        elements: Any = np.ndarray(
            (len(self._rows),),
            np.dtype((np.void, column.nbytes)),
            self._rows,
            self._offsets[column.name],
            (self.columns.nbytes,),
        )
        found: Bytes = elements[places].view(np.uint8)
        return found.reshape(len(places), column.nbytes)

    def move_out(self, leaving: Ints) -> tuple[Ints, Bytes, Bytes]:
        """Bring samples into the order of a message, and clear places for others.

        Args:
            leaving: places of the samples, in the order in which they leave.

        Returns the new place of each place, the message (bytes), and where as many
        others are to be received. Those places are the last ones before the room. The
        caller sets ``is_whole`` once it uses the new places; after an error before that
        nobody knows which samples have moved.
        """
        number, end = len(leaving), self.num_samples
        cleared = end - number
        new_places = np.arange(end)
        new_places[leaving] = np.arange(end, end + number)
        message = self._rows[end : end + number]
        self._rows[:end].take(leaving, axis=0, out=message, mode="clip")
        has_left = new_places >= end
        holes = np.flatnonzero(has_left[:cleared])
        movers = cleared + np.flatnonzero(~has_left[cleared:])
        new_places[movers] = holes
        self.is_whole = False
        self._copy(movers, holes)
        return new_places, message.reshape(-1), self._rows[cleared:end].reshape(-1)

    def _copy(self, sources: Ints, targets: Ints) -> None:
        step = max(1, _COPIED_NBYTES // max(1, self.columns.nbytes))
        for low in range(0, len(sources), step):
            some = slice(low, low + step)
            self._rows[targets[some]] = self._rows[sources[some]]
