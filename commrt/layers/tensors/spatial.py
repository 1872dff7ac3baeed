# SPDX-License-Identifier: Apache-2.0
"""torch's poolings, paddings and interpolations of tensors that are cut in space.

    x = DistTensor.from_whole(images, grid, Placement("data", None, "height", "width"))
    y = torch.nn.MaxPool2d(3, 2, 1)(x)             # halos come from the neighbours

Batch, channels and space may be cut. Each channel is computed by itself, so cut
channels send nothing. ``commrt.layers.spatial`` computes, and has the bytes of halos.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from functools import partial as bound
from typing import Any

import torch
from torch.nn import functional

from commrt.errors import UsageError
from commrt.layers.spatial.adaptive_pooling import (
    adaptive_avg_pool,
    adaptive_max_pool,
)
from commrt.layers.spatial.cut import Cut
from commrt.layers.spatial.interpolation import interpolate
from commrt.layers.spatial.padding import pad as pad_piece
from commrt.layers.spatial.pooling import avg_pool, max_pool
from commrt.layers.tensors.dist_tensor import DistTensor
from commrt.layers.tensors.placement import Placement, Sharded
from commrt.layers.tensors.rules import METHODS, takes

__all__ = ["cuts_of", "on_one_rank", "result_of", "several"]


def cuts_of(what: str, x: DistTensor) -> dict[int, Cut]:
    """Return the cuts of batch and space; UsageError where sums are open.

    Channels may be cut in one piece for each place; their cut is not among the results.
    """
    placement = x.placement
    if placement.partial:
        raise UsageError(
            f"{what}: {x} has parts on several ranks: redistribute() it first"
        )
    found: dict[int, Cut] = {}
    for number, (cut, extent) in enumerate(zip(placement.dims, x.shape, strict=True)):
        if cut is None:
            continue
        if cut.block is not None:
            raise UsageError(
                f"{what}: {x}: dimension {number} must be cut in one piece for each "
                f"place; redistribute() it first"
            )
        if number != 1:
            found[number] = _cut(x, cut, extent)
    return found


def _cut(x: DistTensor, cut: Sharded, extent: int) -> Cut:
    comm = x.grid[cut.axes]
    return Cut(comm, cut.pieces(extent, comm.size))


def result_of(
    x: DistTensor,
    local: Any,
    cuts: Mapping[int, Cut],
    channels: Sharded | None = None,
    num_channels: int | None = None,
    partial: Sequence[str] = (),
) -> DistTensor:
    """Return what a function of pieces gave, as a tensor.

    Args:
        x: the input.
        local: this rank's piece of the result.
        cuts: of batch and space.
        channels: how the result's channels are cut; only with
        num_channels: of the whole result; None: those of ``x``, or of ``local`` where
            nothing cuts them.
        partial: axes along which the result is a sum.
    """
    dims: list[Sharded | None] = [None] * x.dim()
    shape = [*local.shape]
    if num_channels is not None:
        dims[1], shape[1] = channels, num_channels
    elif x.placement.dims[1] is not None and several(x, [1]):
        dims[1], shape[1] = x.placement.dims[1], x.shape[1]
    for number, cut in cuts.items():
        before = x.placement.dims[number]
        assert before is not None
        dims[number] = Sharded(before.axes, sizes=cut.sizes)
        shape[number] = cut.extent
    return DistTensor(local, shape, x.grid, Placement(*dims, partial=partial))


def on_one_rank(
    what: str, function: Callable[..., Any], x: DistTensor, *args: Any, **more: Any
) -> DistTensor:
    """Return what torch's own function gives on a grid of one rank, bit for bit."""
    if x.placement.partial:
        raise UsageError(
            f"{what}: {x} has parts on several ranks: redistribute() it first"
        )
    local = function(x.local, *args, **more)
    return DistTensor.unchecked(local, local.shape, x.grid, _even(x.placement))


@lru_cache(maxsize=1024)
def _even(placement: Placement) -> Placement:
    """Return the same cuts in even pieces."""
    return Placement(*(cut and Sharded(cut.axes) for cut in placement.dims))


def several(x: DistTensor, dims: Iterable[int]) -> tuple[str, ...]:
    """Return the axes of several ranks that cut some dimensions, in grid order."""
    cuts = [x.placement.dims[number] for number in dims]
    cutting = {axis for cut in cuts if cut is not None for axis in cut.axes}
    return tuple(a for a in x.grid.axes if a in cutting and x.grid.size(a) > 1)


@dataclass(frozen=True)
class _Windows:
    """A function of torch whose results are made of windows of the input."""

    of_piece: Callable[..., tuple[Any, dict[int, Cut]]]
    """The same of a rank's piece, with arguments of the same names."""
    arguments: tuple[str, ...]
    """torch's arguments behind the input, in its order."""


def _windowed(
    what: str, function: _Windows, input: DistTensor, *args: Any, **more: Any
) -> DistTensor:
    """Return the function's result, cut along the same axes as its input."""
    if len(args) > len(function.arguments):
        raise UsageError(f"{what}: expected {', '.join(function.arguments)} at most")
    given = dict(zip(function.arguments, args, strict=False)) | more
    for name in ("return_indices", "recompute_scale_factor", "antialias"):
        if given.pop(name, None):
            raise UsageError(f"{what}: {name} is not known for tensors that are cut")
    if not given.get("stride", True):  # torch's pools have an empty one as default
        del given["stride"]
    local, cuts = function.of_piece(input.local, cuts=cuts_of(what, input), **given)
    return result_of(input, local, cuts)


def _adaptive_avg_pool(
    what: str, function: _Windows, input: DistTensor, output_size: Any
) -> DistTensor:
    """Return means; a single one is made by a sum over ranks, and all have it."""
    wanted = [output_size] if isinstance(output_size, int) else output_size
    if {*wanted} != {1}:
        return _windowed(what, function, input, output_size)
    cuts_of(what, input)
    means: DistTensor = METHODS["mean"](input, [*range(2, input.dim())], True)
    return means.redistribute()


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
    return result_of(input, local, cuts)


_ADAPTIVE = ("output_size", "return_indices")
_FUNCTIONS = {
    "max_pool": _Windows(
        max_pool,
        (
            *("kernel_size", "stride", "padding", "dilation", "ceil_mode"),
            "return_indices",
        ),
    ),
    "avg_pool": _Windows(
        avg_pool,
        (
            *("kernel_size", "stride", "padding", "ceil_mode", "count_include_pad"),
            "divisor_override",
        ),
    ),
    "adaptive_avg_pool": _Windows(adaptive_avg_pool, _ADAPTIVE[:1]),
    "adaptive_max_pool": _Windows(adaptive_max_pool, _ADAPTIVE),
}
for _name, _function in _FUNCTIONS.items():
    _rule = _adaptive_avg_pool if _name == "adaptive_avg_pool" else _windowed
    for _dims in (1, 2, 3):
        _named = f"{_name}{_dims}d"
        # Under both names that torch has, where they are two functions.
        _known = {getattr(functional, _named), getattr(torch, _named, None)} - {None}
        takes(*_known)(bound(_rule, _named, _function))
_INTERPOLATE = _Windows(
    interpolate,
    (
        *("size", "scale_factor", "mode", "align_corners", "recompute_scale_factor"),
        "antialias",
    ),
)
takes(functional.interpolate)(bound(_windowed, "interpolate", _INTERPOLATE))
