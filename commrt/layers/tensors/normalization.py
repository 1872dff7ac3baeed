# SPDX-License-Identifier: Apache-2.0
"""torch's normalizations of tensors whose batch, space and channels are cut.

Statistics are those of the whole: of the batch in ``batch_norm``, of each sample in
``group_norm``. Weights and running statistics are plain tensors that all ranks have, as
a module keeps them; weights may be DistTensors, too.

Cut channels: each rank takes the statistics of its channels. In training, running
statistics are gathered, 2 C numbers, so that all ranks keep them whole. A group
normalization needs pieces that are whole groups, or a single group. Gradients of whole
weights are gathered along the axes that cut channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional

from commrt.errors import UsageError
from commrt.layers.process_grid import ProcessGrid
from commrt.layers.spatial import normalization
from commrt.layers.spatial.windows import even_sizes
from commrt.layers.tensors.channels import tile_of
from commrt.layers.tensors.dist_tensor import DistTensor
from commrt.layers.tensors.moves import moved
from commrt.layers.tensors.placement import Placement, Sharded
from commrt.layers.tensors.rules import takes
from commrt.layers.tensors.spatial import cuts_of, several
from commrt.layers.tensors.within import within

__all__ = ["batch_norm", "group_norm"]


@takes(functional.batch_norm)
def batch_norm(
    input: DistTensor,
    running_mean: Any = None,
    running_var: Any = None,
    weight: Any = None,
    bias: Any = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> DistTensor:
    """Return the batch normalization by statistics of the whole batch."""
    _check_input("batch_norm", input)
    cuts_of("batch_norm", input)
    grid, cut = input.grid, _channel_cut(input)
    shared = several(input, [n for n in range(input.dim()) if n != 1])
    comm = grid[shared] if shared else None
    running = [_own(each, grid, cut) for each in (running_mean, running_var)]
    local = normalization.batch_norm(
        *(input.local, *running),
        *(tile_of(each, grid, [cut], ()) for each in (weight, bias)),
        comms=() if comm is None else (comm,),
        training=training,
        momentum=momentum,
        eps=eps,
        sum_weight_gradients_over=comm,
    )
    if training and cut is not None and running_mean is not None:
        _gather_into([running_mean, running_var], running, grid, cut)
    return DistTensor(local, input.shape, grid, input.placement)


@takes(functional.group_norm)
def group_norm(
    input: DistTensor,
    num_groups: int,
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
) -> DistTensor:
    """Return the group normalization of whole samples."""
    _check_input("group_norm", input)
    cuts = cuts_of("group_norm", input)
    grid, cut = input.grid, _channel_cut(input)
    groups = num_groups
    comms = [cut.comm for number, cut in cuts.items() if number >= 2]
    if cut is not None and num_groups == 1:
        comms.append(grid[cut.axes])
    elif cut is not None:
        input, cut, groups = _in_groups(input, cut, num_groups)
    shared = several(input, [n for n in range(input.dim()) if n != 1])
    local = normalization.group_norm(
        *(input.local, groups),
        *(tile_of(each, grid, [cut], ()) for each in (weight, bias)),
        comms=comms,
        eps=eps,
        sum_weight_gradients_over=grid[shared] if shared else None,
    )
    return DistTensor(local, input.shape, grid, input.placement)


def _check_input(what: str, x: Any) -> None:
    """Raise UsageError unless the input is a distributed tensor with channels."""
    if not isinstance(x, DistTensor) or x.dim() < 2:
        raise UsageError(
            f"{what}: {x} must be a DistTensor with a batch and channels; weights may "
            f"be plain tensors that all ranks have"
        )


def _channel_cut(x: DistTensor) -> Sharded | None:
    """Return how channels are cut among several ranks; None: not at all."""
    return x.placement.dims[1] if several(x, [1]) else None


def _in_groups(
    x: DistTensor, cut: Sharded, num_groups: int
) -> tuple[DistTensor, Sharded, int]:
    """Return the input in pieces of whole groups, their cut, and the own groups."""
    grid, channels = x.grid, x.shape[1]
    if not isinstance(num_groups, int) or num_groups < 1 or channels % num_groups:
        raise UsageError(
            f"group_norm: num_groups={num_groups} must divide the {channels} channels"
        )
    per_group = channels // num_groups
    sizes = cut.pieces(channels, grid.size(cut.axes))
    if any(size % per_group for size in sizes):
        per = even_sizes(num_groups, grid.size(cut.axes))
        target = Sharded(cut.axes, sizes=tuple(each * per_group for each in per))
        dims = [*x.placement.dims]
        dims[1] = target
        if within() is None:
            raise UsageError(
                f"group_norm: num_groups={num_groups}: {x} has pieces of channels that "
                f"are not whole groups: redistribute() dimension 1 to {target} first"
            )
        x, cut = x.redistribute(placement=Placement(*dims)), target
        sizes = target.pieces(channels, grid.size(cut.axes))
    if min(sizes) == 0:
        raise UsageError(
            f"group_norm: {num_groups} groups cannot be cut over "
            f"{grid.size(cut.axes)} places: redistribute() so that channels are whole"
        )
    return x, cut, x.local.shape[1] // per_group


def _own(whole: Any, grid: ProcessGrid, cut: Sharded | None) -> Any:
    """Return this rank's channels of running statistics."""
    if whole is None or cut is None:
        return whole
    (low, high, _), *_ = Placement(cut).runs(0, grid, whole.shape[0]) or [(0, 0, 0)]
    return whole[low:high].clone()


def _gather_into(
    whole: Sequence[Any], own: Sequence[Any], grid: ProcessGrid, cut: Sharded
) -> None:
    """Put the statistics of all channels into what every rank keeps whole."""
    both = torch.stack([each.detach() for each in own])
    shape = 2, whole[0].shape[0]
    gathered = moved(both, grid, shape, Placement(None, cut), Placement(None, None))
    for kept, row in zip(whole, gathered, strict=True):
        kept.copy_(row)
