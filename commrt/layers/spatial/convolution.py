# SPDX-License-Identifier: Apache-2.0
"""Convolution of a tensor that is cut in space, in 1 to 3 dimensions.

Each rank computes an even piece of the output, from its piece of the input and from
elements that its neighbours have: its halo.

Pattern: one exchange of strips along each cut dimension, one dimension after another;
a later strip holds what came in an earlier one, so corners need no messages of their
own. With ``overlap`` strips travel while the outputs are computed that need none of
them. The backward pass sends the gradients of the strips to their owners, where they
are added. It may sum the gradients of weight and bias over ranks: one ``allreduce`` of
both, which runs while the gradient of the input is computed.

Bytes that a rank sends along a cut dimension: the elements of its piece that windows of
other ranks' outputs reach, times the other extents (in dimensions that went before with
halo and padding), times the size of an element. For a kernel of k, stride 1 and even
pieces these are ``k - 1`` rows at each inner boundary, in both directions together.
The backward pass sends as many bytes as this rank received, and the allreduce counts
the bytes of weight and bias.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, TypedDict

from torch.nn import functional

from commrt.comm import Communicator
from commrt.errors import UsageError
from commrt.layers.autocast import is_autocast, low_precision
from commrt.layers.spatial.arguments import (
    check_cuts,
    check_filters,
    check_outputs,
    cut_of_outputs,
    per_dimension,
    piece_shape,
    whole_extents,
)
from commrt.layers.spatial.cut import Cut
from commrt.layers.spatial.empty_results import empty_result
from commrt.layers.spatial.grid_convolution import (
    CutDimension,
    GridConvolution,
    GridGeometry,
)
from commrt.layers.spatial.output_split import OutputSplit, is_apart
from commrt.layers.spatial.overlapped_convolution import (
    Geometry,
    OverlappedConvolution,
)
from commrt.layers.spatial.padded_windows import check_mode, padded, padded_window
from commrt.layers.spatial.weight_gradients import check_sum, summed_gradients
from commrt.layers.spatial.windows import Range, Sliding

__all__ = ["conv"]

PLAIN = {1: functional.conv1d, 2: functional.conv2d, 3: functional.conv3d}


def conv(
    x: Any,
    weight: Any,
    bias: Any = None,
    *,
    cuts: Mapping[int, Cut],
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] | str = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    padding_mode: str = "zeros",
    overlap: bool | None = None,
    sum_weight_gradients_over: Communicator | None = None,
) -> tuple[Any, dict[int, Cut]]:
    """Return this rank's piece of a convolution, and how the result is cut.

    Args:
        x: this rank's piece: batch, channels, then 1 to 3 spatial dimensions.
        weight: equal on all ranks: outputs, channels / groups, kernel.
        bias: one element for each output channel, or None.
        cuts: the dimensions that are cut: spatial ones (2 and up), and the batch (0),
            which moves nothing. Pieces may be uneven, empty, and narrower than a halo.
        stride, padding, dilation, groups: as in torch; also "same" and "valid".
        padding_mode: "zeros", "reflect", "replicate" or "circular".
        overlap: compute outputs that need no halo while the halo travels. With another
            padding than zeros the halo is always waited for first. None: do so where
            the cut leaves this node. Inside of one a halo comes sooner than the borders
            are computed apart.
        sum_weight_gradients_over: ranks over which the backward pass sums the gradients
            of weight and bias. None: they are this rank's parts of the sums.

    Returns:
        The piece of the output, and its cuts: even pieces on the same communicators.

    Collective over the communicators of the cuts, also in the backward pass. ``x`` must
    need a gradient on all ranks or on none, and so must the weights. Results with and
    without ``overlap`` agree within the rounding of a convolution, not bit for bit.
    Under torch's autocast, strips travel in its type, and gradients of weights are
    summed in that of the weights. Where no spatial dimension is cut among several
    ranks, the result is torch's own, bit for bit.

    Raises UsageError for arguments that do not fit and for a result without elements,
    before anything is sent.
    """
    dims = check_cuts("conv", x, cuts)
    check_filters("conv", x, weight, bias, groups)
    check_sum("conv", sum_weight_gradients_over)
    kernel = tuple(weight.shape[2:])
    slidings = _slidings(kernel, *map(_hashable, (stride, padding, dilation)))
    extents = whole_extents(x, cuts)[2:]
    pads = [(each.low, each.high) for each in slidings]
    check_mode("conv", "padding_mode", padding_mode, extents, pads)
    outputs = [one.outputs(n) for one, n in zip(slidings, extents, strict=True)]
    check_outputs("conv", extents, outputs)
    made = cut_of_outputs(cuts, outputs)
    strides = tuple(each.stride for each in slidings)
    dilations = tuple(each.dilation for each in slidings)

    along = [dim for dim, cut in cuts.items() if dim >= 2 and cut.comm.size > 1]
    dims_cut: list[CutDimension] = []
    if padding_mode != "zeros":
        x, pads = _with_own_elements(x, slidings, cuts, made, along, padding_mode)
    elif along:
        if is_autocast(x):
            # Sums of gradients stay in the type of the weights.
            weight, bias = summed_gradients(weight, bias, sum_weight_gradients_over)
            sum_weight_gradients_over = None
            x, weight, bias = (_as_autocast(each) for each in (x, weight, bias))
        # The dimension with the largest strips comes last: they need the longest.
        along.sort(key=lambda dim: (slidings[dim - 2].span / extents[dim - 2], dim))
        for dim in along:
            pads[dim - 2] = (0, 0)
            dims_cut.append(
                CutDimension(dim, cuts[dim], slidings[dim - 2], made[dim].pieces)
            )
    x, both = _padded(x, pads)
    if dims_cut:
        how = _How(
            shape=piece_shape(x, weight.shape[0], outputs, made),
            stride=strides,
            padding=both,
            dilation=dilations,
            groups=groups,
            sum_over=sum_weight_gradients_over,
        )
        apart = any(is_apart(overlap, each.cut) for each in dims_cut)
        return _of_piece(x, weight, bias, dims_cut, how, apart), made
    weight, bias = summed_gradients(weight, bias, sum_weight_gradients_over)
    shape = piece_shape(x, weight.shape[0], outputs, made)
    if 0 in shape[2:]:
        return empty_result(shape, x, weight, bias), made
    return PLAIN[dims](x, weight, bias, strides, both, dilations, groups), made


class _How(TypedDict):
    """The fields that both geometries of a cut convolution have."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    sum_over: Communicator | None


def _of_piece(
    x: Any,
    weight: Any,
    bias: Any,
    dims: Sequence[CutDimension],
    how: _How,
    apart: bool,
) -> Any:
    """Return this rank's piece of the output, where some dimensions are cut."""
    if len(dims) > 1:
        grid = GridGeometry(tuple(dims), **how, is_apart=apart)
        return GridConvolution.apply(x, weight, bias, grid)
    (one,) = dims
    is_empty = 0 in how["shape"]
    split = OutputSplit(
        one.dim, one.cut, one.sliding, one.outputs, apart, is_empty=is_empty
    )
    geometry = Geometry(split=split, sliding=one.sliding, **how)
    return OverlappedConvolution.apply(x, weight, bias, geometry)


# -- arguments -------------------------------------------------------------------------


def _hashable(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


@lru_cache(maxsize=4096)
def _slidings(
    kernel: tuple[int, ...],
    stride: int | Sequence[int],
    padding: int | Sequence[int] | str,
    dilation: int | Sequence[int],
) -> tuple[Sliding, ...]:
    """Return the kernel in each spatial dimension."""
    dims = len(kernel)
    strides = per_dimension("conv", "stride", stride, dims, 1)
    dilations = per_dimension("conv", "dilation", dilation, dims, 1)
    if isinstance(padding, str):
        pads = _named_pads(padding, kernel, strides, dilations)
    else:
        sides = per_dimension("conv", "padding", padding, dims, 0)
        pads = [(each, each) for each in sides]
    every = zip(kernel, strides, pads, dilations, strict=True)
    return tuple(Sliding(k, s, low, high, d) for k, s, (low, high), d in every)


def _named_pads(
    name: str,
    kernel: tuple[int, ...],
    strides: tuple[int, ...],
    dilations: tuple[int, ...],
) -> list[Range]:
    if name == "valid":
        return [(0, 0)] * len(kernel)
    if name != "same":
        raise UsageError(
            f"conv: padding={name!r} must be 'same', 'valid', or integers from 0 on"
        )
    if max(strides) > 1:
        raise UsageError(f"conv: padding='same' needs stride 1, not {strides}")
    more = [(k - 1) * d for k, d in zip(kernel, dilations, strict=True)]
    return [(each // 2, each - each // 2) for each in more]


def _as_autocast(x: Any | None) -> Any:
    """Return a tensor in the type in which torch's autocast would convolve it."""
    return None if x is None else x.to(low_precision(x, x.dtype))


# -- what the outputs read -------------------------------------------------------------


def _padded(x: Any, pads: Sequence[Range]) -> tuple[Any, tuple[int, ...]]:
    """Return ``x`` and the symmetric padding that is left for the convolution.

    A dimension that has more padding on one side than on the other gets it here.
    """
    more: list[int] = []
    for low, high in reversed(pads):
        both = min(low, high)
        more += [low - both, high - both]
    if any(more):
        x = functional.pad(x, more)
    return x, tuple(min(pad) for pad in pads)


def _with_own_elements(
    x: Any,
    slidings: Sequence[Sliding],
    cuts: Mapping[int, Cut],
    made: Mapping[int, Cut],
    along: Sequence[int],
    mode: str,
) -> tuple[Any, list[Range]]:
    """Return what this rank's outputs read, padded by elements of the tensor."""
    pads = [(each.low, each.high) for each in slidings]
    if not along:  # as torch's modules do, bit for bit
        every = [side for pad in reversed(pads) for side in pad]
        return functional.pad(x, every, mode=mode), [(0, 0)] * len(pads)
    for dim, sliding in enumerate(slidings, 2):
        if dim in along:
            reads = [sliding.reads(*out) for out in made[dim].pieces]
            x = padded_window(x, dim, cuts[dim], reads, mode)
        else:
            reads_all = (-sliding.low, x.shape[dim] + sliding.high)
            x = padded(x, dim, reads_all, mode)
    return x, [(0, 0)] * len(pads)
