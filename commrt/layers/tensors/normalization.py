# SPDX-License-Identifier: Apache-2.0
"""torch's normalizations of tensors that are cut in space or in the batch.

Statistics are those of the whole: of the batch in ``batch_norm``, of each sample in
``group_norm``. Weights and running statistics are plain tensors that all ranks have, as
a module keeps them.
"""

from __future__ import annotations

from typing import Any

from torch.nn import functional

from commrt.errors import UsageError
from commrt.layers.spatial import normalization
from commrt.layers.tensors.dist_tensor import DistTensor
from commrt.layers.tensors.rules import takes
from commrt.layers.tensors.spatial import check_weights, cuts_of, cutting_comm

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
    check_weights("batch_norm", input, weight, bias)
    cuts_of("batch_norm", input)
    comm = cutting_comm(input)
    local = normalization.batch_norm(
        *(input.local, running_mean, running_var, weight, bias),
        comms=() if comm is None else (comm,),
        training=training,
        momentum=momentum,
        eps=eps,
        sum_weight_gradients_over=comm,
    )
    return DistTensor(local, input.shape, input.grid, input.placement)


@takes(functional.group_norm)
def group_norm(
    input: DistTensor,
    num_groups: int,
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
) -> DistTensor:
    """Return the group normalization of whole samples."""
    check_weights("group_norm", input, weight, bias)
    cuts = cuts_of("group_norm", input)
    if input.dim() < 2:
        raise UsageError(f"group_norm: {input} must have a batch and channels")
    local = normalization.group_norm(
        *(input.local, num_groups, weight, bias),
        comms=[cut.comm for number, cut in cuts.items() if number >= 2],
        eps=eps,
        sum_weight_gradients_over=cutting_comm(input),
    )
    return DistTensor(local, input.shape, input.grid, input.placement)
