# SPDX-License-Identifier: Apache-2.0
"""Inverses of factors: computed by their owners, kept by the groups of layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

import torch

from commrt.comm import Communicator
from commrt.layers.all_or_none import meet
from commrt.layers.kfac.factors import Pair, damping_of, inverse_of
from commrt.layers.kfac.model_layers import Layer
from commrt.layers.kfac.placement import Placement
from commrt.layers.kfac.triangles import packed_length, unpacked
from commrt.layers.process_grid import ProcessGrid

__all__ = ["GROUP", "RECEIVERS", "Inverses", "Task"]

Tensor: TypeAlias = torch.Tensor

RECEIVERS, GROUP = "receivers", "group"
"""Axes of the grid: ranks of one place in all groups, and the ranks of a group."""


class Task(NamedTuple):
    """The factors of a layer that are to be inverted."""

    factors: Pair
    damping: float


class Inverses:
    """The inverses that this rank keeps.

    Args:
        grid: the ranks, with the axes RECEIVERS and GROUP.
        layers: of the model.
        placement: of their factors.
    """

    def __init__(
        self, grid: ProcessGrid, layers: Sequence[Layer], placement: Placement
    ) -> None:
        self._grid, self._layers, self._placement = grid, layers, placement
        self._group = grid.coords[RECEIVERS]
        self.held: dict[int, tuple[Tensor, Tensor]] = {}
        """Inverses of A and G, whole matrices, by layer."""

    def _is_kept(self, layer: int) -> bool:
        return self._placement.group_of(layer) == self._group

    def refresh(self, tasks: Mapping[int, Task]) -> None:
        """Invert factors; collective, with the same tasks on all ranks.

        Bytes: an ``allgather`` of 8 for each rank, which tells of errors. In each group
        of several ranks a ``bcast`` from each rank that has inverted, of its triangles.
        """
        error: Exception | None = None
        mine: dict[tuple[int, int], Tensor] = {}
        rank = self._grid.rank
        try:
            for number, task in tasks.items():
                shifts = None
                for which, owner in enumerate(self._placement.owners[number]):
                    if owner != rank:
                        continue
                    shifts = shifts or damping_of(*task)
                    name = self._layers[number].name
                    mine[number, which] = inverse_of(
                        name, task.factors[which], shifts[which]
                    )
        except Exception as wrong:  # noqa: BLE001  the other ranks must hear of it
            error = wrong
        meet(self._grid.comm, "KFAC.step", error, [])
        size = self._placement.gradient_workers
        sent: dict[int, list[Tensor]] = {place: [] for place in range(size)}
        triangles: dict[tuple[int, int], Tensor] = {}
        for number in filter(self._is_kept, tasks):
            layer = self._layers[number]
            for which, owner in enumerate(self._placement.owners[number]):
                found = mine.get((number, which))
                if found is None:
                    length = packed_length(layer.rows.sides[which])
                    found = tasks[number].factors[which].new_empty(length)
                triangles[number, which] = found
                sent[owner % size].append(found)
        broadcast(self._grid[GROUP], sent)
        for number in filter(self._is_kept, tasks):
            inner, outer = (unpacked(triangles[number, which]) for which in range(2))
            self.held[number] = inner, outer

    def precondition(self, gradients: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """Return the preconditioned gradients of the layers that are kept here; local.

        Those of other layers are room for what other ranks send.

        Args:
            gradients: (outputs, inputs) by layer, the same on all ranks.
        """
        found = {}
        for number, gradient in gradients.items():
            if self._is_kept(number):
                inner, outer = self.held[number]
                found[number] = outer @ gradient @ inner
            else:
                found[number] = torch.empty_like(gradient)
        return found

    def share(self, gradients: Mapping[int, Tensor]) -> None:
        """Give all ranks the preconditioned gradients; collective.

        Bytes: for each group a ``bcast`` of those of its layers, where there are
        several groups.
        """
        number = self._placement.num_ranks // self._placement.gradient_workers
        sent: dict[int, list[Tensor]] = {place: [] for place in range(number)}
        for layer, gradient in gradients.items():
            sent[self._placement.group_of(layer)].append(gradient)
        broadcast(self._grid[RECEIVERS], sent)


def broadcast(comm: Communicator, sent: Mapping[int, Sequence[Tensor]]) -> None:
    """Replace tensors by those of one rank each; collective.

    Args:
        comm: the ranks.
        sent: by the rank that has the values; of equal shapes on all ranks.

    All broadcasts are under way together: one for the tensors of a rank that have the
    same type and device.
    """
    if comm.size == 1:
        return
    under_way = []
    for root, tensors in sent.items():
        kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        for each in tensors:
            kinds.setdefault((each.dtype, each.device), []).append(each)
        for same in kinds.values():
            flat = torch.cat([each.reshape(-1) for each in same])
            request = comm.bcast(flat, root=root, nonblocking=True)
            under_way.append((root, same, flat, request))
    for root, same, flat, request in under_way:
        request.wait()
        if root != comm.rank:
            sizes = [each.numel() for each in same]
            for each, part in zip(same, flat.split(sizes), strict=True):
                each.copy_(part.view(each.shape))
