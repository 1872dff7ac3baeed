# SPDX-License-Identifier: Apache-2.0
"""Other shapes of the same elements: permutations, and reshapes that keep blocks.

Nothing moves. A reshape keeps a cut where the cut dimension is the first of those that
become one, or that one becomes, and no piece is cut within the others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch

from commrt.errors import UsageError
from commrt.layers.tensors.dist_tensor import DistTensor
from commrt.layers.tensors.placement import Placement, Sharded
from commrt.layers.tensors.rules import takes
from commrt.layers.tensors.within import within
from commrt.vocabulary.checks import as_items

__all__ = ["flatten", "permute", "reshape", "squeeze", "transpose", "unsqueeze"]

Tensor: TypeAlias = torch.Tensor
Cut: TypeAlias = Sharded | None


@takes(torch.permute, Tensor.permute, method="permute")
def permute(x: DistTensor, *dims: Any) -> DistTensor:
    """Return the tensor with its dimensions in another order."""
    order = [number % x.dim() for number in _integers(dims)]
    if sorted(order) != [*range(x.dim())]:
        raise UsageError(f"permute: dims={order} must name each of {x.dim()} once")
    cuts = [x.placement.dims[number] for number in order]
    shape = [x.shape[number] for number in order]
    return DistTensor(
        x.local.permute(order), shape, x.grid, x.placement.with_dims(cuts)
    )


@takes(torch.transpose, Tensor.transpose, method="transpose")
def transpose(x: DistTensor, dim0: int, dim1: int) -> DistTensor:
    """Return the tensor with two dimensions exchanged."""
    order = [*range(x.dim())]
    order[dim0], order[dim1] = order[dim1], order[dim0]
    return permute(x, order)


@takes(torch.t, Tensor.t, method="t")
def t(x: DistTensor) -> DistTensor:
    """Return the transposed matrix."""
    return x if x.dim() < 2 else transpose(x, 0, 1)


@takes(torch.unsqueeze, Tensor.unsqueeze, method="unsqueeze")
def unsqueeze(x: DistTensor, dim: int) -> DistTensor:
    """Return the tensor with a dimension of extent 1 more."""
    at = dim % (x.dim() + 1)
    cuts, shape = [*x.placement.dims], [*x.shape]
    cuts.insert(at, None)
    shape.insert(at, 1)
    local = x.local.unsqueeze(at)
    return DistTensor(local, shape, x.grid, x.placement.with_dims(cuts))


@takes(torch.squeeze, Tensor.squeeze, method="squeeze")
def squeeze(x: DistTensor, dim: Any = None) -> DistTensor:
    """Return the tensor without dimensions of extent 1 that nothing cuts."""
    given = range(x.dim()) if dim is None else [dim] if isinstance(dim, int) else dim
    gone = [
        number % x.dim()
        for number in given
        if x.shape[number] == 1 and x.placement.dims[number] is None
    ]
    kept = [number for number in range(x.dim()) if number not in gone]
    cuts = [x.placement.dims[number] for number in kept]
    shape = [x.shape[number] for number in kept]
    local = x.local.reshape([x.local.shape[number] for number in kept])
    return DistTensor(local, shape, x.grid, x.placement.with_dims(cuts))


@takes(torch.flatten, Tensor.flatten, method="flatten")
def flatten(x: DistTensor, start_dim: int = 0, end_dim: int = -1) -> DistTensor:
    """Return the tensor with neighbouring dimensions as one."""
    first, last = start_dim % max(x.dim(), 1), end_dim % max(x.dim(), 1)
    middle = math.prod(x.shape[first : last + 1])
    return reshape(x, [*x.shape[:first], middle, *x.shape[last + 1 :]])


@takes(torch.unflatten, Tensor.unflatten, method="unflatten")
def unflatten(x: DistTensor, dim: int, sizes: Sequence[int]) -> DistTensor:
    """Return the tensor with one dimension as several."""
    at = dim % x.dim()
    into = _filled(sizes, x.shape[at])
    return reshape(x, [*x.shape[:at], *into, *x.shape[at + 1 :]])


@takes(torch.reshape, Tensor.reshape, method="reshape")
@takes(Tensor.view, method="view")
def reshape(x: DistTensor, *shape: Any) -> DistTensor:
    """Return the tensor in another shape, where no piece has to move.

    Raises UsageError where it would, and names the dimension.
    """
    target = _filled(_integers(shape), x.numel())
    if math.prod(target) != x.numel():
        raise UsageError(f"reshape: {tuple(x.shape)} does not fit into {target}")
    if within() is not None:
        x = _with_whole_channels_cut(x, target)
    cuts: list[Cut] = []
    local: list[int] = []
    for inside, outside in _groups([*x.shape], target):
        own = [x.placement.dims[number] for number in inside]
        extents = [x.shape[number] for number in inside]
        new = [target[number] for number in outside]
        made = own if extents == new else _recut(x, inside, new)
        cuts += made
        local += [
            extent if cut is None else _own_extent(x, cut, extent)
            for extent, cut in zip(new, made, strict=True)
        ]
    placement = x.placement.with_dims(cuts)
    return DistTensor(x.local.reshape(local), target, x.grid, placement)


def _with_whole_channels_cut(x: DistTensor, target: Sequence[int]) -> DistTensor:
    """Return a tensor of which channels and space become one, cut by channels alone.

    Axes that cut space cut channels then; each rank has as many elements as before.
    Without enough channels for that, each rank gets the whole samples, if it may.
    """
    module = within()
    cutting = [n for n in range(2, x.dim()) if _is_cut(x, n)]
    is_flat = [*target] == [x.shape[0], math.prod(x.shape[1:])] and x.dim() > 2
    if not is_flat or not cutting or module is None:
        return x
    dims = [n for n in range(1, x.dim()) if _is_cut(x, n)]
    axes = [a for n in dims for cut in [x.placement.dims[n]] if cut for a in cut.axes]
    rest = [None] * (x.dim() - 2)
    if x.shape[1] >= x.grid.size(axes):
        return x.redistribute(x.placement.dims[0], Sharded(tuple(axes)), *rest)
    if module.allow_gather:
        return x.redistribute(x.placement.dims[0], None, *rest)
    raise UsageError(
        f"reshape: {x}: elements of several ranks become one dimension, and "
        f"{x.shape[1]} channels are too few for {x.grid.size(axes)} places: pass "
        f"allow_gather=True to parallelize_cnn, or give the layer before it a strategy "
        f"that does not cut space"
    )


def _is_cut(x: DistTensor, number: int) -> bool:
    cut = x.placement.dims[number]
    return cut is not None and x.grid.size(cut.axes) > 1


def _own_extent(x: DistTensor, cut: Sharded, extent: int) -> int:
    """Return the elements that this rank has of a dimension."""
    return Placement(cut).local_shape(x.grid, [extent])[0]


def _recut(x: DistTensor, inside: Sequence[int], new: Sequence[int]) -> list[Cut]:
    """Return the cuts of the dimensions that a group of dimensions becomes."""
    none: list[Cut] = [None] * len(new)
    cut_at = [number for number in inside if x.placement.dims[number] is not None]
    if not cut_at:
        return none
    number = cut_at[0]
    cut = x.placement.dims[number]
    outer = [n for n in inside if n < number and x.shape[n] != 1]
    first = next((at for at, extent in enumerate(new) if extent != 1), None)
    if (
        cut is None
        or len(cut_at) > 1
        or outer
        or cut.block is not None
        or first is None
    ):
        raise _must_move(x, number, new)
    places, extent = x.grid.size(cut.axes), x.shape[number]
    sizes = cut.pieces(extent, places)
    before = math.prod(x.shape[n] for n in inside if n > number)
    after = math.prod(new[first + 1 :])
    if any(size * before % after for size in sizes):
        raise _must_move(x, number, new)
    pieces = tuple(size * before // after for size in sizes)
    none[first] = Sharded(cut.axes, sizes=pieces)
    return none


def _must_move(x: DistTensor, number: int, new: Sequence[int]) -> UsageError:
    return UsageError(
        f"reshape: {x}: dimension {number} is cut, and elements of several ranks would "
        f"meet in one of {tuple(new)}: redistribute() so that it is whole, or cut it "
        f"where the new dimensions end"
    )


def _groups(
    shape: Sequence[int], target: Sequence[int]
) -> list[tuple[list[int], list[int]]]:
    """Return the smallest groups of neighbouring dimensions with equal products."""
    if 0 in shape:  # any product is equal: only equal beginnings and ends are known
        return _groups_of_nothing(shape, target)
    found: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(shape) or j < len(target):
        inside, outside, one, other = [], [], 1, 1
        if i < len(shape):
            inside, one, i = [i], shape[i], i + 1
        if j < len(target):
            outside, other, j = [j], target[j], j + 1
        while one != other:
            if one < other:
                inside, one, i = [*inside, i], one * shape[i], i + 1
            else:
                outside, other, j = [*outside, j], other * target[j], j + 1
        found.append((inside, outside))
    return found


def _groups_of_nothing(
    shape: Sequence[int], target: Sequence[int]
) -> list[tuple[list[int], list[int]]]:
    head = 0
    while head < min(len(shape), len(target)) and shape[head] == target[head]:
        head += 1
    found = [([n], [n]) for n in range(head)]
    rest = [*range(head, len(shape))], [*range(head, len(target))]
    return [*found, rest] if rest[0] or rest[1] else found


def _integers(given: Sequence[Any]) -> list[int]:
    """Return numbers that were given one by one, or as one sequence."""
    if len(given) == 1 and (items := as_items(given[0])) is not None:
        given = items
    return [int(one) for one in given]


def _filled(shape: Sequence[int], numel: int) -> list[int]:
    """Return a shape with its -1 replaced."""
    target = [int(extent) for extent in shape]
    if target.count(-1) > 1:
        raise UsageError(f"reshape: {target} has more than one -1")
    if -1 in target:
        known = math.prod(extent for extent in target if extent != -1)
        if known == 0 or numel % known:
            raise UsageError(f"reshape: {numel} elements do not fit into {target}")
        target[target.index(-1)] = numel // known
    return target
