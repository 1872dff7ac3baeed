# SPDX-License-Identifier: Apache-2.0
"""Arrays that say wrong things of themselves, raise, or change their mind."""

from __future__ import annotations

import array
import mmap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import commrt
from commrt.arrays.device import is_on_device
from commrt.arrays.host import empty_like_array, view, view_anywhere, view_new
from commrt.boxes.strided import strided
from commrt.errors import BufferError_, UsageError

VALUES = np.arange(4, dtype=np.float32)


class Liar(np.ndarray[Any, Any]):
    """An array that claims more memory, and of another type, than it has."""

    dtype = property(lambda self: np.dtype("float64"))  # type: ignore[assignment]
    size = property(lambda self: 1 << 30)  # type: ignore[assignment]
    shape = property(lambda self: (1 << 30,))  # type: ignore[assignment]
    strides = property(lambda self: (8,))  # type: ignore[assignment]
    flags = property(lambda self: VALUES.flags)  # type: ignore[assignment]
    ctypes = property(lambda self: None)  # type: ignore[assignment]


def test_what_numpy_knows_of_a_subclass_holds() -> None:
    x = VALUES.copy().view(Liar)
    for seen in (view(x, "x"), view_anywhere(x, "x", any_type=True)):
        assert (seen.count, seen.dtype.name, seen.shape) == (4, "float32", (4,))
        assert seen.array is x
    assert strided(x, "x").shape == (4,)
    made = empty_like_array(view(x, "x"), (3,))
    assert view_new(made, view(x, "x"), (3,), "out").nbytes == 12


def test_subclasses_of_numpy(tmp_path: Path) -> None:
    file = tmp_path / "values"
    VALUES.tofile(file)
    mapped = np.memmap(file, np.float32, mode="r+")
    comm = commrt.init()
    for x in (
        VALUES.reshape(1, 4).view(np.matrix),
        VALUES.copy().view(np.recarray),
        mapped,
    ):
        assert comm.allreduce(x) is x
        assert np.asarray(x).ravel().tolist() == VALUES.tolist()
    with pytest.raises(BufferError_, match="allreduce: the output array is read-only"):
        comm.allreduce(np.memmap(file, np.float32, mode="r"))
    with pytest.raises(BufferError_, match="allreduce: x is a masked array"):
        comm.allreduce(np.ma.masked_array(VALUES, VALUES > 1))


class Raises:
    """An array whose attributes raise something."""

    def __init__(self, name: str, error: BaseException) -> None:
        self.name, self.error = name, error

    def __getattr__(self, name: str) -> Any:
        if name == self.name:
            raise self.error
        raise AttributeError(name)


class Export:
    """An array that exports itself by DLPack, as ``device`` and ``data`` say."""

    def __init__(
        self, device: Callable[[], Any], data: Callable[..., Any] | None = None
    ) -> None:
        self.device, self.data = device, data

    def __dlpack_device__(self) -> Any:
        return self.device()

    def __dlpack__(self, **how: Any) -> Any:
        assert self.data is not None
        return self.data()


def fail(error: BaseException) -> Callable[..., Any]:
    """Return a function that raises."""

    def failing(*_: Any, **__: Any) -> Any:
        raise error

    return failing


ERRORS = [KeyError("k"), RuntimeError("r"), MemoryError(), OSError(5, "o"), TypeError()]


@pytest.mark.parametrize("error", ERRORS, ids=lambda each: type(each).__name__)
def test_whatever_an_array_raises_names_the_argument(error: Exception) -> None:
    wrong = [
        Raises("__cuda_array_interface__", error),
        Raises("__dlpack_device__", error),
        Export(fail(error)),
        Export(lambda: (1, 0), fail(error)),
        Export(lambda: (2, 0), fail(error)),
    ]
    for x in wrong:
        with pytest.raises(BufferError_, match=r"^allreduce: x is a ") as caught:
            view_anywhere(x, "allreduce: x")
        assert caught.value.__cause__ is not None


@pytest.mark.parametrize("said", [None, 1, (), ("cpu", 0), "cpu", object()])
def test_a_device_that_is_none(said: Any) -> None:
    with pytest.raises(BufferError_, match=r"^x is "):
        view_anywhere(Export(lambda: said), "x")


@pytest.mark.parametrize("capsule", [None, 5, object(), VALUES])
@pytest.mark.parametrize("kind", [1, 2])
def test_a_capsule_that_is_none(capsule: Any, kind: int) -> None:
    with pytest.raises(BufferError_, match=r"^x "):
        view_anywhere(Export(lambda: (kind, 0), lambda: capsule), "x")


def test_an_array_that_changes_its_mind() -> None:
    places = iter([(1, 0), (2, 0), (2, 0)])
    x = Export(lambda: next(places), VALUES.__dlpack__)
    with pytest.raises(BufferError_, match="x is on a device"):
        view_anywhere(x, "x")
    # Each call looks anew, so one that has run before is no promise for the next.
    arrays = iter([np.ones(4, np.float32), np.ones(4, np.float32), np.ones(9)])
    comm = commrt.init()
    y = Export(lambda: (1, 0), lambda: next(arrays).__dlpack__())
    for _ in range(2):
        comm.allreduce(y, out=np.empty(4, np.float32))
    with pytest.raises(BufferError_, match="out has dtype float32, x has float64"):
        comm.allreduce(y, out=np.empty(4, np.float32))


INTERFACES: dict[str, Any] = {
    "no dictionary": 5,
    "no keys": {},
    "no shape": {"shape": None, "typestr": "<f4", "data": (4096, False)},
    "negative": {"shape": (-1,), "typestr": "<f4", "data": (4096, False)},
    "no address": {"shape": (4,), "typestr": "<f4", "data": (0, False)},
    "no data": {"shape": (4,), "typestr": "<f4", "data": None},
    "no type": {"shape": (4,), "typestr": "?!", "data": (4096, False)},
    "strides": {"shape": (4,), "typestr": "<f4", "data": (4096, False), "strides": ()},
    "words": {"shape": ("a",), "typestr": "<f4", "data": ("b", False)},
}


@pytest.mark.parametrize("name", INTERFACES)
def test_interfaces_that_make_no_sense(name: str) -> None:
    class Interfaced:
        __cuda_array_interface__ = INTERFACES[name]

    assert is_on_device(Interfaced())
    with pytest.raises(BufferError_, match=r"^x "):
        view_anywhere(Interfaced(), "x")


def released() -> memoryview:
    """Return a view of memory that was given back."""
    found = memoryview(bytearray(8))
    found.release()
    return found


def closed() -> mmap.mmap:
    """Return a map of memory that is gone."""
    found = mmap.mmap(-1, 8)
    found.close()
    return found


@pytest.mark.parametrize("make", [released, closed])
def test_buffers_that_are_gone(make: Callable[[], Any]) -> None:
    with pytest.raises(BufferError_, match=r"^x is a .* asked for its memory"):
        view_anywhere(make(), "x")


def test_a_buffer_stays_where_it_is_while_it_is_used() -> None:
    given = array.array("f", [1, 2, 3])
    seen = view(given, "x")
    with pytest.raises(BufferError):
        given.append(4)
    assert seen.count == 3


class Library:
    """A library of arrays that makes other ones than it is asked for."""

    def __init__(self, made: Any) -> None:
        self.made = made

    float32 = "float32"

    def empty(self, shape: Any, dtype: Any) -> Any:
        """Return what it always returns."""
        return self.made


@pytest.mark.parametrize(
    "made", [np.empty(1, np.float32), np.empty(4, np.float16), np.broadcast_to(0.0, 4)]
)
def test_an_output_that_is_not_what_was_asked_for(made: Any) -> None:
    class Foreign(Export):
        def __array_namespace__(self) -> Any:
            return Library(made)

    x = Foreign(lambda: (1, 0), lambda: VALUES.copy().__dlpack__())
    with pytest.raises(BufferError_, match=r"^allgather: out.*(pass out=|C-contig)"):
        commrt.init().allgather(x)


def test_a_plan_does_not_run_on_memory_that_is_gone() -> None:
    x = np.ones(4, np.float32)
    call = commrt.init().plan.allreduce(x)
    assert call() is x
    x.resize(1 << 20, refcheck=False)
    with pytest.raises(UsageError, match=r"allreduce: an array .* plan the call again"):
        call()
