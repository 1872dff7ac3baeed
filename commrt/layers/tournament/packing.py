# SPDX-License-Identifier: Apache-2.0
"""Tensors of any types and shapes, one behind another in the bytes of one message.

Tensors of larger elements come first. The size of an element is a power of two, so each
tensor begins at a multiple of its own, and no byte is lost between two of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

import torch

__all__ = ["Buffers", "Slot", "pack", "slot_of", "unpack"]

Tensor: TypeAlias = torch.Tensor
Buffers: TypeAlias = Mapping[str, Tensor]
"""Bytes of packed tensors, by the type of the device that has them."""


class Slot(NamedTuple):
    """The facts of a tensor that its bytes do not tell."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    device: str
    """The type of the device, such as "cpu"."""

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        itemsize: int = self.dtype.itemsize
        return math.prod(self.shape) * itemsize


def slot_of(tensor: Tensor) -> Slot:
    """Return the facts of a tensor."""
    return Slot(tensor.dtype, tuple(tensor.shape), tensor.device.type)


def pack(tensors: Sequence[Tensor]) -> dict[str, Tensor]:
    """Return the bytes of tensors, in memory of their own; types without any left out.

    Strides do not count: elements lie in the order of a contiguous tensor.
    """
    slots = [slot_of(each) for each in tensors]
    parts: dict[str, list[Tensor]] = {}
    for at in _order(slots):
        if slots[at].nbytes:
            given = tensors[at].detach().resolve_conj().resolve_neg()
            flat = given.contiguous().view(-1).view(torch.uint8)
            parts.setdefault(slots[at].device, []).append(flat)
    return {device: torch.cat(found) for device, found in parts.items()}


def unpack(slots: Sequence[Slot], buffers: Buffers) -> list[Tensor]:
    """Return the tensors that were packed; they share the memory of the buffers."""
    found: dict[int, Tensor] = {}
    ends = dict.fromkeys(buffers, 0)
    for at in _order(slots):
        slot = slots[at]
        if not slot.nbytes:
            found[at] = torch.empty(slot.shape, dtype=slot.dtype, device=slot.device)
            continue
        low = ends[slot.device]
        ends[slot.device] = high = low + slot.nbytes
        part = buffers[slot.device][low:high]
        found[at] = part.view(slot.dtype).view(slot.shape)
    return [found[at] for at in range(len(slots))]


def _order(slots: Sequence[Slot]) -> list[int]:
    return sorted(range(len(slots)), key=lambda at: -slots[at].dtype.itemsize)
