# SPDX-License-Identifier: Apache-2.0
"""torch's tensors, wherever their memory is, without importing torch."""

from __future__ import annotations

import sys
from typing import Any

from commrt.errors import BufferError_
from commrt.vocabulary.dtypes import DTYPES, DType

__all__ = ["check_has_data", "code_of", "is_tensor", "tensor_dtype"]

_BY_NAME = {dtype.name: dtype for dtype in DTYPES}


def is_tensor(array: Any) -> bool:
    """Return whether an array is torch's."""
    tensor = getattr(sys.modules.get("torch"), "Tensor", None)
    return tensor is not None and isinstance(array, tensor)


def check_has_data(tensor: Any, what: str) -> None:
    """Raise BufferError_ for a tensor that has a shape and no memory."""
    fakes = sys.modules.get("torch._subclasses.fake_tensor")
    is_fake = fakes is not None and isinstance(tensor, fakes.FakeTensor)
    if is_fake or tensor.device.type == "meta":
        raise BufferError_(
            f"{what} is a tensor without data ({type(tensor).__name__} on "
            f"{tensor.device}), so there is nothing to communicate: pass one with "
            f"memory, as torch.empty_like(x, device='cpu') makes it outside of "
            f"FakeTensorMode"
        )


def code_of(dtype: Any) -> int:
    """Return the engine's code of a ``torch.dtype``; -1 where it has none."""
    found = _BY_NAME.get(_name(dtype))
    return -1 if found is None else found.code


def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def tensor_dtype(tensor: Any, what: str, *, any_strides: bool = False) -> DType:
    """Return the element type of a dense tensor, contiguous but with ``any_strides``.

    Raises BufferError_, which names ``what``, for every other one.
    """
    name = _name(tensor.dtype)
    dtype = _BY_NAME.get(name)
    if dtype is None or tensor.is_sparse or tensor.is_quantized:
        raise BufferError_(
            f"{what} is a torch tensor of {name} ({tensor.layout}), which cannot be "
            f"communicated; supported: dense tensors of {', '.join(_BY_NAME)}"
        )
    contiguous = any_strides or tensor.is_contiguous()
    if not contiguous or tensor.is_conj() or tensor.is_neg():
        raise BufferError_(
            f"{what} is not contiguous in memory (shape {tuple(tensor.shape)}, strides "
            f"{tensor.stride()}): pass x.contiguous()"
        )
    return dtype
