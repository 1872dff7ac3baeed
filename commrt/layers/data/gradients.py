# SPDX-License-Identifier: Apache-2.0
"""Gradients of any library: memory that a sum can be put into, and back from there."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from commrt.arrays.host import (
    HostView,
    numpy_type,
    view,
    view_anywhere,
    zeros_like_array,
)
from commrt.arrays.tensors import is_tensor
from commrt.errors import UsageError

__all__ = ["Parameter", "as_numpy", "in_numpy", "put", "usable"]


@dataclass(frozen=True, eq=False)
class Parameter:
    """The facts of a parameter that are known before its gradient."""

    index: int
    seen: HostView
    """The parameter itself."""

    @classmethod
    def of(cls, index: int, array: Any) -> Parameter:
        """Return the facts of an array; BufferError_ if it cannot be communicated."""
        given = array.detach() if is_tensor(array) else array
        any_order = is_tensor(given) or isinstance(given, np.ndarray)
        if any_order and not is_contiguous(given):
            given = _like(given)
        return cls(index, view_anywhere(given, f"parameter {index}"))

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        return self.seen.shape

    @property
    def count(self) -> int:
        """Its elements."""
        return prod(self.seen.shape)

    @property
    def nbytes(self) -> int:
        """Its bytes."""
        return self.seen.nbytes

    @property
    def dtype(self) -> str:
        """Name of its element type."""
        return self.seen.dtype.name

    @property
    def on_device(self) -> bool:
        """True if it is in the memory of a device."""
        return self.seen.on is not None

    def zeros(self) -> Any:
        """Return a gradient of zeros, which a rank without one contributes."""
        if self.on_device or is_tensor(self.seen.array):
            return zeros_like_array(self.seen, self.shape)
        return np.zeros(self.shape, numpy_type(self.seen))

    def check(self, gradient: Any, what: str) -> None:
        """Raise UsageError unless a gradient is of the parameter's shape and type."""
        if type(gradient) is np.ndarray and type(self.seen.array) is np.ndarray:
            dtype, expected = gradient.dtype, self.seen.array.dtype
            if gradient.shape == self.shape and dtype == expected:
                return
        if not hasattr(gradient, "shape") or not hasattr(gradient, "dtype"):
            raise UsageError(
                f"{what}: a {type(gradient).__name__}; expected an array of shape "
                f"{self.shape} and type {self.dtype}"
            )
        shape = tuple(gradient.shape)
        name = str(gradient.dtype).rpartition(".")[2]
        if shape != self.shape or name != self.dtype:
            raise UsageError(
                f"{what}: a gradient of shape {shape} and type {name}; the parameter "
                f"has {self.shape} and {self.dtype}; they must be equal"
            )


def _like(array: Any) -> Any:
    """Return an empty array like ``array``, whose elements are in order."""
    if is_tensor(array):
        return array.new_empty(tuple(array.shape))
    return np.empty(array.shape, array.dtype)


def is_contiguous(array: Any) -> bool:
    """Return whether the elements of a tensor or a numpy array lie in order."""
    if is_tensor(array):
        return bool(
            array.is_contiguous() and not array.is_conj() and not array.is_neg()
        )
    return bool(array.flags.c_contiguous and array.flags.aligned)


def usable(gradient: Any, what: str) -> Any:
    """Return memory with the gradient's values, which the sum may replace.

    The gradient itself wherever it can be; a copy of what is read-only or not in order.
    """
    if isinstance(gradient, np.ndarray):
        if gradient.flags.writeable and is_contiguous(gradient):
            return gradient
        return np.array(gradient, order="C")
    if is_tensor(gradient):
        given = gradient.detach()
        if is_contiguous(given):
            return given
        return given.clone(memory_format=given_order()).resolve_conj().resolve_neg()
    seen = view_anywhere(gradient, what)
    return gradient if seen.writable else in_numpy(gradient, what).copy()


def given_order() -> Any:
    """Return torch's name for elements in order."""
    import torch

    return torch.contiguous_format


def as_numpy(gradient: Any) -> Any:
    """Return numpy's view of an array that can be written; None of other ones."""
    if isinstance(gradient, np.ndarray):
        return gradient if gradient.flags.writeable else None
    if is_tensor(gradient):
        return gradient.detach().numpy()
    return None


def in_numpy(gradient: Any, what: str) -> Any:
    """Return an array of numpy with the values of one in host memory."""
    found = as_numpy(gradient)
    if found is not None:
        return found
    owner = view(np.asarray(gradient) if np.isscalar(gradient) else gradient, what)
    held = owner.owner
    return held[1] if isinstance(held, tuple) else np.asarray(held)


def put(result: Any, gradient: Any) -> Any:
    """Return ``gradient`` with the values of ``result``; ``result`` if that cannot be.

    The two are one where the sum was made in place.
    """
    if result is gradient or gradient is None:
        return result
    if is_tensor(gradient) and is_tensor(result):
        given = gradient.detach()
        if given.data_ptr() != result.data_ptr() or not is_contiguous(given):
            given.copy_(result)
        return gradient
    target = as_numpy(gradient)
    if target is None:
        return result
    target[...] = result
    return gradient
