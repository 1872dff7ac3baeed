# SPDX-License-Identifier: Apache-2.0
"""Collectives of numbers: ``comm.allreduce(3)``.

A number has no element type that all ranks know: one rank may have 0 where the others
have 0.5. So each rank sends its number with its type, in a record. Every rank that has
a result reduces the records in rank order. Sums of Python's integers are exact.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from commrt.calls.arguments import Call, check_root, parse
from commrt.calls.number_records import (
    OWN_OP,
    RECORD_NBYTES,
    Record,
    encoded,
    records_in,
)
from commrt.calls.number_sums import array_of_numbers, reduced, reduced_by
from commrt.errors import MismatchError, TimeoutError_, UsageError, shown
from commrt.vocabulary.dtypes import check_reduction
from commrt.vocabulary.operations import OpSpec
from commrt.vocabulary.request import Request

__all__ = ["NumberCalls", "takes_numbers"]

_OF_ARRAYS = ("out", "algorithm", "backend", "params", "compress", "residual", "stream")
_MOST_KNOWN = 256
Received = npt.NDArray[np.uint8] | None


def takes_numbers(spec: OpSpec) -> bool:
    """Return whether a number can stand for the array of an operation."""
    reduces = spec.reduces and spec.out_count == "same"
    copies = spec.input_on == "root" and spec.out_count == "same"
    gathers = spec.out_count == "times_size" and not spec.count_arguments
    return reduces or copies or gathers


class Ranks(Protocol):
    """The ranks of the calls."""

    @property
    def name(self) -> str:
        """Its name in messages."""

    @property
    def rank(self) -> int:
        """This rank."""

    @property
    def size(self) -> int:
        """Number of ranks."""


class NumberCalls:
    """Runs collectives of numbers.

    Args:
        group: the ranks.
    """

    def __init__(self, group: Ranks) -> None:
        self._group = group
        self._known: dict[Hashable, _NumberCall] = {}

    def run(
        self,
        spec: OpSpec,
        x: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        refuse: Callable[[str, dict[str, Any], Exception], None],
    ) -> Any:
        """Run a collective of numbers; return its number, or a request.

        Args:
            spec: the operation.
            x: the number.
            args: the arguments behind it.
            kwargs: the others.
            refuse: lets the other ranks know of what is wrong with the call.
        """
        try:
            call = self._call(spec, args, kwargs)
            record = call.record(x)
        except Exception as error:
            refuse(spec.name, kwargs, error)
            raise
        exchange, more = call.exchange
        if call.has_output:
            more = {**more, "out": np.empty(call.size * RECORD_NBYTES, np.uint8)}
        try:
            done = getattr(self._group, exchange)(record, **more)
        except MismatchError as error:
            raise type(error)(f"{spec.name} of a number: {error}") from error
        if call.call.nonblocking:
            return _NumberRequest(done, call, x)
        return call.result(x, done)

    def _call(
        self, spec: OpSpec, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> _NumberCall:
        """Return a call's checked arguments, which are kept for the next like it."""
        values = (*args, *kwargs.values())
        key = spec.name, *kwargs, *map(type, values), *values
        try:
            known = self._known.get(key)
        except Exception:  # noqa: BLE001 - a value that cannot be hashed
            known, key = None, ()
        if known is None:
            group = self._group
            call = parse(spec, (None, *args), kwargs)
            known = _NumberCall(call, group.rank, group.size, group.name)
            known.check(kwargs)
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            if key:
                self._known[key] = known
        return known


@dataclass(frozen=True)
class _NumberCall:
    """The arguments of a call with a number, without the number."""

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
                    f"{name}: {argument}= is for arrays, and x is a number: pass "
                    f"np.array(x), or leave {argument}={shown(given[argument])} out"
                )
        if call.user is not None and call.user.address is not None:
            raise UsageError(
                f"{name}: {call.user.name} is a C function, which takes arrays: pass "
                f"np.array(x, {str(call.user.dtype)!r})"
            )

    @cached_property
    def exchange(self) -> tuple[str, dict[str, Any]]:
        """The operation that carries the records, and its arguments."""
        call, spec = self.call, self.call.spec
        # Not more than is said: the engine runs such calls by itself.
        said = {"timeout_s": call.timeout_s, "name": call.name}
        more: dict[str, Any] = {key: one for key, one in said.items() if one}
        if call.nonblocking:
            more["nonblocking"] = True
        if spec.has_root:
            more["root"] = call.root
        if spec.input_on == "root":
            return "bcast", more
        return ("gather" if spec.output_on == "root" else "allgather"), more

    @cached_property
    def has_output(self) -> bool:
        """True if records of all ranks come to this one."""
        spec = self.call.spec
        to_all = spec.input_on == "all" and spec.output_on != "root"
        return to_all or (spec.output_on == "root" and self.rank == self.call.root)

    @cached_property
    def op_code(self) -> int:
        """The code of its reduction."""
        return OWN_OP if self.call.user is not None else int(self.call.reduction)

    def record(self, x: Any) -> npt.NDArray[np.uint8]:
        """Return this rank's number as bytes."""
        call, spec = self.call, self.call.spec
        return encoded(x, call.factor, spec.code, self.op_code, f"{spec.name}: x")

    def result(self, x: Any, received: Received) -> Any:
        """Return what the call returns, from the records of all ranks or the root."""
        call, spec = self.call, self.call.spec
        if received is None:
            return None
        records = records_in(received)
        self._check_records(records)
        if spec.input_on == "root":
            return x if self.rank == call.root else records[0].number
        if not spec.reduces:
            return array_of_numbers([record.number for record in records])
        if call.user is None:
            self._check_types(records)
        mine = [records[i].number for i in spec.contributors(self.rank, self.size)]
        if not mine:
            return None
        if call.user is not None:
            return reduced_by(call.user, mine, spec.name)
        return reduced(mine, call.reduction)

    def _check_records(self, records: Sequence[Record]) -> None:
        spec = self.call.spec
        first = self.call.root if spec.input_on == "root" else 0
        where = f"{spec.name} on {self.group}"
        if not all(record.is_of(spec.code, self.op_code) for record in records):
            lines = [
                f"  rank {rank}: {each}" for rank, each in enumerate(records, first)
            ]
            raise MismatchError(
                f"{where}: the ranks disagree; let all of them make the same call:\n"
                + "\n".join(lines)
            )
        large = [r for r, each in enumerate(records, first) if each.is_too_large]
        if large:
            error = UsageError(
                f"{where}: the integer of rank {', '.join(map(str, large))} does not "
                f"fit into 64 bits: pass a float, or parts of it"
            )
            error.on_all_ranks = True
            raise error

    def _check_types(self, records: Sequence[Record]) -> None:
        """Raise UsageError, on every rank that has a result, for a type without op."""
        for rank, record in enumerate(records):
            try:
                check_reduction(self.call.reduction, record.dtype)
            except UsageError as error:
                what = f"{self.call.spec.name}: the number of rank {rank}"
                raise UsageError(f"{what}: {error}") from None


class _NumberRequest(Request):
    """A started call with a number: ``wait`` returns a number."""

    def __init__(self, inner: Request, call: _NumberCall, x: Any) -> None:
        """Stand for a request of the records."""
        self._inner, self._call, self._x = inner, call, x
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
        if not self._has_output:
            self._has_output = True
            try:
                self._output = self._call.result(self._x, received)
            except Exception as error:  # noqa: BLE001 - raised again at each wait
                self._error = error
        if self._error is not None:
            raise self._error
        return self._output

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
