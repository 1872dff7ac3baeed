# SPDX-License-Identifier: Apache-2.0
"""A bucket on its way: how its gradients are sent, and what becomes of the sums.

With each bucket goes a byte per parameter that says whether a rank has a gradient of
it. Nobody can know that of the others, and what no rank has is no gradient at all.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from commrt.layers.data.gradients import Parameter, in_numpy, put, usable
from commrt.layers.data.sparse_rows import as_sparse, empty_sparse, scaled

if TYPE_CHECKING:
    from commrt.comm import Communicator

__all__ = ["Bucket", "Transfer", "start"]


@dataclass(eq=False)
class Bucket:
    """Parameters whose gradients go together."""

    parameters: Sequence[Parameter]
    op: str
    """``avg`` or ``sum``."""
    compress: str | None = None
    """The wire format of the sum."""
    largest: int | None = None
    """Number of elements of the sum to take; None: all."""
    sparse: bool = False
    """True if it is one parameter whose gradients are a few of its rows."""
    residual: Any = None
    """Errors that earlier steps owe; None if none are kept."""

    @property
    def members(self) -> tuple[int, ...]:
        """The parameters' numbers."""
        return tuple(parameter.index for parameter in self.parameters)

    @property
    def nbytes(self) -> int:
        """Bytes of the gradients."""
        return sum(parameter.nbytes for parameter in self.parameters)

    @property
    def count(self) -> int:
        """Elements of the gradients."""
        return sum(parameter.count for parameter in self.parameters)

    def owed(self) -> dict[int, Any]:
        """Return the residual of each parameter, a part of ``residual``."""
        found: dict[int, Any] = {}
        if self.residual is None:
            return found
        begin = 0
        for parameter in self.parameters:
            found[parameter.index] = self.residual[begin : begin + parameter.count]
            begin += parameter.count
        return found


class Transfer(ABC):
    """A bucket under way."""

    def __init__(self, bucket: Bucket, given: Sequence[Any], size: int) -> None:
        self._bucket = bucket
        self._given = given
        self._size = size
        owed = bucket.owed()
        there = [
            each is not None or bool(np.any(owed.get(parameter.index, 0)))
            for each, parameter in zip(given, bucket.parameters, strict=True)
        ]
        self._is_there = np.array(there, np.uint8)
        self._requests: list[Any] = []
        self._results: list[Any] | None = None

    @abstractmethod
    def start(self, comm: Communicator) -> None:
        """Start the operations, the same ones on all ranks."""

    @abstractmethod
    def finished(self, outputs: Sequence[Any]) -> list[Any]:
        """Return the sums, from the outputs of the operations."""

    def test(self) -> bool:
        """Return whether it has come to its end, after a little progress."""
        if self._results is None and all([each.test() for each in self._requests]):
            self.wait()
        return self._results is not None

    def wait(self) -> list[Any]:
        """Return the sums; None of what no rank has."""
        if self._results is None:
            outputs = [request.wait() for request in self._requests]
            found = self.finished(outputs[:-1])
            there = self._is_there.tolist()
            self._results = [
                each if is_there else None
                for each, is_there in zip(found, there, strict=True)
            ]
        return self._results

    def _reduced(self, comm: Communicator, array: Any, **arguments: Any) -> None:
        op = self._bucket.op
        self._requests.append(
            comm.allreduce(array, op=op, nonblocking=True, **arguments)
        )

    def _tell_what_is_there(self, comm: Communicator) -> None:
        self._requests.append(
            comm.allreduce(self._is_there, op="max", nonblocking=True)
        )


class _Exact(Transfer):
    """In place, by one allreduce out of the arrays and into them."""

    def start(self, comm: Communicator) -> None:
        bucket = self._bucket
        self._arrays = [
            parameter.zeros() if each is None else usable(each, _name(parameter))
            for each, parameter in zip(self._given, bucket.parameters, strict=True)
        ]
        if len(self._arrays) == 1:
            self._reduced(comm, self._arrays[0])
            self._tell_what_is_there(comm)
            return
        with comm.fused(nbytes=bucket.nbytes + len(self._arrays) + 1):
            for array in self._arrays:
                self._reduced(comm, array)
            self._tell_what_is_there(comm)

    def finished(self, outputs: Sequence[Any]) -> list[Any]:
        return [
            put(array, each)
            for array, each in zip(self._arrays, self._given, strict=True)
        ]


class _Packed(Transfer):
    """Copied into one vector, and from there back."""

    def start(self, comm: Communicator) -> None:
        bucket = self._bucket
        first = bucket.parameters[0].zeros()
        dtype = in_numpy(first, "a bucket").dtype
        self._flat = np.zeros(bucket.count, dtype)
        for part, each, parameter in self._parts():
            if each is not None:
                part[...] = in_numpy(each, _name(parameter))
        self._send(comm)
        self._tell_what_is_there(comm)

    def _parts(self) -> list[tuple[Any, Any, Parameter]]:
        found, begin = [], 0
        for each, parameter in zip(self._given, self._bucket.parameters, strict=True):
            end = begin + parameter.count
            part = self._flat[begin:end].reshape(parameter.shape)
            found.append((part, each, parameter))
            begin = end
        return found

    def _send(self, comm: Communicator) -> None:
        bucket = self._bucket
        residual = {} if bucket.residual is None else {"residual": bucket.residual}
        self._reduced(comm, self._flat, compress=bucket.compress, **residual)

    def finished(self, outputs: Sequence[Any]) -> list[Any]:
        found = []
        for part, each, parameter in self._parts():
            target = parameter.zeros() if each is None else each
            put_there = put(part, target)
            found.append(part.copy() if put_there is part else put_there)
        return found


class _Largest(_Packed):
    """Only the largest elements of the sum."""

    def _send(self, comm: Communicator) -> None:
        bucket = self._bucket
        assert bucket.largest is not None
        self._requests.append(
            comm.topk_allreduce(
                self._flat, bucket.largest, residual=bucket.residual, nonblocking=True
            )
        )

    def finished(self, outputs: Sequence[Any]) -> list[Any]:
        divisor = self._size if self._bucket.op == "avg" else 1
        found = scaled(outputs[0], divisor)
        self._flat[:] = 0
        self._flat[found.indices] = found.values
        return super().finished(outputs)


class _Sparse(Transfer):
    """A few rows of a table, as the sparse allreduce sums them."""

    def start(self, comm: Communicator) -> None:
        parameter, given = self._bucket.parameters[0], self._given[0]
        if given is None:
            dtype = in_numpy(parameter.zeros(), _name(parameter)).dtype
            vector = empty_sparse(parameter.shape, dtype)
        else:
            vector = as_sparse(given, parameter.shape, _name(parameter))
        self._requests.append(
            comm.sparse_allreduce(vector, result="sparse", nonblocking=True)
        )
        self._tell_what_is_there(comm)

    def finished(self, outputs: Sequence[Any]) -> list[Any]:
        divisor = self._size if self._bucket.op == "avg" else 1
        return [scaled(outputs[0], divisor)]


def start(bucket: Bucket, given: Sequence[Any], comm: Communicator) -> Transfer:
    """Start the operations of a bucket.

    Args:
        bucket: which.
        given: this rank's gradients; None of those that it has none of.
        comm: the reducer's own communicator.
    """
    kind: type[Transfer] = _Exact
    if bucket.sparse:
        kind = _Sparse
    elif bucket.largest is not None:
        kind = _Largest
    elif bucket.compress is not None:
        kind = _Packed
    made = kind(bucket, given, comm.size)
    made.start(comm)
    return made


def _name(parameter: Parameter) -> str:
    return f"gradient {parameter.index}"
