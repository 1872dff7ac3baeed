# SPDX-License-Identifier: Apache-2.0
"""Entries: operations that this rank has submitted, from the call until their end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias

import torch

from commrt.hvd.signatures import KINDS, Kind, Signature
from commrt.request import Request

__all__ = ["Entry", "UnderWay", "nbytes_of", "zeros_for"]

Tensor: TypeAlias = torch.Tensor
_NUM_KEYS = 64
"""Unnamed operations of a kind share so many names among the ranks. With a name for
each, no signature would ever be known from an earlier step."""


class UnderWay(Protocol):
    """A collective that brings results."""

    @property
    def request(self) -> Request | None:
        """What a rank may wait for; None: nothing."""
        ...

    def test(self) -> bool:
        """Return whether ``finish`` would not wait."""
        ...

    def finish(self, timeout_s: float | None = None) -> None:
        """Wait for it, and put its results where they belong."""
        ...


class Entry:
    """One operation of this rank.

    Args:
        name: what messages call it.
        signature: of the operation.
        inputs: this rank's tensors, detached. In place they are the outputs as well.
        in_place: whether results go into the inputs.
        number: the number of an unnamed operation of its kind; None: it has a name.
    """

    def __init__(
        self,
        name: str,
        signature: Signature,
        inputs: Sequence[Tensor] = (),
        *,
        in_place: bool = False,
        number: int | None = None,
    ) -> None:
        self.name = name
        self.signature = signature
        self.inputs = list(inputs)
        self.in_place = in_place
        self.outputs: list[Tensor | None] = [
            each if in_place else None for each in self.inputs
        ]
        self.received_splits: tuple[int, ...] = ()
        """Rows that have come from each rank, of an alltoall."""
        self.gathered_rows: dict[int, tuple[int, ...]] = {}
        """Rows of each rank by tensor, of an allgather."""
        self.transfers: list[UnderWay] = []
        self.num_missing = len(self.inputs)
        """Tensors whose transfer has not been started."""
        self.is_agreed = False
        """True once all ranks have submitted it."""
        self.error: BaseException | None = None
        self.key = name if number is None else f"{signature.kind}#{number % _NUM_KEYS}"
        """Name among the ranks."""
        self.is_named = number is None
        """True if the program has given it a name."""

    @property
    def kind(self) -> Kind:
        """Facts of its kind of operation."""
        return KINDS[self.signature.kind]

    @property
    def nbytes(self) -> int:
        """Bytes of this rank's tensors."""
        return sum(map(nbytes_of, self.inputs))

    @property
    def is_started(self) -> bool:
        """True if nothing is left to agree on: its transfers run, or it has failed."""
        return self.error is not None or (self.is_agreed and self.num_missing == 0)

    def fail(self, error: BaseException) -> None:
        """End it with an error, unless it has ended with one."""
        if self.error is None:
            self.error = error

    def __repr__(self) -> str:
        return f"<{self.signature.kind} {self.name}, {self.nbytes} bytes>"


def nbytes_of(tensor: Tensor) -> int:
    """Return the bytes of a tensor's elements."""
    return int(tensor.numel() * tensor.element_size())


def zeros_for(name: str, signature: Signature) -> Entry:
    """Return the entry of a rank that has joined, whose tensors are zeros."""
    inputs = [
        torch.zeros(shape, dtype=dtype_of(dtype), device=signature.device)
        for dtype, shape in signature.tensors
    ]
    return Entry(name, signature, inputs, in_place=True)


def dtype_of(name: str) -> Any:
    """Return torch's element type of a name, such as ``float32``."""
    return getattr(torch, name)
