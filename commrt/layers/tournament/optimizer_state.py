# SPDX-License-Identifier: Apache-2.0
"""The state of optimizers of torch: its tensors, and a structure of all else."""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch

from commrt.errors import UsageError, shown
from commrt.layers.tournament.model_tensors import ModelTensors

__all__ = ["OptimizerState", "facts_of", "load", "optimizers_of", "split_off"]

Tensor: TypeAlias = torch.Tensor
Optimizer: TypeAlias = torch.optim.Optimizer

_SEQUENCES = (list, tuple, deque)
"""Sequences in a state whose tensors move apart from the numbers."""


class _Place(NamedTuple):
    """Stands in a structure where a tensor was."""

    number: int


class OptimizerState(NamedTuple):
    """The states of all optimizers of a rank."""

    structure: bytes
    """All but the tensors, pickled; empty without optimizers."""
    tensors: list[Tensor]
    """The tensors; they are the optimizers' own."""


def optimizers_of(given: Any, model: ModelTensors) -> tuple[Optimizer, ...]:
    """Return the optimizers that a call has given.

    Raises UsageError for other things, and for parameters that are not the model's.
    """
    found = (given,) if isinstance(given, torch.optim.Optimizer) else given
    if not isinstance(found, list | tuple) or not all(
        isinstance(each, torch.optim.Optimizer) for each in found
    ):
        raise UsageError(
            f"Tournament.step: optimizers={shown(given)} must be an optimizer of "
            f"torch, or a list of them"
        )
    known = {id(each) for each in model.parameters}
    for optimizer in found:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) not in known:
                    raise UsageError(
                        f"Tournament.step: {type(optimizer).__name__} has a parameter "
                        f"of shape {tuple(parameter.shape)} that is not the model's; "
                        f"its state would move without it. Make it part of the model"
                    )
    return tuple(found)


def facts_of(optimizers: Sequence[Optimizer], model: ModelTensors) -> object:
    """Return the classes of optimizers and the numbers of their parameters."""
    numbers = {id(each): at for at, each in enumerate(model.parameters)}
    return [
        (
            f"{type(optimizer).__module__}.{type(optimizer).__qualname__}",
            [
                [numbers[id(each)] for each in group["params"]]
                for group in optimizer.param_groups
            ],
        )
        for optimizer in optimizers
    ]


def split_off(optimizers: Sequence[Optimizer]) -> OptimizerState:
    """Return the optimizers' tensors, and the structure without them.

    Raises UsageError for a state that cannot be pickled.
    """
    if not optimizers:
        return OptimizerState(b"", [])
    tensors: list[Tensor] = []
    states = [_without(each.state_dict(), tensors) for each in optimizers]
    try:
        structure = pickle.dumps(states)
    except Exception as error:
        raise UsageError(
            f"Tournament.step: the state of the optimizers cannot be pickled: {error}"
        ) from error
    return OptimizerState(structure, tensors)


def load(
    optimizers: Sequence[Optimizer], structure: bytes, tensors: Sequence[Tensor]
) -> None:
    """Give optimizers the states that ``split_off`` has taken apart.

    Each gets tensors in memory of its own, with the bits that were sent.
    """
    if not optimizers:
        return
    states = pickle.loads(structure)
    for optimizer, state in zip(optimizers, states, strict=True):
        whole = _with(state, tensors)
        optimizer.load_state_dict(whole)
        _keep_types(optimizer, whole)


def _keep_types(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Restore tensors that torch has converted to the type of their parameter.

    An optimizer may keep sums in float32 for parameters in bfloat16, or on the host for
    parameters on a device.
    """
    numbers = [at for group in state["param_groups"] for at in group["params"]]
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    for number, parameter in zip(numbers, parameters, strict=True):
        if number in state["state"] and parameter in optimizer.state:
            held = optimizer.state[parameter]
            optimizer.state[parameter] = _kept(held, state["state"][number])


def _kept(held: Any, sent: Any) -> Any:
    """Return what an optimizer holds, with the types and devices that were sent."""
    if isinstance(sent, torch.Tensor) and isinstance(held, torch.Tensor):
        is_same = (held.dtype, held.device) == (sent.dtype, sent.device)
        return held if is_same else sent
    if isinstance(sent, dict) and isinstance(held, dict):
        for key in held.keys() & sent.keys():
            held[key] = _kept(held[key], sent[key])
    elif type(sent) in _SEQUENCES and type(held) is type(sent):
        if len(held) == len(sent):
            pairs = zip(held, sent, strict=True)
            return _filled(sent, (_kept(*each) for each in pairs))
    elif isinstance(sent, str):
        return sent  # torch takes it for a sequence, and makes another text of it
    return held


def _filled(like: Any, items: Iterable[Any]) -> Any:
    """Return a sequence of the same kind with other items."""
    if isinstance(like, deque):
        return deque(items, like.maxlen)
    return type(like)(items)


def _without(value: Any, found: list[Tensor]) -> Any:
    """Return a state with places for its tensors, which are added to ``found``."""
    if isinstance(value, torch.Tensor):
        if value.layout != torch.strided or value.is_quantized:
            raise UsageError(
                f"Tournament.step: an optimizer's state has a tensor that is stored as "
                f"{value.layout}; expected dense tensors"
            )
        if hasattr(value, "full_tensor"):
            raise UsageError(
                "Tournament.step: an optimizer's state has a DTensor; expected whole "
                "tensors"
            )
        found.append(value)
        return _Place(len(found) - 1)
    if isinstance(value, dict):
        return {key: _without(each, found) for key, each in value.items()}
    if type(value) in _SEQUENCES:
        return _filled(value, (_without(each, found) for each in value))
    return value


def _with(value: Any, tensors: Sequence[Tensor]) -> Any:
    """Return a state with copies of tensors in their places."""
    if isinstance(value, _Place):
        return tensors[value.number].clone()
    if isinstance(value, dict):
        return {key: _with(each, tensors) for key, each in value.items()}
    if type(value) in _SEQUENCES:
        return _filled(value, (_with(each, tensors) for each in value))
    return value
