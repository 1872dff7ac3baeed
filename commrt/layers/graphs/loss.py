# SPDX-License-Identifier: Apache-2.0
"""Cross-entropy of logits whose rows and classes are cut over ranks.

Bytes, for R rows of this rank's logits of e bytes each: over the axes that cut classes,
an allreduce (max) of R * e and one (sum) of 2 R * e; over the axes that cut rows, an
allreduce of 24 bytes. The backward pass sends nothing: each rank's gradient is a
function of what it has.

Source: Megatron-LM's vocabulary-parallel cross-entropy (Shoeybi et al., 2019, section
3), with rows that are cut, too, as in Plexus (SC'25).
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import torch

from commrt.comm import Communicator
from commrt.errors import UsageError, shown
from commrt.layers.autocast import full_precision
from commrt.layers.differentiable_once import differentiable_once
from commrt.layers.process_grid import ProcessGrid
from commrt.layers.tensors import DistTensor, Placement

__all__ = ["cross_entropy3d"]

Tensor: TypeAlias = torch.Tensor


def cross_entropy3d(
    logits: DistTensor,
    target: DistTensor,
    grid: ProcessGrid | None = None,
    *,
    ignore_index: int = -100,
) -> DistTensor:
    """Return the mean cross-entropy, as torch's ``cross_entropy``; differentiable.

    Args:
        logits: (N, C), float32 or float64; rows and classes may be cut by any axes.
            Under torch's autocast shorter ones are taken in float32, as by torch.
        target: (N,), int64 class numbers, cut as the rows are.
        grid: None, or the grid of both.
        ignore_index: rows with this target do not count. Without any row that counts,
            the loss is NaN, as in torch.

    The result is one number, which all ranks have: ``loss.backward()`` may follow.
    Collective. Raises UsageError, on all ranks alike, for a target that is no class.
    """
    _check(logits, target, grid)
    grid, (rows, classes) = logits.grid, logits.placement.dims
    low = 0
    if classes is not None:
        runs = logits.placement.runs(1, grid, logits.shape[1])
        low = runs[0][0] if runs else 0
    how = _How(
        None if classes is None else grid[classes.axes],
        None if rows is None else grid[rows.axes],
        low,
        logits.shape[1],
        ignore_index,
    )
    given = full_precision(logits.local)
    local = _CrossEntropy.apply(given, target.local.detach(), how)
    return DistTensor(local, (), grid, Placement())


class _How(NamedTuple):
    """Where this rank's logits lie in the whole."""

    classes: Communicator | None
    rows: Communicator | None
    low: int
    num_classes: int
    ignore_index: int


class _CrossEntropy(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, how: _How) -> Tensor:
        logits = logits.detach()
        counts = target != how.ignore_index
        is_class = (target >= 0) & (target < how.num_classes)
        num_wrong = int((counts & ~is_class).sum())
        counts = counts & is_class
        column = target - how.low
        is_here = counts & (column >= 0) & (column < logits.shape[1])
        column = column.where(is_here, torch.zeros_like(column))

        largest = logits.new_full((len(logits),), -torch.inf)
        if logits.shape[1]:
            largest = logits.amax(1)
        _reduce(largest, how.classes, "max")
        exponentials = (logits - largest[:, None]).exp()
        both = torch.stack([exponentials.sum(1), torch.zeros_like(largest)])
        if logits.shape[1]:
            own = (logits.gather(1, column[:, None])[:, 0] - largest) * is_here
            both[1] = torch.where(is_here, own, torch.zeros_like(own))
        _reduce(both, how.classes, "sum")
        losses = torch.where(counts, both[0].log() - both[1], torch.zeros_like(both[0]))
        sums = [float(losses.sum()), float(counts.sum()), float(num_wrong)]
        totals = torch.tensor(sums, dtype=torch.float64)
        _reduce(totals, how.rows, "sum")
        if totals[2]:
            raise UsageError(
                f"cross_entropy3d: {int(totals[2])} targets are no classes; expected "
                f"0..{how.num_classes - 1}, or ignore_index={how.ignore_index}"
            )
        ctx.num_counted = totals[1]
        # Softmax is what the gradient needs; the logits themselves are not kept.
        ctx.save_for_backward(
            exponentials.div_(both[0][:, None]), column, is_here, counts
        )
        return (totals[0] / totals[1]).to(logits.dtype)

    @staticmethod
    @differentiable_once("a graph layer")
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        softmax, column, is_here, counts = ctx.saved_tensors
        found = softmax.clone()
        if found.shape[1]:
            ones = is_here.to(found.dtype)[:, None]
            found.scatter_add_(1, column[:, None], -ones)
        scale = (gradient / ctx.num_counted).to(found.dtype)
        return found.mul_(counts[:, None] * scale), None, None


def _reduce(x: Tensor, comm: Communicator | None, op: str) -> None:
    """Reduce a tensor in place over the ranks that cut a dimension, if any do."""
    if comm is not None and comm.size > 1 and x.numel():
        comm.allreduce(x, op)


def _check(logits: Any, target: Any, grid: ProcessGrid | None) -> None:
    """Raise UsageError unless the tensors fit each other."""
    if not isinstance(logits, DistTensor) or not isinstance(target, DistTensor):
        raise UsageError(
            f"cross_entropy3d: logits={shown(logits)} and target={shown(target)} must "
            f"be DistTensors on one grid"
        )
    if target.grid is not logits.grid or grid not in (None, logits.grid):
        raise UsageError(
            f"cross_entropy3d: logits lie on {logits.grid}, the target on "
            f"{target.grid}, and the grid is {grid}; expected the same one"
        )
    if logits.dim() != 2 or target.shape != logits.shape[:1]:
        raise UsageError(
            f"cross_entropy3d: logits of shape {tuple(logits.shape)} and a target of "
            f"shape {tuple(target.shape)}; expected (nodes, classes) and (nodes,)"
        )
    rows = Placement(logits.placement.dims[0])
    cut = logits.placement.dims[1]
    if (
        logits.placement.partial
        or not target.placement.is_same_as(rows, logits.grid, target.shape)
        or (cut is not None and cut.block is not None)
    ):
        raise UsageError(
            f"cross_entropy3d: logits lie as {logits.placement}, the target as "
            f"{target.placement}; expected no open sum, classes cut in one piece for "
            f"each rank, and the target cut as the rows are: {rows}"
        )
    if target.dtype != torch.int64 or not logits.dtype.is_floating_point:
        raise UsageError(
            f"cross_entropy3d: logits are {logits.dtype} and targets {target.dtype}; "
            f"expected floats and int64"
        )
