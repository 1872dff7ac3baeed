# SPDX-License-Identifier: Apache-2.0
"""A forward pass that is done a second time, as the first one was.

Generators of random numbers and autocast are as they were. The block computes with
copies of its buffers from before the first pass, so that running statistics count a
batch once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any, TypeAlias

import torch
from torch import nn

__all__ = ["Replay", "copied_buffers"]

Tensor: TypeAlias = torch.Tensor


def copied_buffers(block: nn.Module) -> dict[str, Tensor]:
    """Return copies of all buffers by name."""
    with torch.no_grad():
        return {name: each.clone() for name, each in block.named_buffers()}


class Replay:
    """The state of the program before a block's forward pass."""

    def __init__(self, block: nn.Module, devices: Iterable[torch.device]) -> None:
        self.buffers = copied_buffers(block)
        self._block = block
        self._is_training = [module.training for module in block.modules()]
        self._generator = torch.get_rng_state()
        every = {*devices, *(x.device for x in block.parameters())}
        every |= {x.device for x in self.buffers.values()}
        self._on_devices = {
            device: torch.cuda.get_rng_state(device)
            for device in every
            if device.type == "cuda"
        }
        self._autocast = {
            kind: (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in {"cpu", *(device.type for device in every)}
            if torch.amp.is_autocast_available(kind)
        }
        self._is_cached = torch.is_autocast_cache_enabled()

    def __call__(self, value: Any) -> Any:
        """Do the forward pass again; gradients are enabled."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng([*self._on_devices]))
            torch.set_rng_state(self._generator)
            for device, state in self._on_devices.items():
                torch.cuda.set_rng_state(state, device)
            for kind, (is_on, dtype) in self._autocast.items():
                stack.enter_context(
                    torch.autocast(
                        kind, dtype, enabled=is_on, cache_enabled=self._is_cached
                    )
                )
            stack.enter_context(torch.enable_grad())
            stack.enter_context(self._modes())
            buffers = {name: each.clone() for name, each in self.buffers.items()}
            return torch.func.functional_call(self._block, buffers, (value,))

    @contextlib.contextmanager
    def _modes(self) -> Iterator[None]:
        """Give each module the mode, training or not, that it had."""
        modules = [*self._block.modules()]
        now = [module.training for module in modules]
        try:
            for module, then in zip(modules, self._is_training, strict=True):
                module.training = then
            yield
        finally:
            for module, before in zip(modules, now, strict=True):
                module.training = before
