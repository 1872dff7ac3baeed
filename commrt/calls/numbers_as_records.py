# SPDX-License-Identifier: Apache-2.0
"""Collectives of numbers: ``comm.allreduce(3)``.

A number has no element type that all ranks know: one rank may have 0 where the others
have 0.5. So each rank sends its number with its type, in a record. Every rank that has
a result reduces the records in rank order, by Python's arithmetic or by numpy's. Sums
of Python's integers are exact.
"""

from __future__ import annotations

import importlib
import operator
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import starmap
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from commrt.arrays.host import view
from commrt.calls.arguments import Call, check_root
from commrt.errors import MismatchError, ReductionError, TimeoutError_, UsageError
from commrt.vocabulary.dtypes import DTYPES, DType, ReduceOp, check_reduction
from commrt.vocabulary.operations import OPERATIONS, OpSpec
from commrt.vocabulary.reductions import Reduction
from commrt.vocabulary.request import Request

__all__ = ["NumberCall", "NumberRequest", "takes_numbers"]

_OF_ARRAYS = ("out", "algorithm", "backend", "params", "compress", "residual", "stream")
_MAGIC = 0x6E756D31
_RECORD = struct.Struct("<IBBBB16s")


class _Record(NamedTuple):
    """One rank's number."""

    magic: int
    coll: int
    op: int
    type: int
    state: int
    value: bytes


_PYTHON = 128
"""Added to the code of an element type: a number of Python."""
_OWN_OP = 255
"""In the place of a reduction's code: one of the user's own."""
_FINE, _TOO_LARGE = 0, 1
_FORMATS = {"bool": "<?", "int64": "<q", "float64": "<d", "complex128": "<dd"}
_OF_PYTHON = {bool: "bool", int: "int64", float: "float64", complex: "complex128"}
_BY_NAME = {dtype.name: dtype for dtype in DTYPES}


def takes_numbers(spec: OpSpec) -> bool:
    """Return whether a number can stand for the array of an operation."""
    reduces = spec.reduces and spec.out_count == "same"
    copies = spec.input_on == "root" and spec.out_count == "same"
    gathers = spec.out_count == "times_size" and not spec.count_arguments
    return reduces or copies or gathers


@dataclass(frozen=True)
class NumberCall:
    """One collective call with a number."""

    call: Call
    rank: int
    size: int
    group: str
    """Name of the communicator."""

    def check(self, given: dict[str, Any]) -> None:
        """Raise UsageError where an argument makes no sense with a number."""
        call, name = self.call, self.call.spec.name
        check_root(call.spec, call.root, self.size)
        for argument in _OF_ARRAYS:
            if given.get(argument) is not None:
                raise UsageError(
                    f"{name}: {argument}= is for arrays, and x is the number "
                    f"{call.x!r}: pass np.array(x), or leave {argument} out"
                )
        if call.user is not None and call.user.address is not None:
            raise UsageError(
                f"{name}: {call.user.name} is a C function, which takes arrays: pass "
                f"np.array(x, {str(call.user.dtype)!r})"
            )

    @property
    def exchange(self) -> tuple[str, dict[str, Any]]:
        """The operation that carries the records, and its arguments."""
        call = self.call
        # Not more than is said: the engine runs such calls by itself.
        said = {"timeout_s": call.timeout_s, "name": call.name}
        more: dict[str, Any] = {key: one for key, one in said.items() if one}
        if call.nonblocking:
            more["nonblocking"] = True
        if call.spec.input_on == "root":
            return "bcast", {**more, "root": call.root}
        to_root = call.spec.output_on == "root"
        if to_root:
            more["root"] = call.root
        if not to_root or self.rank == call.root:
            more["out"] = np.empty(self.size * _RECORD.size, np.uint8)
        return "gather" if to_root else "allgather", more

    def record(self) -> npt.NDArray[np.uint8]:
        """Return this rank's number as bytes."""
        code, value, state = _encoded(self.call)
        said = _MAGIC, self.call.spec.code, self._op_code, code, state
        return np.frombuffer(bytearray(_RECORD.pack(*said, value)), np.uint8)

    @property
    def _op_code(self) -> int:
        return _OWN_OP if self.call.user is not None else int(self.call.reduction)

    def result(self, received: npt.NDArray[np.uint8] | None) -> Any:
        """Return what the call returns, from the records of all ranks or the root."""
        call, spec = self.call, self.call.spec
        if received is None:
            return None
        records = [*starmap(_Record, _RECORD.iter_unpack(received.data))]
        first = call.root if spec.input_on == "root" else 0
        self._check_records(records, first)
        values = [_decoded(record) for record in records]
        if spec.input_on == "root":
            return call.x if self.rank == call.root else values[0]
        if not spec.reduces:
            return np.array(values, _common_type(values))
        mine = [values[i] for i in spec.contributors(self.rank, self.size)]
        if not mine:
            return None
        if call.user is not None:
            return _reduced_by(call.user, mine, spec.name)
        self._check_types(records)
        return _reduced(mine, call.reduction)

    def _check_records(self, records: Sequence[_Record], first: int) -> None:
        where = f"{self.call.spec.name} on {self.group}"
        mine = _MAGIC, self.call.spec.code, self._op_code
        if any(record[:3] != mine for record in records):
            lines = [
                f"  rank {rank}: {_said(record)}"
                for rank, record in enumerate(records, first)
            ]
            raise MismatchError(
                f"{where}: the ranks disagree; let all of them make the same call:\n"
                + "\n".join(lines)
            )
        large = [
            rank
            for rank, record in enumerate(records, first)
            if record.state == _TOO_LARGE
        ]
        if large:
            error = UsageError(
                f"{where}: the integer of rank {', '.join(map(str, large))} does not "
                f"fit into 64 bits: pass a float, or parts of it"
            )
            error.on_all_ranks = True
            raise error

    def _check_types(self, records: Sequence[_Record]) -> None:
        """Raise UsageError, on every rank that has a result, for a type without op."""
        for rank, record in enumerate(records):
            try:
                check_reduction(self.call.reduction, _dtype_of(record))
            except UsageError as error:
                what = f"{self.call.spec.name}: the number of rank {rank}"
                raise UsageError(f"{what}: {error}") from None


def _said(record: _Record) -> str:
    spec = next((each for each in OPERATIONS if each.code == record.coll), None)
    if record.magic != _MAGIC or spec is None:
        return "a call with an array"
    if not spec.reduces:
        return spec.name
    own = record.op == _OWN_OP
    return (
        f"{spec.name} op={'a function of its own' if own else ReduceOp(record.op).name}"
    )


def _encoded(call: Call) -> tuple[int, bytes, int]:
    """Return type, bytes and state of this rank's number."""
    x: Any = call.x
    if isinstance(x, np.generic):
        product = x if call.factor is None else np.multiply(x, call.factor)
        value = np.array(product).astype(x.dtype)
        seen = view(value, f"{call.spec.name}: x")
        return seen.dtype.code, value.tobytes(), _FINE
    kind = next(each for each in _OF_PYTHON if isinstance(x, each))
    number = kind(x) if call.factor is None else kind(x) * call.factor
    kind = kind if call.factor is None else type(number)
    dtype = _BY_NAME[_OF_PYTHON[kind]]
    parts = (number.real, number.imag) if kind is complex else (number,)
    try:
        raw = struct.pack(_FORMATS[dtype.name], *parts)
    except (struct.error, OverflowError):
        return dtype.code | _PYTHON, b"", _TOO_LARGE
    return dtype.code | _PYTHON, raw, _FINE


def _dtype_of(record: _Record) -> DType:
    return DTYPES[record.type % _PYTHON]


def _decoded(record: _Record) -> Any:
    """Return a number as its rank has it."""
    dtype = _dtype_of(record)
    if record.type & _PYTHON:
        parts = struct.unpack_from(_FORMATS[dtype.name], record.value)
        return parts[0] if len(parts) == 1 else complex(*parts)
    raw = record.value[: dtype.itemsize]
    if dtype.needs_ml_dtypes:
        ml_dtypes = importlib.import_module("ml_dtypes")
        return np.frombuffer(raw, getattr(ml_dtypes, dtype.name))[0]
    return np.frombuffer(raw, dtype.name)[0]


def _common_type(values: Sequence[Any]) -> np.dtype[Any]:
    if any(isinstance(value, np.generic) for value in values):
        return np.result_type(*values)
    return np.dtype(_OF_PYTHON[_common_kind(values)])


def _common_kind(values: Sequence[Any]) -> type:
    """Return the widest of Python's types of numbers."""
    kinds = list(_OF_PYTHON)
    return kinds[max(kinds.index(type(value)) for value in values)]


def _least(a: Any, b: Any) -> Any:
    return a if a != a or not (b < a or b != b) else b


def _largest(a: Any, b: Any) -> Any:
    return a if a != a or not (b > a or b != b) else b


_Combine = Callable[[Any, Any], Any]
_COMBINE: dict[ReduceOp, _Combine] = {
    ReduceOp.SUM: operator.add,
    ReduceOp.PREMUL_SUM: operator.add,
    ReduceOp.AVG: operator.add,
    ReduceOp.PROD: operator.mul,
    ReduceOp.MIN: _least,
    ReduceOp.MAX: _largest,
    ReduceOp.LAND: lambda a, b: bool(a) and bool(b),
    ReduceOp.LOR: lambda a, b: bool(a) or bool(b),
    ReduceOp.LXOR: lambda a, b: bool(a) != bool(b),
    ReduceOp.BAND: operator.and_,
    ReduceOp.BOR: operator.or_,
    ReduceOp.BXOR: operator.xor,
}
_OF_BOOLS = {ReduceOp.SUM: ReduceOp.LOR, ReduceOp.PROD: ReduceOp.LAND}
_LOGICAL = (ReduceOp.LAND, ReduceOp.LOR, ReduceOp.LXOR)


def _reduced(values: Sequence[Any], op: ReduceOp) -> Any:
    """Return the reduction of numbers, from the left, of the widest of their types."""
    of_numpy = any(isinstance(value, np.generic) for value in values)
    dtype = _common_type(values)
    kind: Callable[[Any], Any] = dtype.type if of_numpy else _common_kind(values)
    if dtype.kind == "b":
        op = _OF_BOOLS.get(op, op)
    short = of_numpy and dtype.kind not in "biuc" and dtype.itemsize < 4
    wide: Callable[[Any], Any] = np.float32 if short else kind
    with np.errstate(all="ignore"):
        total = reduce(_COMBINE[op], map(wide, values))
        if op in _LOGICAL:
            total = bool(total)
        if op is ReduceOp.AVG:
            total = _divided(total, len(values), of_numpy and dtype.kind in "iu")
            if not of_numpy:
                return total
        return kind(total)


def _divided(total: Any, by: int, toward_zero: bool) -> Any:
    if not toward_zero:
        return total / by
    whole = int(total)
    return abs(whole) // by * (-1 if whole < 0 else 1)


def _reduced_by(user: Reduction, values: Sequence[Any], name: str) -> Any:
    """Return what a reduction of the user's own makes of numbers."""
    dtype = user.dtype or _common_type(values)
    arrays = [np.array([value], dtype) for value in values]
    try:
        found = np.asarray(reduce(user, arrays))[0]
    except Exception as error:
        raise ReductionError(
            f"{name}: the reduction {user.name} raised {type(error).__name__}: {error}"
        ) from error
    of_numpy = any(isinstance(value, np.generic) for value in values)
    return found if of_numpy else found.item()


class NumberRequest(Request):
    """A started call with a number: ``wait`` returns a number."""

    def __init__(self, inner: Request, call: NumberCall) -> None:
        """Stand for a request of the records."""
        self._inner, self._call = inner, call
        self._has_output = False
        self._output: Any = None
        self._error: Exception | None = None

    def wait(self, *, stream: Any = None, timeout_s: Any = None) -> Any:
        """Return the operation's number once it is complete; see ``Request.wait``."""
        try:
            received = self._inner.wait(stream=stream, timeout_s=timeout_s)
        except TimeoutError_ as error:
            error.request = self
            raise
        return self._made(received)

    def synchronize(self, *, timeout_s: Any = None) -> Any:
        """Block the host until complete; the same as ``wait``."""
        return self.wait(timeout_s=timeout_s)

    def test(self) -> bool:
        """Run a little progress; True once complete. Raises the operation's error."""
        return self._inner.test()

    @property
    def done(self) -> bool:
        """True if the operation has ended, without progress."""
        return self._inner.done

    @property
    def operation(self) -> str:
        """Name of the operation."""
        return self._call.call.spec.name

    @property
    def timeout_s(self) -> float:
        """Default limit of its waits, in seconds."""
        return self._inner.timeout_s

    @property
    def seq(self) -> int:
        """Sequence number on its communicator."""
        return self._inner.seq

    def __repr__(self) -> str:
        state = "done" if self.done else "pending"
        return f"<commrt.Request {self.operation} of a number: {state}>"

    def _made(self, received: Any) -> Any:
        if not self._has_output:
            self._has_output = True
            try:
                self._output = self._call.result(received)
            except Exception as error:  # noqa: BLE001 - raised again at each wait
                self._error = error
        if self._error is not None:
            raise self._error
        return self._output
