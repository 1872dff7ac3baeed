# SPDX-License-Identifier: Apache-2.0
"""Padding of a tensor that is cut in space.

The result is cut evenly; so elements move to other ranks besides those of the padding.

Pattern and bytes: one exchange along each cut dimension. A rank sends the elements of
its piece that lie in other ranks' pieces of the result, each once for every time that
the padding has it ("circular"), or once ("reflect", "replicate").
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch.nn import functional

from commrt.errors import UsageError, shown
from commrt.layers.spatial.arguments import (
    check_cuts,
    check_outputs,
    cut_of_outputs,
    whole_extents,
)
from commrt.layers.spatial.cut import Cut
from commrt.layers.spatial.exchange import window
from commrt.layers.spatial.padded_windows import check_mode, padded, padded_window
from commrt.layers.spatial.windows import Range, clipped

__all__ = ["pad"]


def pad(
    x: Any,
    pads: Sequence[int],
    mode: str = "constant",
    value: float = 0.0,
    *,
    cuts: Mapping[int, Cut],
) -> tuple[Any, dict[int, Cut]]:
    """Return this rank's piece of a padded tensor, and how it is cut.

    Args:
        x: this rank's piece: batch, channels, then 1 to 3 spatial dimensions.
        pads: as in torch: elements before and behind the last dimension, then the one
            before it, and so on, of spatial dimensions. Below 0 they crop, with the
            mode "constant".
        mode: "constant", "reflect", "replicate" or "circular".
        value: of the padding, with the mode "constant".
        cuts: the dimensions of ``x`` that are cut; the batch may be one.

    Collective over the communicators of the cuts, also in the backward pass. ``x`` must
    need a gradient on all ranks or on none. Where no spatial dimension is cut among
    several ranks, the result is torch's own, bit for bit.

    Raises UsageError for arguments that do not fit and for a result without elements,
    before anything is sent.
    """
    dims = check_cuts("pad", x, cuts)
    sides = _sides(pads, dims, mode)
    extents = whole_extents(x, cuts)[2:]
    if mode != "constant":
        check_mode("pad", "mode", mode, extents, sides)
    outputs = [n + low + high for n, (low, high) in zip(extents, sides, strict=True)]
    check_outputs("pad", extents, outputs)
    made = cut_of_outputs(cuts, outputs)
    along = [dim for dim, cut in cuts.items() if dim >= 2 and cut.comm.size > 1]
    if not along:
        every = [side for both in reversed(sides) for side in both]
        if mode == "constant":
            return functional.pad(x, every, mode, value), made
        return functional.pad(x, every, mode), made
    for dim, (low, high) in enumerate(sides, 2):
        if dim in along:
            x = _padded_piece(x, dim, cuts[dim], made[dim], low, mode, value)
        elif mode == "constant":
            behind = [0] * (2 * (x.dim() - 1 - dim))
            x = functional.pad(x, [*behind, low, high], mode, value)
        else:
            x = padded(x, dim, (-low, x.shape[dim] + high), mode)
    return x, made


def _padded_piece(
    x: Any, dim: int, cut: Cut, made: Cut, low: int, mode: str, value: float
) -> Any:
    """Return this rank's piece of the result in one dimension that is cut."""
    reads = [(first - low, last - low) for first, last in made.pieces]
    if mode != "constant":
        return padded_window(x, dim, cut, reads, mode)
    windows = [clipped(*each, cut.extent) for each in reads]
    return window(x, dim, cut, windows, fill=value)


def _sides(pads: Sequence[int], dims: int, mode: str) -> list[Range]:
    """Return the padding before and behind each spatial dimension."""
    modes = ("constant", "reflect", "replicate", "circular")
    if mode not in modes:
        raise UsageError(f"pad: mode={shown(mode)} must be one of {', '.join(modes)}")
    pads = tuple(pads)
    if (
        not all(type(each) is int for each in pads)
        or len(pads) % 2
        or len(pads) > 2 * dims
    ):
        raise UsageError(
            f"pad: pads={shown(pads)} must be pairs of integers, of at most {dims} "
            f"spatial dimensions"
        )
    if mode != "constant" and pads and min(pads) < 0:
        raise UsageError(f"pad: pads={pads} below 0 need mode='constant', not {mode!r}")
    pads += (0,) * (2 * dims - len(pads))
    return [(pads[at], pads[at + 1]) for at in range(2 * dims - 2, -1, -2)]
