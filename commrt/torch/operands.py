# SPDX-License-Identifier: Apache-2.0
"""Tensors as commrt takes them: contiguous memory, and copies where they are not.

NCCL's users pass views, aliases, parameters and tensors of any strides. Contiguous
tensors are used where they lie. For others the operation works on a copy, and results
are copied back once it has ended. Every argument comes by ``given`` first: what follows
reads memory, and not every tensor has some.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from commrt._native import has_memory
from commrt.arrays.tensors import (
    check_memory,
    is_dense,
    keeps_values_elsewhere,
    of_own_class,
)
from commrt.errors import CommError
from commrt.torch.errors import as_torch_error, wrong_call
from commrt.torch.wrapped import held_by
from commrt.vocabulary.dtypes import DTYPES

__all__ = [
    "KNOWN",
    "CopyBack",
    "all_given",
    "apart",
    "check_one_device",
    "given",
    "movable",
    "plain",
    "split_back",
    "target",
    "together",
]

CopyBack = Callable[[], None]

KNOWN = {
    getattr(torch, dtype.name): dtype.name
    for dtype in DTYPES
    if hasattr(torch, dtype.name)
}
"""commrt's names of the types of torch's that it knows."""


def given(tensor: torch.Tensor, what: str) -> torch.Tensor:
    """Return the tensor, of torch's own class, that has the memory of an argument.

    That is the argument itself, or the tensor inside of a wrapper, which is waited for
    where its class waits. Raises BufferError_, which names ``what``, for one that has
    no memory. Sparse COO tensors pass.
    """
    if has_memory(tensor):
        return tensor
    if not isinstance(tensor, torch.Tensor):
        raise wrong_call(
            f"{what} is a {type(tensor).__name__}: expected a tensor of torch"
        )
    try:
        found: torch.Tensor = tensor
        if keeps_values_elsewhere(found) and not _is_fake(found):
            found = held_by(found, what)
        found = of_own_class(found, what)
        if found.layout is torch.sparse_coo:
            return found
        if not is_dense(found):
            raise wrong_call(
                f"{what} is a tensor of {found.dtype} and of layout {found.layout}"
                f"{', nested' if found.is_nested else ''}, where commrt takes dense "
                f"ones: only all_reduce takes sparse tensors, of COO; pass "
                f"x.to_dense(), x.dequantize() or the tensors that it is made of"
            )
        check_memory(found, what)
    except CommError as error:
        raise as_torch_error(error) from error.__cause__
    return found


def _is_fake(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, FakeTensor)


def all_given(tensors: Any, what: str) -> list[torch.Tensor]:
    """Return the tensors that have the memory of a list's, as ``given`` does."""
    found = [
        each if has_memory(each) else given(each, f"{what}[{i}]")
        for i, each in enumerate(tensors)
    ]
    check_one_device(found, what)
    return found


def check_one_device(tensors: Sequence[torch.Tensor], what: str) -> None:
    """Raise torch's error for a list that mixes devices, which copies would hide."""
    for i, each in enumerate(tensors):
        if each.device != tensors[0].device:
            raise wrong_call(
                f"{what}[{i}] is on {each.device}, and {what}[0] on "
                f"{tensors[0].device}: expected all tensors of a call on one device"
            )


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor, or a contiguous copy of what it shows."""
    _need_dense(tensor)
    if tensor.is_complex() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    return tensor if tensor.is_contiguous() else tensor.detach().contiguous()


def movable(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor like ``plain``, or its bytes if commrt lacks its type."""
    tensor = plain(tensor)
    if tensor.dtype in KNOWN:
        return tensor
    return tensor.detach().reshape(-1).view(torch.uint8)


def target(
    tensor: torch.Tensor, *, moved: bool = True
) -> tuple[torch.Tensor, CopyBack | None]:
    """Return the memory of an output, and what copies it to the tensor at the end.

    ``moved``: elements are only moved, so that their type does not matter.
    """
    mine = plain(tensor)
    buffer = movable(mine) if moved else mine
    return buffer, None if mine is tensor else lambda: _put(tensor, mine)


def _put(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Copy a value into a tensor, which may be a parameter."""
    with torch.no_grad():
        tensor.detach().copy_(value.view(tensor.shape))


def apart(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Return ``x``, or a copy where it shares memory with ``out``."""
    begin, end = x.data_ptr(), x.data_ptr() + x.nbytes
    first, last = out.data_ptr(), out.data_ptr() + out.nbytes
    return x.detach().clone() if begin < last and first < end else x


def together(tensors: Sequence[torch.Tensor], moved: bool = True) -> torch.Tensor:
    """Return one flat tensor of what all of them show, one after the other.

    Where they lie so already, as the chunks of one tensor do, it is their own memory.
    """
    _need_dense(*tensors)
    if _are_adjacent(tensors):
        flat = _adjacent(tensors)
    else:
        flat = torch.cat([plain(each).detach().reshape(-1) for each in tensors])
    return movable(flat) if moved else flat


def split_back(
    tensors: Sequence[torch.Tensor],
) -> tuple[torch.Tensor, CopyBack | None]:
    """Return flat memory for outputs, and what copies it to them at the end."""
    _need_dense(*tensors)
    if _are_adjacent(tensors):
        return movable(_adjacent(tensors)), None
    first = tensors[0]
    total = sum(tensor.numel() for tensor in tensors)
    flat = torch.empty(total, dtype=first.dtype, device=first.device)
    parts = flat.split([tensor.numel() for tensor in tensors])

    def back() -> None:
        for tensor, part in zip(tensors, parts, strict=True):
            _put(tensor, part)

    return movable(flat), back


def _need_dense(*tensors: torch.Tensor) -> None:
    for tensor in tensors:
        if tensor.layout is not torch.strided:
            raise wrong_call(
                f"a tensor of layout {tensor.layout}, where commrt takes dense ones: "
                f"only all_reduce takes sparse tensors, of COO; pass x.to_dense(), or "
                f"its indices and values each"
            )


def _are_adjacent(tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether each begins where the one before ends, within one storage."""
    first = tensors[0]
    storage = first.untyped_storage().data_ptr()
    at = first.data_ptr()
    for tensor in tensors:
        if (
            not tensor.is_contiguous()
            or tensor.data_ptr() != at
            or tensor.untyped_storage().data_ptr() != storage
            or tensor.dtype != first.dtype
            or tensor.is_conj()
            or tensor.is_neg()
        ):
            return False
        at += tensor.nbytes
    return at != first.data_ptr() or len(tensors) == 1


def _adjacent(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    first = tensors[0].detach()
    total = sum(tensor.numel() for tensor in tensors)
    return first.as_strided((total,), (1,), first.storage_offset())
