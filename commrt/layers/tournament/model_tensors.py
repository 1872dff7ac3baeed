# SPDX-License-Identifier: Apache-2.0
"""The tensors of a model that a tournament moves: parameters and persistent buffers."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any, TypeAlias

import torch
from torch import nn

from commrt.comm import core_of
from commrt.errors import UsageError, shown
from commrt.layers.process_grid import ProcessGrid
from commrt.layers.tensor3d.parameter_cut import cut_of

__all__ = ["ModelTensors"]

Tensor: TypeAlias = torch.Tensor


class ModelTensors:
    """The tensors of one rank's model, each once: parameters, then buffers.

    Args:
        model: of this rank.
        ranks: of this rank's trainer, as ranks of the job. A model that is cut over a
            grid has parts on these ranks alone; ranks of one place in two trainers
            have the same part.

    Raises UsageError for a model whose state is not made of such tensors.
    """

    def __init__(self, model: nn.Module, ranks: Collection[int]) -> None:
        if not isinstance(model, nn.Module):
            raise UsageError(
                f"Tournament.step: model={shown(model)} must be a module of torch"
            )
        self.parameters: tuple[Tensor, ...] = tuple(model.parameters())
        saved = model.state_dict(keep_vars=True)
        saved_ids = {id(each) for each in saved.values()}
        found = [
            *model.named_parameters(),
            *(each for each in model.named_buffers() if id(each[1]) in saved_ids),
        ]
        for name, tensor in found:
            _check(name, tensor)
        held = {id(each) for _, each in found}
        memory = {each.untyped_storage().data_ptr() for _, each in found}
        for name, value in saved.items():
            # Sharded tables have views of a parameter under the names of serial ones.
            is_held = isinstance(value, torch.Tensor) and (
                id(value) in held or value.untyped_storage().data_ptr() in memory
            )
            if not is_held:
                raise UsageError(
                    f"Tournament.step: {name} in the model's state_dict is neither a "
                    f"parameter nor a buffer; a tournament moves these alone. Register "
                    f"it as a buffer"
                )
        self.names = tuple(name for name, _ in found)
        self.tensors = tuple(tensor for _, tensor in found)
        grids = [*_grids(model, self.parameters)]
        for grid in grids:
            if not {*core_of(grid.comm).world_ranks} <= {*ranks}:
                raise UsageError(
                    f"Tournament.step: the model lies on {grid!r}, which has ranks of "
                    f"several trainers; make the grid of tournament.trainer_comm"
                )
        self.facts = (
            [
                (name, str(each.dtype), tuple(each.shape), each.device.type)
                for name, each in zip(self.names, self.tensors, strict=True)
            ],
            [(each.shape, each.coords) for each in grids],
        )
        """Equal on ranks whose models have the same tensors."""

    def take(self, values: list[Tensor]) -> None:
        """Replace the tensors' values, in place."""
        with torch.no_grad():
            for tensor, value in zip(self.tensors, values, strict=True):
                tensor.copy_(value)


def _check(name: str, tensor: Any) -> None:
    kind = ""
    if isinstance(tensor, nn.parameter.UninitializedTensorMixin):
        kind = "has no shape yet; call the model once before"
    elif hasattr(tensor, "full_tensor"):
        kind = (
            "is a DTensor, as FSDP2 and tensor parallelism of torch make them; use "
            "layers on a ProcessGrid of tournament.trainer_comm, or whole parameters"
        )
    elif tensor.layout != torch.strided or tensor.is_quantized:
        kind = f"is stored as {tensor.layout}; expected a dense tensor"
    elif tensor.is_meta:
        kind = "is on the meta device and has no values; move it to a real one"
    elif tensor.is_inference():
        kind = (
            "was made in torch.inference_mode(), and cannot be changed outside of it; "
            "clone it outside"
        )
    elif _may_overlap(tensor):
        kind = (
            f"has strides {tensor.stride()} for shape {tuple(tensor.shape)}, so that "
            f"elements share memory, as expand() makes them; clone() it first"
        )
    if kind:
        raise UsageError(f"Tournament.step: {name} {kind}")


def _may_overlap(tensor: Tensor) -> bool:
    """Return whether two elements may lie at one address.

    Dimensions must nest: a step along one must leave the extent of all finer ones.
    """
    extent = 1
    pairs = zip(tensor.stride(), tensor.shape, strict=True)
    for stride, length in sorted((s, n) for s, n in pairs if n > 1):
        if stride < extent:
            return bool(tensor.numel() > 1)
        extent += stride * (length - 1)
    return False


def _grids(model: nn.Module, parameters: Collection[Tensor]) -> Iterator[ProcessGrid]:
    """Yield each grid on which parameters or layers lie, once."""
    seen: set[int] = set()
    cuts = [cut_of(each) for each in parameters]
    held = [None if cut is None else cut.grid for cut in cuts]
    for grid in (*held, *(getattr(each, "grid", None) for each in model.modules())):
        if isinstance(grid, ProcessGrid) and id(grid) not in seen:
            seen.add(id(grid))
            yield grid
