# SPDX-License-Identifier: Apache-2.0
"""Where the arrays of a bound call lie, which a program may change between two runs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from commrt import _native
from commrt.arrays.device import is_jax, is_on_device, see
from commrt.arrays.host import view_anywhere
from commrt.arrays.tensors import is_tensor, of_own_class
from commrt.devices.arrays import DeviceArray

__all__ = ["places_of"]

_WHAT = "an array that a call is bound to"


def places_of(arrays: Iterable[Any]) -> _native.Places:
    """Return where arrays lie, as the caller passed them; None stands for no array."""
    return _native.Places([*arrays], _look)


def _look(array: Any) -> tuple[int, int] | None:
    """Return an array's address and bytes; None where neither can change.

    What exports a buffer keeps its memory while the buffer is used, and JAX's arrays
    never change.
    """
    if isinstance(array, DeviceArray):
        return array.address, array.nbytes
    if is_jax(array):
        return None
    if is_tensor(array):
        array = of_own_class(array, _WHAT)
    if is_on_device(array, _WHAT):
        seen = see(array, _WHAT, any_strides=True)
        return seen.address, seen.count * seen.dtype.itemsize
    if not hasattr(array, "__dlpack_device__"):
        return None
    found = view_anywhere(array, _WHAT)
    return found.address, found.nbytes
