# SPDX-License-Identifier: Apache-2.0
"""Looks for NaN and infinity in what a rank is about to send (COMMRT_NAN_CHECK)."""

from __future__ import annotations

from typing import Protocol

from commrt import _native
from commrt.arrays.host import HostView
from commrt.errors import NotFiniteError

__all__ = ["check_finite", "not_finite"]


class _Named(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def rank(self) -> int: ...


class _Checked(_Named, Protocol):
    @property
    def nan_check(self) -> bool: ...


def check_finite(
    group: _Checked, what: str, view: HostView | None, argument: str = "x"
) -> None:
    """Raise NotFiniteError where a checking group would send NaN or infinity.

    Arrays on devices are not looked at.
    """
    if not group.nan_check or view is None or view.on is not None:
        return
    index, is_nan = _native.first_not_finite(view.dtype.code, view.address, view.count)
    if index >= 0:
        where = (index, view.count)
        raise not_finite(group, what, argument, where, is_nan=is_nan)


def not_finite(
    group: _Named, what: str, argument: str, where: tuple[int, int], *, is_nan: bool
) -> NotFiniteError:
    """Return the error of an array; ``where`` is an index, and how many there are."""
    index, count = where
    value = "NaN" if is_nan else "infinity"
    return NotFiniteError(
        f"{what} on {group.name}, rank {group.rank}: {argument} has {value} at element "
        f"{index} of {count}; nothing was sent. Look for what made it, or set "
        f"comm.nan_check to False (COMMRT_NAN_CHECK=0)"
    )
