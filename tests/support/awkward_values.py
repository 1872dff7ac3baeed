# SPDX-License-Identifier: Apache-2.0
"""Values that a program passes by mistake, whatever the argument is.

Each is made anew for each call: some change by being looked at.
"""

from __future__ import annotations

import array
import ctypes
import datetime
import decimal
import fractions
import io
import pathlib
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import numpy as np

import commrt

__all__ = ["AWKWARD"]


class Stubborn:
    """Raises at everything that an argument may be asked."""

    def _refuse(self, *_: Any) -> NoReturn:
        raise ZeroDivisionError("the program's own mistake")

    __index__ = __int__ = __float__ = __len__ = __iter__ = _refuse
    __eq__ = __hash__ = __bool__ = __getitem__ = __contains__ = _refuse  # type: ignore[assignment]
    __lt__ = __gt__ = __le__ = __ge__ = __call__ = _refuse
    __array__ = __fspath__ = __enter__ = __exit__ = _refuse


class Asked:
    """Raises whenever an attribute of it is asked for that it does not have."""

    def __getattr__(self, name: str) -> NoReturn:
        raise RuntimeError(f"{name} cannot be said")


class Anything:
    """Has every attribute, and all of them can be called."""

    def __getattr__(self, name: str) -> Anything:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *_: Any, **__: Any) -> Anything:
        return self


class Exporter:
    """Has one protocol of arrays, which gives whatever it is told to give."""

    def __init__(self, **protocol: Any) -> None:
        for name, value in protocol.items():
            setattr(self, name, value)


class DLPack:
    """Says by DLPack that it is an array of the host, and gives something else."""

    def __init__(self, device: Any, gives: Callable[[], Any]) -> None:
        self._device, self._gives = device, gives

    def __dlpack_device__(self) -> Any:
        return self._device

    def __dlpack__(self, **_: Any) -> Any:
        return self._gives()


class Changing:
    """Is another integer each time it is asked."""

    def __init__(self) -> None:
        self._last = -2

    def __index__(self) -> int:
        self._last += 1
        return self._last


class Named(str):
    """A string of a class of its own."""

    __slots__ = ()


def _generator() -> Iterator[int]:
    yield 4
    raise ZeroDivisionError("the program's own mistake")


def _frozen() -> Any:
    x = np.zeros(8, np.float32)
    x.flags.writeable = False
    return x


def _raises() -> NoReturn:
    raise ZeroDivisionError("the program's own mistake")


def _endless(depth: int) -> Any:
    nested: Any = 1
    for _ in range(depth):
        nested = [nested]
    return nested


def _circle() -> Any:
    circle: list[Any] = []
    circle.append(circle)
    return circle


_F = np.float32
AWKWARD: dict[str, Callable[[], Any]] = {
    # Nothing, truth, numbers
    "None": lambda: None,
    "Ellipsis": lambda: ...,
    "NotImplemented": lambda: NotImplemented,
    "True": lambda: True,
    "numpy's True": lambda: np.True_,
    "0": lambda: 0,
    "1": lambda: 1,
    "5": lambda: 5,
    "-1": lambda: -1,
    "2**31": lambda: 2**31,
    "2**40": lambda: 2**40,
    "2**63 - 1": lambda: 2**63 - 1,
    "2**64": lambda: 2**64,
    "-(2**63) - 1": lambda: -(2**63) - 1,
    "10**5000": lambda: 10**5000,
    "0.5": lambda: 0.5,
    "nan": lambda: float("nan"),
    "inf": lambda: float("inf"),
    "-inf": lambda: float("-inf"),
    "1e300": lambda: 1e300,
    "1j": lambda: 1j,
    "numpy's int64": lambda: np.int64(1),
    "numpy's uint64": lambda: np.uint64(2**63 + 1),
    "numpy's float32": lambda: np.float32(1.5),
    "decimal": lambda: decimal.Decimal("1.5"),
    "fraction": lambda: fractions.Fraction(1, 2),
    "changing integer": Changing,
    # Text
    "no text": lambda: "",
    "word": lambda: "frobnicate",
    "capitals": lambda: "SUM",
    "surrogate": lambda: "\ud800",
    "null character": lambda: "a\0b",
    "newline and escape": lambda: "a\n\x1b[31mb",
    "long text": lambda: "x" * 100_000,
    "digits": lambda: "1",
    "numpy's string": lambda: np.str_("sum"),
    "own string": lambda: Named("word"),
    "bytes": lambda: b"12345678",
    "bytearray": lambda: bytearray(32),
    "path": lambda: pathlib.PurePosixPath("word"),
    # Collections
    "empty list": list,
    "empty tuple": lambda: (),
    "empty dict": dict,
    "list": lambda: [4, 4],
    "floats": lambda: [1.0, 2.0],
    "strings": lambda: ["a", "b"],
    "Nones": lambda: [None, None],
    "negative": lambda: [-4, 12],
    "huge counts": lambda: [2**40, 2**40],
    "too large counts": lambda: [2**62, 2**62],
    "counts beyond 64 bits": lambda: [2**70, 1],
    "pairs": lambda: [(1, 2), (3, 4)],
    "triples": lambda: [(1, 2, 3)],
    "ragged": lambda: [[1], [2, 3]],
    "deep list": lambda: _endless(200),
    "circle": _circle,
    "65 sizes": lambda: (1,) * 65,
    "1000 sizes": lambda: [1] * 1000,
    "set": lambda: {1, 2},
    "dict": lambda: {"data": 2},
    "dict of numbers": lambda: {0: 1},
    "dict of huge": lambda: {"chunk": 2**70},
    "range": lambda: range(2),
    "long range": lambda: range(2**62, 2**62 + 2),
    "iterator": lambda: iter([4, 4]),
    "generator that raises": _generator,
    # Classes, functions, objects
    "object": object,
    "class": lambda: int,
    "class of arrays": lambda: np.ndarray,
    "class of numbers": lambda: np.float32,
    "dtype": lambda: np.dtype("float32"),
    "function": lambda: len,
    "lambda": lambda: lambda a, b: a + b,
    "ufunc": lambda: np.sin,
    "ufunc of two": lambda: np.arctan2,
    "module": lambda: np,
    "exception": lambda: ValueError("mistake"),
    "date": lambda: datetime.date(2026, 1, 1),
    "duration": lambda: datetime.timedelta(seconds=1),
    "file": io.BytesIO,
    "stubborn": Stubborn,
    "asked": Asked,
    "anything": Anything,
    "weak protocol": lambda: Exporter(__cuda_array_interface__=5),
    "protocol without fields": lambda: Exporter(__cuda_array_interface__={}),
    "protocol with wrong fields": lambda: Exporter(
        __cuda_array_interface__={
            "shape": ("a",),
            "typestr": "<q9",
            "data": (None, 1),
            "version": 3,
        }
    ),
    "protocol of no device": lambda: Exporter(
        __cuda_array_interface__={
            "shape": (8,),
            "typestr": "<f4",
            "data": (4096, False),
            "version": 3,
        }
    ),
    "array interface of nothing": lambda: Exporter(__array_interface__={"shape": 3}),
    "dlpack that raises": lambda: DLPack((1, 0), _raises),
    "dlpack of no capsule": lambda: DLPack((1, 0), lambda: "capsule"),
    "dlpack of a device": lambda: DLPack((2, 0), lambda: None),
    "dlpack of nowhere": lambda: DLPack("cpu", lambda: None),
    "dlpack of None": lambda: DLPack(None, lambda: None),
    # Arrays
    "array": lambda: np.ones(8, _F),
    "other length": lambda: np.ones(6, _F),
    "odd length": lambda: np.ones(7, _F),
    "other type": lambda: np.ones(8, np.int16),
    "bools": lambda: np.ones(8, bool),
    "complex": lambda: np.ones(8, np.complex64),
    "0-d": lambda: np.array(4.0),
    "0-d integer": lambda: np.array(4),
    "0-d object": lambda: np.array(None),
    "no elements": lambda: np.ones(0, _F),
    "64 dimensions": lambda: np.ones((1,) * 64, _F),
    "integers": lambda: np.array([4, 4]),
    "unsigned": lambda: np.array([4, 4], np.uint8),
    "floats in an array": lambda: np.array([4.0, 4.0]),
    "2-d integers": lambda: np.array([[4], [4]]),
    "read-only": _frozen,
    "strided": lambda: np.ones(16, _F)[::2],
    "reversed": lambda: np.ones(8, _F)[::-1],
    "broadcast": lambda: np.broadcast_to(np.ones(1, _F), (8,)),
    "huge broadcast": lambda: np.broadcast_to(np.ones(1, _F), (2**40,)),
    "objects": lambda: np.ones(8, object),
    "big-endian": lambda: np.ones(8, ">f4"),
    "datetimes": lambda: np.zeros(8, "datetime64[s]"),
    "records": lambda: np.zeros(8, [("a", "f4"), ("b", "i4")]),
    "text in an array": lambda: np.array(["a"] * 8),
    "void": lambda: np.zeros(8, "V4"),
    "masked": lambda: np.ma.masked_less(np.zeros(8, _F), 1),
    "masked scalar": lambda: np.ma.masked,
    "matrix": lambda: np.ones(8, _F).view(np.matrix),
    "memoryview": lambda: memoryview(np.ones(8, _F)),
    "released memoryview": lambda: _released(),
    "array of the library": lambda: array.array("f", [1] * 8),
    "ctypes": lambda: (ctypes.c_float * 8)(),
    # What commrt itself has
    "layout": lambda: commrt.Layout((8,), (2,), (commrt.Block(0),)),
    "block": lambda: commrt.Block(0),
    "sparse": lambda: commrt.SparseVector(np.array([1]), np.ones(1, _F), (8,)),
    "sparse of lists": lambda: (np.array([1]), [1.0], (8,)),
    "reduction": lambda: commrt.reduction(np.add, commutative=True),
}
"""Values by the words that name them in a failure."""


def _released() -> Any:
    view = memoryview(bytearray(32))
    view.release()
    return view
