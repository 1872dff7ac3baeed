# SPDX-License-Identifier: Apache-2.0
"""Numbers and lists that programs pass in the place of an array."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from commrt.errors import BufferError_

__all__ = ["array_of", "as_array", "is_number", "is_plain"]

_NUMBERS = (int, float, complex, np.generic)  # a bool is an int
_LISTS = (list, tuple)
_PLAIN = (*_NUMBERS, *_LISTS)


def is_plain(x: Any) -> bool:
    """Return whether ``x`` is a number, or a list or tuple."""
    return isinstance(x, _PLAIN)


def is_number(x: Any) -> bool:
    """Return whether ``x`` is a number of Python or a scalar of numpy."""
    return isinstance(x, _NUMBERS)


def array_of(x: Any, what: str) -> npt.NDArray[Any]:
    """Return a new array of a number or a list; BufferError_ where there is none."""
    try:
        found: npt.NDArray[Any] = np.array(x)
    except Exception as error:
        raise BufferError_(
            f"{what} is a {type(x).__name__} that numpy makes no array of "
            f"({type(error).__name__}: {error}): pass an array"
        ) from error
    is_inexact = found.dtype.kind == "f" and found.size > 0 and _is_of_integers(x)
    if found.dtype.hasobject or found.dtype.kind in "US" or is_inexact:
        raise BufferError_(
            f"{what} is a {type(x).__name__} of other things than numbers of at most "
            f"64 bits: pass an array, or the object itself to a call such as "
            f"allgather_object or send_object"
        )
    return found


def as_array(x: Any, what: str) -> Any:
    """Return an array as it is, and a new one of a number or a list."""
    return array_of(x, what) if is_plain(x) else x


def _is_of_integers(x: Any) -> bool:
    """Return whether there is nothing but integers of Python in a list of any depth."""
    if isinstance(x, _LISTS):
        return all(map(_is_of_integers, x))
    return isinstance(x, int)
