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
from typing import Any

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

__all__ = ["shards"]


def shards(state: Any) -> Any:
    """Return a state_dict, nested ones too, whose DistTensors torch can save and load.

    Their memory is that of the tensors. Other values stay what they are. Raises
    UsageError for a tensor that leaves sums open.
    """
    if isinstance(state, Mapping):
        return {name: shards(value) for name, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(map(shards, state))
    return _Shards(state) if isinstance(state, DistTensor) else state


class _Shards(torch.Tensor):  # type: ignore[misc]
    """A distributed tensor as torch's checkpoints want it: the boxes of this rank."""

    _local: torch.Tensor
    _boxes: dict[torch.Size, tuple[tuple[int, int, int], ...]]

    @staticmethod
    def __new__(cls, x: DistTensor) -> _Shards:
        if x.placement.partial:
            raise UsageError(
                f"checkpoint: {x}: the sum along {', '.join(x.placement.partial)} is "
                f"still open: redistribute() the tensor first"
            )
        made: _Shards = torch.Tensor._make_wrapper_subclass(
            cls, x.shape, dtype=x.dtype, device=x.device
        )
        runs = [x.placement.runs(at, x.grid, n) for at, n in enumerate(x.shape)]
        made._local = x.local.detach()
        if x.numel() == 0:
            # torch looks for a box of each tensor, also where there is nothing in it.
            made._local = made._local.new_empty(x.shape)
            runs = [[(0, extent, 0)] for extent in x.shape]
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
