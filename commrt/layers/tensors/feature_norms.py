# SPDX-License-Identifier: Apache-2.0
"""torch's layer_norm and rms_norm, also where ranks have pieces of the features.

    x = DistTensor(piece, (32, 512, 768), grid, Placement("data", None, "row"))
    y = torch.nn.LayerNorm(768)(x)  # the statistics are those of all 768 features

Bytes over the axes that cut the features, for R rows of this rank and elements of e
bytes: ``layer_norm`` has two ``allreduce`` of R e forward, of the mean and of the
squares around it, and one of 2 R e backward. ``rms_norm`` has one of R e forward and
one of R e backward. A weight's gradient is summed over the axes that cut rows. Types of
less than 4 bytes are computed in float32, as torch does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch.nn import functional

from commrt.comm import Communicator
from commrt.errors import UsageError
from commrt.layers.differentiable_once import differentiable_once
from commrt.layers.tensors.channels import tile_of
from commrt.layers.tensors.dist_tensor import DistTensor
from commrt.layers.tensors.rules import takes
from commrt.layers.tensors.spatial import several

__all__ = ["layer_norm", "normalized", "rms_norm"]

Tensor: TypeAlias = torch.Tensor


def normalized(
    x: Tensor,
    num_dims: int,
    comm: Communicator,
    count: int,
    eps: float,
    *,
    is_centered: bool,
) -> Tensor:
    """Return a tensor over the root of its mean square; differentiable.

    Args:
        x: this rank's features, in the last dimensions.
        num_dims: dimensions of the features.
        comm: the ranks that have the others.
        count: features of all ranks.
        eps: added to the mean square.
        is_centered: whether the mean is subtracted first.

    Collective, also in the backward pass.
    """
    wide = x.float() if x.dtype.itemsize < 4 else x
    dims = [*range(x.dim() - num_dims, x.dim())]
    found: Tensor = _Normalized.apply(wide, dims, comm, count, eps, is_centered)
    return found.to(x.dtype)


class _Normalized(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        dims: Sequence[int],
        comm: Communicator,
        count: int,
        eps: float,
        is_centered: bool,
    ) -> Tensor:
        shifted = x.detach()
        if is_centered:
            shifted = shifted - _summed(shifted, dims, comm) / count
        squares = _summed(shifted.square(), dims, comm) / count
        scale = (squares + eps).rsqrt()
        result = shifted * scale
        ctx.save_for_backward(result, scale)
        ctx.how = dims, comm, count, is_centered
        return result

    @staticmethod
    @differentiable_once("a DistTensor")
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        result, scale = ctx.saved_tensors
        dims, comm, count, is_centered = ctx.how
        sums = [(gradient * result).sum(dims, keepdim=True)]
        if is_centered:
            sums.append(gradient.sum(dims, keepdim=True))
        both = torch.stack(sums)
        if both.numel():
            comm.allreduce(both)
        found = gradient - result * both[0] / count
        if is_centered:
            found = found - both[1] / count
        return found * scale, None, None, None, None, None


def _summed(x: Tensor, dims: Sequence[int], comm: Communicator) -> Tensor:
    """Return the sum over dimensions, on all ranks."""
    total = x.sum(dims, keepdim=True).contiguous()
    if total.numel():
        comm.allreduce(total)
    return total


@takes(functional.layer_norm)
def layer_norm(
    input: DistTensor,
    normalized_shape: Sequence[int],
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
) -> DistTensor:
    """Return torch's layer normalization, by the statistics of all features."""
    return _of_features("layer_norm", input, normalized_shape, weight, bias, eps)


@takes(functional.rms_norm, torch.rms_norm)
def rms_norm(
    input: DistTensor,
    normalized_shape: Sequence[int],
    weight: Any = None,
    eps: float | None = None,
) -> DistTensor:
    """Return torch's root-mean-square normalization, by all features."""
    if eps is None:
        eps = torch.finfo(input.dtype).eps
    return _of_features("rms_norm", input, normalized_shape, weight, None, eps)


def _of_features(
    what: str,
    x: DistTensor,
    normalized_shape: Sequence[int],
    weight: Any,
    bias: Any,
    eps: float,
) -> DistTensor:
    """Return a normalization over the last dimensions, cut as the input is."""
    shape = (*normalized_shape,)
    if not isinstance(x, DistTensor):
        raise UsageError(
            f"{what}: the input must be a DistTensor; weights may be plain tensors "
            f"that all ranks have"
        )
    if x.placement.partial:
        raise UsageError(
            f"{what}: {x} has parts on several ranks: redistribute() it first"
        )
    first = x.dim() - len(shape)
    if not shape or first < 0 or (*x.shape[first:],) != shape:
        raise UsageError(
            f"{what}: normalized_shape={shape} must be the last dimensions of {x}"
        )
    for name, each in (("weight", weight), ("bias", bias)):
        if each is not None and (*each.shape,) != shape:
            raise UsageError(
                f"{what}: {name} of shape {tuple(each.shape)}; expected {shape}"
            )
    dims = x.placement.dims[first:]
    rows = several(x, range(first))
    parts = [tile_of(each, x.grid, dims, rows) for each in (weight, bias)]
    axes = several(x, range(first, x.dim()))
    if not axes:
        more = parts if what == "layer_norm" else parts[:1]
        local = getattr(functional, what)(
            x.local, x.local.shape[first:], *more, eps=eps
        )
        return DistTensor(local, x.shape, x.grid, x.placement)
    local = normalized(
        *(x.local, len(shape), x.grid[axes], math.prod(shape), eps),
        is_centered=what == "layer_norm",
    )
    for each, function in zip(parts, (torch.mul, torch.add), strict=True):
        local = local if each is None else function(local, each)
    return DistTensor(local, x.shape, x.grid, x.placement)
