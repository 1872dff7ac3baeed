# SPDX-License-Identifier: Apache-2.0
"""A model on a grid and its optimizer, in torch's distributed checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from commrt.errors import UsageError
from commrt.layers.tensor3d.parameter_cut import cut_of
from commrt.layers.tensor3d.whole_state import WholeState
from commrt.layers.tensors.checkpoint import OptimizerShards

__all__ = ["TrainingState"]


class TrainingState:
    """The state of a training, which torch's distributed checkpoint saves and loads.

        from torch.distributed import checkpoint

        state = {"training": TrainingState(model, optimizer)}
        checkpoint.save(state, checkpoint_id=folder)
        checkpoint.load(state, checkpoint_id=folder)  # on any grid

    Each rank saves its shards, and reads those that it needs. So a checkpoint loads on
    another grid. One process loads it into the serial model, of whole tensors: these
    need no TrainingState, but their own one fits, too.

    Args:
        model: with layers of a grid, or none.
        optimizer: over its parameters; None: the model alone.

    Raises UsageError for a model whose parameters FSDP2 has cut, too, and for sharded
    embedding bags.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None
    ) -> None:
        self._model = model
        named: dict[str, Any] = {}
        for name, parameter in model.named_parameters():
            if hasattr(parameter, "full_tensor"):
                raise UsageError(
                    f"TrainingState: {name} is cut by FSDP2, too: save the whole "
                    f"state that state_dict(model) returns"
                )
            cut = cut_of(parameter)
            named[name] = parameter if cut is None else (parameter, cut.pieces)
        for path, module in model.named_modules():
            if isinstance(module, WholeState) and module.has_parts:
                raise UsageError(
                    f"TrainingState: {path or type(model).__name__} has parts of "
                    f"tables under the names of whole ones: save the whole state that "
                    f"state_dict(model) returns"
                )
        self._optimizer = None
        if optimizer is not None:
            self._optimizer = OptimizerShards(optimizer, named)

    def state_dict(self) -> dict[str, Any]:
        """Return the model's and the optimizer's state; torch calls it."""
        state: dict[str, Any] = {"model": {}}
        for name, value in self._model.state_dict(keep_vars=True).items():
            cut = cut_of(value) if isinstance(value, torch.Tensor) else None
            if cut is not None:
                state["model"][name] = cut.pieces.of_part(value)
            else:
                is_tensor = isinstance(value, torch.Tensor)
                state["model"][name] = value.detach() if is_tensor else value
        if self._optimizer is not None:
            state["optimizer"] = self._optimizer.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take what is no tensor; torch has filled the tensors already."""
        if self._optimizer is not None:
            self._optimizer.load_state_dict(state["optimizer"])
