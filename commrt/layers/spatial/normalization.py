# SPDX-License-Identifier: Apache-2.0
"""Batch and group normalization of a tensor that is cut over ranks.

Each rank takes count, mean and squared deviations of its piece. The ranks' figures are
merged by the formula of Chan, Golub and LeVeque, which does not cancel.

Pattern, for each communicator over which statistics are taken: one ``allgather`` of
``2 C + 2`` numbers forward, and one ``allreduce`` of ``2 C`` numbers backward, where C
is the number of statistics: channels of a batch normalization, samples times groups of
a group normalization. Gradients of weight and bias may be summed by one ``allreduce``;
where that goes over the ranks of the statistics, the backward pass's own has the sums.
Bytes: those numbers, times the size of an element of the statistics.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional

from commrt.comm import Communicator
from commrt.errors import UsageError, shown
from commrt.layers.differentiable_once import differentiable_once
from commrt.layers.spatial.channel_sums import combined, gradient_sums, statistics
from commrt.layers.spatial.weight_gradients import check_sum, summed_gradients

__all__ = ["batch_norm", "group_norm"]


def batch_norm(
    x: Any,
    running_mean: Any = None,
    running_var: Any = None,
    weight: Any = None,
    bias: Any = None,
    *,
    comms: Sequence[Communicator] = (),
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
    sum_weight_gradients_over: Communicator | None = None,
) -> Any:
    """Return this rank's piece of a batch normalization; it is cut as ``x`` is.

    Args:
        x: this rank's piece: batch, channels, then any dimensions. It may be empty.
        running_mean, running_var: one element per channel, or None. In training they
            are updated in place, alike on all ranks of ``comms``.
        weight, bias: one element per channel, or None.
        comms: communicators over which statistics are taken, such as those of the cuts
            of batch, rows and columns. None of them: each rank has its own.
        training: use the statistics of this batch.
        momentum, eps: as in torch.
        sum_weight_gradients_over: ranks over which the backward pass sums the gradients
            of weight and bias. None: they are this rank's parts of the sums.

    In training collective over ``comms``, also in the backward pass. With one rank in
    each of them the result is torch's own, bit for bit.

    Raises UsageError for arguments that do not fit, before anything is sent. A batch
    with one value for each channel raises it on all ranks, once they know of it.
    """
    channels = _check("batch_norm", x, weight, bias, comms, sum_weight_gradients_over)
    for name, each in (("running_mean", running_mean), ("running_var", running_var)):
        if each is not None and tuple(each.shape) != (channels,):
            raise UsageError(
                f"batch_norm: {name} of shape {tuple(each.shape)} must have one "
                f"element for each of {channels} channels"
            )
    if not training and (running_mean is None or running_var is None):
        raise UsageError(
            "batch_norm: training=False needs running_mean and running_var"
        )
    several = [comm for comm in comms if comm.size > 1]
    # Sums of gradients over the ranks of the statistics are made for these anyway.
    has_sums = training and several == [sum_weight_gradients_over]
    if not has_sums:
        weight, bias = summed_gradients(weight, bias, sum_weight_gradients_over)
    if not training or not several:
        return functional.batch_norm(
            *(x, running_mean, running_var, weight, bias, training, momentum, eps)
        )
    y, mean, variance, count = _Normalized.apply(
        *(x, weight, bias, several, eps, has_sums)
    )
    if count < 2:
        raise UsageError(
            f"batch_norm: x has {count} value for each channel over all ranks; "
            f"training needs more"
        )
    if running_mean is not None:
        running_mean.lerp_(mean.to(running_mean.dtype), momentum)
    if running_var is not None:
        unbiased = variance * (count / (count - 1))
        running_var.lerp_(unbiased.to(running_var.dtype), momentum)
    return y


def group_norm(
    x: Any,
    num_groups: int,
    weight: Any = None,
    bias: Any = None,
    *,
    comms: Sequence[Communicator] = (),
    eps: float = 1e-5,
    sum_weight_gradients_over: Communicator | None = None,
) -> Any:
    """Return this rank's piece of a group normalization; it is cut as ``x`` is.

    Args:
        x: this rank's piece: batch, all channels, then any dimensions.
        num_groups: groups of channels.
        weight, bias: one element per channel, or None.
        comms: communicators along which spatial dimensions are cut. The batch may be
            cut, too; its communicator is none of them.
        eps: as in torch.
        sum_weight_gradients_over: ranks over which the backward pass sums the gradients
            of weight and bias. None: they are this rank's parts of the sums.

    Collective over ``comms``, also in the backward pass. With one rank in each of them
    the result is torch's own, bit for bit. Raises UsageError for arguments that do not
    fit, before anything is sent.
    """
    channels = _check("group_norm", x, weight, bias, comms, sum_weight_gradients_over)
    if not isinstance(num_groups, int) or num_groups < 1 or channels % num_groups:
        raise UsageError(
            f"group_norm: num_groups={shown(num_groups)} must divide the {channels} "
            f"channels of x"
        )
    weight, bias = summed_gradients(weight, bias, sum_weight_gradients_over)
    several = [comm for comm in comms if comm.size > 1]
    if not several:
        return functional.group_norm(x, num_groups, weight, bias, eps)
    groups = x.reshape(1, x.shape[0] * num_groups, channels // num_groups, *x.shape[2:])
    y = _Normalized.apply(groups, None, None, several, eps, False)[0].view(x.shape)
    return _scaled(y, weight, bias).to(x.dtype)


def _check(
    what: str,
    x: Any,
    weight: Any,
    bias: Any,
    comms: Sequence[Communicator],
    sum_over: Communicator | None,
) -> int:
    """Return the number of channels of ``x``."""
    if x.dim() < 2:
        raise UsageError(
            f"{what}: x of shape {tuple(x.shape)} must have a batch and channels"
        )
    for name, each in (("weight", weight), ("bias", bias)):
        if each is not None and tuple(each.shape) != (x.shape[1],):
            raise UsageError(
                f"{what}: {name} of shape {tuple(each.shape)} must have one element "
                f"for each of {x.shape[1]} channels"
            )
    for comm in comms:
        if not isinstance(comm, Communicator):
            raise UsageError(
                f"{what}: comms has {shown(comm)}, which is no communicator"
            )
    check_sum(what, sum_over)
    return int(x.shape[1])


def _scaled(y: Any, weight: Any, bias: Any) -> Any:
    """Return ``y * weight + bias`` by channel."""
    by_channel = (-1, *[1] * (y.dim() - 2))
    if weight is not None:
        y = y * weight.view(by_channel)
    return y if bias is None else y + bias.view(by_channel)


# -- statistics over ranks -------------------------------------------------------------


class _Normalized(torch.autograd.Function):  # type: ignore[misc]
    """``x`` less its mean, by its deviation, scaled; by dimension 1, over all ranks.

    Also returns mean, variance and count.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Any,
        weight: Any,
        bias: Any,
        comms: list[Communicator],
        eps: float,
        sums_weights: bool,
    ) -> tuple[Any, ...]:
        count, mean, deviation = statistics(x)
        for comm in comms:
            count, mean, deviation = _merged(count, mean, deviation, comm)
        variance = deviation / max(count, 1)
        if x.numel():
            y = functional.batch_norm(x, mean, variance, weight, bias, eps=eps)
        else:
            y = x.clone()
        ctx.comms, ctx.count, ctx.eps, ctx.sums_weights = (
            comms,
            count,
            eps,
            sums_weights,
        )
        ctx.save_for_backward(x, weight, mean, variance)
        ctx.mark_non_differentiable(mean, variance)
        return y, mean, variance, count

    @staticmethod
    @differentiable_once("a spatial layer")
    def backward(ctx: Any, gradient: Any, *_: Any) -> tuple[Any, ...]:
        x, weight, mean, variance = ctx.saved_tensors
        scale = (variance + ctx.eps).rsqrt()
        own = gradient_sums(gradient, x, mean)
        # Each element of x also changes mean and variance, which all ranks use.
        sums = own.clone()
        for comm in ctx.comms:
            comm.allreduce(sums)
        by_bias, by_weight = sums.chunk(2)
        a = scale if weight is None else weight * scale
        share = a / -max(ctx.count, 1)
        of_x = combined(
            *(gradient, x, mean, a, share * by_weight * scale.square()),
            share * by_bias,
        )
        of_weight = of_bias = None
        if weight is not None:
            of_bias, of_products = (sums if ctx.sums_weights else own).chunk(2)
            of_weight = of_products * scale
        return of_x, of_weight, of_bias, None, None, None


def _merged(
    count: int, mean: Any, deviation: Any, comm: Communicator
) -> tuple[int, Any, Any]:
    """Return the statistics of all ranks' pieces together, equal on all of them."""
    # A count is exact in float32 up to 2 ** 24: two parts of it are exact far beyond.
    parts = [float(part) for part in divmod(count, 1 << 20)]
    own = torch.cat([mean, deviation, mean.new_tensor(parts)])
    rows = own.new_empty((comm.size, own.numel()))
    comm.allgather(own, out=rows.view(-1))
    counts = [int(high) << 20 | int(low) for high, low in rows[:, -2:].tolist()]
    total = sum(counts)
    if total == 0:
        return 0, mean, deviation
    weights = mean.new_tensor([each / total for each in counts]).view(-1, 1)
    means, deviations = rows[:, :-2].chunk(2, dim=1)
    merged = (weights * means).sum(0)
    between = (weights * (means - merged).square()).sum(0) * total
    return total, merged, deviations.sum(0) + between
