# SPDX-License-Identifier: Apache-2.0
"""Gradients of a model with branches, each summed once over the ranks that share it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import nn

from commrt.comm import Communicator
from commrt.errors import UsageError, shown
from commrt.layers.branches.branches import Branches
from commrt.layers.sharded_update.meeting import meet
from commrt.layers.tensor3d.once import mark_summed, refuse_summed

__all__ = ["sync_gradients"]

Tensor: TypeAlias = torch.Tensor
Named: TypeAlias = Sequence[tuple[str, Tensor]]


def sync_gradients(model: nn.Module, *, average: bool = True) -> None:
    """Sum a model's gradients; call it once after ``backward()``; collective.

    Parameters of a branch are summed over its ranks. Where ranks have samples of their
    own, all other parameters are summed over all ranks. Where all ranks have the same
    samples, these parameters have the whole gradient already.

    Args:
        model: with ``Branches`` over the same ranks.
        average: with samples of their own: True: gradients become those of the mean of
            all ranks' losses; False: of their sum.

    A parameter that no rank has a gradient of gets none. Pattern: an ``allreduce`` of
    17 bytes over the ranks of a branch, and one over all; for each type an
    ``allreduce`` of the gradients, and one element for each.

    Raises UsageError, on all ranks, where a gradient was summed before or is sparse,
    where two ``Branches`` share a parameter, and where ranks of a branch train
    different ones.
    """
    if not isinstance(model, nn.Module):
        raise UsageError(f"sync_gradients: model={shown(model)} must be a module")
    layers = [each for each in model.modules() if isinstance(each, Branches)]
    modes = {each.samples for each in layers}
    if len(modes) != 1 or len({each.grid.num_ranks for each in layers}) != 1:
        raise UsageError(
            f"sync_gradients: the model {type(model).__name__} has {len(layers)} "
            f"Branches with samples of {sorted(modes)}; expected some, with the same"
        )
    comm = layers[0].grid.comm if layers[0].grid.num_ranks > 1 else None
    owner: dict[int, Branches] = {}
    shared: list[str] = []
    for layer in layers:
        for name, each in layer.named_parameters():
            if owner.setdefault(id(each), layer) is not layer:
                shared.append(name)
    trained = [
        (name, each) for name, each in model.named_parameters() if each.requires_grad
    ]
    whole = [each for each in trained if id(each[1]) not in owner]
    error: Exception | None = None
    try:
        if shared:
            raise UsageError(
                f"sync_gradients: two Branches share the parameter {shared[0]}, which "
                f"would be summed over the ranks of one alone; give each its own"
            )
        refuse_summed("sync_gradients", trained)
        for name, parameter in trained:
            if parameter.grad is not None and parameter.grad.layout != torch.strided:
                raise UsageError(
                    f"sync_gradients: the gradient of {name} is sparse; make its layer "
                    f"with dense gradients"
                )
    except UsageError as caught:
        error = caught
    fact = f"{_text(whole)}, {average}"
    parts = {
        layer: [each for each in trained if owner.get(id(each[1])) is layer]
        for layer in layers
    }
    for layer in layers:
        try:
            own = [each for each in layer.named_parameters() if each[1].requires_grad]
            meet(layer.branch_comm, "sync_gradients", None, _text(own))
        except UsageError as caught:  # raised on the branch's ranks, and not on others
            error = error or caught
    meet(comm, "sync_gradients", error, fact)
    ranks = layers[0].grid.num_ranks
    scale = 1.0 / ranks if average and modes == {"own"} else 1.0
    for layer, own in parts.items():
        _sum(own, layer.branch_comm, scale)
    if modes == {"own"}:
        _sum(whole, comm, scale)
    mark_summed(trained)


def _text(named: Named) -> str:
    return f"{[(name, tuple(each.shape), each.dtype) for name, each in named]}"


@torch.no_grad()  # type: ignore[untyped-decorator]
def _sum(named: Named, comm: Communicator | None, scale: float) -> None:
    """Replace gradients by multiples of their sums; behind them go flags of each."""
    kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for _, parameter in named:
        kinds.setdefault((parameter.dtype, parameter.device), []).append(parameter)
    for parameters in kinds.values():
        grads = [each.grad for each in parameters]
        if comm is None:
            for grad in grads:
                if grad is not None and scale != 1:
                    grad.mul_(scale)
            continue
        flags = parameters[0].new_tensor([grad is not None for grad in grads])
        parts = [
            (torch.zeros_like(each) if grad is None else grad).reshape(-1)
            for each, grad in zip(parameters, grads, strict=True)
        ]
        flat = torch.cat([*parts, flags])
        comm.allreduce(flat)
        *sums, flags = flat.split([*(each.numel() for each in parameters), len(flags)])
        for each, total, is_there in zip(parameters, sums, flags.tolist(), strict=True):
            if is_there:
                found = (total * scale).view(each.shape)
                each.grad = found if each.grad is None else each.grad.copy_(found)
