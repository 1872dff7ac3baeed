# SPDX-License-Identifier: Apache-2.0
"""How products over channels are computed where axes of a grid cut the channels.

A convolution or linear layer sums over input channels and makes output channels: its
filters. Each axis that cuts channels can be used in one of two ways (Dryden et al.,
"Channel and Filter Parallelism for Large-Scale CNN Training", SC'19, section 3):

- It keeps the input where it is. Each rank computes all filters from its channels. The
  parts are summed, and each rank gets its filters: a reduce_scatter forward, an
  allgather of the output's gradient backward. Of p ranks each receives (p - 1) n for
  its n elements of the output, in both passes.
- It keeps the output where it is. Each rank gathers the input along the axis and
  computes its own filters: an allgather forward, a reduce_scatter of the input's
  gradient backward. Each receives (p - 1) m for its m elements of the input.

The form "x" uses all axes in the first way, "y" in the second, and "w" some in each:
then a rank computes with one tile of the weight. "auto" takes the fewest bytes. An axis
that cuts filters alone costs nothing forward, and an allreduce of the input's gradient
backward. One that cuts channels alone costs an allreduce of the output forward.

Weights may be whole on every rank, as modules keep them, or distributed tensors. A rank
computes with its tile. The tile's gradient is summed over the ranks that have other
samples or rows, by an allreduce of the tile alone. A whole weight's tiles are gathered
then, n (1 - 1 / tiles) bytes, so that optimizers and checkpoints are those of one
process. The gradient of a distributed weight stays in tiles.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from commrt.errors import UsageError
from commrt.layers.process_grid import ProcessGrid
from commrt.layers.spatial.windows import even_sizes
from commrt.layers.tensors.dist_tensor import DistTensor
from commrt.layers.tensors.moves import moved, moved_for_parts, summed_backward
from commrt.layers.tensors.placement import Placement, Sharded
from commrt.layers.tensors.within import within

__all__ = [
    "ChannelForm",
    "biased",
    "form_of",
    "grouped_cut",
    "taken",
    "tile_of",
    "tiled",
    "wanted_filters",
]

Axes: TypeAlias = tuple[str, ...]
FORMS = ("auto", "x", "y", "w")


@dataclass(frozen=True)
class ChannelForm:
    """How one product over channels is computed."""

    name: str
    """"x", "y" or "w"; "x" where both ways are the same."""
    channels: Sharded | None
    """How channels are cut in the computation."""
    filters: Sharded | None
    """How filters are cut in the computation."""
    open_sums: Axes
    """Axes along which the computed result is the sum of parts."""
    result: Sharded | None
    """How the filters are cut in the end."""
    nbytes: float
    """Bytes that a rank receives in both passes, as if all pieces were even."""


def wanted_filters(x: DistTensor, filters: int, dim: int = 1) -> Axes:
    """Return the axes that shall cut the filters: the strategy's, or the channels'.

    Too few filters for a piece on every place stay whole.
    """
    module, cut = within(), x.placement.dims[dim]
    asked = module.filters if module is not None else cut.axes if cut else ()
    others = {
        a for n, d in enumerate(x.placement.dims) if d and n != dim for a in d.axes
    }
    axes = tuple(a for a in asked if x.grid.size(a) > 1 and a not in others)
    return axes if filters >= x.grid.size(axes) else ()


def form_of(
    x: DistTensor, out_numel: int, filters: Axes, stationary: str, dim: int = 1
) -> ChannelForm:
    """Return how a product over channels is computed; local.

    Args:
        x: the input; ``dim`` has its channels.
        out_numel: elements of the whole result.
        filters: axes that shall cut the result's channels, in any order.
        stationary: "auto", or one of the forms "x", "y" and "w".
        dim: the dimension of the channels.

    Raises UsageError where the form needs more axes than cut both.
    """
    grid, cut = x.grid, x.placement.dims[dim]
    channels = tuple(a for a in (cut.axes if cut else ()) if grid.size(a) > 1)
    both = [a for a in channels if a in filters]
    # Kept axes must come first in the order of the cut, so that pieces nest.
    kept = [both[:count] for count in range(len(both), -1, -1)]
    names = {len(both): "x", 0: "y"}
    forms = []
    for some in kept:
        name = "x" if not both else names.get(len(some), "w")
        if stationary in ("auto", name) or not both:
            forms.append(_form(x, cut, channels, filters, some, name, out_numel, dim))
    if not forms:
        raise UsageError(
            f"stationary={stationary!r}: axes {both} cut channels and filters; "
            f"expected two of them at least for 'w'; use 'x', 'y' or 'auto'"
        )
    return min(forms, key=lambda form: form.nbytes)


def _form(
    x: DistTensor,
    cut: Sharded | None,
    channels: Axes,
    filters: Axes,
    kept: Sequence[str],
    name: str,
    out_numel: int,
    dim: int,
) -> ChannelForm:
    """Return the form in which the axes ``kept`` keep the input where it is."""
    grid = x.grid
    stay = tuple(a for a in channels if a in kept or a not in filters)
    computed = tuple(a for a in grid.axes if a in filters and a not in kept)
    result = (*computed, *kept)
    others = [d.axes for n, d in enumerate(x.placement.dims) if d and n != dim]
    shares = math.prod(grid.size(axes) for axes in others)
    own_x = math.prod(x.shape) / shares / grid.size(stay)
    own_y = out_numel / shares / grid.size(computed)
    received = 0.0
    gathered = grid.size([a for a in channels if a not in stay])
    received += 2 * own_x * (gathered - 1) / gathered
    alone = grid.size([a for a in computed if a not in channels])
    received += 2 * own_x * (alone - 1) / alone
    scattered = grid.size(kept)
    received += 2 * own_y * (scattered - 1) / scattered
    summed = grid.size([a for a in stay if a not in filters])
    received += 2 * own_y / scattered * (summed - 1) / summed
    keeps_all = stay == channels
    return ChannelForm(
        name=name,
        channels=cut if keeps_all and stay else Sharded(stay) if stay else None,
        filters=Sharded(computed) if computed else None,
        open_sums=stay,
        result=Sharded(result) if result else None,
        nbytes=received * x.dtype.itemsize,
    )


def taken(x: DistTensor, form: ChannelForm, dim: int = 1) -> DistTensor:
    """Return the input as the form needs it, for ranks that compute parts of sums."""
    dims = [*x.placement.dims]
    dims[dim] = form.channels
    target = Placement(*dims)
    axes = form.filters.axes if form.filters else ()
    local = moved_for_parts(x.local, x.grid, tuple(x.shape), x.placement, target, axes)
    return DistTensor(local, x.shape, x.grid, target)


def tile_of(
    weight: Any,
    grid: ProcessGrid,
    dims: Sequence[Sharded | None],
    shared: Sequence[str],
) -> Any:
    """Return this rank's tile of a weight that is whole, or a distributed tensor.

    Args:
        weight: the same on all ranks, or a DistTensor.
        grid: the ranks.
        dims: how the tile is cut.
        shared: axes along which ranks compute parts of the tile's gradient; these are
            summed. ``()`` where the function of the tile does so.
    """
    if weight is None:
        return None
    whole, source = weight, Placement.replicated(weight.dim())
    if isinstance(weight, DistTensor):
        whole, source = weight.local, weight.placement
        if source.partial or weight.grid is not grid:
            raise UsageError(
                f"a weight that is distributed must lie on the input's grid without "
                f"open sums; it is {weight}"
            )
    target = Placement(*dims)
    part = moved(whole, grid, tuple(weight.shape), source, target)
    return summed_backward(part, grid, shared)


def tiled(parameter: Any, grid: ProcessGrid) -> Any:
    """Return a parameter of which a rank keeps a tile as a distributed tensor.

    Any other value is returned as it is.
    """
    module = within()
    found = module.tiles.get(id(parameter)) if module is not None else None
    if found is None:
        return parameter
    shape = torch.Size(found.shape)
    return DistTensor.unchecked(parameter, shape, grid, found.placement)


def biased(
    y: DistTensor, bias: Any, form: ChannelForm, shared: Sequence[str], dim: int = 1
) -> DistTensor:
    """Return a result with its open sums made, its filters cut, and a bias added."""
    dims = [*y.placement.dims]
    dims[dim] = form.result
    y = y.redistribute(placement=Placement(*dims))
    if bias is None:
        return y
    part = tile_of(bias, y.grid, [form.result], shared)
    if torch.is_autocast_enabled(y.device.type):  # as a product of torch adds it
        part = part.to(y.dtype)
    local = y.local + part.view(-1, *[1] * (y.dim() - dim - 1))
    return DistTensor(local, y.shape, y.grid, y.placement)


def grouped_cut(
    axes: Axes, grid: ProcessGrid, groups: int, channels: int
) -> Sharded | None:
    """Return the cut of channels into whole groups, as even as can be."""
    if not axes:
        return None
    per_group = channels // groups
    sizes = even_sizes(groups, grid.size(axes))
    return Sharded(axes, sizes=tuple(size * per_group for size in sizes))
