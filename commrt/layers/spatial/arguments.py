# SPDX-License-Identifier: Apache-2.0
"""Checks arguments of spatial functions; an error names the argument and its value.

All checks run before anything is sent. They look at nothing but this rank's arguments,
so ranks that are given different ones may fail alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from commrt.errors import UsageError, shown
from commrt.layers.spatial.cut import Cut

__all__ = [
    "check_cuts",
    "check_filters",
    "check_outputs",
    "cut_of_outputs",
    "is_whole",
    "per_dimension",
    "piece_shape",
    "whole_extents",
]


def check_cuts(what: str, x: Any, cuts: Mapping[int, Cut], first: int = 2) -> int:
    """Return the number of spatial dimensions of ``x``.

    Args:
        what: the function, for messages.
        x: this rank's piece: batch, channels, then 1 to 3 spatial dimensions.
        cuts: how dimensions are cut; those from ``first`` on may be, and the batch.
        first: the first dimension besides the batch that may be cut.

    Raises UsageError where x has another number of dimensions, or a cut does not fit.
    """
    if not 3 <= x.dim() <= 5:
        raise UsageError(
            f"{what}: x of shape {tuple(x.shape)} must have a batch, channels and 1 to "
            f"3 spatial dimensions"
        )
    for dim, cut in cuts.items():
        if not isinstance(cut, Cut):
            raise UsageError(f"{what}: cuts[{dim}]={shown(cut)} must be a Cut")
        if type(dim) is not int or not (dim == 0 or first <= dim < x.dim()):
            raise UsageError(
                f"{what}: cuts has dimension {shown(dim)}; of {x.dim()} dimensions "
                f"0 may be cut, and {first} to {x.dim() - 1}"
            )
        size = cut.sizes[cut.comm.rank]
        if x.shape[dim] != size:
            raise UsageError(
                f"{what}: x of shape {tuple(x.shape)} does not fit cuts[{dim}]: rank "
                f"{cut.comm.rank} has {size} elements of dimension {dim} in "
                f"{cut.sizes}"
            )
    return int(x.dim()) - 2


def is_whole(cuts: Mapping[int, Cut], first: int = 2) -> bool:
    """Return whether no dimension from ``first`` on is cut among several ranks."""
    return all(cut.comm.size == 1 for dim, cut in cuts.items() if dim >= first)


def whole_extents(x: Any, cuts: Mapping[int, Cut]) -> tuple[int, ...]:
    """Return the shape of the whole tensor of which ``x`` is this rank's piece."""
    return tuple(
        cuts[dim].extent if dim in cuts else size for dim, size in enumerate(x.shape)
    )


def per_dimension(
    what: str, name: str, value: Any, dims: int, least: int
) -> tuple[int, ...]:
    """Return an argument as one integer for each spatial dimension.

    Raises UsageError unless it is an integer, or ``dims`` of them, from ``least`` on.
    """
    values = (value,) * dims if isinstance(value, int) else value
    try:
        values = tuple(values)
    except TypeError:
        values = ()
    if len(values) == 1:
        values *= dims
    fits = all(
        isinstance(each, int) and type(each) is not bool and each >= least
        for each in values
    )
    if not fits or len(values) != dims:
        raise UsageError(
            f"{what}: {name}={shown(value)} must be an integer, or {dims} of them, "
            f"from {least} on"
        )
    return values


def check_filters(
    what: str,
    x: Any,
    weight: Any,
    bias: Any,
    groups: int,
    *,
    is_transposed: bool = False,
) -> None:
    """Raise UsageError where weight, bias and groups do not fit ``x`` and each other.

    Args:
        what: the function, for messages.
        x: this rank's piece; it has all channels.
        weight: its first dimension has the output channels; in a transposed convolution
            the second one.
        bias: one element for each output channel, or None.
        groups: groups of channels.
        is_transposed: of the convolution.
    """
    if not isinstance(groups, int) or groups < 1:
        raise UsageError(f"{what}: groups={shown(groups)} must be an integer from 1 on")
    if weight.dim() != x.dim():
        raise UsageError(
            f"{what}: weight of shape {tuple(weight.shape)} must have the {x.dim()} "
            f"dimensions of x, whose shape is {tuple(x.shape)}"
        )
    if 0 in weight.shape or weight.shape[0] % groups:
        raise UsageError(
            f"{what}: weight of shape {tuple(weight.shape)} must have elements, and "
            f"groups={groups} must divide its first dimension"
        )
    taken, made = weight.shape[1] * groups, weight.shape[0]
    if is_transposed:
        taken, made = made, taken
    if x.shape[1] != taken:
        raise UsageError(
            f"{what}: x of shape {tuple(x.shape)} has {x.shape[1]} channels; weight of "
            f"shape {tuple(weight.shape)} with groups={groups} takes {taken}"
        )
    if bias is not None and tuple(bias.shape) != (made,):
        raise UsageError(
            f"{what}: bias of shape {tuple(bias.shape)} must have one element for each "
            f"of {made} output channels"
        )


def check_outputs(what: str, extents: tuple[int, ...], outputs: list[int]) -> None:
    """Raise UsageError where a spatial dimension of the result would be empty."""
    if min(outputs) < 1:
        raise UsageError(
            f"{what}: x with spatial dimensions {extents} gives an empty result "
            f"of {tuple(max(0, each) for each in outputs)}"
        )


def cut_of_outputs(
    cuts: Mapping[int, Cut], outputs: tuple[int, ...] | list[int]
) -> dict[int, Cut]:
    """Return the cuts of a result: even pieces of these extents, on the same ranks.

    The batch stays cut as it is.
    """
    return {
        dim: cut if dim < 2 else Cut.even(cut.comm, outputs[dim - 2])
        for dim, cut in cuts.items()
    }


def piece_shape(
    x: Any, channels: int, outputs: Sequence[int], made: Mapping[int, Cut]
) -> tuple[int, ...]:
    """Return the shape of this rank's piece of a result.

    Args:
        x: has the batch.
        channels: of the result.
        outputs: its spatial extents.
        made: how it is cut.
    """
    shape = [x.shape[0], channels, *outputs]
    for dim, cut in made.items():
        shape[dim] = cut.sizes[cut.comm.rank]
    return tuple(shape)
