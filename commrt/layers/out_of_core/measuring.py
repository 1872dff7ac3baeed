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
from commrt.layers.out_of_core.far import Clock
from commrt.layers.out_of_core.entries import storage_key
from commrt.layers.out_of_core.replay import copied_buffers
from commrt.layers.out_of_core.values import mapped, tensors_of

__all__ = ["measure"]

Tensor: TypeAlias = torch.Tensor


class _Seen(NamedTuple):
    """One block's measurement."""

    forward_s: float
    backward_s: float
    inner_nbytes: int
    input_nbytes: int
    """Of the input, which the program does not hold."""
    saves_input: bool
    output_nbytes: int
    """Of the output, if the block saves it."""
    buffers_nbytes: int
    num_storages: int
    keeps_input: bool
    """False: it changes its input in place."""


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
    held = {storage_key(x) for x in tensors_of(sample, "the sample")}
    devices = [device] if device.type == "cuda" else []
    seen = []
    with torch.random.fork_rng(devices):
        value = sample
        for number, block in enumerate(blocks):
            tensors_of(value, f"the input of block {number}")
            runs = []
            for _ in range(repeats + 1):
                run, output = _run(block, value, held, clock, device)
                runs.append(run)
            times = runs[1:]
            seen.append(
                runs[-1]._replace(
                    forward_s=median(run.forward_s for run in times),
                    backward_s=median(run.backward_s for run in times),
                )
            )
            value = output
    return [_cost(seen, number) for number in range(len(seen))]


def _cost(seen: Sequence[_Seen], number: int) -> BlockCost:
    """Return the cost of a block; its input belongs to it."""
    own = seen[number]
    is_saved = own.saves_input or (number > 0 and seen[number - 1].output_nbytes > 0)
    input_nbytes = own.input_nbytes if is_saved else 0
    resident = own.input_nbytes + own.buffers_nbytes
    return BlockCost(
        own.forward_s,
        own.backward_s,
        own.inner_nbytes + input_nbytes,
        output_nbytes=own.output_nbytes,
        resident_nbytes=resident,
        recomputed_nbytes=resident + own.inner_nbytes + own.output_nbytes,
        num_transfers=own.num_storages + (1 if input_nbytes else 0),
        recompute_s=None if own.inner_nbytes or own.output_nbytes else 0.0,
        can_recompute=own.keeps_input,
    )


def _run(
    block: nn.Module, value: Any, held: set[int | None], clock: Clock, device: Any
) -> tuple[_Seen, Any]:
    """Run a block forward and backward; return what was seen, and its output."""
    given = mapped(value, lambda x: x.detach().requires_grad_(x.requires_grad))
    with torch.enable_grad():
        changed = mapped(given, torch.clone)  # blocks may write to their inputs
    inputs = tensors_of(changed, "an input")
    buffers = copied_buffers(block)
    apart = {storage_key(x) for x in (*block.parameters(), *buffers.values())}
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        key = storage_key(tensor)
        if key is not None and key not in apart:
            saved[key] = tensor.untyped_storage().nbytes()
            kept.append(tensor.detach())
        return tensor.detach()

    kept: list[Tensor] = []  # so that no storage takes the place of another
    versions = [x._version for x in inputs]
    _settle(device)
    begin = clock.now()
    with torch.enable_grad(), saved_tensors_hooks(pack, lambda x: x):
        output = torch.func.functional_call(block, buffers, (changed,))
        _settle(device)
    middle = clock.now()
    outputs = tensors_of(output, "an output")
    backward_s = _backward_s(block, tensors_of(given, "an input"), outputs, clock)
    is_held = any(storage_key(x) in held for x in tensors_of(value, "an input"))
    sizes = {storage_key(x): x.untyped_storage().nbytes() for x in inputs}
    results = {storage_key(x) for x in outputs} - {*sizes}
    inner = {key for key in saved if key not in sizes and key not in results}
    out_keys = [key for key in saved if key in results]
    seen = _Seen(
        middle - begin,
        backward_s,
        sum(saved[key] for key in inner),
        0 if is_held else sum(sizes.values()),
        not is_held and any(key in saved for key in sizes),
        sum(saved[key] for key in out_keys),
        sum(each.nbytes for each in buffers.values()) if saved else 0,
        len(inner),
        versions == [x._version for x in inputs],
    )
    if is_held and {storage_key(x) for x in outputs} & {*sizes}:
        held |= {storage_key(x) for x in outputs}  # a view of the program's input
    with torch.no_grad():
        after = mapped(output, lambda x: x.detach().requires_grad_(x.requires_grad))
    return seen, after


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
