# SPDX-License-Identifier: Apache-2.0
"""torch's cross_entropy, nll_loss and softmax, of tensors whose classes may be cut.

    logits = DistTensor(piece, (1024, 50257), grid, Placement("data", "vocabulary"))
    loss = functional.cross_entropy(logits, target)  # target lies as the rows do
    loss.backward()

Batch and space may be cut in any way. Where classes are cut, too, no rank gets the
logits of another one (Megatron-LM's vocabulary-parallel cross-entropy, Shoeybi et al.,
2019, section 3). Results and gradients are those of torch.

Bytes, for R rows (samples times places) of this rank and elements of e bytes:

- over the axes that cut rows: an ``allreduce`` of 24 bytes, forward;
- over the axes that cut classes, ``cross_entropy`` with class numbers: an allreduce
  (max) of R e and one (sum) of 2 R e, or 3 R e with label smoothing, forward;
- ``log_softmax`` and ``softmax``: an allreduce (max) and one (sum) of R e each,
  forward, and one of R e backward. ``cross_entropy`` with probabilities sends these,
  and R e;
- ``nll_loss``: an allreduce of R e, forward.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.nn import functional

from commrt.comm import Communicator
from commrt.errors import UsageError, shown
from commrt.layers.differentiable_once import differentiable_once
from commrt.layers.tensors.dist_tensor import DistTensor
from commrt.layers.tensors.loss_reductions import (
    check_call,
    lying_as,
    made,
    of_one_rank,
)
from commrt.layers.tensors.placement import Placement
from commrt.layers.tensors.rules import takes
from commrt.layers.tensors.spatial import several

__all__ = ["cross_entropy", "log_softmax", "nll_loss", "softmax"]

Tensor: TypeAlias = torch.Tensor


# -- where classes lie -----------------------------------------------------------------


class _Classes(NamedTuple):
    """The classes of this rank."""

    dim: int
    """The dimension of the input."""
    extent: int
    """Classes in all."""
    axes: tuple[str, ...]
    """Axes of several ranks that cut them; () where each rank has all."""
    comm: Communicator | None
    """The ranks along these axes; None where each has all."""
    numbers: Tensor
    """The numbers of this rank's classes, in its order."""

    def columns(self, target: Tensor) -> tuple[Tensor, Tensor]:
        """Return where targets lie in this rank's classes, and which ones do.

        The column of a class of another rank is 0.
        """
        places = target.new_full((self.extent + 1,), -1)
        places[self.numbers] = torch.arange(
            len(self.numbers), device=target.device, dtype=target.dtype
        )
        is_class = (target >= 0) & (target < self.extent)
        found = places[target.where(is_class, target.new_tensor(self.extent))]
        return found.clamp(min=0), found >= 0


def _classes_of(x: DistTensor, dim: int) -> _Classes:
    axes = several(x, [dim])
    runs = x.placement.runs(dim, x.grid, x.shape[dim])
    pieces = [torch.arange(low, high) for low, high, _ in runs]
    numbers = torch.cat(pieces) if pieces else torch.arange(0)
    comm = x.grid[axes] if axes else None
    return _Classes(dim, x.shape[dim], axes, comm, numbers.to(x.device))


def _rows_of(x: DistTensor, dim: int) -> tuple[Placement, torch.Size]:
    """Return where rows lie, and their shape: the input without its classes."""
    dims = [cut for number, cut in enumerate(x.placement.dims) if number != dim]
    shape = [extent for number, extent in enumerate(x.shape) if number != dim]
    return Placement(*dims), torch.Size(shape)


# -- softmax ---------------------------------------------------------------------------


class _LogSoftmax(torch.autograd.Function):  # type: ignore[misc]
    """Logarithms of probabilities over the last dimension, which is cut."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Communicator) -> Tensor:
        x = x.detach()
        shifted = x - _largest(x, comm)[..., None]
        total = shifted.exp().sum(-1).contiguous()
        comm.allreduce(total)
        result = shifted - total.log()[..., None]
        ctx.comm = comm
        ctx.save_for_backward(result)
        return result

    @staticmethod
    @differentiable_once("a DistTensor")
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (result,) = ctx.saved_tensors
        total = gradient.sum(-1).contiguous()
        ctx.comm.allreduce(total)
        return gradient - result.exp() * total[..., None], None


def _largest(x: Tensor, comm: Communicator) -> Tensor:
    """Return the largest of each row's classes on all ranks."""
    largest = x.new_full(x.shape[:-1], -torch.inf)
    if x.shape[-1]:
        largest = x.amax(-1).contiguous()
    comm.allreduce(largest, "max")
    return largest


def _softmax(
    what: str,
    function: Callable[..., Tensor],
    input: DistTensor,
    dim: int | None = None,
    _stacklevel: int = 3,
    dtype: Any = None,
) -> DistTensor:
    """Return softmax or its logarithm over a dimension, cut as the input is."""
    x = input
    if x.placement.partial:
        raise UsageError(
            f"{what}: {x} has parts on several ranks: redistribute() it first"
        )
    if not isinstance(dim, int) or not -x.dim() <= dim < x.dim():
        raise UsageError(f"{what}: dim={shown(dim)} must be a dimension of {x}")
    at = dim % x.dim()
    axes = several(x, [at])
    if not axes:
        local = function(x.local, dim=at, dtype=dtype)
    else:
        moved_last = x.local.to(dtype or x.dtype).movedim(at, -1)
        local = _LogSoftmax.apply(moved_last, x.grid[axes]).movedim(-1, at)
        local = local.exp() if what == "softmax" else local
    return DistTensor(local, x.shape, x.grid, x.placement)


log_softmax = partial(_softmax, "log_softmax", functional.log_softmax)
softmax = partial(_softmax, "softmax", functional.softmax)


def _of_torch(
    rule: Callable[..., DistTensor], input: DistTensor, dim: int, dtype: Any = None
) -> DistTensor:
    """Call a rule with the arguments of torch's functions outside of ``functional``."""
    return rule(input, dim, dtype=dtype)


for _name, _rule in (("log_softmax", log_softmax), ("softmax", softmax)):
    takes(getattr(functional, _name))(_rule)
    _short = partial(_of_torch, _rule)
    takes(getattr(torch, _name), getattr(Tensor, _name), method=_name)(_short)


# -- losses of rows --------------------------------------------------------------------


@takes(functional.cross_entropy)
def cross_entropy(
    input: Any,
    target: Any,
    weight: Any = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> DistTensor:
    """Return torch's cross_entropy of class numbers, or of probabilities."""
    what = "cross_entropy"
    check_call(what, input, target, reduction, size_average, reduce)
    dim, weight = _check_rows(what, input, weight)
    if not 0.0 <= label_smoothing <= 1.0:
        raise UsageError(
            f"{what}: label_smoothing={label_smoothing} must be from 0 to 1"
        )
    more = {"weight": weight, "label_smoothing": label_smoothing}
    if target.dtype.is_floating_point:
        return _of_probabilities(input, target, dim, reduction, more)
    rows = _rows_and_target(what, input, target, dim, ignore_index)

    def cut_classes(x: Tensor, y: Tensor, counts: Tensor) -> Tensor:
        flat = x.movedim(dim, -1).reshape(y.numel(), x.shape[dim])
        how = _How(rows.classes, weight, label_smoothing)
        found: Tensor = _CrossEntropy.apply(
            flat, y.reshape(-1), counts.reshape(-1), how
        )
        return found.view(y.shape)

    return _judged(rows, reduction, more, cut_classes)


@takes(functional.nll_loss)
def nll_loss(
    input: Any,
    target: Any,
    weight: Any = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
) -> DistTensor:
    """Return torch's nll_loss of logarithms of probabilities."""
    what = "nll_loss"
    check_call(what, input, target, reduction, size_average, reduce)
    dim, weight = _check_rows(what, input, weight)
    rows = _rows_and_target(what, input, target, dim, ignore_index)

    def cut_classes(x: Tensor, y: Tensor, counts: Tensor) -> Tensor:
        column, is_here = rows.classes.columns(y)
        is_here = is_here & counts
        last = x.movedim(dim, -1)
        if not last.shape[-1]:
            last = functional.pad(last, (0, 1))
        own = last.gather(-1, column[..., None])[..., 0]
        own = own.where(is_here, torch.zeros_like(own))
        if weight is not None:
            own = own * _of_targets(weight, y, counts)
        parts = rows.placement.with_partial(rows.classes.axes)
        return -DistTensor(own, rows.shape, input.grid, parts).redistribute().local

    return _judged(rows, reduction, {"weight": weight}, cut_classes)


def _check_rows(what: str, x: DistTensor, weight: Any) -> tuple[int, Any]:
    """Return the dimension of the classes, and the weight as all ranks have it."""
    if x.dim() == 0 or not x.dtype.is_floating_point:
        raise UsageError(
            f"{what}: {x} must have classes, in dimension 1 behind a batch or as the "
            f"only dimension, and be of floats"
        )
    dim = 1 if x.dim() > 1 else 0
    if isinstance(weight, DistTensor):
        if weight.placement.partial or several(weight, range(weight.dim())):
            raise UsageError(
                f"{what}: the weight {weight} must be whole on every rank: "
                f"redistribute() it first"
            )
        weight = weight.local
    if weight is not None and tuple(weight.shape) != (x.shape[dim],):
        raise UsageError(
            f"{what}: weight of shape {tuple(weight.shape)}; expected a number for "
            f"each of the {x.shape[dim]} classes"
        )
    return dim, weight


class _Rows(NamedTuple):
    """The rows of a loss."""

    what: str
    """The loss."""
    x: DistTensor
    target: DistTensor
    """The target; it lies as the rows do."""
    placement: Placement
    shape: torch.Size
    classes: _Classes
    ignore_index: int


def _rows_and_target(
    what: str, x: DistTensor, target: DistTensor, dim: int, ignore_index: int
) -> _Rows:
    """Return the rows; UsageError for a target that does not fit them."""
    placement, shape = _rows_of(x, dim)
    if target.shape != shape or target.dtype != torch.int64:
        raise UsageError(
            f"{what}: target of shape {tuple(target.shape)} and type {target.dtype}; "
            f"expected class numbers in int64 of shape {tuple(shape)}"
        )
    target = lying_as(what, target, placement)
    classes = _classes_of(x, dim)
    return _Rows(what, x, target, placement, shape, classes, ignore_index)


def _of_targets(weight: Tensor, target: Tensor, counts: Tensor) -> Tensor:
    """Return the weight of each row's class; 0 where it does not count."""
    zero = target.new_zeros(())
    found = weight[target.where(counts, zero)] if len(weight) else counts * 0.0
    return found.where(counts, torch.zeros_like(found))


def _judged(
    rows: _Rows,
    reduction: str,
    more: dict[str, Any],
    cut_classes: Callable[[Tensor, Tensor, Tensor], Tensor],
) -> DistTensor:
    """Return the loss of rows: whole, or with reduction "none" cut as they are.

    Args:
        rows: the rows.
        reduction: "none", "mean" or "sum".
        more: arguments of torch's function.
        cut_classes: returns the losses of rows whose classes are cut, by this rank's
            logits, the target, and which rows count.
    """
    x, classes, y = rows.x, rows.classes, rows.target.local.detach()
    counts = y != rows.ignore_index
    is_class = (y >= 0) & (y < classes.extent)
    num_wrong = int((counts & ~is_class).sum())
    counts = counts & is_class
    # A target that is no class does not reach torch, which raises on one rank alone.
    y = y.where(counts, y.new_tensor(rows.ignore_index))
    function = partial(
        getattr(functional, rows.what), ignore_index=rows.ignore_index, **more
    )
    if x.grid.num_ranks == 1 and not num_wrong:
        local = function(x.local, y, reduction=reduction)
        return of_one_rank(local, x.grid, rows.placement)
    if classes.axes:
        local = cut_classes(x.local, y, counts)
    elif y.numel():
        local = function(x.local, y, reduction="none")
    else:
        local = x.local.sum(classes.dim)  # torch takes no empty space
    weight = more["weight"]
    divisor = counts.sum() if weight is None else _of_targets(weight, y, counts).sum()
    return made(
        DistTensor(local, rows.shape, x.grid, rows.placement),
        reduction,
        divisor=divisor,
        num_wrong=num_wrong,
        wrong=f"{rows.what}: {{number}} targets are no classes; expected "
        f"0..{classes.extent - 1}, or ignore_index={rows.ignore_index}",
    )


class _How(NamedTuple):
    """The arguments of ``_CrossEntropy`` that have no gradient."""

    classes: _Classes
    weight: Tensor | None
    smoothing: float


class _CrossEntropy(torch.autograd.Function):  # type: ignore[misc]
    """The losses of rows (R, C) whose classes are cut.

    A row with the class t and the weights w has the loss (1 - s) w_t (L - x_t) + s / C
    sum_c w_c (L - x_c). Here s is the smoothing, and L the logarithm of the sum of
    exponentials.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, counts: Tensor, how: _How) -> Tensor:
        x, classes = x.detach(), how.classes
        assert classes.comm is not None
        column, is_here = classes.columns(y)
        is_here = is_here & counts
        shifted = x - _largest(x, classes.comm)[:, None]
        exponentials = shifted.exp()
        own = torch.zeros_like(exponentials.sum(1))
        if x.shape[1]:
            own = shifted.gather(1, column[:, None])[:, 0].where(is_here, own)
        parts = [exponentials.sum(1), own]
        weights, share = None, how.smoothing / max(classes.extent, 1)
        if how.smoothing:
            weights = x.new_ones(x.shape[1])
            if how.weight is not None:
                weights = how.weight[classes.numbers].to(x.dtype)
            parts.append((shifted * weights).sum(1))
        sums = torch.stack(parts)
        classes.comm.allreduce(sums)
        logarithm = sums[0].log()
        of_class = (1 - how.smoothing) * counts.to(x.dtype)
        if how.weight is not None:
            of_class = of_class * _of_targets(how.weight, y, counts).to(x.dtype)
        factor = of_class
        losses = of_class * (logarithm - sums[1])
        if weights is not None:
            total = float(classes.extent)
            if how.weight is not None:
                total = float(how.weight.sum())
            factor = factor + share * total
            losses = losses + share * (total * logarithm - sums[2])
        ctx.share, ctx.classes = share, classes
        softmax = exponentials.div_(sums[0][:, None])
        ctx.save_for_backward(
            *(softmax, column, is_here, counts, of_class, factor, weights)
        )
        return losses.where(counts, torch.zeros_like(losses))

    @staticmethod
    @differentiable_once("a DistTensor")
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        softmax, column, is_here, counts, of_class, factor, weights = ctx.saved_tensors
        nothing = torch.zeros_like(gradient)
        g = gradient.where(counts, nothing)
        found = softmax * (g * factor)[:, None]
        if found.shape[1]:
            own = (g * of_class).where(is_here, nothing)
            found.scatter_add_(1, column[:, None], -own[:, None])
        if weights is not None:
            found -= ctx.share * g[:, None] * weights
        return found, None, None, None


# -- probabilities as targets ----------------------------------------------------------


def _of_probabilities(
    x: DistTensor, target: DistTensor, dim: int, reduction: str, more: dict[str, Any]
) -> DistTensor:
    """Return the cross-entropy of probabilities; its mean is over the rows."""
    if target.shape != x.shape:
        raise UsageError(
            f"cross_entropy: probabilities of shape {tuple(target.shape)}; expected "
            f"the input's shape {tuple(x.shape)}"
        )
    target = lying_as("cross_entropy", target, x.placement)
    rows, shape = _rows_of(x, dim)
    axes = several(x, [dim])
    if x.grid.num_ranks == 1 and reduction != "none":
        local = functional.cross_entropy(
            x.local, target.local, reduction=reduction, **more
        )
        return of_one_rank(local, x.grid, rows)
    if not axes:
        local = (x.local * target.local).sum(dim)  # torch takes no empty space
        if local.numel():
            local = functional.cross_entropy(
                x.local, target.local, reduction="none", **more
            )
        return made(DistTensor(local, shape, x.grid, rows), reduction)
    smoothing, weight = more["label_smoothing"], more["weight"]
    logs = log_softmax(x, dim).local
    wanted = target.local * (1 - smoothing) + smoothing / x.shape[dim]
    if weight is not None:
        own = weight[_classes_of(x, dim).numbers].to(logs.dtype)
        wanted = wanted * own.view(-1, *[1] * (x.dim() - dim - 1))
    parts = -(logs * wanted).sum(dim)
    open_sums = Placement(*rows.dims, partial=axes)
    losses = DistTensor(parts, shape, x.grid, open_sums).redistribute()
    return made(losses, reduction)
