# SPDX-License-Identifier: Apache-2.0
"""Times and bytes of blocks, measured on a sample."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from commrt.layers.out_of_core.costs import BlockCost
from commrt.layers.out_of_core.entries import can_leave, storage_key, version_of
from commrt.layers.out_of_core.far import Clock
from commrt.layers.out_of_core.replay import copied_buffers
from commrt.layers.out_of_core.values import mapped, tensors_of

__all__ = ["measure"]

Tensor: TypeAlias = torch.Tensor


class _Seen(NamedTuple):
    """One block's measurement. Storages that the program holds do not count."""

    forward_s: float
    backward_s: float
    inner_nbytes: int
    """Saved, of neither input nor output."""
    num_inner: int
    """Storages of these."""
    input_nbytes: int
    """Of the input, saved or not."""
    saved_input_nbytes: int
    """Of the input, where this block or the one before saves it."""
    num_saved_inputs: int
    """Storages of these."""
    output_nbytes: int
    """Of the output, where the block saves it."""
    buffers_nbytes: int
    keeps_input: bool
    """False: it changes its input in place."""


class _Storages(NamedTuple):
    """Keys of storages in which the next block's input lies."""

    held: frozenset[int | None]
    """Of the program's input."""
    saved: frozenset[int | None]
    """That a block saves."""


def measure(
    blocks: Sequence[nn.Module], sample: Any, clock: Clock, *, repeats: int = 3
) -> list[BlockCost]:
    """Return the cost of each block; the median of some runs, after one that warms up.

    Parameters, their gradients, buffers and generators of random numbers stay as they
    are. One block's tensors are near at a time.

    Args:
        blocks: in order.
        sample: an input of the first, as large as any that follows.
        clock: that times.
        repeats: runs.
    """
    device = tensors_of(sample, "the sample")[0].device
    held = frozenset(storage_key(x) for x in tensors_of(sample, "the sample"))
    known = _Storages(held, frozenset())
    tensors = [x for block in blocks for x in (*block.parameters(), *block.buffers())]
    devices = {x.device for x in (*tensors_of(sample, "the sample"), *tensors)}
    costs = []
    with torch.random.fork_rng([each for each in devices if each.type == "cuda"]):
        value = sample
        for number, block in enumerate(blocks):
            tensors_of(value, f"the input of block {number}")
            _run(block, value, known, clock, device)
            times = [
                _run(block, value, known, clock, device)[0] for _ in range(repeats - 1)
            ]
            seen, value, known = _run(block, value, known, clock, device)
            times.append(seen)
            costs.append(
                _cost(
                    seen._replace(
                        forward_s=median(each.forward_s for each in times),
                        backward_s=median(each.backward_s for each in times),
                    )
                )
            )
    return costs


def _cost(seen: _Seen) -> BlockCost:
    """Return the cost of a block; its input belongs to it."""
    saves_any = seen.num_inner or seen.num_saved_inputs or seen.output_nbytes
    resident = seen.input_nbytes + seen.buffers_nbytes if saves_any else 0
    return BlockCost(
        seen.forward_s,
        seen.backward_s,
        seen.inner_nbytes + seen.saved_input_nbytes,
        output_nbytes=seen.output_nbytes,
        resident_nbytes=resident,
        recomputed_nbytes=resident + seen.inner_nbytes + seen.output_nbytes,
        num_transfers=seen.num_inner + seen.num_saved_inputs,
        recompute_s=None if seen.inner_nbytes or seen.output_nbytes else 0.0,
        can_recompute=seen.keeps_input,
    )


def _run(
    block: nn.Module, value: Any, known: _Storages, clock: Clock, device: torch.device
) -> tuple[_Seen, Any, _Storages]:
    """Run a block forward and backward; return what was seen, and its output."""
    given = mapped(value, lambda x: x.detach().requires_grad_(x.requires_grad))
    copies: dict[int, Any] = {}
    with torch.enable_grad():
        # Blocks may write to their inputs, which are views of larger storages perhaps.
        changed = mapped(given, lambda x: _Copy.apply(x, copies))
    inputs = tensors_of(changed, "an input")
    buffers = copied_buffers(block)
    apart = {storage_key(x) for x in (*block.parameters(), *buffers.values())}
    saved: dict[int | None, int] = {}
    kept: list[Tensor] = []  # so that no storage takes the place of another

    def pack(tensor: Tensor) -> Tensor:
        key = storage_key(tensor)
        if key is not None and key not in apart:
            saved[key] = tensor.untyped_storage().nbytes()
            kept.append(tensor.detach())
        return tensor.detach()

    versions = [version_of(x) for x in inputs]
    _settle(device)
    begin = clock.now()
    with torch.enable_grad(), saved_tensors_hooks(pack, lambda x: x):
        output = torch.func.functional_call(block, buffers, (changed,))
        _settle(device)
    middle = clock.now()
    outputs = tensors_of(output, "an output")
    backward_s = _backward_s(block, tensors_of(given, "an input"), outputs, clock)
    given_keys = [storage_key(x) for x in tensors_of(value, "an input")]
    pairs = {storage_key(x): key for x, key in zip(inputs, given_keys, strict=True)}
    sizes = {
        storage_key(x): x.untyped_storage().nbytes()
        for x in inputs
        if pairs[storage_key(x)] not in known.held and storage_key(x) is not None
    }
    saved_inputs = {key for key in sizes if key in saved or pairs[key] in known.saved}
    results = {storage_key(x) for x in outputs}
    fresh = [key for key in saved if key in results and key not in pairs]
    inner = [key for key in saved if key not in results and key not in pairs]
    seen = _Seen(
        middle - begin,
        backward_s,
        sum(saved[key] for key in inner),
        len(inner),
        sum(sizes.values()),
        sum(sizes[key] for key in saved_inputs),
        len(saved_inputs),
        sum(saved[key] for key in fresh),
        sum(each.nbytes for each in buffers.values()) if saved else 0,
        versions == [version_of(x) for x in inputs],
    )
    after = _Storages(
        frozenset(key for key in results & {*pairs} if pairs[key] in known.held),
        frozenset(fresh) | (saved_inputs & results),
    )
    with torch.no_grad():
        value = mapped(output, lambda x: x.detach().requires_grad_(x.requires_grad))
    return seen, value, after


class _Copy(torch.autograd.Function):  # type: ignore[misc]  # torch is not looked into
    """The tensor in a copy of its whole storage, which others of the storage share."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, copies: dict[int, Any]) -> Tensor:
        key = storage_key(x)
        if key is None or not can_leave(x):
            return x.clone()
        if key not in copies:
            copies[key] = x.untyped_storage().clone()
        made = torch.empty(0, dtype=x.dtype, device=x.device)
        return made.set_(copies[key], x.storage_offset(), x.shape, x.stride())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def _backward_s(
    block: nn.Module,
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
    clock: Clock,
) -> float:
    """Return the seconds of a backward pass that leaves gradients alone."""
    wanted = [x for x in (*inputs, *block.parameters()) if x.requires_grad]
    reached = [x for x in outputs if x.requires_grad]
    if not wanted or not reached:
        return 0.0
    gradients = [torch.ones_like(x) for x in reached]
    _settle(reached[0].device)
    begin = clock.now()
    torch.autograd.grad(reached, wanted, gradients, allow_unused=True)
    _settle(reached[0].device)
    return clock.now() - begin


def _settle(device: torch.device) -> None:
    """Wait until the device has computed what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
