# SPDX-License-Identifier: Apache-2.0
"""Functions of elements: each rank computes with its own part.

Operands of other shapes are broadcast as torch does. Where one operand is cut and
another one is whole, the whole one is cut first, which moves nothing; in the backward
pass its gradient is gathered (a dimension that is cut), or summed (one that was
broadcast).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
from torch.nn import functional

from commrt.errors import UsageError
from commrt.layers.process_grid import ProcessGrid
from commrt.layers.tensors.dist_tensor import DistTensor
from commrt.layers.tensors.moves import moved, summed_backward
from commrt.layers.tensors.placement import Placement, Sharded
from commrt.layers.tensors.rules import takes
from commrt.layers.tensors.within import within

__all__ = ["alike", "of_elements", "same_grid"]

Tensor: TypeAlias = torch.Tensor

_OF_ONE = (
    *("abs", "acos", "asin", "atan", "ceil", "clamp"),
    *("cos", "cosh", "erf", "exp", "expm1", "floor"),
    *("log", "log1p", "logical_not", "reciprocal", "relu", "round"),
    *("rsqrt", "sigmoid", "sign", "sin", "sinh", "sqrt"),
    *(
        "square",
        "tan",
        "tanh",
    ),
)
_ACTIVATIONS = (
    *(
        functional.relu,
        functional.relu6,
        functional.gelu,
        functional.silu,
        functional.leaky_relu,
        functional.elu,
        functional.selu,
        functional.softplus,
    ),
    *(
        functional.hardtanh,
        functional.hardswish,
        functional.hardsigmoid,
        functional.mish,
        functional.logsigmoid,
        functional.celu,
    ),
)
_OF_TWO = (
    *("add", "sub", "mul", "div", "maximum", "minimum"),
    *("pow", "eq", "ne", "lt", "le", "gt"),
    *("ge", "where", "logical_and", "logical_or", "atan2", "fmod"),
    *("remainder",),
)
_LINEAR = {"add", "sub"}
"""Where all operands are parts of sums, so is the result."""


def same_grid(what: str, tensors: Sequence[DistTensor]) -> ProcessGrid:
    """Return the operands' grid; UsageError where they have different ones."""
    grid = tensors[0].grid
    for other in tensors[1:]:
        if other.grid is not grid:
            raise UsageError(f"{what}: operands lie on two grids, {grid} and another")
    return grid


def of_elements(
    name: str, function: Callable[..., Tensor], *args: Any, **more: Any
) -> Any:
    """Return the function's result, cut as its operands are."""
    tensors = [x for x in args if isinstance(x, DistTensor)]
    grid = same_grid(name, tensors)
    for x in (*args, *more.values()):
        if isinstance(x, torch.Tensor) and x.numel() > 1:
            raise UsageError(
                f"{name}: one operand is a plain tensor of shape {tuple(x.shape)}: "
                f"make it a DistTensor, by DistTensor.from_whole"
            )
    if len(tensors) > 1 and within() is not None:
        args = _met(args, tensors)
        tensors = [x for x in args if isinstance(x, DistTensor)]
    open_sums = _open_sums(name, args, tensors)
    first, *others = tensors
    if all(x.shape == first.shape and x.placement == first.placement for x in others):
        locals_ = [x.local if isinstance(x, DistTensor) else x for x in args]
        return _lying_as(first, function(*locals_, **more))
    shapes = {x.shape for x in tensors}
    # torch's function takes longer than all the rest here.
    shape = shapes.pop() if len(shapes) == 1 else torch.broadcast_shapes(*shapes)
    dims = _common_cuts(name, grid, shape, tensors)
    locals_ = [
        _fitted(x, grid, shape, dims) if isinstance(x, DistTensor) else x for x in args
    ]
    placement = Placement(*dims, partial=open_sums)
    return DistTensor(function(*locals_, **more), shape, grid, placement)


def _met(args: Sequence[Any], tensors: Sequence[DistTensor]) -> tuple[Any, ...]:
    """Return operands without open sums; those of one shape are cut alike."""
    first = next(x for x in tensors if x.dim() == max(y.dim() for y in tensors))
    target = Placement(*first.placement.dims)
    return tuple(
        x
        if not isinstance(x, DistTensor)
        else x.redistribute(placement=target)
        if x.shape == first.shape
        else x.redistribute()
        for x in args
    )


def alike(
    what: str, wanted: Sequence[tuple[DistTensor, Placement]]
) -> list[DistTensor]:
    """Return tensors where they shall lie; only within a parallel model they move."""
    for x, placement in wanted:
        same = x.placement.is_same_as(placement, x.grid, x.shape)
        if not same and within() is None:
            raise UsageError(
                f"{what}: {x} must lie as {placement}: redistribute() it first"
            )
    return [x.redistribute(placement=placement) for x, placement in wanted]


def _open_sums(
    name: str, args: Sequence[Any], tensors: Sequence[DistTensor]
) -> tuple[str, ...]:
    """Return the partial axes of the result; UsageError where it would be wrong."""
    first, *others = [x.placement.partial for x in tensors]
    if not first and not any(others):
        return ()
    is_sum = name in _LINEAR and len(tensors) == len(args)
    is_scaled = len(tensors) == 1 and (
        name == "mul" or (name == "div" and isinstance(args[0], DistTensor))
    )
    if is_scaled or (is_sum and all(each == first for each in others)):
        return first
    raise UsageError(
        f"{name}: {tensors[0]} is a sum whose parts lie on several ranks: "
        f"redistribute() it first"
    )


def _common_cuts(
    name: str, grid: ProcessGrid, shape: torch.Size, tensors: Sequence[DistTensor]
) -> list[Sharded | None]:
    """Return how the result is cut: as every operand that is cut there."""
    dims: list[Sharded | None] = [None] * len(shape)
    for x in tensors:
        offset = len(shape) - x.dim()
        for number, dim in enumerate(x.placement.dims):
            at = offset + number
            if dim is None or (x.shape[number] != shape[at]):
                continue
            if dims[at] is None:
                dims[at] = dim
            if dims[at] == dim:
                continue
            one, other = Placement(dims[at]), Placement(dim)
            if not one.is_same_as(other, grid, [shape[at]]):
                raise UsageError(
                    f"{name}: dimension {at} is cut in two ways, {one} and {other}: "
                    f"redistribute() one operand"
                )
    used = [axis for dim in dims if dim for axis in dim.axes]
    if len({*used}) < len(used):
        raise UsageError(
            f"{name}: operands cut different dimensions along the same axis: "
            f"{', '.join(repr(x.placement) for x in tensors)}; redistribute() one"
        )
    return dims


def _fitted(
    x: DistTensor, grid: ProcessGrid, shape: torch.Size, dims: Sequence[Sharded | None]
) -> Tensor:
    """Return an operand's part as the result is cut."""
    offset = len(shape) - x.dim()
    own = [
        dims[offset + number] if extent == shape[offset + number] else cut
        for number, (extent, cut) in enumerate(
            zip(x.shape, x.placement.dims, strict=True)
        )
    ]
    local = x.local
    if any(
        mine is None and cut for mine, cut in zip(x.placement.dims, own, strict=True)
    ):
        local = moved(
            local, grid, tuple(x.shape), x.placement, x.placement.with_dims(own)
        )
    spread = [
        axis
        for at, dim in enumerate(dims)
        if dim and (at < offset or x.shape[at - offset] != shape[at])
        for axis in dim.axes
    ]
    return summed_backward(local, grid, spread)


def _of_one(
    name: str, function: Callable[..., Tensor], x: Any, *args: Any, **more: Any
) -> Any:
    """Return a function of the elements of one tensor."""
    if x.placement.partial and within() is not None:
        x = x.redistribute()
    if x.placement.partial:
        raise UsageError(
            f"{name}: {x} has parts on several ranks: redistribute() it first"
        )
    return _lying_as(x, function(x.local, *args, **more))


def _kept(
    function: Callable[..., Tensor], x: DistTensor, *args: Any, **more: Any
) -> Any:
    """Return what is right for parts of sums, too."""
    return _lying_as(x, function(x.local, *args, **more))


def _lying_as(x: DistTensor, local: Tensor) -> DistTensor:
    """Return what a function of elements made of this rank's part of a tensor."""
    if local.shape != x.local.shape:  # of a plain operand with more dimensions
        return DistTensor(local, x.shape, x.grid, x.placement)
    return DistTensor.unchecked(local, x.shape, x.grid, x.placement)


for _name in _OF_ONE:
    _function = getattr(torch, _name)
    _rule = partial(_of_one, _name, _function)
    takes(_function, getattr(Tensor, _name), method=_name)(_rule)
for _function in _ACTIVATIONS:
    takes(_function)(partial(_of_one, _function.__name__, _function))
for _name in _OF_TWO:
    _function = getattr(torch, _name)
    _rule = partial(of_elements, _name, _function)
    takes(_function, getattr(Tensor, _name), method=_name)(_rule)
for _name in ("neg", "clone", "detach"):
    _function = getattr(torch, _name)
    takes(_function, getattr(Tensor, _name), method=_name)(partial(_kept, _function))
for _name in ("contiguous", "to", "float", "double", "half", "bfloat16"):
    _function = getattr(Tensor, _name)
    takes(_function, method=_name)(partial(_kept, _function))
