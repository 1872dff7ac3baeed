# SPDX-License-Identifier: Apache-2.0
"""A grid of processes with named axes, on which layers are cut."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING

import numpy as np

from commrt.comm import Communicator
from commrt.errors import UsageError, shown

if TYPE_CHECKING:
    from torch.distributed import DeviceMesh

__all__ = ["ProcessGrid"]


class ProcessGrid:
    """Processes in a grid with named axes, the last one fastest.

        grid = ProcessGrid(commrt.init(), {"data": 2, "height": 2, "width": 0})
        grid.coords                  # {"data": 0, "height": 1, "width": 0}
        grid["height"].allreduce(x)  # among the two ranks of this column

    Layers name axes of the grid, and get from it the communicators along them.

    Args:
        comm: the ranks; it stays the caller's. Calls of the grid meet no call of it.
        axes: ranks along each axis, by name; one or more 0 are chosen so that the
            product is the number of ranks.

    Collective over ``comm``. Raises UsageError for axes that do not fit the ranks.
    """

    def __init__(self, comm: Communicator, axes: Mapping[str, int]) -> None:
        if not isinstance(comm, Communicator):
            raise UsageError(
                f"ProcessGrid: comm={shown(comm)} must be a communicator, as "
                f"commrt.init() returns it"
            )
        self._given = comm
        self._mesh = comm.mesh(axes)
        self._own = comm.dup(name=f"{comm.name}.grid")
        # Each function of a layer asks for them, several times.
        self._shape, self._coords = self._mesh.shape, self._mesh.coords
        self._num_ranks = self._own.size

    @classmethod
    def from_device_mesh(
        cls, mesh: DeviceMesh, comm: Communicator | None = None
    ) -> ProcessGrid:
        """Return the grid of a DeviceMesh of torch, with the same axes and places.

        Args:
            mesh: its dimensions must have names.
            comm: a communicator whose ranks are those of torch's default group; None:
                that group's own, which must be commrt's.

        Collective over the ranks of the mesh.
        """
        import torch.distributed as dist

        names = mesh.mesh_dim_names
        if names is None:
            raise UsageError(
                "ProcessGrid.from_device_mesh: the mesh has no names; make it with "
                'mesh_dim_names, such as ("data", "height")'
            )
        if comm is None:
            comm = getattr(dist.group.WORLD, "communicator", None)
        if comm is None:
            raise UsageError(
                "ProcessGrid.from_device_mesh: torch's default group is none of "
                "commrt: pass comm, a communicator with the same ranks"
            )
        ranks = mesh.mesh.flatten().tolist()
        if ranks != [*range(comm.size)]:
            comm = comm.create_group(ranks)
        return cls(comm, dict(zip(names, mesh.mesh.shape, strict=True)))

    def device_mesh(self, device_type: str = "cpu") -> DeviceMesh:
        """Return torch's DeviceMesh with the same axes and places; collective.

        torch.distributed must have been initialised.
        """
        import torch
        import torch.distributed as dist

        if not dist.is_initialized():
            raise UsageError(
                "ProcessGrid.device_mesh: torch.distributed has no default group: "
                "call commrt.torch.init_process_group(comm) first"
            )
        ranks = self._own.allgather(np.array([dist.get_rank()], np.int64))
        extents = tuple(self.shape.values())
        places = torch.from_numpy(np.asarray(ranks).reshape(extents))
        return dist.DeviceMesh(device_type, places, mesh_dim_names=self.axes)

    # -- places --------------------------------------------------------------------

    @property
    def axes(self) -> tuple[str, ...]:
        """The names of the axes, the last one fastest."""
        return self._mesh.axes

    @property
    def shape(self) -> dict[str, int]:
        """Ranks along each axis."""
        return {**self._shape}

    @property
    def coords(self) -> dict[str, int]:
        """This rank's place on each axis."""
        return {**self._coords}

    @property
    def rank(self) -> int:
        """This rank, in the order of places."""
        return self._own.rank

    @property
    def num_ranks(self) -> int:
        """Ranks of the grid."""
        return self._num_ranks

    def size(self, axes: str | Sequence[str]) -> int:
        """Return the number of ranks along one axis, or along several together."""
        number = 1
        for name in (axes,) if isinstance(axes, str) else axes:
            number *= self._shape.get(name) or self._mesh.size(name)
        return number

    def place(self, axes: Sequence[str]) -> int:
        """Return this rank's place along several axes, the last one fastest."""
        found = 0
        for name in axes:
            found = found * self._shape[name] + self._coords[name]
        return found

    # -- communicators -------------------------------------------------------------

    @property
    def comm(self) -> Communicator:
        """All ranks, in the order of places; the grid's own communicator."""
        return self._own

    def __getitem__(self, axes: str | tuple[str, ...]) -> Communicator:
        """Return the communicator along one axis through this rank, or along several.

        Along several it is made at the first use, which is collective over its ranks.
        """
        names = (axes,) if isinstance(axes, str) else tuple(axes)
        return self._own if names == self.axes else self._mesh[names]

    # -- the end -------------------------------------------------------------------

    def free(self) -> None:
        """Release what the grid has made; local, idempotent."""
        self._mesh.free()
        self._own.free()

    def __enter__(self) -> ProcessGrid:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            self.free()

    def __repr__(self) -> str:
        return f"<ProcessGrid {self.shape} of {self._given.name}, at {self.coords}>"
