# SPDX-License-Identifier: Apache-2.0
"""Memory for what ranks send, kept from step to step."""

from __future__ import annotations

from typing import TypeAlias

import torch

__all__ = ["Buffers"]

Tensor: TypeAlias = torch.Tensor
_MOST = 4
"""Buffers of a type and device that are kept while nobody uses them."""


class Buffers:
    """Flat tensors that come back, and are taken again.

    The first use of memory that the system has just given costs more than a copy of as
    many bytes. So buffers stay, as long as the longest that was asked for.
    """

    def __init__(self) -> None:
        self._free: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}

    def take(self, count: int, like: Tensor) -> Tensor:
        """Return a flat tensor of ``count`` elements or more, of any values.

        Args:
            count: elements.
            like: has the type and the device.
        """
        free = self._free.setdefault((like.dtype, like.device), [])
        found = free.pop() if free else None
        if found is None or found.numel() < count:
            found = like.new_empty(count, requires_grad=False)
        return found

    def give(self, buffer: Tensor) -> None:
        """Keep a tensor that nobody uses any more, for the next one who asks."""
        free = self._free[buffer.dtype, buffer.device]
        if len(free) < _MOST:
            free.append(buffer)
