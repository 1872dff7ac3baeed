# SPDX-License-Identifier: Apache-2.0
"""Views of users' arrays: address, length and element type, with or without copying.

The dispatcher in C++ recognises plain numpy arrays by itself; everything else comes
here. Nothing is ever copied: an array that cannot be used in place is an error.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from commrt import _native
from commrt.arrays.device import is_cupy, is_jax, is_on_device, see
from commrt.arrays.foreign import asking
from commrt.arrays.tensors import (
    check_memory,
    is_tensor,
    of_own_class,
    tensor_dtype,
)
from commrt.devices.arrays import DeviceArray
from commrt.errors import BufferError_, CommError, MemoryError_, UsageError, shown
from commrt.vocabulary.dtypes import DTYPES, DType

__all__ = [
    "HostView",
    "block_shape",
    "copy_of",
    "empty_like_array",
    "never_changes",
    "numpy_type",
    "overlap",
    "plain_array",
    "view",
    "view_any",
    "view_anywhere",
    "view_new",
    "zeros_like_array",
]

_BY_NAME = {dtype.name: dtype for dtype in DTYPES}
_HOST_ONLY = "this takes arrays in host memory; copy it there first"
_DLPACK_HOST = (1, 3, 10, 13)  # CPU, CUDA pinned, ROCm pinned, CUDA managed


@dataclass(frozen=True, slots=True)
class HostView:
    """The facts that the engine needs of an array in host memory."""

    array: Any
    """The object that the user passed."""
    owner: Any
    """Keeping it alive keeps the memory alive, and where it is."""
    address: int
    """Address of the first element."""
    count: int
    """Elements."""
    dtype: DType
    """Element type."""
    shape: tuple[int, ...]
    """Shape of the user's array."""
    writable: bool
    """True if results may be stored."""
    device: int | None = None
    """Number of the device that the memory is on; None for host memory."""
    stream: int | None = None
    """Stream that orders its use, as an integer; None for host memory."""
    copied_from: int = 0
    """Address of the first element of the user's array, if this is a copy of it."""
    on: Any = None
    """The device that the memory is on; None for host memory."""

    @property
    def nbytes(self) -> int:
        """Bytes from the first to the last element."""
        return self.count * self.dtype.itemsize


@cache
def record_type(dtype: np.dtype[Any]) -> DType:
    """Return the element type of records, which the engine moves as bytes."""
    return DType(str(dtype), _BY_NAME["uint8"].code, dtype.itemsize, "bytes")


def numpy_type(seen: HostView) -> np.dtype[Any]:
    """Return numpy's type of the elements; BufferError_ where numpy has none."""
    if isinstance(seen.array, np.ndarray):
        given: np.dtype[Any] = plain_array(seen.array).dtype
        return given
    if not seen.dtype.needs_ml_dtypes:
        return np.dtype(seen.dtype.name)
    try:
        import ml_dtypes
    except ImportError:
        raise BufferError_(
            f"numpy has {seen.dtype.name} from the package ml_dtypes, which is not "
            f"installed: pip install ml_dtypes"
        ) from None
    found: np.dtype[Any] = np.dtype(getattr(ml_dtypes, seen.dtype.name))
    return found


def view_any(array: Any, what: str) -> HostView:
    """Return the view of an array, like ``view``; records and other bytes pass."""
    if isinstance(array, np.ndarray) and not isinstance(array, np.ma.MaskedArray):
        with asking(array, what):
            plain = plain_array(array)
        dtype = plain.dtype
        known = _BY_NAME.get(dtype.name)
        if (known is None or dtype.names is not None) and (
            dtype.itemsize and not dtype.hasobject
        ):
            return _checked(plain, array, record_type(dtype), what)
    return view(array, what)


def view(array: Any, what: str) -> HostView:
    """Return the view of ``array``, or raise BufferError_ that names ``what``.

    Accepted: numpy arrays (ml_dtypes' types included), torch CPU tensors, anything
    with DLPack on the host, and objects with a buffer. All C-contiguous, of a type in
    ``commrt.vocabulary.dtypes``, in native byte order.
    """
    plain = _native.view_of_numpy(array) if type(array) is np.ndarray else None
    if plain is not None:
        address, count, code, writable = plain
        shape = array.shape
        return HostView(array, array, address, count, DTYPES[code], shape, writable)
    with asking(array, what):
        return _view_other(array, what)


def _view_other(array: Any, what: str) -> HostView:
    """Return the view of an array that is not as simple as most."""
    if isinstance(array, np.ndarray):
        if isinstance(array, np.ma.MaskedArray):
            raise BufferError_(
                f"{what} is a masked array, whose mask would be lost: pass "
                f"x.filled(...) or x.data"
            )
        return _view_numpy(plain_array(array), array, what)
    if is_tensor(array):
        return _view_torch(array, what)
    if isinstance(array, type):
        raise BufferError_(
            f"{what} is the class {array.__name__}: expected an array, which is an "
            f"object of such a class"
        )
    return _view_by_protocol(array, what)


def _view_by_protocol(array: Any, what: str) -> HostView:
    """Return the view of an object that is neither numpy's nor torch's."""
    if hasattr(array, "__cuda_array_interface__"):
        raise BufferError_(f"{what} is a CUDA array: {_HOST_ONLY}")
    if hasattr(array, "__dlpack_device__"):
        return _view_dlpack(array, what)
    try:
        buffer = memoryview(array)
    except TypeError:
        by_name = isinstance(array, str | dict | set)
        also = "; bcast_object, send_object and the like take other objects"
        raise BufferError_(
            f"{what} is a {type(array).__name__}: expected a numpy array, a torch "
            f"tensor, or an object with DLPack or a buffer{also if by_name else ''}"
        ) from None
    return _view_buffer(array, buffer, what)


def plain_array(array: Any) -> np.ndarray[Any, Any]:
    """Return an array of numpy's own class on the memory of one of a subclass.

    A subclass may say anything of itself; what numpy knows of it holds.
    """
    if type(array) is np.ndarray:
        return array
    return np.ndarray.view(array, np.ndarray)


def view_anywhere(
    array: Any, what: str, *, any_type: bool = False, any_strides: bool = False
) -> HostView:
    """Return the view of a host or device array; ``any_type`` allows plain bytes.

    With ``any_strides`` an array on a device need not be contiguous.
    """
    if type(array) is np.ndarray or not is_on_device(array, what):
        return view_any(array, what) if any_type else view(array, what)
    with asking(array, what):
        seen = see(array, what, any_strides=any_strides)
    return HostView(
        array,
        array if seen.owner is None else (array, seen.owner),
        seen.address,
        seen.count,
        seen.dtype,
        seen.shape,
        seen.writable,
        seen.number,
        seen.stream,
        on=seen.device,
    )


def _view_numpy(array: np.ndarray[Any, Any], given: Any, what: str) -> HostView:
    dtype = _BY_NAME.get(array.dtype.name)
    if dtype is None or array.dtype.names is not None:
        raise BufferError_(
            f"{what} has dtype {array.dtype}, which cannot be communicated as it is: "
            f"{_way_out(array.dtype)}; supported: {', '.join(_BY_NAME)}"
        )
    if not array.dtype.isnative:
        raise BufferError_(
            f"{what} is stored in foreign byte order ({array.dtype.str}): convert it "
            f"with x.astype(x.dtype.newbyteorder('='))"
        )
    return _checked(array, given, dtype, what)


def _checked(
    array: np.ndarray[Any, Any], given: Any, dtype: DType, what: str
) -> HostView:
    if not array.flags.c_contiguous or not array.flags.aligned:
        raise BufferError_(
            f"{what} with shape {array.shape} and strides {array.strides} is not "
            f"C-contiguous and aligned: pass numpy.ascontiguousarray(x)"
        )
    address = array.ctypes.data
    if address == 0 and array.size:
        raise BufferError_(
            f"{what} has elements and no address: pass an array with memory"
        )
    if dtype.needs_ml_dtypes:
        _native.register_numpy_type(array.dtype.num, dtype.code)
    return HostView(
        given,
        array if array is given else (given, array),
        address,
        array.size,
        dtype,
        array.shape,
        bool(array.flags.writeable),
    )


def _way_out(dtype: np.dtype[Any]) -> str:
    """Return what to do with an array of a type that the engine does not know."""
    if dtype.hasobject:
        return "its elements are references to objects of this process"
    if dtype.kind in "mM":
        return "pass x.view('int64'), in which NaT is the least integer"
    if dtype.kind in "fc":
        # Its format is the processor's own, and no vector unit knows it.
        smaller = "float64" if dtype.kind == "f" else "complex128"
        return f"pass x.astype({smaller!r}), or x.view('uint8') to move its bytes"
    return "pass x.view('uint8') to move its bytes"


def _view_torch(given: Any, what: str) -> HostView:
    tensor = of_own_class(given, what)
    dtype = tensor_dtype(tensor, what)
    check_memory(tensor, what)
    if tensor.device.type != "cpu":
        raise BufferError_(f"{what} is on {tensor.device}: {_HOST_ONLY}")
    address, count = tensor.data_ptr(), tensor.numel()
    owner = tensor if tensor is given else (given, tensor)
    return HostView(given, owner, address, count, dtype, tuple(tensor.shape), True)


def _view_dlpack(array: Any, what: str) -> HostView:
    kind, _ = array.__dlpack_device__()
    if kind not in _DLPACK_HOST:
        raise BufferError_(
            f"{what} is on a device (DLPack device type {kind}): {_HOST_ONLY}"
        )
    try:
        # JAX gives numpy more types than DLPack; it copies for neither.
        exported = np.asarray(array) if is_jax(array) else np.from_dlpack(array)
    except (RuntimeError, TypeError, ValueError, BufferError) as exc:
        raise BufferError_(
            f"{what} is a {type(array).__name__} that DLPack cannot export to numpy "
            f"({exc})"
        ) from exc
    return _view_numpy(exported, array, what)


def _view_buffer(array: Any, buffer: memoryview, what: str) -> HostView:
    if not buffer.c_contiguous:
        raise BufferError_(
            f"{what} is a buffer that is not C-contiguous: pass a contiguous copy of it"
        )
    try:
        exported = np.asarray(buffer)
    except (TypeError, ValueError) as exc:
        raise BufferError_(
            f"{what} is a buffer of format {buffer.format!r}, which numpy cannot read"
        ) from exc
    return _view_numpy(exported, array, what)


def overlap(a: HostView, b: HostView) -> bool:
    """Return whether the two arrays share memory."""
    return a.address < b.address + b.nbytes and b.address < a.address + a.nbytes


def never_changes(x: HostView) -> bool:
    """Return whether an array in host memory is of a library whose arrays never change.

    An operation that would put its result into ``x`` makes a new array for it.
    """
    return x.on is None and is_jax(x.array)


def empty_like_array(
    x: HostView,
    shape: tuple[int, ...],
    dtype: str | None = None,
    *,
    zeroed: bool = False,
) -> Any:
    """Return a new array of ``shape`` in the library that ``x`` comes from.

    For a JAX array in host memory it is an array of numpy: nothing can be put into a
    JAX array.

    Args:
        x: what it is for.
        shape: its shape.
        dtype: name of its element type, by itself that of ``x``.
        zeroed: if it is numpy's, it has zeros.

    Raises:
        UsageError: the library has no arrays of that shape, or cannot be asked.
        MemoryError_: there is no memory for it.
    """
    try:
        return _new_array(x, shape, dtype, np.zeros if zeroed else np.empty)
    except MemoryError as error:
        raise MemoryError_(
            f"{_result(x, shape, dtype)} does not fit into memory ({error}): check the "
            f"numbers of elements, or pass out="
        ) from error
    except (ValueError, OverflowError) as error:
        if isinstance(error, CommError):
            raise
        raise UsageError(
            f"{_result(x, shape, dtype)} cannot be made ({error}): pass out="
        ) from error


def _result(x: HostView, shape: tuple[int, ...], dtype: str | None) -> str:
    many = shown(prod(shape))
    return f"out, a new array of {many} elements of {dtype or x.dtype.name},"


def _new_array(
    x: HostView,
    shape: tuple[int, ...],
    dtype: str | None,
    of_numpy: Callable[..., npt.NDArray[Any]],
) -> Any:
    if is_tensor(x.array):
        of = None if dtype is None else getattr(sys.modules["torch"], dtype)
        return of_own_class(x.array, "x").new_empty(shape, dtype=of)
    if isinstance(x.array, np.ndarray):
        return of_numpy(shape, dtype=dtype or numpy_type(x))
    if isinstance(x.array, DeviceArray):
        return DeviceArray(x.array.device, shape, dtype or x.array.dtype)
    if is_cupy(x.array):
        return sys.modules["cupy"].empty(shape, dtype=dtype or x.array.dtype)
    namespace = getattr(x.array, "__array_namespace__", None)
    if is_jax(x.array) and x.on is not None:
        raise UsageError(
            "pass out=, an array of another library: JAX's arrays never change once "
            "they are made, so nothing can be put into one"
        )
    if is_jax(x.array):
        return of_numpy(shape, dtype=dtype or numpy_type(x))
    if namespace is None and x.on is not None:
        raise UsageError(
            f"pass out=: nothing is known of how to allocate a {type(x.array).__name__}"
        )
    if namespace is not None:
        library = namespace()
        return library.empty(shape, dtype=getattr(library, dtype or x.dtype.name))
    return of_numpy(shape, dtype=dtype or x.dtype.name)


def view_new(
    made: Any,
    x: HostView,
    shape: tuple[int, ...],
    what: str,
    *,
    dtype: str | None = None,
) -> HostView:
    """Return the view of what ``empty_like_array`` or ``zeros_like_array`` made.

    Raises BufferError_ where the library that ``x`` comes from has made another array
    than it was asked for.
    """
    seen = view_anywhere(made, what, any_type=True)
    same_type = seen.dtype is x.dtype if dtype is None else seen.dtype.name == dtype
    if seen.count != prod(shape) or not same_type or not seen.writable:
        raise BufferError_(
            f"{what}: the library of x, {type(x.array).__module__}, was asked for an "
            f"array of shape {shape} and type {dtype or x.dtype.name}, and made one of "
            f"shape {seen.shape} and type {seen.dtype.name}"
            f"{'' if seen.writable else ', which cannot be written'}: pass out="
        )
    return seen


def zeros_like_array(x: HostView, shape: tuple[int, ...]) -> Any:
    """Return a new array of zeros, as ``empty_like_array``."""
    if is_tensor(x.array):
        return of_own_class(x.array, "x").new_zeros(shape)
    if x.on is None:
        made = empty_like_array(x, shape, zeroed=True)
        if not isinstance(made, np.ndarray):
            made[...] = 0
        return made
    if is_cupy(x.array):
        return sys.modules["cupy"].zeros(shape, dtype=x.array.dtype)
    made = empty_like_array(x, shape)
    if isinstance(made, DeviceArray):
        made.put(np.zeros(shape, made.dtype))
    else:
        made[...] = 0
    return made


def copy_of(x: HostView) -> HostView:
    """Return a view of a copy of ``x``; on devices ``x``, which is copied anyway."""
    if x.on is not None:
        return x
    copied = np.empty(x.nbytes, np.uint8)
    ctypes.memmove(copied.ctypes.data, x.address, x.nbytes)
    address = copied.ctypes.data
    return replace(x, owner=copied, address=address, copied_from=x.address)


def block_shape(x: HostView, size: int) -> tuple[int, ...]:
    """Return the shape of one of ``size`` equal blocks of ``x``."""
    if x.shape and x.shape[0] % size == 0:
        return (x.shape[0] // size, *x.shape[1:])
    return (prod(x.shape) // size,)
