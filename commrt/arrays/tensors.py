# SPDX-License-Identifier: Apache-2.0
"""torch's tensors, wherever their memory is, without importing torch.

Not every tensor has memory. Subclasses may keep their values in other tensors (DTensor,
results of functional collectives), compute them (fake, meta, batched tensors), or have
none left, as torch keeps the views of a storage that was freed. For some of these torch
says an address all the same. So whatever is read of a tensor's memory passes here.
"""

from __future__ import annotations

import sys
from typing import Any

from commrt.errors import BufferError_
from commrt.vocabulary.dtypes import DTYPES, DType

__all__ = [
    "check_memory",
    "code_of",
    "is_dense",
    "is_tensor",
    "keeps_values_elsewhere",
    "of_own_class",
    "tensor_dtype",
]

_BY_NAME = {dtype.name: dtype for dtype in DTYPES}


def is_tensor(array: Any) -> bool:
    """Return whether an array is torch's."""
    tensor = getattr(sys.modules.get("torch"), "Tensor", None)
    return tensor is not None and isinstance(array, tensor)


def _is_plain(tensor: Any) -> bool:
    """Return whether a tensor is of one of torch's own two classes."""
    torch = sys.modules["torch"]
    kind = type(tensor)
    return kind is torch.Tensor or kind is torch.nn.Parameter


def keeps_values_elsewhere(tensor: Any) -> bool:
    """Return whether operations on a tensor are its class's own affair.

    Such a tensor has no memory that its class would vouch for.
    """
    if _is_plain(tensor):
        return False
    cpp = sys.modules["torch"]._C
    return type(tensor).__torch_dispatch__ is not cpp._disabled_torch_dispatch_impl


def of_own_class(tensor: Any, what: str) -> Any:
    """Return a tensor of torch's own class on the memory of ``tensor``.

    Its methods are torch's, where those of a subclass may say anything. Raises
    BufferError_, which names ``what``, for a subclass that keeps its values elsewhere.
    """
    if _is_plain(tensor):
        return tensor
    torch = sys.modules["torch"]
    kind = type(tensor)
    if keeps_values_elsewhere(tensor):
        _check_is_real(tensor, what)
        raise BufferError_(
            f"{what} is a {kind.__name__}, which has no memory of its own: pass the "
            f"tensor that holds its values, as x.to_local() is for a DTensor and "
            f"x.wait() for the result of a functional collective"
        )
    if isinstance(tensor, torch.nn.parameter.UninitializedTensorMixin):
        raise BufferError_(
            f"{what} is a {kind.__name__}, which has no shape yet: call its module "
            f"once, or its materialize(shape)"
        )
    with torch._C.DisableTorchFunctionSubclass():
        return torch.Tensor.detach(tensor)


def _check_is_real(tensor: Any, what: str) -> None:
    """Raise BufferError_ for a tensor that stands for one without having values."""
    fakes = sys.modules.get("torch._subclasses.fake_tensor")
    is_fake = fakes is not None and isinstance(tensor, fakes.FakeTensor)
    if is_fake or tensor.device.type == "meta":
        raise BufferError_(
            f"{what} is a tensor without data ({type(tensor).__name__} on "
            f"{tensor.device}), so there is nothing to communicate: pass one with "
            f"memory, as torch.empty_like(x, device='cpu') makes it outside of "
            f"FakeTensorMode"
        )


def check_memory(tensor: Any, what: str) -> None:
    """Raise BufferError_ unless the elements of a dense tensor lie in its storage.

    ``tensor`` is of torch's own class (``of_own_class``).
    """
    _check_is_real(tensor, what)
    try:
        storage = tensor.untyped_storage()
        address, room = storage.data_ptr(), storage.nbytes()
        first, steps = tensor.storage_offset(), tensor.stride()
    except (NotImplementedError, RuntimeError) as error:
        raise BufferError_(
            f"{what} is a tensor that stands for another one, as within torch.func's "
            f"transforms, and has no memory ({_first_line(error)}): pass the tensor "
            f"that was given to the transform"
        ) from error
    shape = tuple(tensor.shape)
    if 0 in shape:
        return
    last = first + sum((n - 1) * step for n, step in zip(shape, steps, strict=True))
    needed = (last + 1) * tensor.element_size()
    if address == 0 or needed > room:
        raise BufferError_(
            f"{what} with shape {shape} needs {needed} bytes of its storage, which has "
            f"{room if address else 'none'}: the storage was freed or made shorter, as "
            f"by untyped_storage().resize_(0); give it its memory back before the call"
        )


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0].rstrip(". ")


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
    if dtype is None or not is_dense(tensor):
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


def is_dense(tensor: Any) -> bool:
    """Return whether a tensor's elements are its values, each at its stride."""
    is_strided = str(tensor.layout) == "torch.strided"
    return is_strided and not tensor.is_quantized and not tensor.is_nested
