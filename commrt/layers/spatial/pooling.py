# SPDX-License-Identifier: Apache-2.0
"""Pooling with windows of a fixed size, of a tensor that is cut in space.

Each rank computes an even piece of the output.

Pattern and bytes: one exchange of strips along each cut dimension, as for a convolution
of the same kernel. Where windows do not reach over a boundary (a kernel no larger than
the stride, and pieces that are multiples of it) nothing is sent. With ``overlap`` the
strips of the last cut dimension, the longest, travel while the windows are taken that
need none of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from commrt.errors import UsageError, shown
from commrt.layers.spatial.arguments import (
    check_cuts,
    check_outputs,
    cut_of_outputs,
    per_dimension,
    piece_shape,
    whole_extents,
)
from commrt.layers.spatial.beside_halo import beside_halo
from commrt.layers.spatial.cut import Cut
from commrt.layers.spatial.empty_results import empty_result
from commrt.layers.spatial.exchange import window_of_outputs
from commrt.layers.spatial.output_split import OutputSplit
from commrt.layers.spatial.windows import Range, Sliding

__all__ = ["avg_pool", "max_pool"]

MAX = {1: functional.max_pool1d, 2: functional.max_pool2d, 3: functional.max_pool3d}
AVG = {1: functional.avg_pool1d, 2: functional.avg_pool2d, 3: functional.avg_pool3d}


def max_pool(
    x: Any,
    kernel_size: int | Sequence[int],
    *,
    cuts: Mapping[int, Cut],
    stride: int | Sequence[int] | None = None,
    padding: int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    ceil_mode: bool = False,
    overlap: bool = False,
) -> tuple[Any, dict[int, Cut]]:
    """Return this rank's piece of the largest elements in windows, and its cuts.

    Args:
        x: this rank's piece: batch, channels, then 1 to 3 spatial dimensions.
        kernel_size, stride, padding, dilation, ceil_mode: as in torch.
        cuts: the dimensions of ``x`` that are cut; the batch may be one.
        overlap: take windows that need no halo while it travels. It pays where taking
            them lasts longer than the copies that it costs. The backward pass can then
            not be differentiated once more.

    Collective over the communicators of the cuts, also in the backward pass. ``x`` must
    need a gradient on all ranks or on none. The result has the bits of torch's.

    Raises UsageError for arguments that do not fit and for a result without elements,
    before anything is sent.
    """
    dims = check_cuts("max_pool", x, cuts)
    slidings = _slidings(
        "max_pool", dims, kernel_size, stride, padding, dilation, ceil_mode
    )
    outputs, made = _outputs("max_pool", x, cuts, slidings)
    kernel, strides, dilations = _of_torch(slidings)

    def pool(wide: Any, pads: list[int]) -> Any:
        return MAX[dims](wide, kernel, strides, pads, dilations, ceil_mode)

    cutting = _Cutting(cuts, made, slidings, overlap)
    shape = piece_shape(x, x.shape[1], outputs, made)
    return _pooled(x, cutting, shape, -math.inf, pool), made


def avg_pool(
    x: Any,
    kernel_size: int | Sequence[int],
    *,
    cuts: Mapping[int, Cut],
    stride: int | Sequence[int] | None = None,
    padding: int | Sequence[int] = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
    overlap: bool = False,
) -> tuple[Any, dict[int, Cut]]:
    """Return this rank's piece of the means of windows, and its cuts.

    Args:
        x: this rank's piece: batch, channels, then 1 to 3 spatial dimensions.
        kernel_size, stride, padding, ceil_mode, count_include_pad: as in torch.
        divisor_override: as in torch, which has it in 2 and 3 dimensions.
        cuts: the dimensions of ``x`` that are cut; the batch may be one.
        overlap: take windows that need no halo while it travels. It pays where taking
            them lasts longer than the copies that it costs. The backward pass can then
            not be differentiated once more.

    Collective over the communicators of the cuts, also in the backward pass. ``x`` must
    need a gradient on all ranks or on none. Where no spatial dimension is cut among
    several ranks, the result is torch's own, bit for bit.

    Raises UsageError for arguments that do not fit and for a result without elements,
    before anything is sent.
    """
    dims = check_cuts("avg_pool", x, cuts)
    slidings = _slidings("avg_pool", dims, kernel_size, stride, padding, 1, ceil_mode)
    if divisor_override is not None and (dims == 1 or divisor_override == 0):
        raise UsageError(
            f"avg_pool: divisor_override={shown(divisor_override)} must be an integer "
            f"other than 0, for 2 or 3 spatial dimensions; x has {dims}"
        )
    outputs, made = _outputs("avg_pool", x, cuts, slidings)
    extents = whole_extents(x, cuts)[2:]
    kernel, strides, _ = _of_torch(slidings)
    counts = []
    for dim, (sliding, extent) in enumerate(zip(slidings, extents, strict=True), 2):
        out = made[dim].own if dim in made else (0, outputs[dim - 2])
        counts.append(_counts(sliding, extent, out, count_include_pad))
    are_alike = all(len({*each}) == 1 for each in counts)
    divisor = divisor_override
    if divisor is None:
        divisor = math.prod(each[0] for each in counts) if are_alike else 1

    def pool(wide: Any, pads: list[int]) -> Any:
        return _sums(wide, (kernel, strides, pads, ceil_mode), divisor)

    def pool_whole(wide: Any, pads: list[int]) -> Any:
        more = () if dims == 1 else (divisor_override,)
        how = kernel, strides, pads, ceil_mode, count_include_pad
        return AVG[dims](wide, *how, *more)

    cutting = _Cutting(cuts, made, slidings, overlap)
    shape = piece_shape(x, x.shape[1], outputs, made)
    is_whole = not cutting.along
    y = _pooled(x, cutting, shape, 0.0, pool_whole if is_whole else pool)
    if is_whole or are_alike or divisor_override is not None or 0 in shape[2:]:
        return y, made
    for dim, each in enumerate(counts, 2):
        last = [1] * (x.dim() - dim - 1)
        y = y / torch.tensor(each, dtype=x.dtype, device=x.device).view(-1, *last)
    return y, made


# -- arguments -------------------------------------------------------------------------


def _slidings(
    what: str,
    dims: int,
    kernel_size: int | Sequence[int],
    stride: int | Sequence[int] | None,
    padding: int | Sequence[int],
    dilation: int | Sequence[int],
    ceil_mode: bool,
) -> list[Sliding]:
    """Return the windows in each spatial dimension."""
    kernel = per_dimension(what, "kernel_size", kernel_size, dims, 1)
    strides = kernel
    if stride is not None:
        strides = per_dimension(what, "stride", stride, dims, 1)
    pads = per_dimension(what, "padding", padding, dims, 0)
    dilations = per_dimension(what, "dilation", dilation, dims, 1)
    if any(2 * pad > k for pad, k in zip(pads, kernel, strict=True)):
        raise UsageError(
            f"{what}: padding={shown(padding)} must be at most half of "
            f"kernel_size={shown(kernel_size)}"
        )
    every = zip(kernel, strides, pads, dilations, strict=True)
    return [Sliding(k, s, p, p, d, bool(ceil_mode)) for k, s, p, d in every]


def _outputs(
    what: str, x: Any, cuts: Mapping[int, Cut], slidings: Sequence[Sliding]
) -> tuple[list[int], dict[int, Cut]]:
    """Return the extents of the result, and how it is cut."""
    extents = whole_extents(x, cuts)[2:]
    outputs = [one.outputs(n) for one, n in zip(slidings, extents, strict=True)]
    check_outputs(what, extents, outputs)
    return outputs, cut_of_outputs(cuts, outputs)


def _of_torch(slidings: Sequence[Sliding]) -> tuple[list[int], list[int], list[int]]:
    """Return kernel, stride and dilation as torch takes them."""
    return (
        [each.kernel for each in slidings],
        [each.stride for each in slidings],
        [each.dilation for each in slidings],
    )


# -- windows ---------------------------------------------------------------------------


@dataclass(frozen=True)
class _Cutting:
    """How input and output of a pooling are cut.

    Args:
        cuts, made: of the input and of the output.
        slidings: the windows in each spatial dimension.
        overlap: as asked for.
    """

    cuts: Mapping[int, Cut]
    made: Mapping[int, Cut]
    slidings: Sequence[Sliding]
    overlap: bool

    @property
    def along(self) -> list[int]:
        """The spatial dimensions that are cut among several ranks, longest strips last.

        The order is the same on all ranks.
        """
        found = [d for d, cut in self.cuts.items() if d >= 2 and cut.comm.size > 1]
        return sorted(found, key=lambda d: (self._part(d), d))

    def _part(self, dim: int) -> float:
        return self.slidings[dim - 2].span / max(1, self.cuts[dim].extent)

    @property
    def pads(self) -> list[int]:
        """The padding that is left for torch."""
        sides = [each.low for each in self.slidings]
        return [0 if d in self.along else side for d, side in enumerate(sides, 2)]

    def window(self, x: Any, dim: int, fill: float) -> Any:
        """Return what this rank's outputs read along a dimension."""
        of_dim = self.cuts[dim], self.slidings[dim - 2], self.made[dim]
        return window_of_outputs(x, dim, *of_dim, fill=fill)

    def split(self, dim: int, shape: Sequence[int]) -> OutputSplit | None:
        """Return the outputs along a dimension, None where all are computed at once."""
        cut, sliding = self.cuts[dim], self.slidings[dim - 2]
        if not self.overlap:
            return None
        is_empty = 0 in shape
        return OutputSplit(
            dim, cut, sliding, self.made[dim].pieces, True, is_empty=is_empty
        )


def _pooled(
    x: Any,
    cutting: _Cutting,
    shape: Sequence[int],
    fill: float,
    pool: Callable[[Any, list[int]], Any],
) -> Any:
    """Return this rank's outputs.

    ``pool`` gets what outputs read, and the padding that is left for torch.
    """
    along, pads = cutting.along, cutting.pads
    for dim in along[:-1]:
        x = cutting.window(x, dim, fill)
    if along:
        split = cutting.split(along[-1], shape)
        if split is not None:
            return beside_halo(x, split, lambda wide, _: pool(wide, pads), shape, fill)
        x = cutting.window(x, along[-1], fill)
    return empty_result(shape, x) if 0 in shape[2:] else pool(x, pads)


def _counts(sliding: Sliding, extent: int, out: Range, with_pad: bool) -> list[int]:
    """Return by how many elements the mean of each window divides."""
    counts = []
    for number in range(*out):
        low, high = sliding.reads(number, number + 1)
        high = min(high, extent + sliding.high)
        if not with_pad:
            low, high = max(low, 0), min(high, extent)
        counts.append(high - low)
    return counts


def _sums(x: Any, arguments: tuple[Any, ...], divisor: int) -> Any:
    """Return the sums of windows, divided by one number."""
    if x.dim() > 3:
        return AVG[x.dim() - 2](x, *arguments, True, divisor)
    (kernel,), (stride,), (pad,), ceil_mode = arguments
    flat = (1, kernel), (1, stride), (0, pad), ceil_mode  # only 2-d takes a divisor
    return functional.avg_pool2d(x.unsqueeze(2), *flat, True, divisor).squeeze(2)
