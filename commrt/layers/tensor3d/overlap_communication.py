# SPDX-License-Identifier: Apache-2.0
"""Switches the overlap of a model's collectives on and off."""

from __future__ import annotations

from typing import Any

from torch import nn

from commrt.errors import UsageError
from commrt.layers.tensor3d.gradients import grid_of
from commrt.layers.tensor3d.grid_module import GridModule
from commrt.layers.tensor3d.overlap import Overlap

__all__ = ["overlap_communication"]


def overlap_communication(
    model: nn.Module,
    all_reduce: bool = True,
    reduce_scatter: bool = True,
    all_gather: bool = True,
) -> None:
    """Choose which collectives of a model's layers run while ranks compute; local.

    Args:
        model: with layers of a grid. Call its forward, not that of a part, so that the
            order of layers is known from the second step on.
        all_reduce: of an input's gradient, while the weight's is computed.
        reduce_scatter: of weights' gradients, until the end of ``backward()``. They
            are put into ``.grad`` then: hooks of these parameters do not see them.
            Blocks of gradients of all layers are kept so long. What
            ``torch.autograd.grad`` returns is summed at once, and ``.grad`` stays as it
            is.
        all_gather: of the next layer's weight. One more block is kept.

    Results have the same bits with and without. Raises UsageError for a model without
    layers of a grid, and for ``reduce_scatter`` where FSDP2 has the parameters, which
    takes their gradients before the end of the backward pass.
    """
    grid_of("overlap_communication", model, None)
    for name, parameter in model.named_parameters():
        if reduce_scatter and hasattr(parameter, "to_local"):
            raise UsageError(
                f"overlap_communication: {name} is a DTensor: FSDP2 takes gradients "
                f"before the backward pass ends; pass reduce_scatter=False"
            )
    overlap = Overlap(all_reduce, reduce_scatter, all_gather)
    for module in model.modules():
        if isinstance(module, GridModule):
            module.set_overlap(overlap)
    for handle in getattr(model, "overlap_hooks", ()):
        handle.remove()
    model.overlap_hooks = (
        model.register_forward_pre_hook(_Begin(overlap)),
        model.register_forward_hook(_End(overlap)),
    )


class _Begin:
    """A hook that notes the begin of a model's forward pass."""

    def __init__(self, overlap: Overlap) -> None:
        self._overlap = overlap

    def __call__(self, module: nn.Module, inputs: Any) -> None:
        self._overlap.begin()


class _End:
    """A hook that notes the end of a model's forward pass."""

    def __init__(self, overlap: Overlap) -> None:
        self._overlap = overlap

    def __call__(self, module: nn.Module, inputs: Any, outputs: Any) -> None:
        self._overlap.end()
