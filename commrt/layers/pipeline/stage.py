# SPDX-License-Identifier: Apache-2.0
"""A serial model that is cut into the stages of a pipeline, and its layers' times."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import nn

from commrt.comm import Communicator
from commrt.errors import UsageError, shown
from commrt.layers.pipeline.agreement import meet
from commrt.vocabulary.checks import as_integer

__all__ = ["Stage", "load_state_dict", "measure_layers", "split", "state_dict"]

Tensor: TypeAlias = torch.Tensor
Layers: TypeAlias = nn.Sequential | nn.ModuleList | Sequence[nn.Module]


class Stage(nn.Sequential):  # type: ignore[misc]
    """Layers of a serial model, under the names that they have there.

    It takes one tensor, or several, which its first layer gets as a tuple: what the
    layer before it returns. So its ``state_dict()`` has the names of the serial model,
    and ``load_state_dict(serial_state, strict=False)`` loads them.
    """

    def forward(self, *inputs: Any) -> Any:
        """Return the output of the last layer."""
        values = inputs[0] if len(inputs) == 1 else inputs
        for layer in self:
            values = layer(values)
        return values


def split(layers: Layers, ranges: Sequence[range], stage: int) -> Stage:
    """Return a stage of a model: some of its layers, not copied.

        placement = partition(measure_layers(model, example), speeds)
        stage = split(model, placement.ranges, comm.rank)

    Args:
        layers: an ``nn.Sequential``, or a list of modules as an ``nn.ModuleList`` is.
            Each layer gets the output of the one before it.
        ranges: layers of each stage, all of them, in order.
        stage: the stage to return.

    Raises UsageError for ranges that leave layers out or take some twice, and where
    layers of two stages share a parameter or a buffer.
    """
    named = _named("split", layers)
    bounds = _checked_ranges(ranges, len(named))
    number = as_integer(stage)
    if number is None or not 0 <= number < len(bounds):
        raise UsageError(
            f"split: stage={shown(stage)} must be a number in 0..{len(bounds) - 1}, "
            f"since there are {len(bounds)} ranges"
        )
    _check_shared(named, bounds)
    own = bounds[number]
    return Stage(OrderedDict(named[own.start : own.stop]))


def _named(what: str, layers: Any) -> list[tuple[str, nn.Module]]:
    """Return the layers with their names in the serial model."""
    if isinstance(layers, nn.Sequential | nn.ModuleList):
        # A module that stands at two places is a layer at both.
        return [*layers._modules.items()]
    if isinstance(layers, nn.Module | str | bytes):
        layers = None
    try:
        found = [(str(at), layer) for at, layer in enumerate(layers)]
    except TypeError:
        found = []
    if not found or not all(isinstance(layer, nn.Module) for _, layer in found):
        raise UsageError(
            f"{what}: layers={shown(layers)} must be an nn.Sequential, or a list of "
            f"modules"
        )
    return found


def _checked_ranges(ranges: Any, num_layers: int) -> list[range]:
    found = [*ranges] if isinstance(ranges, list | tuple) else []
    stop, is_whole = 0, bool(found)
    for each in found:
        is_run = isinstance(each, range) and each.step == 1 and len(each) > 0
        if not is_run or each.start != stop:
            is_whole = False
            break
        stop = each.stop
    if not is_whole or stop != num_layers:
        raise UsageError(
            f"split: ranges={shown(ranges)} must be ranges that follow each other from "
            f"0 to {num_layers}, the number of layers, and none of them empty"
        )
    return found


def _check_shared(named: list[tuple[str, nn.Module]], ranges: list[range]) -> None:
    owners: dict[int, tuple[int, str]] = {}
    for stage, layers in enumerate(ranges):
        for name, layer in named[layers.start : layers.stop]:
            for inner, tensor in _tensors(layer):
                first, known = owners.setdefault(id(tensor), (stage, f"{name}.{inner}"))
                if first != stage:
                    raise UsageError(
                        f"split: stage {first} and stage {stage} share a tensor, "
                        f"{known} and {name}.{inner}; choose ranges that keep both "
                        f"layers in one stage, or give each a tensor of its own"
                    )


def _tensors(layer: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from layer.named_parameters(remove_duplicate=False)
    yield from layer.named_buffers(remove_duplicate=False)


# -- states ----------------------------------------------------------------------------


def state_dict(stage: nn.Module, comm: Communicator) -> dict[str, Any]:
    """Return the state of the whole model on all ranks, under serial names; collective.

    Args:
        stage: this rank's, as ``split`` returns it.
        comm: the ranks of the pipeline, one for each stage.

    Tensors of other stages are copies on the host; those of this one are its own.
    Raises UsageError on all ranks where two stages have the same name.
    """
    what = "pipeline.state_dict"
    own: dict[str, Any] = {}
    error: Exception | None = None
    try:
        own = dict(stage.state_dict())
        packed = {
            name: value.detach().cpu() if isinstance(value, torch.Tensor) else value
            for name, value in own.items()
        }
    except Exception as wrong:  # noqa: BLE001  the other ranks must hear of it
        error = wrong
    meet(comm, what, error, [])
    whole: dict[str, Any] = {}
    for rank, part in enumerate(comm.allgather_object(packed)):
        twice = [name for name in part if name in whole]
        if twice:
            raise UsageError(
                f"{what}: rank {rank} and an earlier one have {twice[0]}; pass the "
                f"stages of one model, as split returns them, one on each rank"
            )
        whole.update(own if rank == comm.rank else part)
    return whole


def load_state_dict(stage: nn.Module, state: Mapping[str, Any]) -> None:
    """Load this stage's part of a serial model's state; local.

    Raises UsageError where a tensor of the stage is missing, or has another shape.
    """
    what = "pipeline.load_state_dict"
    if not isinstance(stage, nn.Module) or not isinstance(state, Mapping):
        raise UsageError(f"{what}: expected a stage and a state, found {shown(state)}")
    wanted = stage.state_dict()
    missing = [name for name in wanted if name not in state]
    if missing:
        raise UsageError(
            f"{what}: the state has no {', '.join(missing[:3])}; expected the names of "
            f"the serial model, as its state_dict() has them"
        )
    for name, value in wanted.items():
        given = state[name]
        if (
            isinstance(value, torch.Tensor)
            and getattr(given, "shape", 0) != value.shape
        ):
            raise UsageError(
                f"{what}: {name} has shape {tuple(getattr(given, 'shape', ()))} in the "
                f"state; expected {tuple(value.shape)}"
            )
    stage.load_state_dict({name: state[name] for name in wanted})


# -- times -----------------------------------------------------------------------------


def measure_layers(
    layers: Layers,
    example: Any,
    *,
    repeats: int = 3,
    clock: Callable[[], float] = time.perf_counter,
) -> list[float]:
    """Return the seconds that each layer takes, forward and backward; local.

    Args:
        layers: as ``split`` takes them.
        example: input of the first layer, such as a micro-batch.
        repeats: runs of each layer, of which the median counts, after one more.
        clock: returns seconds.

    Each layer gets the output of the one before it. The values of parameters, buffers,
    gradients and of the generator of random numbers on the host are kept. Times of the
    processes differ, so measure on one rank and tell the others, such as by
    ``comm.bcast_object(costs, 0)``.
    """
    what = "measure_layers"
    named = _named(what, layers)
    number = as_integer(repeats)
    if number is None or number < 1:
        raise UsageError(f"{what}: repeats={shown(repeats)} must be an integer from 1")
    found = []
    values = example
    generator = torch.get_rng_state()
    try:
        for _, layer in named:
            buffers = [(each, each.clone()) for each in layer.buffers()]
            gradients = [(each, each.grad) for each in layer.parameters()]
            try:
                times = []
                for _ in range(number + 1):
                    output, seconds = _timed(layer, values, clock)
                    times.append(seconds)
            finally:
                with torch.no_grad():
                    for buffer, kept in buffers:
                        buffer.copy_(kept)
                for parameter, gradient in gradients:
                    parameter.grad = gradient
            found.append(sorted(times[1:])[number // 2])
            values = output
    finally:
        torch.set_rng_state(generator)
    return found


def _timed(
    layer: nn.Module, values: Any, clock: Callable[[], float]
) -> tuple[Any, float]:
    for parameter in layer.parameters():
        parameter.grad = None  # else a gradient of the program's would be added to
    given = _entering(values)
    with torch.enable_grad():
        _wait_for_devices(values)
        start = clock()
        output = layer(given)
        leaves = [each for each in _each_tensor(output) if each.requires_grad]
        torch.autograd.backward(leaves, [torch.ones_like(each) for each in leaves])
        _wait_for_devices(output)
        seconds = clock() - start
    return output, seconds


def _entering(values: Any) -> Any:
    """Return tensors that a stage could get: without history, and not leaves."""
    if isinstance(values, torch.Tensor):
        fresh = values.detach().clone()
        if fresh.is_floating_point() or fresh.is_complex():
            return fresh.requires_grad_().clone()
        return fresh
    if isinstance(values, list | tuple):
        return type(values)(map(_entering, values))
    return values


def _each_tensor(values: Any) -> Iterable[Tensor]:
    if isinstance(values, torch.Tensor):
        yield values
    elif isinstance(values, list | tuple):
        for each in values:
            yield from _each_tensor(each)


def _wait_for_devices(values: Any) -> None:
    for each in _each_tensor(values):
        if each.is_cuda:
            torch.cuda.synchronize(each.device)
            return
