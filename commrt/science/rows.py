# SPDX-License-Identifier: Apache-2.0
"""Rows of data that ranks have in pieces: their types, and the check of all ranks.

A rank has rows of its own, any number, also none. Rows are numbered in the order of
ranks, so a row has one number, whatever the number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from commrt.comm import Communicator
from commrt.errors import UsageError, shown
from commrt.group.agreed_calls import fact_number

__all__ = [
    "Bools",
    "Floats",
    "Ints",
    "RowCut",
    "agreed_rows",
    "as_array",
    "as_rows",
    "as_values",
]

Floats: TypeAlias = npt.NDArray[np.float64]
Ints: TypeAlias = npt.NDArray[np.int64]
Bools: TypeAlias = npt.NDArray[np.bool_]
Settings = TypeVar("Settings")

_POSITIVE = (1 << 63) - 1
"""Keeps a number of 64 bits within int64."""
_LARGEST = 1e100
"""Of data: sums of squares are finite."""


@dataclass(frozen=True)
class RowCut:
    """The numbers of the rows that each rank has."""

    counts: tuple[int, ...]
    """Rows of each rank, in rank order."""
    rank: int
    """This rank."""
    num_features: int
    """Columns of a row."""

    @property
    def total(self) -> int:
        """Rows of all ranks."""
        return sum(self.counts)

    @property
    def ids(self) -> Ints:
        """The numbers of this rank's rows."""
        first = sum(self.counts[: self.rank])
        return np.arange(first, first + self.counts[self.rank], dtype=np.int64)


def as_rows(what: str, x: Any) -> Floats:
    """Return rows as a contiguous array (rows, features) of float64.

    Raises UsageError for other shapes, for types that are no real numbers, for NaN and
    infinity, and for numbers beyond 1e100.
    """
    return _as_finite(what, "x", x, 2, "(rows, features)")


def as_values(what: str, y: Any, num_rows: int) -> Floats:
    """Return one number for each row, as a contiguous array of float64."""
    values = _as_finite(what, "y", y, 1, "(rows,)")
    if len(values) != num_rows:
        raise UsageError(
            f"{what}: y has {len(values)} values, and x {num_rows} rows; expected one "
            f"value for each row"
        )
    return values


def as_array(what: str, name: str, value: Any, shape: str) -> npt.NDArray[Any]:
    """Return an argument as an array; UsageError for what numpy cannot read.

    Args:
        what, name: the call and the argument, for the error.
        value: the argument. A tensor of a device, or with a gradient, is no array.
        shape: the expected one, for the error.
    """
    try:
        return np.asarray(value)
    except Exception as error:  # an object of the program raises what it likes
        raise UsageError(
            f"{what}: {name}={shown(value)} is no array; expected one of shape {shape}"
        ) from error


def _as_finite(what: str, name: str, value: Any, ndim: int, shape: str) -> Floats:
    given = as_array(what, name, value, shape)
    if given.ndim != ndim or given.dtype.kind not in "fiub":
        raise UsageError(
            f"{what}: {name} has the shape {given.shape} and the type {given.dtype}; "
            f"expected real numbers of shape {shape}"
        )
    found: Floats = np.ascontiguousarray(given, np.float64)
    if not np.isfinite(found).all():
        raise UsageError(
            f"{what}: {name} has NaN or infinity; expected finite numbers: leave such "
            f"rows out"
        )
    if np.max(np.abs(found), initial=0.0) > _LARGEST:
        raise UsageError(
            f"{what}: {name} has numbers beyond {_LARGEST:g}, whose squares overflow; "
            f"divide by a unit of their size"
        )
    return found


def agreed_rows(
    what: str,
    comm: Communicator,
    check: Callable[[], tuple[tuple[Floats, ...], Settings]],
) -> tuple[tuple[Floats, ...], Settings, RowCut]:
    """Return what ``check`` returns, and the cut of its first array's rows; collective.

    Args:
        what: the call, for errors.
        comm: the ranks.
        check: returns arrays, rows first, and settings, or raises UsageError. Settings
            must be equal on all ranks. They are compared by their ``repr``, so
            ``check`` gives equal ones one type.

    Raises UsageError on all ranks alike where one of them refuses its arguments, where
    numbers of columns differ, and where settings do. Another error of ``check`` is
    raised on its rank, and the other ranks raise UsageError. Bytes: an allgather of 32
    for each rank.
    """
    said = np.zeros(4, np.int64)
    refusal: Exception | None = None
    try:
        arrays, settings = check()
        said[:] = 0, *arrays[0].shape, fact_number(settings) & _POSITIVE
    except Exception as error:  # noqa: BLE001 - the other ranks wait in the allgather
        refusal = error
        said[0] = 1
    if comm.size > 1:
        every: Ints = np.empty((comm.size, 4), np.int64)
        comm.allgather(said, out=every)
    else:
        every = said[None]
    if refusal is not None:
        raise refusal
    wrong = np.flatnonzero(every[:, 0])
    if len(wrong):
        raise UsageError(
            f"{what}: rank {wrong[0]} refused its arguments, so no rank goes on; the "
            f"error on rank {wrong[0]} says why"
        )
    for column, name in ((2, "columns of x"), (3, "settings")):
        others = np.flatnonzero(every[:, column] != every[0, column])
        if len(others):
            values = ""
            if column == 2:
                values = f" ({every[others[0], 2]} and {every[0, 2]})"
            raise UsageError(
                f"{what}: the {name} of rank {others[0]} are not those of rank 0"
                f"{values}; pass the same on all ranks"
            )
    counts = tuple(every[:, 1].tolist())
    return arrays, settings, RowCut(counts, comm.rank, int(every[0, 2]))
