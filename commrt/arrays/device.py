# SPDX-License-Identifier: Apache-2.0
"""Arrays on devices as users pass them, and the streams that order their use."""

from __future__ import annotations

import operator
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Protocol

import numpy as np

from commrt._native import register_numpy_type
from commrt.arrays.dlpack import export
from commrt.arrays.foreign import asking
from commrt.arrays.tensors import check_memory, is_tensor, of_own_class, tensor_dtype
from commrt.devices.arrays import DeviceArray, DeviceStream, current_stream
from commrt.devices.registry import cuda_device, find_device
from commrt.errors import BufferError_, UsageError, shown
from commrt.vocabulary.dtypes import DTYPES, DType

__all__ = [
    "OnDevice",
    "as_stream",
    "code_of",
    "current_stream_of",
    "device_number",
    "is_cupy",
    "is_jax",
    "is_on_device",
    "see",
    "stream_that_orders",
]

_BY_NAME = {dtype.name: dtype for dtype in DTYPES}
_DLPACK_CUDA, _DLPACK_MANAGED = 2, 13
_LEGACY = 1
"""Number by which array interfaces call the driver's stream 0."""


@dataclass(frozen=True, slots=True)
class OnDevice:
    """The facts that staging needs of an array on a device."""

    address: int
    count: int
    dtype: DType
    shape: tuple[int, ...]
    writable: bool
    device: Any
    """The device."""
    number: int
    """Its number."""
    stream: int | None
    """The stream that the array says it is ordered by; None where it says nothing."""
    strides: tuple[int, ...] | None = None
    """Bytes between elements in each dimension; None where the array is
    C-contiguous."""
    owner: Any = None
    """Object that keeps the memory alive, besides the array itself."""


def seems_on_device(array: Any) -> bool:
    """Return whether an array is in the memory of a device; False if it cannot say."""
    try:
        return array is not None and is_on_device(array)
    except Exception:  # noqa: BLE001  of an object that is not ours
        return False


def is_on_device(array: Any, what: str = "the array") -> bool:
    """Return whether an array says that it is in the memory of a device.

    Raises BufferError_, which names ``what``, for one that cannot say.
    """
    if isinstance(array, np.ndarray | type):
        return False
    with asking(array, what):
        if is_tensor(array):
            return bool(array.device.type == "cuda")
        if hasattr(array, "__cuda_array_interface__"):
            return True
        if not hasattr(array, "__dlpack_device__"):
            return False
        return bool(array.__dlpack_device__()[0] == _DLPACK_CUDA)


def see(array: Any, what: str, *, any_strides: bool = False) -> OnDevice:
    """Return what an array on a device is, or raise BufferError_ that names ``what``.

    Accepted: ``DeviceArray``, torch's tensors, what has
    ``__cuda_array_interface__`` (cupy, numba, JAX), and what has DLPack. All
    C-contiguous, but with ``any_strides``, and of a type in
    ``commrt.vocabulary.dtypes``.
    """
    if isinstance(array, DeviceArray):
        return OnDevice(
            array.address,
            prod(array.shape),
            _dtype(array.dtype, what),
            array.shape,
            not array.readonly,
            array.device,
            getattr(array.device, "ordinal", 0),
            current_stream(array.device),
        )
    with asking(array, what):
        return _see_other(array, what, any_strides)


def _see_other(array: Any, what: str, any_strides: bool) -> OnDevice:
    """Return what an array of another library is."""
    if is_tensor(array):
        return _see_tensor(array, what, any_strides)
    interface = getattr(array, "__cuda_array_interface__", None)
    if interface is not None:
        seen = _see_interface(interface, what, any_strides)
        if is_cupy(array):  # whose interface says that of its current device
            return replace(seen, stream=current_stream_of(array, seen.device))
        return replace(seen, writable=False) if is_jax(array) else seen
    return _see_dlpack(array, what, any_strides)


def _see_dlpack(array: Any, what: str, any_strides: bool) -> OnDevice:
    found = export(array, what)
    dtype = _BY_NAME.get(found.dtype)
    if dtype is None:
        raise BufferError_(
            f"{what} has dtype {found.dtype}, which cannot be communicated as it is; "
            f"supported: {', '.join(_BY_NAME)}"
        )
    strides = None
    if found.strides is not None:
        strides = tuple(step * dtype.itemsize for step in found.strides)
    if not any_strides:
        _check_contiguous(found.shape, strides, dtype.itemsize, what)
    device, number = _device_of(found.address, found.device, what)
    return OnDevice(
        found.address,
        prod(found.shape),
        dtype,
        found.shape,
        not found.readonly and not is_jax(array),
        device,
        number,
        0,  # it was told to come before the legacy stream
        strides,
        found.capsule,
    )


def _device_of(address: int, number: int, what: str) -> tuple[Any, int]:
    """Return the device of an address; of no address, that of the number."""
    return find_device(address, what) if address else (cuda_device(number), number)


def _see_tensor(given: Any, what: str, any_strides: bool) -> OnDevice:
    tensor = of_own_class(given, what)
    dtype = tensor_dtype(tensor, what, any_strides=any_strides)
    check_memory(tensor, what)
    number = tensor.device.index or 0
    return OnDevice(
        tensor.data_ptr(),
        tensor.numel(),
        dtype,
        tuple(tensor.shape),
        True,
        cuda_device(number),
        number,
        None,
        tuple(step * dtype.itemsize for step in tensor.stride()),
        None if tensor is given else tensor,
    )


def _see_interface(interface: Any, what: str, any_strides: bool) -> OnDevice:
    shape = tuple(interface["shape"])
    if interface.get("mask") is not None:
        raise BufferError_(
            f"{what} is a masked array, whose mask would be lost: pass "
            f"its data, with a value filled in"
        )
    dtype = np.dtype(interface["typestr"])
    strides = interface.get("strides")
    if not any_strides:
        _check_contiguous(shape, strides, dtype.itemsize, what)
    address, readonly = interface["data"]
    address = int(address or 0)
    exported = interface.get("stream")
    if exported == 0:
        raise BufferError_(
            f"{what} says stream 0, which its interface does not allow: "
            f"say 1 for the default stream, or None for no stream"
        )
    known = _dtype(dtype, what)
    if any(length < 0 for length in shape):
        raise BufferError_(f"{what} says the shape {shape}, with a negative length")
    if address == 0 and prod(shape):
        raise BufferError_(
            f"{what} has elements and no address: pass an array with memory"
        )
    device, number = find_device(address, what) if address else (cuda_device(0), 0)
    return OnDevice(
        address,
        prod(shape),
        known,
        shape,
        not readonly,
        device,
        number,
        0 if exported == _LEGACY else exported,
        None if strides is None else tuple(strides),
    )


def code_of(typestr: str) -> int:
    """Return the engine's code of an array interface's type; -1 where it has none."""
    try:
        return _dtype(np.dtype(typestr), typestr).code
    except (BufferError_, TypeError):
        return -1


def _dtype(dtype: np.dtype[Any], what: str) -> DType:
    found = _BY_NAME.get(dtype.name)
    if found is None or dtype.names is not None or not dtype.isnative:
        raise BufferError_(
            f"{what} has dtype {dtype}, which cannot be communicated as it is; "
            f"supported: {', '.join(_BY_NAME)}"
        )
    if found.needs_ml_dtypes:
        register_numpy_type(dtype.num, found.code)
    return found


def _check_contiguous(
    shape: tuple[int, ...], strides: Any, itemsize: int, what: str
) -> None:
    if strides is None or not prod(shape):
        return
    expected = itemsize
    for length, stride in zip(reversed(shape), reversed(strides), strict=True):
        if length != 1 and stride != expected:
            raise BufferError_(
                f"{what} with shape {shape} and strides {tuple(strides)} is not "
                f"C-contiguous: pass a contiguous copy, such as "
                f"cupy.ascontiguousarray(x)"
            )
        expected *= length


def is_cupy(array: Any) -> bool:
    """Return whether an array is cupy's, without importing it."""
    return type(array).__module__.partition(".")[0] == "cupy"


def is_jax(array: Any) -> bool:
    """Return whether an array is JAX's, which never change once they are made."""
    return type(array).__module__.partition(".")[0] in ("jax", "jaxlib")


def current_stream_of(array: Any, device: Any) -> int:
    """Return the current stream of the library that an array comes from.

    Where the library has none that is known here: what the array says it is ordered by,
    else the legacy stream.
    """
    if is_tensor(array):
        torch = sys.modules["torch"]
        return int(torch.cuda.current_stream(array.device).cuda_stream)
    if is_cupy(array):
        # Each of a thread's devices has one; without an argument it is that of cupy's
        # current device.
        ordinal = getattr(device, "ordinal", None)
        of = () if ordinal is None else (ordinal,)
        return int(sys.modules["cupy"].cuda.get_current_stream(*of).ptr)
    if not isinstance(array, DeviceArray):
        exported = getattr(array, "__cuda_array_interface__", {}).get("stream")
        if exported:
            return 0 if exported == _LEGACY else int(exported)
    return current_stream(device)


def stream_that_orders(array: Any, asked: Any = None) -> int:
    """Return the stream that orders a call on an array, by its handle.

    That which the call asks for, else the current one.
    """
    if asked is not None:
        handle = _handle(asked) or 0
        return 0 if handle == _LEGACY else handle
    if isinstance(array, DeviceArray) or is_tensor(array):
        return current_stream_of(array, array.device)
    return current_stream_of(array, see(array, "x", any_strides=True).device)


def as_stream(stream: Any, device: Any, what: str) -> int:
    """Return a stream's handle: an integer, or anything with ``__cuda_stream__``.

    Raises UsageError for anything else, and for a stream of another device.
    """
    if isinstance(stream, DeviceStream):
        if stream.device is not device:
            raise UsageError(
                f"{what}: {shown(stream)} is not on the device of the array: a stream "
                f"orders work of its own device only"
            )
        return stream.handle
    number = device_number(stream, what)
    with _asking_stream(stream, what):
        handle = _handle(stream)
    ordinal = getattr(device, "ordinal", None)
    if number is not None and ordinal is not None and number != ordinal:
        raise UsageError(
            f"{what}: stream {shown(stream)} is on device {number}, the array on "
            f"device {ordinal}: a stream orders work of its own device only"
        )
    if handle is None or handle < 0:
        raise UsageError(
            f"{what}: stream={shown(stream)} must be None, the integer handle of a "
            "CUDA stream, or an object with __cuda_stream__, such as cupy's and "
            "torch's"
        )
    return 0 if handle == _LEGACY else handle


@contextmanager
def _asking_stream(stream: Any, what: str) -> Iterator[None]:
    """Raise whatever a stream raises about itself as UsageError that names ``what``."""
    try:
        yield
    except Exception as error:
        raise UsageError(
            f"{what}: stream= is a {type(stream).__name__} that fails when it is asked "
            f"for its handle ({type(error).__name__}: {error}): pass None, or the "
            f"integer handle of a CUDA stream"
        ) from error


def device_number(stream: Any, what: str) -> int | None:
    """Return the number of a stream's device; None where it does not say.

    cupy's say ``device_id``, and -1 where it may be any; torch's have a ``device`` with
    ``index``, those of cuda.core one with ``device_id``. Raises UsageError, which names
    ``what``, for a stream that cannot say.
    """
    with _asking_stream(stream, what):
        number = getattr(stream, "device_id", None)
        if number is None:
            on = getattr(stream, "device", None)
            number = getattr(on, "index", getattr(on, "device_id", None))
    is_known = isinstance(number, int) and number >= 0
    return number if is_known else None


def _handle(stream: Any) -> int | None:
    if isinstance(stream, bool):
        return None
    protocol = getattr(stream, "__cuda_stream__", None)
    if protocol is not None:
        told = protocol() if callable(protocol) else protocol
        return int(told[1])
    for name in ("cuda_stream", "ptr"):  # torch before 2.10, cupy before 14
        found = getattr(stream, name, None)
        if isinstance(found, int):
            return found
    try:
        return operator.index(stream)
    except TypeError:
        return None


class Placed(Protocol):
    """An array, as far as its place is concerned."""

    @property
    def on(self) -> Any:
        """The device; None for host memory."""
        ...

    @property
    def device(self) -> int | None:
        """Its number."""
        ...


def place_of(what: str, arrays: Sequence[Placed], stream: Any = None) -> Any:
    """Return the device that all arrays are on, None for host memory.

    Raises UsageError where they are not in one place, and for a stream that host
    arrays would not follow.
    """
    on = arrays[0].on if arrays else None
    if any(each.on is not on for each in arrays):
        places = {id(each.on): each for each in arrays}
        names = sorted(
            "host memory" if each.on is None else f"device {each.device}"
            for each in places.values()
        )
        raise UsageError(
            f"{what}: its arrays are in different places: {' and '.join(names)}; pass "
            f"arrays of one device, or of host memory"
        )
    if on is None and stream is not None:
        raise UsageError(
            f"{what}: stream= is for arrays on devices, and these are in host memory; "
            f"leave it out"
        )
    return on
