# SPDX-License-Identifier: Apache-2.0
"""Weights that ranks along the depth of a grid store in pieces.

Pattern: an ``allgatherv`` of the block before a layer computes, in the forward pass and
again in the backward pass, and a ``reduce_scatterv`` of its gradient. Bytes of each:
those of the block. The gradient's shard is the sum over the samples of all ranks along
the depth.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeAlias

import torch

from commrt.comm import Communicator
from commrt.layers.tensor3d.parameter_cut import ParameterCut

__all__ = ["DepthShards", "Gathered", "Reduced"]

Tensor: TypeAlias = torch.Tensor


class Gathered:
    """A block on its way; ``wait()`` returns it."""

    def __init__(
        self, shard: torch.Tensor, dtype: torch.dtype, block: Tensor, request: Any
    ) -> None:
        self._shard, self._version, self._dtype = shard, shard._version, dtype
        self._block, self._request = block, request

    def is_of(self, shard: torch.Tensor, dtype: torch.dtype) -> bool:
        """Return whether this is the block of a shard as it is now."""
        is_same = self._shard is shard and self._version == shard._version
        return is_same and self._dtype == dtype

    def wait(self) -> Tensor:
        """Return the block."""
        if self._request is not None:
            self._request.wait()
        return self._block


class Reduced:
    """A sum of gradients on its way; ``wait()`` returns this rank's part of it."""

    def __init__(self, part: Tensor, request: Any) -> None:
        self._part, self._request = part, request

    def wait(self) -> Tensor:
        """Return this rank's part of the sum."""
        if self._request is not None:
            self._request.wait()
        return self._part


class DepthShards:
    """One weight along the depth of a grid.

    Args:
        cut: how the weight is cut.
    """

    def __init__(self, cut: ParameterCut) -> None:
        assert cut.depth is not None
        self.comm: Communicator | None = cut.depth.comm
        self._shape = cut.block_shape
        row = math.prod(self._shape[1:])
        self._counts = [rows * row for rows in cut.rows]
        self._is_empty = sum(self._counts) == 0
        self._own_shape = (cut.rows[cut.depth.place], *self._shape[1:])

    def __deepcopy__(self, memo: Mapping[int, Any]) -> DepthShards:
        """Return one of its own: layers are told apart by it."""
        copied = DepthShards.__new__(DepthShards)
        copied.__dict__.update(self.__dict__)
        return copied

    def start(self, shard: Tensor, dtype: torch.dtype) -> Gathered:
        """Start to gather the block from the shards of all ranks, in a type."""
        mine = shard.detach().to(dtype)
        if self.comm is None or self._is_empty:
            return Gathered(shard, dtype, mine.view(self._shape), None)
        block = mine.new_empty(self._shape)
        request = self.comm.allgatherv(
            mine.contiguous().view(-1),
            counts=self._counts,
            out=block.view(-1),
            nonblocking=True,
        )
        return Gathered(shard, dtype, block, request)

    def reduce(self, gradient: Tensor) -> Reduced:
        """Start to sum gradients of the block; each rank gets its shard's."""
        if self.comm is None or self._is_empty:
            return Reduced(gradient.view(self._own_shape), None)
        part = gradient.new_empty(self._own_shape)
        request = self.comm.reduce_scatterv(
            gradient.contiguous().view(-1),
            counts=self._counts,
            out=part.view(-1),
            nonblocking=True,
        )
        return Reduced(part, request)

    def add_up(self, gradient: Tensor) -> Reduced:
        """Start to sum what all ranks along the depth have whole, such as a bias's."""
        if self.comm is None or gradient.numel() == 0:
            return Reduced(gradient, None)
        return Reduced(gradient, self.comm.allreduce(gradient, nonblocking=True))
