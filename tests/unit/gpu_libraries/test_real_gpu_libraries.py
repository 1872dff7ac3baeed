# SPDX-License-Identifier: Apache-2.0
"""What commrt asks of cupy, numba, cuda.core and nccl4py, asked of the real ones.

None of them does anything without a GPU, but their arrays, streams and communicators
can be made of addresses. ``make test-gpu-libraries`` installs them.
"""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from commrt import _native
from commrt.arrays.device import as_stream, is_cupy
from commrt.arrays.host import view_anywhere
from commrt.devices import DeviceArray, ThreadDevice, serve, stop_serving
from commrt.errors import UsageError
from commrt.nccl.adoption import pointer_of
from commrt.vocabulary.dtypes import DTYPES

STREAM = 0x12340
DEVICE = SimpleNamespace(ordinal=0)
CUPY_TYPES = [each.name for each in DTYPES if not each.needs_ml_dtypes]


@pytest.fixture
def cupy() -> Any:
    return pytest.importorskip("cupy", reason="make test-gpu-libraries")


def of_cupy(cupy: Any, array: DeviceArray) -> Any:
    """Return an array of cupy in the memory of another one."""
    memory = cupy.cuda.UnownedMemory(array.address, array.nbytes, array, device_id=0)
    pointer = cupy.cuda.MemoryPointer(memory, 0)
    return cupy.ndarray(array.shape, array.dtype, memptr=pointer)


@pytest.mark.parametrize("dtype", CUPY_TYPES)
def test_arrays_of_cupy_are_seen(
    dtype: str, cupy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The only thing that is asked of a driver.
    here = SimpleNamespace(ptr=STREAM)
    monkeypatch.setattr(cupy.cuda, "get_current_stream", lambda *device: here)
    with ThreadDevice() as device:
        serve(device)
        try:
            array = DeviceArray(device, (3, 8), dtype)
            x = of_cupy(cupy, array)
            assert is_cupy(x)
            seen = _native.view_on_device(x)
            assert seen is not None
            address, count, code, writable, on, stream, exported = seen
            assert (address, count, writable, on) == (array.address, 24, True, device)
            assert DTYPES[code].name == np.dtype(dtype).name
            assert (stream, exported) == (STREAM, STREAM)
            assert _native.view_on_device(x[:, ::2]) is None  # Python says why
            assert _native.view_on_device(x[:0]) is None
            array.free()
        finally:
            stop_serving(device)


def test_cupy_tells_the_current_stream_of_any_device(cupy: Any) -> None:
    doc = cupy.cuda.get_current_stream.__doc__
    assert "device_id" in doc


@pytest.mark.filterwarnings("ignore:ExternalStream is deprecated")
def test_streams_of_cupy_are_taken(cupy: Any) -> None:
    assert as_stream(cupy.cuda.Stream.null, DEVICE, "call") == 0
    there = cupy.cuda.ExternalStream(STREAM, 1)
    with pytest.raises(UsageError, match=r"is on device 1, the array on device 0"):
        as_stream(there, DEVICE, "call")
    assert as_stream(there, SimpleNamespace(ordinal=1), "call") == STREAM


def test_a_communicator_of_cupy_has_its_pointer_where_commrt_looks(cupy: Any) -> None:
    nccl = pytest.importorskip("cupy.cuda.nccl", exc_type=ImportError)
    made = nccl.NcclCommunicator.__new__(nccl.NcclCommunicator)
    with pytest.raises(UsageError, match="holds no communicator of NCCL"):
        pointer_of(made)


def test_a_communicator_of_nccl4py_has_its_pointer_where_commrt_looks() -> None:
    core = pytest.importorskip("nccl.core", reason="make test-gpu-libraries")
    assert pointer_of(core.Communicator(0x1234)) == 0x1234


def test_streams_of_numba_are_taken() -> None:
    driver = pytest.importorskip(
        "numba.cuda.cudadrv.driver", reason="make test-gpu-libraries"
    )
    assert as_stream(driver.Stream(STREAM), DEVICE, "call") == STREAM
    assert as_stream(driver.Stream(0), DEVICE, "call") == 0


def test_arrays_of_numba_have_the_interface_that_is_read() -> None:
    arrays = pytest.importorskip(
        "numba.cuda.cudadrv.devicearray", reason="make test-gpu-libraries"
    )
    fake = SimpleNamespace(value=None)
    with ThreadDevice() as device:
        serve(device)
        try:
            array = DeviceArray(device, (3, 8), "f4")
            fake.value = array.address
            told = SimpleNamespace(
                device_ctypes_pointer=fake,
                shape=(3, 8),
                strides=(32, 4),
                dtype=np.dtype("f4"),
                itemsize=4,
                ndim=2,
                size=24,
                alloc_size=96,
                flags={"C_CONTIGUOUS": True, "F_CONTIGUOUS": False},
                stream=0,
            )
            read = arrays.DeviceNDArrayBase.__cuda_array_interface__.fget
            exported = SimpleNamespace(__cuda_array_interface__=read(told))
            seen = view_anywhere(exported, "x")
            assert (seen.address, seen.count, seen.on) == (array.address, 24, device)
            assert seen.stream is None
            array.free()
        finally:
            stop_serving(device)


def test_streams_of_cuda_core_say_what_is_asked() -> None:
    core = pytest.importorskip("cuda.core", reason="make test-gpu-libraries")
    stream = core.Stream.from_handle(STREAM)
    assert stream.__cuda_stream__() == (0, STREAM)
    assert isinstance(inspect.getattr_static(core.Device, "device_id"), object)
    assert hasattr(core.Stream, "device")
