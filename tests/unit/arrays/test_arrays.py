# SPDX-License-Identifier: Apache-2.0
"""Views of arrays of every origin."""

from __future__ import annotations

import array
import ctypes
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from commrt._native import view_of_numpy
from commrt.arrays.host import block_shape, copy_of, empty_like_array, overlap, view
from commrt.errors import BufferError_
from commrt.vocabulary.dtypes import DTYPES


def numpy_type(name: str) -> Any:
    """Return numpy's type of that name."""
    return np.dtype(getattr(ml_dtypes, name, name))


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.name)
def test_numpy_arrays_of_every_type(dtype: Any) -> None:
    x = np.zeros((3, 2), numpy_type(dtype.name))
    seen = view(x, "x")
    assert (seen.address, seen.count, seen.shape) == (x.ctypes.data, 6, (3, 2))
    assert seen.dtype is dtype
    assert seen.nbytes == x.nbytes
    assert seen.writable
    assert (seen.device, seen.stream) == (None, None)
    assert seen.array is seen.owner is x
    # The dispatcher sees the same, ml_dtypes' types once they were seen here.
    assert view_of_numpy(x) == (x.ctypes.data, 6, dtype.code, True)


@pytest.mark.parametrize(
    "x",
    [
        np.zeros(8)[::2],
        np.zeros((2, 2), order="F"),
        np.zeros(4, ">f8"),
        np.zeros(4, object),
        np.zeros(4, "datetime64[s]"),
        np.zeros(4, [("a", "f4")]),
        np.zeros(17, np.uint8)[1:].view(np.float64),
        np.broadcast_to(np.zeros(1), 3),
        np.ma.zeros(3),
        np.zeros(3).view(np.matrix),
        [1, 2],
        3.5,
    ],
    ids=lambda x: type(x).__name__,
)
def test_the_dispatcher_recognises_nothing_that_it_should_not(x: Any) -> None:
    assert view_of_numpy(x) is None


def test_scalars_and_empty_arrays_are_arrays() -> None:
    assert view(np.array(2.0), "x").count == 1
    assert view(np.zeros((0, 5)), "x").count == 0
    assert view(np.zeros((4, 1))[::2][:, :1].copy(), "x").count == 2
    assert view(np.zeros((1, 8))[:, :], "x").count == 8


def test_writability_is_seen() -> None:
    assert not view(b"abc", "x").writable
    assert view(bytearray(b"abc"), "x").writable
    assert not view(np.broadcast_to(np.zeros(1), (1,)), "x").writable


@pytest.mark.parametrize(
    ("made", "dtype", "count"),
    [
        (array.array("f", [1, 2]), "float32", 2),
        (bytearray(5), "uint8", 5),
        ((ctypes.c_double * 3)(), "float64", 3),
        (memoryview(bytearray(8)).cast("I"), "uint32", 2),
    ],
)
def test_buffers(made: Any, dtype: str, count: int) -> None:
    seen = view(made, "x")
    assert (seen.dtype.name, seen.count, seen.writable) == (dtype, count, True)
    assert seen.array is made
    assert empty_like_array(seen, (2,)).dtype == dtype


class Exporter:
    """An array of some library: nothing but DLPack, and maybe a namespace."""

    def __init__(self, inner: Any, device: tuple[Any, int] = (1, 0)) -> None:
        self.inner = inner
        self.device = device

    def __dlpack_device__(self) -> tuple[Any, int]:
        return self.device

    def __dlpack__(self, **options: Any) -> Any:
        return self.inner.__dlpack__(**options)


class Namespaced(Exporter):
    def __array_namespace__(self) -> Any:
        class Library:
            float32 = np.float32

            @staticmethod
            def empty(shape: tuple[int, ...], dtype: Any) -> Any:
                return Namespaced(np.empty(shape, dtype))

        return Library


def test_dlpack_arrays_on_the_host() -> None:
    inner = np.arange(6, dtype=np.float32).reshape(2, 3)
    exporter = Exporter(inner)
    seen = view(exporter, "x")
    assert (seen.address, seen.shape) == (inner.ctypes.data, (2, 3))
    assert seen.array is exporter
    assert isinstance(empty_like_array(seen, (4,)), np.ndarray)


def test_outputs_come_from_the_arrays_own_library() -> None:
    seen = view(Namespaced(np.zeros(3, np.float32)), "x")
    made = empty_like_array(seen, (2, 3))
    assert isinstance(made, Namespaced)
    assert view(made, "out").array is made


def test_dlpack_arrays_elsewhere_are_refused() -> None:
    with pytest.raises(BufferError_, match=r"x is on a device .DLPack device type 2"):
        view(Exporter(np.zeros(3), (2, 0)), "x")


def test_dlpack_that_fails_is_explained() -> None:
    with pytest.raises(BufferError_, match="Exporter that DLPack cannot export"):
        view(Exporter(np.zeros(3, ">f4")), "x")


def test_cuda_arrays_are_refused() -> None:
    class Cuda:
        __cuda_array_interface__: Any = {}  # noqa: RUF012

    with pytest.raises(BufferError_, match=r"x is a CUDA array: .* copy it there"):
        view(Cuda(), "x")


def test_what_is_refused_is_named() -> None:
    for wrong, message in [
        ([1.0], "allreduce: x is a list"),
        (memoryview(bytes(8))[::2], "not C-contiguous"),
        (memoryview(bytes(8)).cast("c"), r"\|S1, which cannot be communicated"),
        (np.ma.masked_less(np.zeros(3), 1), "masked array, whose mask would be lost"),
    ]:
        with pytest.raises(BufferError_, match=message):
            view(wrong, "allreduce: x")


def test_overlap() -> None:
    whole = np.zeros(10)
    a, b = view(whole[:5], "a"), view(whole[5:], "b")
    assert not overlap(a, b)
    assert overlap(a, view(whole[4:6], "c"))
    assert overlap(a, a)


def test_copies_have_memory_of_their_own() -> None:
    x = np.arange(5.0)
    copied = copy_of(view(x, "x"))
    x[:] = 0
    assert np.frombuffer(copied.owner, np.float64).tolist() == [0, 1, 2, 3, 4]
    assert copied.address == copied.owner.ctypes.data
    assert copy_of(view(x[:0], "x")).count == 0


def test_shapes_of_blocks() -> None:
    assert block_shape(view(np.zeros((6, 2)), "x"), 3) == (2, 2)
    assert block_shape(view(np.zeros((2, 6)), "x"), 3) == (4,)
    assert block_shape(view(np.zeros(6), "x"), 3) == (2,)
