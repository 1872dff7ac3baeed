# SPDX-License-Identifier: Apache-2.0
"""For tests of programs that know only CUDA and NCCL: both, answered by CPU and commrt.

``answer()`` changes torch in this process, for good: what such a program says to CUDA
is done on the CPU, and the process groups it asks NCCL for are commrt's. So a program
runs unchanged where there is no GPU, and what it asks of communication is the same.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist

import commrt

__all__ = ["answer"]

CPU = torch.device("cpu")
FACTORIES = (
    *("empty", "zeros", "ones", "full", "tensor", "as_tensor", "arange", "eye"),
    *("rand", "randn", "randint", "randperm", "linspace"),
    *("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like"),
)
NEW = ("new_empty", "new_zeros", "new_ones", "new_full", "new_tensor")


def answer() -> None:
    """Let the CPU answer for CUDA, and commrt for NCCL, from now on."""
    for name in FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    for name in NEW:
        setattr(torch.Tensor, name, _on_cpu(getattr(torch.Tensor, name)))
    for kind in (torch.Tensor, torch.nn.Module):
        kind.cuda = _itself  # type: ignore[method-assign, assignment]
        kind.to = _moved(kind.to)  # type: ignore[method-assign, assignment]
    torch.Tensor.pin_memory = _itself  # type: ignore[method-assign, assignment]
    torch.histc = _of_any_type(torch.histc)  # type: ignore[assignment]
    _answer_device_calls()
    dist.init_process_group = _asked_of_commrt(dist.init_process_group)
    dist.new_group = _asked_of_commrt(dist.new_group)


def _means_cuda(device: Any) -> bool:
    """Whether a device is CUDA's: a number, a text or torch's own."""
    if isinstance(device, bool):
        return False
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, int) or str(device).startswith("cuda")


def _on_cpu(make: Callable[..., Any]) -> Callable[..., Any]:
    """Return a factory of tensors that makes CUDA's on the CPU."""

    @functools.wraps(make)
    def made(*args: Any, **kwargs: Any) -> Any:
        if _means_cuda(kwargs.get("device")):
            kwargs["device"] = CPU
        kwargs.pop("pin_memory", None)
        return make(*args, **kwargs)

    return made


def _itself(thing: Any, *args: Any, **kwargs: Any) -> Any:
    """Stay where it is."""
    return thing


def _moved(to: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``to`` with CUDA's devices as the CPU."""

    @functools.wraps(to)
    def moved(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = [CPU if _means_cuda(each) else each for each in args]
        if _means_cuda(kwargs.get("device")):
            kwargs["device"] = CPU
        return to(self, *found, **kwargs)

    return moved


def _of_any_type(histc: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``histc`` for integers, too, as CUDA has it."""

    @functools.wraps(histc)
    def counted(x: Any, *args: Any, **kwargs: Any) -> Any:
        return histc(x.float(), *args, **kwargs).to(x.dtype)

    return counted


def _answer_device_calls() -> None:
    """Answer what a program asks ``torch.cuda``."""
    cuda: Any = torch.cuda
    cuda.is_available = lambda: True
    cuda.device_count = dist.get_world_size
    cuda.current_device = lambda: 0
    cuda.set_device = cuda.empty_cache = lambda *_: None
    cuda.synchronize = lambda *_: commrt.synchronize()
    cuda.manual_seed = cuda.manual_seed_all = torch.default_generator.manual_seed
    cuda.get_rng_state = lambda *_: torch.get_rng_state()
    cuda.set_rng_state = lambda state, *_: torch.set_rng_state(state)
    cuda.memory_allocated = cuda.max_memory_allocated = lambda *_: 0
    cuda.device = cuda.stream = lambda *_: nullcontext()
    cuda.current_stream = cuda.Stream = lambda *_, **__: _Stream()


class _Stream:
    """A stream of what has been done already."""

    def wait_stream(self, other: Any) -> None:
        """Wait for nothing."""

    def synchronize(self) -> None:
        """Wait for the communication that is under way."""
        commrt.synchronize()


def _asked_of_commrt(make: Callable[..., Any]) -> Callable[..., Any]:
    """Return a maker of groups whose groups of NCCL are commrt's."""

    @functools.wraps(make)
    def made(*args: Any, **kwargs: Any) -> Any:
        kwargs.pop("device_id", None)
        found = ["commrt" if each == "nccl" else each for each in args]
        if kwargs.get("backend") == "nccl":
            kwargs["backend"] = "commrt"
        return make(*found, **kwargs)

    return made
