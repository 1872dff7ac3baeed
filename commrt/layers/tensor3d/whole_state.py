# SPDX-License-Identifier: Apache-2.0
"""States of the serial model, from a model on a grid and into it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from torch import nn

from commrt.errors import UsageError
from commrt.layers.process_grid import ProcessGrid
from commrt.layers.tensor3d.grid_module import cuts_of, wrong_shape
from commrt.layers.tensor3d.parameter_cut import ParameterCut

__all__ = ["WholeState", "load_own", "load_state_dict", "state_dict"]

Tensor: TypeAlias = torch.Tensor


class WholeState(ABC):
    """A base of modules of which ranks have different children."""

    has_parts = False
    """True if an entry of a rank's state may be a part of the whole one."""

    @property
    @abstractmethod
    def grid(self) -> ProcessGrid:
        """The ranks."""

    @abstractmethod
    def has_elsewhere(self, name: str) -> bool:
        """Return whether an entry of the state is another rank's; local."""

    def whole_shape(self, name: str) -> tuple[int, ...] | None:
        """Return the whole shape of an entry that this rank has a part of; local.

        None: this rank has all of it, or none.
        """
        return None

    @abstractmethod
    def gathered(self) -> dict[str, Any]:
        """Return the state of the children of all ranks; collective."""


def load_own(module: WholeState, load: Callable[..., None], *given: Any) -> None:
    """Load a module's state as torch does; entries of other ranks may be in it; local.

    Args:
        module: whose ``_load_from_state_dict`` calls this.
        load: that of its base in torch.
        given: what torch has called it with.
    """
    state, prefix, metadata, strict, missing, unexpected, errors = given
    unknown: list[str] = []
    load(state, prefix, metadata, strict, missing, unknown, errors)
    unexpected += [
        key for key in unknown if not module.has_elsewhere(key.removeprefix(prefix))
    ]


def state_dict(
    model: nn.Module, *, on_first_only: bool = False
) -> dict[str, Any] | None:
    """Return the state_dict that the serial model would have; collective.

    Args:
        model: with layers of a grid.
        on_first_only: True: the grid's first rank gets it, all others get None.

    Its tensors are copies. Pattern: for each cut parameter an ``allgatherv`` over the
    ranks that have pieces of it, or a ``gatherv``. Bytes: those of the parameter. A
    shared parameter is gathered once.
    """
    cuts = _cuts(model)
    wholes: dict[int, Any] = {}
    found: dict[str, Any] = {}
    is_first = True
    for name, value in model.state_dict(keep_vars=True).items():
        if not isinstance(value, torch.Tensor):
            found[name] = value
            continue
        if id(value) not in wholes:
            mine, cut = _whole_over_data(value.detach()), cuts.get(name)
            if cut is None:
                wholes[id(value)] = mine.clone()
            else:
                whole = cut.whole(mine, on_first_only=on_first_only)
                wholes[id(value)] = whole
                is_first = is_first and not any(cut.grid.coords.values())
        found[name] = wholes[id(value)]
    for path, module in _spread_modules(model):
        gathered = module.gathered()
        found |= {_joined(path, name): value for name, value in gathered.items()}
        is_first = is_first and not any(module.grid.coords.values())
    return None if on_first_only and not is_first else found


def load_state_dict(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Load a state_dict of the serial model, or of this rank's shards; local.

    Raises UsageError, which names all that does not fit, before anything is loaded.
    """
    cuts, expected = _cuts(model), model.state_dict(keep_vars=True)
    wrong = [f"{name} is missing" for name in expected if name not in state]
    elsewhere = {
        name
        for path, module in _spread_modules(model)
        for name in state
        if name.startswith(_joined(path, ""))
        and module.has_elsewhere(name.removeprefix(_joined(path, "")))
    }
    wrong += [
        f"the model has no {name}"
        for name in state
        if name not in expected and name not in elsewhere
    ]
    wholes = {
        name: module.whole_shape(name.removeprefix(_joined(path, "")))
        for path, module in _spread_modules(model)
        for name in expected
        if name.startswith(_joined(path, ""))
    }
    for name, value in expected.items():
        given = state.get(name)
        if not isinstance(value, torch.Tensor) or not isinstance(given, torch.Tensor):
            continue
        shape, cut = tuple(given.shape), cuts.get(name)
        whole = wholes.get(name)
        if cut is None and shape not in (tuple(value.shape), whole):
            expect = f"{tuple(value.shape)}"
            if whole is not None and whole != tuple(value.shape):
                expect = f"{whole}, the whole tensor's, or {expect}, this rank's part's"
            wrong.append(f"{name} has the shape {shape}; expected {expect}")
        elif cut is not None and shape not in (cut.shape, cut.shard_shape):
            wrong.append(wrong_shape(name, shape, cut))
    if wrong:
        raise UsageError(
            f"load_state_dict: the state does not fit the {type(model).__name__}: "
            + "; ".join(wrong)
        )
    model.load_state_dict(state)


def _cuts(model: nn.Module) -> dict[str, ParameterCut]:
    """Return how each cut entry of a model's state_dict is cut, by its name."""
    return {
        _joined(path, name): cut
        for path, module in model.named_modules(remove_duplicate=False)
        for name, cut in cuts_of(module).items()
    }


def _spread_modules(model: nn.Module) -> list[tuple[str, WholeState]]:
    """Return the modules of which ranks have different children, by their names."""
    return [
        (path, module)
        for path, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, WholeState)
    ]


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _whole_over_data(tensor: Tensor) -> Tensor:
    """Return a parameter that FSDP2 has cut, whole; any other as it is."""
    whole: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole
