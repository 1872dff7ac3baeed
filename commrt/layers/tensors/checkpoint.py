# SPDX-License-Identifier: Apache-2.0
"""Saving and loading by torch's distributed checkpoint.

    from torch.distributed import checkpoint

    checkpoint.save(shards({"weight": x}), checkpoint_id=folder)
    checkpoint.load(shards({"weight": y}), checkpoint_id=folder)  # fills y's memory

Each rank saves the boxes that it has. torch saves a box once that several ranks have,
and reads for each rank the boxes that it needs, whatever cuts the tensor had when it
was saved. So a checkpoint can be loaded on another grid, or by one process.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from commrt.errors import UsageError
from commrt.layers.tensors.dist_tensor import DistTensor

__all__ = ["OptimizerShards", "Pieces", "shards"]

Run: TypeAlias = tuple[int, int, int]


class Pieces(NamedTuple):
    """Where this rank's part of a tensor lies in the whole."""

    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    runs: tuple[tuple[Run, ...], ...]
    """For each dimension the runs of elements that this rank has.

    Each is (low, high, position of low in this rank's part).
    """

    @classmethod
    def of(cls, x: DistTensor) -> Pieces:
        """Return the pieces of a tensor; UsageError where a sum is open."""
        if x.placement.partial:
            raise UsageError(
                f"checkpoint: {x}: the sum along {', '.join(x.placement.partial)} is "
                f"still open: redistribute() the tensor first"
            )
        runs = (tuple(x.placement.runs(at, x.grid, n)) for at, n in enumerate(x.shape))
        return cls(tuple(x.shape), tuple(runs))

    def of_part(self, part: torch.Tensor) -> torch.Tensor:
        """Return this rank's part as torch's checkpoints save and load it."""
        return _Shards(part, self)


def shards(state: Any) -> Any:
    """Return a state_dict, nested ones too, whose DistTensors torch can save and load.

    Their memory is that of the tensors. Other values stay what they are. Raises
    UsageError for a tensor that leaves sums open.
    """
    if isinstance(state, Mapping):
        return {name: shards(value) for name, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(map(shards, state))
    if isinstance(state, DistTensor):
        return Pieces.of(state).of_part(state.local)
    return state


class _Shards(torch.Tensor):  # type: ignore[misc]
    """A distributed tensor as torch's checkpoints want it: the boxes of this rank."""

    _local: torch.Tensor
    _boxes: dict[torch.Size, tuple[Run, ...]]

    @staticmethod
    def __new__(cls, local: torch.Tensor, pieces: Pieces) -> _Shards:
        made: _Shards = torch.Tensor._make_wrapper_subclass(
            cls, pieces.shape, dtype=local.dtype, device=local.device
        )
        runs = pieces.runs
        made._local = local.detach()
        if 0 in pieces.shape:
            # torch looks for a box of each tensor, also where there is nothing in it.
            made._local = made._local.new_empty(pieces.shape)
            runs = tuple(((0, extent, 0),) for extent in pieces.shape)
        made._boxes = {
            torch.Size(low for low, _, _ in box): box
            for box in itertools.product(*runs)
        }
        return made

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [
            ChunkStorageMetadata(at, torch.Size(high - low for low, high, _ in box))
            for at, box in self._boxes.items()
        ]

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self._local)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets, number),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, properties, self.shape),
            )
            for number, chunk in enumerate(self.__create_chunk_list__())
        ]

    def __get_tensor_shard__(self, index: Any) -> torch.Tensor:
        part = self._local
        for number, (low, high, at) in enumerate(self._boxes[index.offset]):
            part = part.narrow(number, at, high - low)
        return part

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise UsageError(
            f"checkpoint: {function} of what shards() returned: it is for saving and "
            f"loading only; compute with the DistTensor"
        )


# -- optimizers ------------------------------------------------------------------------


class OptimizerShards:
    """An optimizer's state, as torch's distributed checkpoint saves and loads it.

        weights = {"weight": w}  # a DistTensor; the optimizer has w.local
        state = {"optimizer": OptimizerShards(optimizer, weights)}
        checkpoint.save(state, checkpoint_id=folder)
        checkpoint.load(state, checkpoint_id=folder)

    What has the shape of a parameter, such as Adam's moments, is cut as the parameter
    is. So a state loads under other placements, on another grid, or in one process.
    Numbers such as steps and learning rates are the same on all ranks.

    Args:
        optimizer: any of torch whose state has numbers, and tensors of the parameters'
            shapes. One that has made no step yet gets a state by a step of zeros.
        parameters: all of the optimizer's, by name: DistTensors, or tensors that are
            whole on every rank, or pairs of a rank's part and its ``Pieces``.

    Raises UsageError for parameters without a name, and states of other shapes.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, parameters: Mapping[str, Any]
    ) -> None:
        self._optimizer = optimizer
        self._parameters: dict[str, tuple[torch.Tensor, Pieces | None]] = {}
        for name, given in parameters.items():
            if isinstance(given, DistTensor):
                self._parameters[name] = given.local, Pieces.of(given)
            else:
                self._parameters[name] = (
                    given if isinstance(given, tuple) else (given, None)
                )
        self._names = {id(x): name for name, (x, _) in self._parameters.items()}
        for number, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                if id(parameter) not in self._names:
                    raise UsageError(
                        f"OptimizerShards: a parameter of shape "
                        f"{tuple(parameter.shape)} in group {number} of the "
                        f"{type(optimizer).__name__} has no name: give all parameters"
                    )

    def state_dict(self) -> dict[str, Any]:
        """Return the state by names of parameters; torch's checkpoints call it."""
        if not self._optimizer.state:
            _step_of_zeros(self._optimizer)
        groups = [
            {**group, "params": [self._names[id(x)] for x in group["params"]]}
            for group in self._optimizer.param_groups
        ]
        state = {}
        for name, (parameter, pieces) in self._parameters.items():
            found = self._optimizer.state.get(parameter, {})
            state[name] = {
                key: self._shared(name, key, value, parameter, pieces)
                for key, value in found.items()
            }
        return {"state": state, "groups": groups}

    def _shared(
        self,
        name: str,
        key: str,
        value: Any,
        parameter: torch.Tensor,
        pieces: Pieces | None,
    ) -> Any:
        """Return a value of a parameter's state as it is saved."""
        if not isinstance(value, torch.Tensor):
            return value
        if value.shape == parameter.shape:
            return value if pieces is None else pieces.of_part(value)
        if value.numel() == 1 or pieces is None:
            return value
        raise UsageError(
            f"OptimizerShards: {key} of {name} has the shape {tuple(value.shape)}; "
            f"expected a number, or {tuple(parameter.shape)}, the parameter's: "
            f"{type(self._optimizer).__name__} does not keep its state by elements"
        )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take what is no tensor; torch has filled the tensors already.

        Raises UsageError for groups of other parameters, before anything is taken.
        """
        groups = self._optimizer.param_groups
        mine = [[self._names[id(x)] for x in group["params"]] for group in groups]
        theirs = [group["params"] for group in state["groups"]]
        if mine != theirs:
            raise UsageError(
                f"OptimizerShards: the checkpoint has groups of the parameters "
                f"{theirs}; this optimizer has {mine}"
            )
        for group, given in zip(groups, state["groups"], strict=True):
            group.update({k: v for k, v in given.items() if k != "params"})
        for name, found in state["state"].items():
            kept = self._optimizer.state[self._parameters[name][0]]
            for key, value in found.items():
                if not isinstance(value, torch.Tensor):
                    kept[key] = value


def _step_of_zeros(optimizer: torch.optim.Optimizer) -> None:
    """Make the state of an optimizer without changing a parameter; as torch does it."""
    groups = optimizer.param_groups
    parameters = [x for group in groups for x in group["params"] if x.requires_grad]
    gradients = [x.grad for x in parameters]
    rates = [group.get("lr") for group in groups]
    for x in parameters:
        x.grad = torch.zeros_like(x)
    for group, rate in zip(groups, rates, strict=True):
        if rate is not None:
            is_tensor = isinstance(rate, torch.Tensor)
            group["lr"] = torch.zeros_like(rate) if is_tensor else 0.0
    optimizer.step(closure=None)
    for group, rate in zip(groups, rates, strict=True):
        if rate is not None:
            group["lr"] = rate
    for x, gradient in zip(parameters, gradients, strict=True):
        x.grad = gradient
