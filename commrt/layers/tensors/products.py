# SPDX-License-Identifier: Apache-2.0
"""Products of distributed tensors: ``einsum``, and what is one of them.

Each axis of the grid may cut one letter of the product, or none. A letter of the result
that is cut leaves each rank a piece of it; a letter that is summed over leaves parts of
a sum. ``plan`` looks at every choice of letters that the operands or the result are
cut by, counts the bytes that a rank would receive, and takes the cheapest.

Bytes of a choice, for a rank: of each operand what its part lacks of what the choice
needs, n (1 - overlap); of the result, where its placement is given, 2 (p - 1) / p n for
a sum over p ranks that all get, (p - 1) / p n for one that is cut, and n (1 - overlap)
for other moves. In the backward pass the same moves run the other way, and operands
that an axis does not cut have their gradients summed along it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import torch
from torch.nn import functional

from commrt.errors import UsageError, shown
from commrt.layers.process_grid import ProcessGrid
from commrt.layers.tensors.channels import (
    biased,
    form_of,
    taken,
    tile_of,
    tiled,
    wanted_filters,
)
from commrt.layers.tensors.dist_tensor import DistTensor
from commrt.layers.tensors.elementwise import same_grid
from commrt.layers.tensors.moves import moved, summed_backward
from commrt.layers.tensors.placement import Placement, Sharded
from commrt.layers.tensors.rules import METHODS, takes
from commrt.layers.tensors.spatial import several
from commrt.layers.tensors.within import within

__all__ = ["ProductPlan", "einsum", "linear", "matmul", "plan", "received"]

Tensor: TypeAlias = torch.Tensor
Cuts: TypeAlias = dict[str, Sharded]


@dataclass(frozen=True)
class ProductPlan:
    """How a product is computed."""

    operands: tuple[Placement, ...]
    """Where each operand is moved to first."""
    result: Placement
    """Where the result lies, before it is moved to where it was asked for."""
    summed: tuple[tuple[str, ...], ...]
    """For each operand, axes along which its gradient is summed."""
    nbytes: float
    """Bytes that a rank receives in the forward pass, as if all pieces were even."""
    flops: float
    """Multiplications of a rank; of plans with the same bytes the one with the fewest
    is taken."""


@takes(torch.einsum)
def einsum(
    spec: str, *operands: DistTensor, out: Placement | None = None
) -> DistTensor:
    """Return the product of tensors, as ``torch.einsum`` writes it.

        y = einsum("bse,ehd->bshd", x, w)
        y = einsum("ij,jk->ik", a, b, out=Placement("row", "col"))

    Args:
        spec: letters of each operand, ``->``, and letters of the result.
        operands: tensors on one grid.
        out: where the result shall lie; None: where the cheapest way leaves it, which
            may be parts of a sum.

    Collective where operands have to move; ``plan`` says what will.
    """
    letters, result = _letters(spec, operands)
    product = _product(
        spec,
        operands,
        _kept_plan(spec, operands, out),
        lambda *parts: torch.einsum(f"{','.join(letters)}->{result}", *parts),
    )
    return product if out is None else product.redistribute(placement=out)


def _product(
    spec: str,
    operands: Sequence[DistTensor],
    chosen: ProductPlan,
    compute: Callable[..., Tensor],
) -> DistTensor:
    """Return the product by a plan; ``compute`` makes this rank's part of parts."""
    letters, result = _letters(spec, operands)
    grid = operands[0].grid
    parts = [
        summed_backward(
            moved(x.local, grid, tuple(x.shape), x.placement, placement), grid, axes
        )
        for x, placement, axes in zip(
            operands, chosen.operands, chosen.summed, strict=True
        )
    ]
    extents = _extents(spec, letters, operands)
    shape = [extents[letter] for letter in result]
    return DistTensor(compute(*parts), shape, grid, chosen.result)


def plan(spec: str, *operands: DistTensor, out: Placement | None = None) -> ProductPlan:
    """Return how ``einsum`` would compute a product; local."""
    letters, result = _letters(spec, operands)
    grid = same_grid(f"einsum {spec!r}", operands)
    extents = _extents(spec, letters, operands)
    shape = [extents[letter] for letter in result]
    if out is not None:
        out.check("einsum: out", grid, shape)
    given = [
        _cuts(word, x.placement) for word, x in zip(letters, operands, strict=True)
    ]
    if out is not None:
        given.append(_cuts(result, out))
    item = max(x.dtype.itemsize for x in operands)
    choices = [
        _costed(grid, letters, result, extents, operands, cuts, out, item)
        for cuts in _choices(grid, given)
    ]
    return min(choices, key=lambda each: (each.nbytes, each.flops))


_PLANS: WeakKeyDictionary[ProcessGrid, dict[Hashable, ProductPlan]] = (
    WeakKeyDictionary()
)
_MOST_PLANS = 1024
"""Plans that are kept for a grid; then all are dropped."""


def _kept_plan(
    spec: str, operands: Sequence[DistTensor], out: Placement | None = None
) -> ProductPlan:
    """Return the plan of an equal call that came before, or a new one."""
    _letters(spec, operands)
    plans = _PLANS.setdefault(same_grid(f"einsum {spec!r}", operands), {})
    key = spec, out, *((x.shape, x.placement, x.dtype) for x in operands)
    found = plans.get(key)
    if found is None:
        if len(plans) >= _MOST_PLANS:
            plans.clear()
        found = plans[key] = plan(spec, *operands, out=out)
    return found


def _letters(spec: str, operands: Sequence[Any]) -> tuple[list[str], str]:
    """Return the letters of each operand and of the result, or UsageError."""
    text = spec.replace(" ", "") if isinstance(spec, str) else ""
    left, arrow, result = text.partition("->")
    words = left.split(",")
    is_right = arrow and all(word.isalpha() or not word for word in [*words, result])
    if not is_right or len(words) != len(operands):
        raise UsageError(
            f"einsum: spec={shown(spec)} must be letters for each of the "
            f"{len(operands)} operands and the result, such as 'ij,jk->ik'"
        )
    for word, x in zip(words, operands, strict=True):
        if not isinstance(x, DistTensor):
            raise UsageError(
                f"einsum {spec!r}: operand {word!r} is no DistTensor: make it one by "
                f"DistTensor.from_whole"
            )
        if len(word) != x.dim() or len({*word}) != len(word):
            raise UsageError(
                f"einsum {spec!r}: {word!r} must be {x.dim()} different letters, one "
                f"for each dimension of {tuple(x.shape)}"
            )
    known = {*"".join(words)}
    if not {*result} <= known or len({*result}) != len(result):
        raise UsageError(
            f"einsum {spec!r}: the result {result!r} must be different letters of the "
            f"operands"
        )
    return words, result


def _extents(
    spec: str, letters: Sequence[str], operands: Sequence[DistTensor]
) -> dict[str, int]:
    """Return each letter's extent; UsageError where operands differ."""
    found: dict[str, int] = {}
    for word, x in zip(letters, operands, strict=True):
        for letter, extent in zip(word, x.shape, strict=True):
            if found.setdefault(letter, extent) != extent:
                raise UsageError(
                    f"einsum {spec!r}: {letter!r} has {found[letter]} elements in one "
                    f"operand and {extent} in another"
                )
    return found


def _cuts(word: str, placement: Placement) -> Cuts:
    """Return what cuts each letter."""
    pairs = zip(word, placement.dims, strict=True)
    return {letter: dim for letter, dim in pairs if dim is not None}


def _choices(grid: ProcessGrid, given: Sequence[Cuts]) -> list[Cuts]:
    """Return every way to cut letters that operands or the result know."""
    options = {(letter, cut) for cuts in given for letter, cut in cuts.items()}
    ordered = sorted(options, key=repr)
    found: list[Cuts] = []
    for count in range(len(grid.axes) + 1):
        for some in itertools.combinations(ordered, count):
            axes = [axis for _, cut in some for axis in cut.axes]
            letters = {letter for letter, _ in some}
            if len({*axes}) == len(axes) and len(letters) == len(some):
                found.append(dict(some))
    return found


def _costed(
    grid: ProcessGrid,
    letters: Sequence[str],
    result: str,
    extents: Mapping[str, int],
    operands: Sequence[DistTensor],
    cuts: Cuts,
    out: Placement | None,
    item: int,
) -> ProductPlan:
    """Return the plan of one choice, with its bytes."""
    targets = [Placement(*map(cuts.get, word)) for word in letters]
    used = {axis for cut in cuts.values() for axis in cut.axes}
    summed = tuple(
        tuple(a for a in grid.axes if a in used and a not in target.cut_axes)
        for target in targets
    )
    open_sums = {
        axis
        for letter, cut in cuts.items()
        if letter not in result
        for axis in cut.axes
        if grid.size(axis) > 1
    }
    placement = Placement(*map(cuts.get, result), partial=sorted(open_sums))
    shape = [extents[letter] for letter in result]
    nbytes = sum(
        received(grid, x.shape, x.placement, target) * x.dtype.itemsize
        for x, target in zip(operands, targets, strict=True)
    )
    if out is not None:
        nbytes += received(grid, shape, placement, out) * item
    flops = math.prod(extents.values()) / grid.size([*used])
    return ProductPlan(tuple(targets), placement, summed, nbytes, flops)


def received(
    grid: ProcessGrid, shape: Sequence[int], source: Placement, target: Placement
) -> float:
    """Return elements that a rank receives in a move, as if pieces were even."""
    if source.is_same_as(target, grid, shape):
        return 0.0
    total, dims = 0.0, [*source.dims]
    here = math.prod(shape) / _places(grid, source.dims)
    for axis in source.partial:
        if axis in target.partial:
            continue
        p = grid.size(axis)
        at = [
            number
            for number, dim in enumerate(target.dims)
            if dim is not None and dim.axes == (axis,) and dims[number] is None
        ]
        if at and target.dims[at[0]] is not None:
            total += here * (p - 1) / p
            here /= p
            dims[at[0]] = target.dims[at[0]]
        else:
            total += 2 * here * (p - 1) / p
    needed = math.prod(shape) / _places(grid, target.dims)
    overlap = 1.0
    for before, after, extent in zip(dims, target.dims, shape, strict=True):
        one, other = Placement(before), Placement(after)
        if before is not None and not one.is_same_as(other, grid, [extent]):
            overlap /= grid.size(before.axes)
    return total + needed * (1 - overlap)


def _places(grid: ProcessGrid, dims: Sequence[Sharded | None]) -> int:
    return math.prod(grid.size(dim.axes) for dim in dims if dim is not None)


# -- products that have names of their own ---------------------------------------------


@takes(torch.matmul, torch.mm, torch.bmm, Tensor.matmul, method="matmul")
def matmul(one: DistTensor, other: DistTensor) -> DistTensor:
    """Return the matrix product; dimensions before the last two are a batch."""
    if not (isinstance(one, DistTensor) and isinstance(other, DistTensor)):
        raise UsageError("matmul: both operands must be DistTensors")
    if min(one.dim(), other.dim()) < 1:
        raise UsageError(f"matmul: {one} and {other}: expected a dimension at least")
    batch = "abcdefgh"[: max(one.dim(), other.dim(), 2) - 2]
    left = (batch + "ij")[-one.dim() :] if one.dim() > 1 else "j"
    right = (batch + "jk")[-other.dim() :] if other.dim() > 1 else "j"
    result = batch + ("i" if one.dim() > 1 else "") + ("k" if other.dim() > 1 else "")
    spec = f"{left},{right}->{result}"
    chosen = _kept_plan(spec, [one, other])
    return _product(spec, [one, other], chosen, torch.matmul)


@takes(functional.linear)
def linear(
    x: DistTensor, weight: DistTensor, bias: DistTensor | None = None
) -> DistTensor:
    """Return ``x @ weight.T + bias``, as ``torch.nn.functional.linear``.

    With a bias the result is no sum with open parts: those are summed first. A weight
    that is a plain tensor, whole on every rank, is used as in a convolution.
    """
    if not isinstance(weight, DistTensor):
        return _of_whole_weight(x, weight, bias)
    batch = "abcdefgh"[: x.dim() - 1]
    spec = f"{batch}i,oi->{batch}o"
    chosen = _kept_plan(spec, [x, weight])
    if bias is None or chosen.result.partial:
        product = _product(spec, [x, weight], chosen, functional.linear)
        if bias is None:
            return product
        added: DistTensor = METHODS["add"](product.redistribute(), bias)
        return added
    if bias.shape != weight.shape[:1]:
        raise UsageError(
            f"linear: bias has shape {tuple(bias.shape)}; expected "
            f"{tuple(weight.shape[:1])}, one number for each output"
        )
    grid = same_grid("linear", [x, weight, bias])
    cut = Placement(chosen.result.dims[-1])
    part = moved(bias.local, grid, tuple(bias.shape), bias.placement, cut)
    others = [axis for axis in chosen.result.cut_axes if axis not in cut.cut_axes]
    part = summed_backward(part, grid, others)
    return _product(
        spec, [x, weight], chosen, lambda a, b: functional.linear(a, b, part)
    )


def _of_whole_weight(x: DistTensor, weight: Any, bias: Any) -> DistTensor:
    """Return a linear layer whose weight all ranks have, its gradient whole, too.

    Of a module that keeps tiles of them, weight and gradient are this rank's tiles.
    """
    is_plain = not isinstance(bias, DistTensor)
    weight, bias = tiled(weight, x.grid), tiled(bias, x.grid)
    if not is_plain or x.dim() < 1 or x.shape[-1] != weight.shape[1]:
        raise UsageError(
            f"linear: {x} and a weight of shape {tuple(weight.shape)} that every rank "
            f"has: expected {weight.shape[1]} features, and a bias that is such a "
            f"tensor"
        )
    dim = x.dim() - 1
    x = x.redistribute()
    if x.grid.num_ranks == 1 and not isinstance(weight, DistTensor):
        local = functional.linear(x.local, weight, bias)
        placement = _of_any_features(x.placement)
        return DistTensor.unchecked(local, local.shape, x.grid, placement)
    numel = math.prod(x.shape[:-1]) * weight.shape[0]
    module = within()
    wanted = wanted_filters(x, weight.shape[0], dim)
    if module is None:
        wanted = ()
    form = form_of(x, numel, wanted, module.stationary if module else "auto", dim)
    shared = several(x, range(dim))
    x = taken(x, form, dim)
    tile = tile_of(weight, x.grid, [form.filters, form.channels], shared)
    early = None
    if not form.open_sums:
        early = tile_of(bias, x.grid, [form.filters], shared)
    local = functional.linear(x.local, tile, early)
    dims = [*x.placement.dims[:-1], form.filters]
    shape = [*x.shape[:-1], weight.shape[0]]
    y = DistTensor(local, shape, x.grid, Placement(*dims, partial=form.open_sums))
    return biased(y, bias, form, shared, dim) if form.open_sums else y


@lru_cache(maxsize=1024)
def _of_any_features(placement: Placement) -> Placement:
    """Return the same cuts, and the last dimension whole."""
    return Placement(*placement.dims[:-1], None)
