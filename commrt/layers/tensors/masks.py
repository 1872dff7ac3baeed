# SPDX-License-Identifier: Apache-2.0
"""torch's dropout of distributed tensors: one mask for any cut.

The first rank of the grid draws a seed from torch's generator, and all ranks get it. An
element is dropped by a hash of the seed and of its place in the whole tensor. So
``torch.manual_seed`` on that rank repeats a run, on any cut; and activation
checkpointing, which restores torch's generator, draws the same mask again.

On one rank dropout is torch's own, bit for bit. With p = 0, and in evaluation, nothing
is drawn or sent.

Pattern: one ``bcast`` of 8 bytes over the grid for each call. The backward pass sends
nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch.nn import functional

from commrt.errors import UsageError
from commrt.layers.agreed_seed import agreed_seed
from commrt.layers.spatial.cut import Cut
from commrt.layers.spatial.dropout import dropout as of_piece
from commrt.layers.tensors.dist_tensor import DistTensor
from commrt.layers.tensors.rules import takes

__all__: list[str] = []


def _dropped(
    what: str,
    function: Callable[..., torch.Tensor],
    whole_channels: bool,
    input: DistTensor,
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,
) -> DistTensor:
    """Return the tensor with elements, or channels, set to 0 in training."""
    x, grid = input, input.grid
    if not training or p == 0:
        return x
    if x.placement.partial:
        raise UsageError(
            f"{what}: {x} has parts on several ranks: redistribute() it first"
        )
    if grid.num_ranks == 1:
        return DistTensor(function(x.local, p, True), x.shape, grid, x.placement)
    cuts: dict[int, Cut] = {}
    for number, (cut, extent) in enumerate(zip(x.placement.dims, x.shape, strict=True)):
        if cut is None or grid.size(cut.axes) == 1:
            continue
        if cut.block is not None:
            raise UsageError(
                f"{what}: {x}: dimension {number} must be cut in one piece for each "
                f"place; redistribute() it first"
            )
        comm = grid[cut.axes]
        cuts[number] = Cut(comm, cut.pieces(extent, comm.size))
    seed = agreed_seed(grid.comm, only_first_draws=True)
    local = of_piece(x.local, p, seed=seed, cuts=cuts, whole_channels=whole_channels)
    return DistTensor(local, x.shape, grid, x.placement)


for _name in ("dropout", "dropout1d", "dropout2d", "dropout3d"):
    _function = getattr(functional, _name)
    takes(_function)(partial(_dropped, _name, _function, _name != "dropout"))
