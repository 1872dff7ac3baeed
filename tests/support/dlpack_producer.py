# SPDX-License-Identifier: Apache-2.0
"""Arrays on devices that have DLPack and nothing else, of either version."""

from __future__ import annotations

import ctypes
from typing import Any

from commrt.arrays.dlpack import _Tensor, _Versioned
from commrt.devices import DeviceArray

_new = ctypes.PYFUNCTYPE(
    ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p
)(("PyCapsule_New", ctypes.pythonapi))
_CODES = {"i": 0, "u": 1, "f": 2, "c": 5, "b": 6}


class OnlyDlpack:
    """An array of a library that commrt knows nothing of."""

    def __init__(
        self,
        array: DeviceArray,
        *,
        versioned: bool = True,
        readonly: bool = False,
        strides: tuple[int, ...] | None = None,
        offset: int = 0,
        code: int | None = None,
        major: int = 1,
    ) -> None:
        self.array = array
        self.versioned = versioned
        self.asked: list[Any] = []
        """The streams that it was told to come before."""
        ndim = len(array.shape)
        self._shape = (ctypes.c_int64 * ndim)(*array.shape)
        self._strides = (ctypes.c_int64 * ndim)(*(strides or ())) if strides else None
        tensor = _Tensor(
            array.address - offset,
            2,
            0,
            ndim,
            _CODES[array.dtype.kind] if code is None else code,
            8 * array.dtype.itemsize,
            1,
            self._shape,
            self._strides,
            offset,
        )
        self._held: Any = tensor
        if versioned:
            self._held = _Versioned(major, 0, None, None, int(readonly), tensor)

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 0

    def __dlpack__(self, *, stream: Any = None, **more: Any) -> Any:
        if more and not self.versioned:
            raise TypeError("__dlpack__() got an unexpected keyword argument")
        self.asked.append(stream)
        name = b"dltensor_versioned" if self.versioned else b"dltensor"
        return _new(ctypes.addressof(self._held), name, None)
