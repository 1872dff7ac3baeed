# SPDX-License-Identifier: Apache-2.0
"""Bytes that autograd keeps for the backward pass, and those that halos add to them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

__all__ = ["HaloBytes", "saved_nbytes"]


def saved_nbytes(model: nn.Module, x: Any) -> int:
    """Return the bytes of storages that a forward pass keeps, without the weights."""
    weights = {each.untyped_storage().data_ptr() for each in model.parameters()}
    kept: dict[int, Any] = {}

    def pack(tensor: Any) -> Any:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = model(x)
    found = sum(storage.nbytes() for storage in kept.values())
    del y
    return found


class HaloBytes:
    """Bytes of all elements that convolutions and poolings of a model read from others.

    Args:
        model: run it once; hooks count.
        ranks: along each dimension that is cut.
    """

    def __init__(self, model: nn.Module, ranks: Mapping[int, int]) -> None:
        self.nbytes = 0.0
        for module in self._sliding(model.modules()):
            module.register_forward_pre_hook(self._count)
        self._ranks = ranks

    def _sliding(self, modules: Iterable[nn.Module]) -> Iterable[nn.Module]:
        kinds = (nn.Conv2d, nn.Conv3d, nn.MaxPool2d, nn.MaxPool3d)
        return (each for each in modules if isinstance(each, kinds))

    def _count(self, module: Any, args: Any) -> None:
        (x,) = args
        own = window = x.numel() * x.element_size()
        for dim, ranks in self._ranks.items():
            kernel, dilation, stride = (
                value[dim - 2] if isinstance(value, tuple) else value
                for value in (module.kernel_size, module.dilation, module.stride)
            )
            rows = max(0, (kernel - 1) * dilation + 1 - stride)
            own /= ranks
            window *= 1 / ranks + rows / x.shape[dim]
        self.nbytes += window - own
