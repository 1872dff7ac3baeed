# SPDX-License-Identifier: Apache-2.0
"""Arrays on devices that say where they are by DLPack alone.

The capsule is read as dlpack.h lays it out, versions 0.x and 1.x. It is never consumed,
so its own destructor gives the memory back, whenever the capsule goes.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np

from commrt.errors import BufferError_

__all__ = ["Exported", "export"]

_LEGACY_STREAM = 1
_READ_ONLY = 1
_MOST_DIMS = 64
"""More dimensions than any library's arrays have."""
_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)
_is_valid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_IsValid", ctypes.pythonapi)
)
_KINDS = {0: "int", 1: "uint", 2: "float", 4: "bfloat", 5: "complex", 6: "bool"}


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _Versioned(ctypes.Structure):
    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    )


@dataclass(frozen=True)
class Exported:
    """The contents of a DLPack capsule."""

    capsule: Any
    """Keeping it alive keeps the memory alive."""
    address: int
    device: int
    """Number of the device."""
    dtype: str
    """Name of the element type."""
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    """Elements between neighbours in each dimension; None where the array is
    C-contiguous."""
    readonly: bool


def export(array: Any, what: str) -> Exported:
    """Return what an array with ``__dlpack__`` says of itself.

    It is ordered before what is given to the legacy stream from now on. Raises
    BufferError_, which names ``what``, for types that are not known.
    """
    try:
        capsule = array.__dlpack__(stream=_LEGACY_STREAM, max_version=(1, 0))
    except TypeError:  # before DLPack 1.0
        capsule = array.__dlpack__(stream=_LEGACY_STREAM)
    except (BufferError, RuntimeError, ValueError) as error:
        raise BufferError_(
            f"{what} is a {type(array).__name__} that does not export itself by "
            f"DLPack: {error}"
        ) from error
    tensor, readonly = _read(capsule, what)
    if not 0 <= tensor.ndim <= _MOST_DIMS:
        raise BufferError_(
            f"{what} exports DLPack with {tensor.ndim} dimensions; expected 0 to "
            f"{_MOST_DIMS}"
        )
    shape = tuple(tensor.shape[i] for i in range(tensor.ndim))
    if any(length < 0 for length in shape) or (not tensor.data and 0 not in shape):
        raise BufferError_(
            f"{what} exports DLPack of shape {shape} at address {tensor.data or 0}: "
            f"pass an array with memory"
        )
    strides = None
    if tensor.strides:
        strides = tuple(tensor.strides[i] for i in range(tensor.ndim))
    return Exported(
        capsule,
        (tensor.data or 0) + tensor.byte_offset,
        tensor.device_id,
        _dtype(tensor, what),
        shape,
        strides,
        readonly,
    )


def _read(capsule: Any, what: str) -> tuple[_Tensor, bool]:
    if _is_valid(capsule, b"dltensor_versioned"):
        held = _Versioned.from_address(_pointer(capsule, b"dltensor_versioned"))
        if held.major != 1:
            raise BufferError_(
                f"{what} exports DLPack {held.major}.{held.minor}; 1.x and older are "
                f"known here"
            )
        return held.tensor, bool(held.flags & _READ_ONLY)
    if _is_valid(capsule, b"dltensor"):
        return _Tensor.from_address(_pointer(capsule, b"dltensor")), False
    raise BufferError_(
        f"{what} exports no DLPack capsule that was not used before: "
        f"its __dlpack__() must return a new one in every call"
    )


def _dtype(tensor: _Tensor, what: str) -> str:
    kind = _KINDS.get(tensor.code)
    if kind is None or tensor.lanes != 1:
        raise BufferError_(
            f"{what} has DLPack's type code {tensor.code} of {tensor.bits} bits and "
            f"{tensor.lanes} lanes, which cannot be communicated as it is"
        )
    if kind == "bool":
        return "bool"
    if kind == "bfloat":
        return f"bfloat{tensor.bits}"
    return str(np.dtype(f"{kind}{tensor.bits}").name)
