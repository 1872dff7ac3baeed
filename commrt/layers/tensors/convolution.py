# SPDX-License-Identifier: Apache-2.0
"""torch's convolutions of tensors whose batch, space and channels are cut.

    x = DistTensor.from_whole(images, grid, Placement("data", "channel", "height"))
    y = torch.nn.Conv1d(64, 128, 3, padding=1)(x)  # filters are cut along "channel"

Halos come from the neighbours in space. Products over channels are computed in the form
that ``commrt.layers.tensors.channels`` chooses. Without a parallel model around the
call, the axes that cut the input's channels cut the result's, in even pieces.

With several groups of channels, each rank computes whole groups and sends nothing for
channels. The pieces must be groups as a whole; within a parallel model the input is
moved so that they are.

Weights are whole on every rank, or DistTensors. A whole weight's gradient is whole on
every rank, and that of a DistTensor lies as the weight. Bytes: those of
``commrt.layers.spatial.convolution`` for halos, and those of the form for channels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

import torch
from torch.nn import functional

from commrt.errors import UsageError
from commrt.layers.process_grid import ProcessGrid
from commrt.layers.spatial.convolution import conv
from commrt.layers.spatial.cut import Cut
from commrt.layers.spatial.transposed_convolution import conv_transpose
from commrt.layers.tensors.channels import (
    ChannelForm,
    biased,
    form_of,
    grouped_cut,
    taken,
    tile_of,
    tiled,
    wanted_filters,
)
from commrt.layers.tensors.dist_tensor import DistTensor
from commrt.layers.tensors.placement import Placement, Sharded
from commrt.layers.tensors.rules import takes
from commrt.layers.tensors.spatial import cuts_of, on_one_rank, result_of, several
from commrt.layers.tensors.within import within

__all__ = ["convolved"]

ARGUMENTS = {
    False: ("weight", "bias", "stride", "padding", "dilation", "groups"),
    True: (
        *("weight", "bias", "stride", "padding", "output_padding", "groups"),
        "dilation",
    ),
}
FUNCTIONS: dict[str, Callable[..., Any]] = {
    f"{name}{dims}d": getattr(functional, f"{name}{dims}d")
    for name in ("conv", "conv_transpose")
    for dims in (1, 2, 3)
}
"""torch's own, by name."""
OF_PIECE: dict[bool, Callable[..., tuple[Any, dict[int, Cut]]]] = {
    False: conv,
    True: conv_transpose,
}


def convolved(
    what: str, is_transposed: bool, input: DistTensor, *args: Any, **more: Any
) -> DistTensor:
    """Return a convolution, cut in space as its input is."""
    names = ARGUMENTS[is_transposed]
    if isinstance(input, DistTensor) and input.grid.num_ranks == 1:
        plain = _on_one_rank(what, is_transposed, input, args, more)
        if plain is not None:
            return plain
    if len(args) > len(names):
        raise UsageError(f"{what}: expected {', '.join(names)} at most")
    given = dict(zip(names, args, strict=False)) | more
    weight, bias = given.pop("weight", None), given.pop("bias", None)
    if not isinstance(input, DistTensor) or weight is None:
        raise UsageError(
            f"{what}: the input must be a DistTensor, and there must be a weight; a "
            f"plain input with a DistTensor as weight is none of both"
        )
    weight, bias = tiled(weight, input.grid), tiled(bias, input.grid)
    groups = given.get("groups", 1)
    _check_channels(what, input, weight, groups, is_transposed)
    is_plain = not isinstance(weight, DistTensor) and not isinstance(bias, DistTensor)
    cuts = cuts_of(what, input)
    filters = weight.shape[1] * groups if is_transposed else weight.shape[0]
    wanted = wanted_filters(input, filters)
    of_piece = partial(OF_PIECE[is_transposed], **given)
    shared = several(input, [n for n in range(input.dim()) if n != 1])
    if is_plain and not wanted and not several(input, [1]):
        comm = input.grid[shared] if shared else None
        local, made = of_piece(
            input.local, weight, bias, cuts=cuts, sum_weight_gradients_over=comm
        )
        return result_of(input, local, made)
    if groups > 1:
        return _of_groups(
            what, is_transposed, input, weight, bias, wanted, groups, given
        )
    module = within()
    numel = _numel(
        *(is_transposed, tuple(input.shape), tuple(weight.shape)),
        *(tuple(sorted((n, _hashable(v)) for n, v in given.items())),),
    )
    form = form_of(input, numel, wanted, module.stationary if module else "auto")
    _check_pieces(what, input, form)
    x = taken(input, form)
    space: list[Sharded | None] = [None] * (weight.dim() - 2)
    cut = (
        [form.channels, form.filters]
        if is_transposed
        else [form.filters, form.channels]
    )
    tile = tile_of(weight, x.grid, [*cut, *space], ())
    comm = x.grid[shared] if shared else None
    early = None if form.open_sums else tile_of(bias, x.grid, [form.filters], ())
    local, made = of_piece(
        x.local, tile, early, cuts=cuts, sum_weight_gradients_over=comm
    )
    y = result_of(x, local, made, form.filters, filters, form.open_sums)
    if not form.open_sums:
        return y
    return biased(y, bias, form, shared)


def _on_one_rank(
    what: str,
    is_transposed: bool,
    x: DistTensor,
    args: Sequence[Any],
    more: Mapping[str, Any],
) -> DistTensor | None:
    """Return torch's own result with plain weights; None with others."""
    weight = args[0] if args else more.get("weight")
    if not isinstance(weight, torch.Tensor) or any(
        isinstance(each, DistTensor) for each in (*args[1:], *more.values())
    ):
        return None
    groups = args[5] if len(args) > 5 else more.get("groups", 1)
    _check_channels(what, x, weight, groups, is_transposed)
    return on_one_rank(what, FUNCTIONS[what], x, *args, **more)


def _check_channels(
    what: str, x: DistTensor, weight: Any, groups: int, is_transposed: bool
) -> None:
    """Raise UsageError where the whole channels do not fit the whole weight."""
    if weight.dim() != x.dim() or 0 in weight.shape:
        raise UsageError(
            f"{what}: weight of shape {tuple(weight.shape)} must have elements and the "
            f"{x.dim()} dimensions of x, whose shape is {tuple(x.shape)}"
        )
    takes_ = weight.shape[0] if is_transposed else weight.shape[1] * groups
    if x.shape[1] != takes_:
        raise UsageError(
            f"{what}: x of shape {tuple(x.shape)} has {x.shape[1]} channels; weight of "
            f"shape {tuple(weight.shape)} with groups={groups} takes {takes_}"
        )


def _check_pieces(what: str, x: DistTensor, form: ChannelForm) -> None:
    """Raise UsageError, on every rank, where one would compute without channels."""
    cut = form.channels
    if cut is not None and min(cut.pieces(x.shape[1], x.grid.size(cut.axes))) < 1:
        raise UsageError(
            f"{what}: {x} has no channel on some places along {cut.axes}: "
            f"redistribute() so that channels are whole, or cut into pieces of one at "
            f"least"
        )


@lru_cache(maxsize=4096)
def _numel(
    is_transposed: bool,
    shape: tuple[int, ...],
    weight: tuple[int, ...],
    given: tuple[tuple[str, Any], ...],
) -> int:
    """Return the elements of the whole result; torch says it without computing."""
    name = f"conv{'_transpose' if is_transposed else ''}{len(shape) - 2}d"
    x, w = torch.empty(shape, device="meta"), torch.empty(weight, device="meta")
    return int(getattr(functional, name)(x, w, **dict(given)).numel())


def _hashable(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


# -- groups of channels ----------------------------------------------------------------


def _of_groups(
    what: str,
    is_transposed: bool,
    x: DistTensor,
    weight: Any,
    bias: Any,
    wanted: tuple[str, ...],
    groups: int,
    given: Mapping[str, Any],
) -> DistTensor:
    """Return a convolution of groups of channels, of which each rank has whole ones."""
    grid, cut = x.grid, x.placement.dims[1]
    axes = several(x, [1]) or wanted
    places = grid.size(axes)
    if places > groups:
        raise UsageError(
            f"{what}: {groups} groups cannot be cut over {places} places along {axes}: "
            f"redistribute() the input so that channels are whole, or give this layer "
            f"a strategy without channel and filter"
        )
    target = grouped_cut(axes, grid, groups, x.shape[1])
    placement = Placement(x.placement.dims[0], target, *x.placement.dims[2:])
    if not placement.is_same_as(x.placement, grid, x.shape):
        if cut is not None and several(x, [1]) and within() is None:
            raise UsageError(
                f"{what}: groups={groups}: {x} has pieces of channels that are not "
                f"whole groups: redistribute() dimension 1 to {target} first"
            )
        x = x.redistribute(placement=placement)
    filters = weight.shape[1] * groups if is_transposed else weight.shape[0]
    made_cut = grouped_cut(axes, grid, groups, filters)
    first = target if is_transposed else made_cut
    space: list[Sharded | None] = [None] * (weight.dim() - 1)
    shared = several(x, [n for n in range(x.dim()) if n != 1])
    own = even_groups(grid, axes, groups)
    local, made = OF_PIECE[is_transposed](
        x.local,
        tile_of(weight, grid, [first, *space], ()),
        tile_of(bias, grid, [made_cut], ()),
        cuts=cuts_of(what, x),
        sum_weight_gradients_over=grid[shared] if shared else None,
        **{**given, "groups": own},
    )
    y = result_of(x, local, made, made_cut, filters)
    if {*axes} == {*wanted}:
        return y
    dims = [*y.placement.dims]
    dims[1] = Sharded(wanted) if wanted else None
    return y.redistribute(placement=Placement(*dims))


def even_groups(grid: ProcessGrid, axes: tuple[str, ...], groups: int) -> int:
    """Return the groups of this rank."""
    places, place = grid.size(axes), grid.place(axes)
    return (place + 1) * groups // places - place * groups // places


for _name, _is_transposed in (("conv", False), ("conv_transpose", True)):
    for _dims in (1, 2, 3):
        _named = f"{_name}{_dims}d"
        # Under both names that torch has, where they are two functions.
        _known = {getattr(functional, _named), getattr(torch, _named, None)} - {None}
        takes(*_known)(partial(convolved, _named, _is_transposed))
