# SPDX-License-Identifier: Apache-2.0
"""Sums of sparse tensors: what each rank has is gathered, as Horovod does it."""

from __future__ import annotations

from typing import TypeAlias

import torch

from commrt.errors import UsageError, shown
from commrt.hvd.handles import Handle
from commrt.hvd.operators import Average, ReduceOp, Sum
from commrt.hvd.process_sets import ProcessSet, global_process_set
from commrt.hvd.submitting import MOVED, Call, refusing

__all__ = ["sparse_allreduce_async"]

Tensor: TypeAlias = torch.Tensor


def sparse_allreduce_async(
    tensor: Tensor,
    name: str | None,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    *,
    pieces: str = "",
) -> Handle:
    """Start the sum or average of sparse COO tensors: two allgathers of what they have.

    The result is a sparse tensor that is not coalesced. The handle may be called, as
    Horovod's programs do, or be given to ``synchronize``. ``pieces``: of cut
    parameters whose gradients these are; equal on all ranks.
    """
    what = "hvd.sparse_allreduce_async"
    with refusing("sparse_allreduce_async", "allgather", name, process_set):
        if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.sparse_coo:
            raise UsageError(f"{what}: {shown(tensor)} is no sparse COO tensor")
        if op not in (Average, Sum):
            raise UsageError(f"{what}: op={shown(op)} must be hvd.Average or hvd.Sum")
        given = tensor.detach().coalesce()
    both = [given.indices().T.contiguous(), given.values().contiguous()]
    call = Call("sparse_allreduce_async", "allgather", name, process_set)
    entry = call.entry(both, lambda: {"pieces": pieces}, MOVED)

    def result() -> Tensor:
        indices, values = entry.outputs
        assert indices is not None
        assert values is not None
        if op is Average:
            values = values / len(call.ranks)
        made: Tensor = torch.sparse_coo_tensor(
            indices.T, values, given.shape, check_invariants=False
        )
        return made

    return call.handle(entry, result)


# -- allgather and broadcast -----------------------------------------------------------
