# SPDX-License-Identifier: Apache-2.0
"""Interpolation of a tensor that is cut in space.

Each rank computes an even piece of the output, one dimension after another.

Pattern and bytes: one exchange along each cut dimension. A rank sends the elements of
its piece between which outputs of other ranks lie, times the other extents of the input
(with what came in the dimensions that went before), times the size of an element. For
whole factors and pieces that lie like their outputs these are, with linear modes, up to
one row at each side of a boundary; with nearest ones none.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from commrt.errors import UsageError, shown
from commrt.layers.spatial.arguments import (
    check_cuts,
    check_outputs,
    cut_of_outputs,
    per_dimension,
    whole_extents,
)
from commrt.layers.spatial.cut import Cut
from commrt.layers.spatial.exchange import fetch
from commrt.layers.spatial.linear_sources import LinearSources, linear_sources, span_of
from commrt.layers.spatial.windows import Range

__all__ = ["interpolate"]

LINEAR = {1: "linear", 2: "bilinear", 3: "trilinear"}
NEAREST = ("nearest", "nearest-exact")


def interpolate(
    x: Any,
    size: int | Sequence[int] | None = None,
    scale_factor: float | Sequence[float] | None = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    *,
    cuts: Mapping[int, Cut],
) -> tuple[Any, dict[int, Cut]]:
    """Return this rank's piece of an interpolated tensor, and how it is cut.

    Args:
        x: this rank's piece: batch, channels, then 1 to 3 spatial dimensions.
        size: spatial extents of the whole result; or
        scale_factor: outputs per element, in all spatial dimensions or for each.
        mode: "nearest", "nearest-exact", or "linear", "bilinear", "trilinear" in 1, 2,
            3 spatial dimensions.
        align_corners: as in torch, for linear modes.
        cuts: the dimensions of ``x`` that are cut; the batch may be one.

    Collective over the communicators of the cuts, also in the backward pass. ``x`` must
    need a gradient on all ranks or on none. Where no spatial dimension is cut among
    several ranks, the result is torch's own, bit for bit.

    Raises UsageError for arguments that do not fit and for a result without elements,
    before anything is sent.
    """
    dims = check_cuts("interpolate", x, cuts)
    if mode not in (*NEAREST, LINEAR[dims]):
        raise UsageError(
            f"interpolate: mode={shown(mode)} must be one of {', '.join(NEAREST)} and "
            f"{LINEAR[dims]} for {dims} spatial dimensions"
        )
    if mode in NEAREST and align_corners is not None:
        raise UsageError(
            f"interpolate: align_corners={align_corners} is for linear modes; mode is "
            f"{mode!r}"
        )
    extents = whole_extents(x, cuts)[2:]
    outputs, scales = _outputs(extents, size, scale_factor)
    check_outputs("interpolate", extents, list(outputs))
    made = cut_of_outputs(cuts, outputs)
    along = [dim for dim, cut in cuts.items() if dim >= 2 and cut.comm.size > 1]
    if not along:
        y = functional.interpolate(
            x, size, scale_factor, mode=mode, align_corners=align_corners
        )
        return y, made
    sources: dict[int, LinearSources] = {}
    firsts = dict.fromkeys(range(2, x.dim()), 0)
    for dim, extent, count, scale in zip(
        range(2, x.dim()), extents, outputs, scales, strict=True
    ):
        sources[dim] = _sources(x, extent, count, scale, mode, bool(align_corners))
    for dim in along:
        spans = [_span(sources[dim], out) for out in made[dim].pieces]
        x = fetch(x, dim, cuts[dim], spans)
        firsts[dim] = spans[cuts[dim].comm.rank][0]
    for dim, count in enumerate(outputs, 2):
        out = made[dim].own if dim in made else (0, count)
        x = _along(x, dim, sources[dim], out, firsts[dim], mode in NEAREST)
    return x, made


def _outputs(
    extents: Sequence[int],
    size: int | Sequence[int] | None,
    scale_factor: float | Sequence[float] | None,
) -> tuple[tuple[int, ...], list[float | None]]:
    """Return the extents of the result, and the factors that were given."""
    dims = len(extents)
    if (size is None) == (scale_factor is None):
        raise UsageError(
            f"interpolate: size={shown(size)} and scale_factor={shown(scale_factor)}: "
            f"give one of them"
        )
    if size is not None:
        return per_dimension("interpolate", "size", size, dims, 1), [None] * dims
    given = scale_factor
    if isinstance(given, int | float):
        given = [given] * dims
    factors = [*given] if isinstance(given, Sequence) else []
    fits = all(isinstance(each, int | float) and each > 0 for each in factors)
    if not fits or len(factors) != dims:
        raise UsageError(
            f"interpolate: scale_factor={shown(scale_factor)} must be a number above "
            f"0, or {dims} of them"
        )
    outputs = [math.floor(n * each) for n, each in zip(extents, factors, strict=True)]
    return tuple(outputs), [float(each) for each in factors]


def _sources(
    x: Any,
    extent: int,
    outputs: int,
    scale: float | None,
    mode: str,
    align_corners: bool,
) -> LinearSources:
    """Return which elements of a whole dimension make the outputs."""
    if mode not in NEAREST:
        precise = np.float64 if x.dtype == torch.float64 else np.float32
        return linear_sources(extent, outputs, scale, align_corners, precise)
    # Torch rounds places in several ways; so it is asked by means of a small tensor.
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    others = [2] * (x.dim() - 3)
    ramp = torch.arange(extent, dtype=dtype, device=x.device)
    ramp = ramp.view(1, 1, -1, *[1] * len(others)).expand(1, 2, -1, *others)
    ramp = ramp.contiguous()
    if scale is None:
        found = functional.interpolate(ramp, (outputs, *others), mode=mode)
    else:
        factors = (scale, *[1.0] * len(others))
        found = functional.interpolate(ramp, scale_factor=factors, mode=mode)
    places = found[0, 0].reshape(outputs, -1)[:, 0].long().cpu().numpy()
    return LinearSources(places, places, np.zeros(outputs))


def _span(sources: LinearSources, out: Range) -> Range:
    """Return the range of elements that some outputs are made of."""
    return span_of(sources.low[slice(*out)], sources.high[slice(*out)])


def _along(
    x: Any, dim: int, sources: LinearSources, out: Range, first: int, is_nearest: bool
) -> Any:
    """Return some outputs of one dimension, of which ``x`` begins at ``first``."""
    low = torch.from_numpy(sources.low[slice(*out)] - first).to(x.device)
    below = x.index_select(dim, low)
    if is_nearest:
        return below
    high = torch.from_numpy(sources.high[slice(*out)] - first).to(x.device)
    part = torch.from_numpy(sources.part[slice(*out)]).to(x.device, x.dtype)
    return below.lerp(
        x.index_select(dim, high), part.view(-1, *[1] * (x.dim() - dim - 1))
    )
