# SPDX-License-Identifier: Apache-2.0
"""Transposed convolution of a tensor that is cut in space, in 1 to 3 dimensions.

Each rank computes an even piece of the output, from all inputs that contribute to it.

Pattern: one exchange of strips along each cut dimension, one dimension after another.
With ``overlap`` the strips of the last one, the longest, travel while the outputs are
computed that need none of them. The backward pass sends the gradients of the strips to
their owners, and may sum the gradients of weight and bias over ranks by one
``allreduce`` of both.

Bytes that a rank sends along a cut dimension: the elements of its piece that contribute
to outputs of other ranks, times the other extents (with what came in the dimensions
that went before), times the size of an element. With a stride of s and a kernel of
k = s, pieces that lie like their outputs need nothing of other ranks. The backward pass
sends as many bytes as this rank received; the allreduce counts those of the weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.nn import functional

from commrt.comm import Communicator
from commrt.errors import UsageError
from commrt.layers.autocast import low_precision
from commrt.layers.spatial.arguments import (
    check_cuts,
    check_filters,
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
from commrt.layers.spatial.weight_gradients import check_sum, summed_gradients
from commrt.layers.spatial.windows import Range, Spreading

__all__ = ["conv_transpose"]

PLAIN = {
    1: functional.conv_transpose1d,
    2: functional.conv_transpose2d,
    3: functional.conv_transpose3d,
}


def conv_transpose(
    x: Any,
    weight: Any,
    bias: Any = None,
    *,
    cuts: Mapping[int, Cut],
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] = 0,
    output_padding: int | Sequence[int] = 0,
    groups: int = 1,
    dilation: int | Sequence[int] = 1,
    overlap: bool = False,
    sum_weight_gradients_over: Communicator | None = None,
) -> tuple[Any, dict[int, Cut]]:
    """Return this rank's piece of a transposed convolution, and how it is cut.

    Args:
        x: this rank's piece: batch, channels, then 1 to 3 spatial dimensions.
        weight: equal on all ranks: channels, outputs / groups, kernel.
        bias: one element for each output channel, or None.
        cuts: the dimensions that are cut: spatial ones (2 and up), and the batch (0),
            which moves nothing. Pieces may be uneven, empty, and narrow.
        stride, padding, output_padding, groups, dilation: as in torch.
        overlap: compute outputs that need no halo while it travels. It pays where they
            take longer than the copies that it costs. The backward pass can then not be
            differentiated once more.
        sum_weight_gradients_over: ranks over which the backward pass sums the gradients
            of weight and bias. None: they are this rank's parts of the sums.

    Returns:
        The piece of the output, and its cuts: even pieces on the same communicators.

    Collective over the communicators of the cuts, also in the backward pass. ``x`` must
    need a gradient on all ranks or on none, and so must the weights. Where no spatial
    dimension is cut among several ranks, the result is torch's own, bit for bit.

    Raises UsageError for arguments that do not fit and for a result without elements,
    before anything is sent.
    """
    dims = check_cuts("conv_transpose", x, cuts)
    check_filters("conv_transpose", x, weight, bias, groups, is_transposed=True)
    check_sum("conv_transpose", sum_weight_gradients_over)
    spreadings = _spreadings(weight, stride, padding, output_padding, dilation, dims)
    extents = whole_extents(x, cuts)[2:]
    outputs = [one.outputs(n) for one, n in zip(spreadings, extents, strict=True)]
    check_outputs("conv_transpose", extents, outputs)
    made = cut_of_outputs(cuts, outputs)

    along = [dim for dim, cut in cuts.items() if dim >= 2 and cut.comm.size > 1]
    # The dimension with the largest strips comes last: they need the longest.
    along.sort(
        key=lambda dim: (spreadings[dim - 2].reach / max(1, extents[dim - 2]), dim)
    )
    weight, bias = summed_gradients(weight, bias, sum_weight_gradients_over)
    shape = piece_shape(x, weight.shape[1] * groups, outputs, made)
    spread = _Spread(weight, spreadings, groups, shape, tuple(along))
    if not along:
        if 0 in shape[2:]:
            return empty_result(shape, x, weight, bias), made
        return spread.whole(x, bias), made
    *before, last = along
    for dim in before:
        x = window_of_outputs(x, dim, cuts[dim], spreadings[dim - 2], made[dim])
    own = {dim: made[dim].own for dim in along}
    kernel, is_empty = spreadings[last - 2], 0 in shape
    if overlap:
        split = OutputSplit(
            *(last, cuts[last], kernel, made[last].pieces), True, is_empty=is_empty
        )
        x = beside_halo(
            *(x, split, lambda wide, out: spread.part(wide, {**own, last: out}), shape)
        )
    else:
        x = window_of_outputs(x, last, cuts[last], kernel, made[last])
        x = x if is_empty else spread.part(x, own)
    if is_empty:
        return empty_result(shape, x, weight, bias), made
    return (x if bias is None else x + bias.view(-1, *[1] * dims)), made


@dataclass(frozen=True)
class _Spread:
    """The convolution of what a rank has.

    Args:
        weight: as in ``conv_transpose``.
        spreadings: the kernel in each spatial dimension.
        groups: as in torch.
        shape: of this rank's piece of the output.
        along: the dimensions that are cut among several ranks.
    """

    weight: Any
    spreadings: Sequence[Spreading]
    groups: int
    shape: Sequence[int]
    along: tuple[int, ...]

    def whole(self, x: Any, bias: Any) -> Any:
        """Return torch's own result."""
        every = self.spreadings
        pads, more = [one.padding for one in every], [one.more for one in every]
        return self._plain(x, bias, pads, more)

    def part(self, wide: Any, outs: Mapping[int, Range]) -> Any:
        """Return the outputs in these ranges of the cut dimensions, without bias.

        ``wide``: the inputs that contribute to them.
        """
        if 0 in wide.shape[2:]:  # none does
            shape = [*self.shape]
            for dim, (low, high) in outs.items():
                shape[dim] = high - low
            wide = wide.to(low_precision(wide, wide.dtype))  # as other parts are
            return empty_result(shape, wide, self.weight)
        pads, more = [], []
        for dim, one in enumerate(self.spreadings, 2):
            pads.append(0 if dim in self.along else one.padding)
            more.append(0 if dim in self.along else one.more)
        y = self._plain(wide, None, pads, more)
        return _trimmed(y, {dim: self._place(dim, out) for dim, out in outs.items()})

    def _place(self, dim: int, out: Range) -> Range:
        """Return where some outputs lie in those that their inputs give."""
        spreading = self.spreadings[dim - 2]
        first = spreading.first(spreading.reads(*out)[0])
        return out[0] - first, out[1] - first

    def _plain(self, x: Any, bias: Any, pads: list[int], more: list[int]) -> Any:
        strides = [one.stride for one in self.spreadings]
        dilations = [one.dilation for one in self.spreadings]
        how = strides, pads, more, self.groups, dilations
        return PLAIN[len(strides)](x, self.weight, bias, *how)


def _spreadings(
    weight: Any,
    stride: int | Sequence[int],
    padding: int | Sequence[int],
    output_padding: int | Sequence[int],
    dilation: int | Sequence[int],
    dims: int,
) -> list[Spreading]:
    """Return the kernel in each spatial dimension."""
    what = "conv_transpose"
    strides = per_dimension(what, "stride", stride, dims, 1)
    pads = per_dimension(what, "padding", padding, dims, 0)
    more = per_dimension(what, "output_padding", output_padding, dims, 0)
    dilations = per_dimension(what, "dilation", dilation, dims, 1)
    for s, m, d in zip(strides, more, dilations, strict=True):
        if m >= max(s, d):
            raise UsageError(
                f"{what}: output_padding={output_padding} must be smaller than stride "
                f"{strides} or dilation {dilations}"
            )
    every = zip(weight.shape[2:], strides, pads, dilations, more, strict=True)
    return [Spreading(*each) for each in every]


def _trimmed(y: Any, trims: Mapping[int, Range]) -> Any:
    """Return the outputs in these ranges; those outside of ``y`` are 0."""
    zeros = [0, 0] * (y.dim() - 2)
    for dim, (low, high) in trims.items():
        first, last = max(low, 0), min(high, y.shape[dim])
        y = y.narrow(dim, min(first, y.shape[dim]), max(0, last - first))
        side = 2 * (y.dim() - 1 - dim)
        inside = max(0, last - first)
        before = min(first, high) - low if inside else 0
        zeros[side : side + 2] = [before, high - low - inside - before]
    return functional.pad(y, zeros) if any(zeros) else y
