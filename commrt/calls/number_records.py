# SPDX-License-Identifier: Apache-2.0
"""One rank's number as bytes, with its type and the call that it belongs to."""

from __future__ import annotations

import importlib
import struct
from itertools import starmap
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from commrt.arrays.host import view
from commrt.vocabulary.dtypes import DTYPES, DType, ReduceOp
from commrt.vocabulary.operations import OPERATIONS

__all__ = ["OWN_OP", "RECORD_NBYTES", "Record", "encoded", "records_in"]

_MAGIC = 0x6E756D31
_LAYOUT = struct.Struct("<IBBBB16s")
RECORD_NBYTES = _LAYOUT.size
OWN_OP = 255
"""In the place of a reduction's code: one of the user's own."""
_PYTHON = 128
"""Added to the code of an element type: a number of Python."""
_FINE, _TOO_LARGE = 0, 1
_FORMATS = {"bool": "<?", "int64": "<q", "float64": "<d", "complex128": "<dd"}
_OF_PYTHON = {bool: "bool", int: "int64", float: "float64", complex: "complex128"}
_CODES = {dtype.name: dtype.code for dtype in DTYPES}


class Record(NamedTuple):
    """One rank's number."""

    magic: int
    coll: int
    op: int
    type: int
    state: int
    value: bytes

    @property
    def is_too_large(self) -> bool:
        """True for an integer that 64 bits do not hold."""
        return self.state == _TOO_LARGE

    @property
    def dtype(self) -> DType:
        """The type of the number."""
        return DTYPES[self.type % _PYTHON]

    @property
    def number(self) -> Any:
        """The number as its rank has it."""
        dtype = self.dtype
        if self.type & _PYTHON:
            parts = struct.unpack_from(_FORMATS[dtype.name], self.value)
            return parts[0] if len(parts) == 1 else complex(*parts)
        raw = self.value[: dtype.itemsize]
        if dtype.needs_ml_dtypes:
            ml_dtypes = importlib.import_module("ml_dtypes")
            return np.frombuffer(raw, getattr(ml_dtypes, dtype.name))[0]
        return np.frombuffer(raw, dtype.name)[0]

    def is_of(self, coll: int, op: int) -> bool:
        """Return whether it belongs to such a call."""
        return self.magic == _MAGIC and self.coll == coll and self.op == op

    def __str__(self) -> str:
        spec = next((each for each in OPERATIONS if each.code == self.coll), None)
        if self.magic != _MAGIC or spec is None:
            return "a call with an array"
        if not spec.reduces:
            return spec.name
        own = self.op == OWN_OP
        op = "a function of its own" if own else ReduceOp(self.op).name
        return f"{spec.name} op={op}"


def encoded(
    x: Any, factor: int | float | None, coll: int, op: int, what: str
) -> npt.NDArray[np.uint8]:
    """Return the record of a number, times a factor.

    An integer that is too large becomes a record that says so, so that all ranks hear
    of it. A scalar of a type that cannot be communicated raises BufferError_.
    """
    code, value, state = _typed(x, factor, what)
    made = _LAYOUT.pack(_MAGIC, coll, op, code, state, value)
    return np.frombuffer(bytearray(made), np.uint8)


def records_in(received: npt.NDArray[np.uint8]) -> list[Record]:
    """Return the records that an array has."""
    return [*starmap(Record, _LAYOUT.iter_unpack(received.data))]


def _typed(x: Any, factor: int | float | None, what: str) -> tuple[int, bytes, int]:
    """Return type, bytes and state of a number."""
    if isinstance(x, np.generic):
        product = x if factor is None else np.multiply(x, factor)
        value = np.array(product).astype(x.dtype)
        return view(value, what).dtype.code, value.tobytes(), _FINE
    kind = next(each for each in _OF_PYTHON if isinstance(x, each))
    number = kind(x)
    if factor is not None:
        number *= factor
        kind = type(number)
    name = _OF_PYTHON[kind]
    code = _CODES[name] | _PYTHON
    parts = (number.real, number.imag) if kind is complex else (number,)
    try:
        return code, struct.pack(_FORMATS[name], *parts), _FINE
    except (struct.error, OverflowError):
        return code, b"", _TOO_LARGE
