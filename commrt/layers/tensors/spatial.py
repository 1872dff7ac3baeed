# SPDX-License-Identifier: Apache-2.0
"""torch's convolutions, poolings and paddings of tensors that are cut in space.

    x = DistTensor.from_whole(images, grid, Placement("data", None, "height", "width"))
    y = torch.nn.Conv2d(3, 8, 3, padding=1)(x)     # halos come from the neighbours

Batch and space may be cut, channels are whole. Weights are plain tensors that all ranks
have, as a module keeps them. Their gradients are summed over the axes that cut ``x``,
so every rank has the whole gradient. ``commrt.layers.spatial`` computes, and has the
bytes that are sent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch.nn import functional

from commrt.comm import Communicator
from commrt.errors import UsageError
from commrt.layers.spatial.adaptive_pooling import (
    adaptive_avg_pool,
    adaptive_max_pool,
)
from commrt.layers.spatial.convolution import conv
from commrt.layers.spatial.cut import Cut
from commrt.layers.spatial.interpolation import interpolate as interpolate_piece
from commrt.layers.spatial.padding import pad as pad_piece
from commrt.layers.spatial.pooling import avg_pool, max_pool
from commrt.layers.spatial.transposed_convolution import conv_transpose
from commrt.layers.tensors.dist_tensor import DistTensor
from commrt.layers.tensors.placement import Placement, Sharded
from commrt.layers.tensors.rules import METHODS, takes

__all__ = ["check_weights", "cuts_of", "cutting_comm"]


def cuts_of(what: str, x: DistTensor) -> dict[int, Cut]:
    """Return the cuts of a tensor; UsageError where channels are cut or sums open."""
    placement = x.placement
    if placement.partial:
        raise UsageError(
            f"{what}: {x} has parts on several ranks: redistribute() it first"
        )
    found: dict[int, Cut] = {}
    for number, (cut, extent) in enumerate(zip(placement.dims, x.shape, strict=True)):
        if cut is None:
            continue
        if cut.block is not None or (number == 1 and x.grid.size(cut.axes) > 1):
            raise UsageError(
                f"{what}: {x}: dimension {number} must be "
                f"{'whole: it has the channels' if number == 1 else 'cut in one piece'}"
                f"; redistribute() it first"
            )
        if number != 1:
            found[number] = _cut(x, cut, extent)
    return found


def _cut(x: DistTensor, cut: Sharded, extent: int) -> Cut:
    comm = x.grid[cut.axes]
    return Cut.even(comm, extent) if cut.sizes is None else Cut(comm, cut.sizes)


def _result(x: DistTensor, local: Any, cuts: Mapping[int, Cut]) -> DistTensor:
    """Return what a function of pieces gave, as a tensor."""
    dims: list[Sharded | None] = [None] * x.dim()
    shape = [*local.shape]
    for number, cut in cuts.items():
        before = x.placement.dims[number]
        assert before is not None
        dims[number] = Sharded(before.axes, sizes=cut.sizes)
        shape[number] = cut.extent
    return DistTensor(local, shape, x.grid, Placement(*dims))


def cutting_comm(x: DistTensor) -> Communicator | None:
    """Return the ranks whose parts of a weight's gradient belong together."""
    cutting = x.placement.cut_axes
    axes = tuple(a for a in x.grid.axes if a in cutting and x.grid.size(a) > 1)
    return x.grid[axes] if axes else None


def check_weights(what: str, x: Any, weight: Any, bias: Any) -> None:
    """Raise UsageError unless only the input is a distributed tensor."""
    if not isinstance(x, DistTensor) or isinstance(weight, DistTensor):
        raise UsageError(
            f"{what}: the input must be a DistTensor, and the weight a plain tensor "
            f"that all ranks have"
        )
    if isinstance(bias, DistTensor):
        raise UsageError(f"{what}: bias must be a plain tensor that all ranks have")


def _conv(
    what: str,
    input: DistTensor,
    weight: Any,
    bias: Any = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> DistTensor:
    check_weights(what, input, weight, bias)
    local, cuts = conv(
        *(input.local, weight, bias),
        cuts=cuts_of(what, input),
        stride=stride,
        padding=padding,
        dilation=dilation,
        groups=groups,
        sum_weight_gradients_over=cutting_comm(input),
    )
    return _result(input, local, cuts)


def _conv_transpose(
    what: str,
    input: DistTensor,
    weight: Any,
    bias: Any = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
) -> DistTensor:
    check_weights(what, input, weight, bias)
    local, cuts = conv_transpose(
        *(input.local, weight, bias),
        cuts=cuts_of(what, input),
        stride=stride,
        padding=padding,
        output_padding=output_padding,
        groups=groups,
        dilation=dilation,
        sum_weight_gradients_over=cutting_comm(input),
    )
    return _result(input, local, cuts)


def _max_pool(
    what: str,
    input: DistTensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> DistTensor:
    if return_indices:
        raise UsageError(f"{what}: return_indices: places are not known across ranks")
    local, cuts = max_pool(
        *(input.local, kernel_size),
        cuts=cuts_of(what, input),
        stride=stride or None,
        padding=padding,
        dilation=dilation,
        ceil_mode=ceil_mode,
    )
    return _result(input, local, cuts)


def _avg_pool(
    what: str,
    input: DistTensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> DistTensor:
    local, cuts = avg_pool(
        *(input.local, kernel_size),
        cuts=cuts_of(what, input),
        stride=stride or None,
        padding=padding,
        ceil_mode=ceil_mode,
        count_include_pad=count_include_pad,
        divisor_override=divisor_override,
    )
    return _result(input, local, cuts)


@takes(functional.interpolate)
def interpolate(
    input: DistTensor,
    size: Any = None,
    scale_factor: Any = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
    antialias: bool = False,
) -> DistTensor:
    """Return a tensor with other spatial extents."""
    if recompute_scale_factor or antialias:
        raise UsageError(
            "interpolate: recompute_scale_factor and antialias are not known here"
        )
    local, cuts = interpolate_piece(
        input.local,
        *(size, scale_factor, mode, align_corners),
        cuts=cuts_of("interpolate", input),
    )
    return _result(input, local, cuts)


def _adaptive_avg_pool(what: str, input: DistTensor, output_size: Any) -> DistTensor:
    """Return means; a single one is made by a sum over ranks, and all have it."""
    wanted = [output_size] if isinstance(output_size, int) else output_size
    if {*wanted} == {1}:
        cuts_of(what, input)
        means: DistTensor = METHODS["mean"](input, [*range(2, input.dim())], True)
        return means.redistribute()
    cuts = cuts_of(what, input)
    local, made = adaptive_avg_pool(input.local, output_size, cuts=cuts)
    return _result(input, local, made)


def _adaptive_max_pool(
    what: str, input: DistTensor, output_size: Any, return_indices: bool = False
) -> DistTensor:
    if return_indices:
        raise UsageError(f"{what}: return_indices: places are not known across ranks")
    cuts = cuts_of(what, input)
    local, made = adaptive_max_pool(input.local, output_size, cuts=cuts)
    return _result(input, local, made)


@takes(functional.pad)
def pad(
    input: DistTensor, pad: Any, mode: str = "constant", value: float | None = None
) -> DistTensor:
    """Return a tensor with more elements around it in space."""
    local, cuts = pad_piece(
        input.local,
        pad,
        mode,
        0.0 if value is None else value,
        cuts=cuts_of("pad", input),
    )
    return _result(input, local, cuts)


_RULES: dict[str, Callable[..., DistTensor]] = {
    "conv": _conv,
    "conv_transpose": _conv_transpose,
    "max_pool": _max_pool,
    "avg_pool": _avg_pool,
    "adaptive_avg_pool": _adaptive_avg_pool,
    "adaptive_max_pool": _adaptive_max_pool,
}
for _name, _rule in _RULES.items():
    for _dims in (1, 2, 3):
        _named = f"{_name}{_dims}d"
        # Under both names that torch has, where they are two functions.
        _known = {getattr(functional, _named), getattr(torch, _named, None)} - {None}
        takes(*_known)(partial(_rule, _named))
