# SPDX-License-Identifier: Apache-2.0
"""The state of optimizers of torch: its tensors, and a structure of all else."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import torch

from commrt.errors import UsageError, shown
from commrt.layers.tournament.model_tensors import ModelTensors

__all__ = ["OptimizerState", "facts_of", "load", "optimizers_of", "split_off"]

Tensor: TypeAlias = torch.Tensor
Optimizer: TypeAlias = torch.optim.Optimizer


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
    """Return the kinds of optimizers and the numbers of their parameters."""
    numbers = {id(each): at for at, each in enumerate(model.parameters)}
    return [
        (
            type(optimizer).__qualname__,
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

    An optimizer may keep sums in float32 for parameters in bfloat16.
    """
    numbers = [at for group in state["param_groups"] for at in group["params"]]
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    for number, parameter in zip(numbers, parameters, strict=True):
        entries = state["state"].get(number)
        held = optimizer.state.get(parameter)
        if not isinstance(entries, dict) or not isinstance(held, dict):
            continue
        for name, value in entries.items():
            mine = held.get(name)
            if not isinstance(value, torch.Tensor):
                continue
            if isinstance(mine, torch.Tensor) and mine.dtype != value.dtype:
                held[name] = value.to(mine.device)


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
    if type(value) in (list, tuple):
        return type(value)(_without(each, found) for each in value)
    return value


def _with(value: Any, tensors: Sequence[Tensor]) -> Any:
    """Return a state with copies of tensors in their places."""
    if isinstance(value, _Place):
        return tensors[value.number].clone()
    if isinstance(value, dict):
        return {key: _with(each, tensors) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_with(each, tensors) for each in value)
    return value
