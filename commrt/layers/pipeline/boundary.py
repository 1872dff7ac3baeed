# SPDX-License-Identifier: Apache-2.0
"""Tensors between two stages: their types and shapes, and their bytes in a message.

Tensors lie one behind another, those of larger elements first. The size of an element
is a power of two, so each begins at a multiple of its own, and no byte is lost.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch

from commrt.errors import UsageError, shown
from commrt.layers.pipeline.agreement import Numbers

__all__ = ["DTYPES", "MOST_NUMBERS", "Signature", "TensorSpec", "as_tensors"]

Tensor: TypeAlias = torch.Tensor

DTYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    *(torch.complex64, torch.complex128),
)
"""Types of tensors that stages may exchange; their places here stand for them."""

MOST_NUMBERS = 512
"""Numbers that a signature may have in a message."""


class TensorSpec(NamedTuple):
    """The facts of a tensor that its bytes do not tell."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    needs_gradient: bool
    """True where its gradient goes back."""

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        itemsize: int = self.dtype.itemsize
        return math.prod(self.shape) * itemsize


class Signature(NamedTuple):
    """The tensors of a micro-batch at a boundary between two stages."""

    specs: tuple[TensorSpec, ...]

    @classmethod
    def of(cls, tensors: Sequence[Tensor], is_training: bool) -> Signature:
        """Return the signature of a stage's outputs."""
        return cls(
            tuple(
                TensorSpec(
                    *(each.dtype, tuple(each.shape)),
                    is_training and each.requires_grad,
                )
                for each in tensors
            )
        )

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(spec.nbytes for spec in self.specs)

    @property
    def back(self) -> tuple[TensorSpec, ...]:
        """The tensors whose gradients go back."""
        return tuple(spec for spec in self.specs if spec.needs_gradient)

    # -- the signature itself in a message ---------------------------------------------

    def numbers(self) -> Numbers:
        """Return the signature as numbers; UsageError if these are too many."""
        found = [len(self.specs)]
        for spec in self.specs:
            code = 2 * DTYPES.index(spec.dtype) + spec.needs_gradient
            found += [code, len(spec.shape), *spec.shape]
        if len(found) > MOST_NUMBERS:
            raise UsageError(
                f"MessageDrivenPipeline: a stage returned {len(self.specs)} tensors, "
                f"whose shapes are {len(found)} numbers; expected {MOST_NUMBERS} at "
                f"most: join some of them"
            )
        return np.array(found, np.int64)

    @classmethod
    def from_numbers(cls, numbers: Numbers) -> Signature:
        """Return the signature that ``numbers`` were made of."""
        values = iter(numbers.tolist())
        specs = []
        for _ in range(next(values)):
            code, ndim = next(values), next(values)
            shape = tuple(next(values) for _ in range(ndim))
            specs.append(TensorSpec(DTYPES[code // 2], shape, bool(code % 2)))
        return cls(tuple(specs))

    # -- values forward ----------------------------------------------------------------

    def packed(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the bytes of tensors, one contiguous tensor's own memory."""
        return _joined([*map(_bytes_of, tensors)], self.specs)

    def unpacked(self, wire: Tensor) -> list[Tensor]:
        """Return the tensors that lie in a message; they share its memory."""
        return _cut(wire, self.specs)

    # -- gradients back ----------------------------------------------------------------

    @property
    def back_nbytes(self) -> int:
        """Bytes of the gradients' message, where none is missing."""
        return sum(spec.nbytes for spec in self.back) + self._num_flags

    @property
    def _num_flags(self) -> int:
        """Bytes that say which gradients there are; a lone one needs none."""
        back = self.back
        return 0 if len(back) == 1 and back[0].nbytes else len(back)

    def back_packed(self, gradients: Sequence[Tensor | None]) -> Tensor:
        """Return the bytes of gradients, of which some may be None, in one message.

        The message has memory of its own. Autograd may give a gradient's memory to the
        ``.grad`` of a parameter too, to which the next micro-batch adds in place.
        """
        there = [
            (spec, each, _bytes_of(each))
            for spec, each in zip(self.back, gradients, strict=True)
            if each is not None
        ]
        specs = [spec for spec, _, _ in there]
        parts = _joined([part for _, _, part in there], specs)
        if not self._num_flags:
            is_shared = any(parts.data_ptr() == each.data_ptr() for _, each, _ in there)
            return parts.clone() if is_shared else parts
        flags = torch.tensor([each is not None for each in gradients])
        return torch.cat([parts, flags.view(torch.uint8).to(parts.device)])

    def back_unpacked(self, wire: Tensor, nbytes: int) -> list[Tensor | None]:
        """Return the gradients that lie in the first bytes of a message."""
        back = self.back
        if self._num_flags:
            flags = wire[nbytes - len(back) : nbytes].tolist()
        else:
            flags = [nbytes > 0]
        is_there = [bool(flag) for flag in flags]
        found = iter(
            _cut(
                wire,
                [spec for spec, flag in zip(back, is_there, strict=True) if flag],
            )
        )
        return [next(found) if flag else None for flag in is_there]


def as_tensors(what: str, values: Any, device: torch.device) -> tuple[Tensor, ...]:
    """Return a tensor, or a tuple or list of tensors, as a tuple.

    Raises UsageError for anything else, and for tensors that no message can carry.
    """
    found = (values,) if isinstance(values, torch.Tensor) else values
    if not isinstance(found, tuple | list) or not found:
        raise UsageError(
            f"MessageDrivenPipeline: {what} {shown(values)}; expected a tensor, or a "
            f"tuple of tensors"
        )
    for each in found:
        if not isinstance(each, torch.Tensor):
            raise UsageError(
                f"MessageDrivenPipeline: {what} a tuple with {shown(each)} in it; "
                f"expected tensors only"
            )
        if each.layout != torch.strided or each.dtype not in DTYPES:
            raise UsageError(
                f"MessageDrivenPipeline: {what} a tensor of type {each.dtype} and "
                f"layout {each.layout}; expected a dense one of a common type"
            )
        if each.device.type != device.type:
            raise UsageError(
                f"MessageDrivenPipeline: {what} a tensor on {each.device}; expected "
                f"one on {device}, where this stage's tensors are"
            )
    return tuple(found)


def _bytes_of(tensor: Tensor) -> Tensor:
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return plain.reshape(-1).view(torch.uint8)


def _order(specs: Sequence[TensorSpec]) -> list[int]:
    return sorted(range(len(specs)), key=lambda at: -specs[at].dtype.itemsize)


def _joined(parts: Sequence[Tensor], specs: Sequence[TensorSpec]) -> Tensor:
    if len(parts) == 1:
        return parts[0]
    if not parts:
        return torch.empty(0, dtype=torch.uint8)
    return torch.cat([parts[at] for at in _order(specs)])


def _cut(wire: Tensor, specs: Sequence[TensorSpec]) -> list[Tensor]:
    """Return tensors on the memory of a message.

    They are no views: a stage may change its inputs in place, and autograd lets a
    function return no views that are changed.
    """
    found: dict[int, Tensor] = {}
    low = 0
    for at in _order(specs):
        spec = specs[at]
        made = torch.empty(0, dtype=spec.dtype, device=wire.device)
        if spec.nbytes:
            storage = wire.untyped_storage()
            made.set_(storage, low // spec.dtype.itemsize, spec.shape)
        else:
            made = made.reshape(spec.shape)
        found[at] = made
        low += spec.nbytes
    return [found[at] for at in range(len(specs))]
