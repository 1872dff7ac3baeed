# SPDX-License-Identifier: Apache-2.0
"""A grid of ranks with named axes, and a communicator along each of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Generic, Protocol, TypeVar

from commrt.errors import ClosedError, UsageError, shown, suggest
from commrt.grids.geometry import Grid, fill_dims, ranks_along
from commrt.vocabulary.checks import as_items

__all__ = ["Mesh", "parse_axes"]


class Ranks(Protocol):
    """A communicator, as far as a mesh knows it."""

    @property
    def rank(self) -> int:
        """This process's rank."""
        ...

    def free(self) -> None:
        """Release it; local."""
        ...


C = TypeVar("C", bound=Ranks)


class Mesh(Generic[C]):
    """The ranks of a communicator in a grid with named axes, the last one fastest.

        mesh = comm.mesh({"data": 2, "tensor": 4})
        mesh["tensor"].allreduce(partial)          # among 4 ranks
        mesh["data"].allreduce(grad, op="avg")     # among 2 ranks
        mesh["data", "tensor"].barrier()           # both axes, as one

    The communicators along single axes are made with the mesh; one along several axes
    is made when it is first asked for, which is then collective over its ranks.
    """

    def __init__(
        self,
        comm: C,
        shape: Mapping[str, int],
        label: str,
        title: str,
        make: Callable[[Sequence[int], str, str], C],
    ) -> None:
        """Collective over ``comm``; users call ``comm.mesh``.

        ``make`` returns a communicator of ranks of ``comm``, by a key that the ranks
        agree on and a name.
        """
        self._names = names = tuple(shape)
        self._grid = Grid(tuple(shape.values()), (False,) * len(names))
        self._comm, self._make = comm, make
        self._label, self._title = label, title
        self._coords = self._grid.coords_of(comm.rank)
        self._made: dict[tuple[str, ...], C] = {}
        self._closed = False
        for name in names:
            self._along((name,))

    @property
    def comm(self) -> C:
        """The communicator of all ranks that the mesh was made of; it stays yours."""
        return self._comm

    @property
    def axes(self) -> tuple[str, ...]:
        """The names of the axes, the last one fastest."""
        return self._names

    @property
    def shape(self) -> dict[str, int]:
        """Ranks along each axis."""
        return dict(zip(self._names, self._grid.dims, strict=True))

    @property
    def coords(self) -> dict[str, int]:
        """Coordinate of this rank on each axis."""
        return dict(zip(self._names, self._coords, strict=True))

    def size(self, axis: str) -> int:
        """Return the number of ranks along ``axis``."""
        return self._grid.dims[self._number(axis)]

    def rank_at(self, coords: Mapping[str, int]) -> int:
        """Return the rank of ``comm`` at ``coords``, which names every axis."""
        if not isinstance(coords, Mapping):
            raise UsageError(
                f"mesh.rank_at: coords={shown(coords)} must name a place on each axis "
                f"of {self.shape}, such as {dict.fromkeys(self._names, 0)}"
            )
        for axis in coords:
            self._number(axis)
        missing = [name for name in self._names if name not in coords]
        if missing:
            raise UsageError(
                f"mesh.rank_at: coords={dict(coords)} lacks {', '.join(missing)}; "
                f"expected a place on each axis of {self.shape}"
            )
        return self._grid.rank_at([coords[name] for name in self._names])

    def __getitem__(self, axes: str | tuple[str, ...]) -> C:
        """Return the communicator along one axis, or along several flattened into one.

        Its ranks are ordered by their places, the last of the named axes fastest.
        """
        if self._closed:
            raise ClosedError(
                f"{self._title} was freed and has no communicators any more: make "
                f"another mesh by comm.mesh()"
            )
        names = axes if isinstance(axes, tuple) else (axes,)
        if len({*map(self._number, names)}) != len(names) or not names:
            raise UsageError(
                f"mesh[{shown(names)}]: name one or more different axes of {self.shape}"
            )
        return self._comm if names == self._names else self._along(names)

    def free(self) -> None:
        """Release the communicators that the mesh has made; local, idempotent."""
        for made in self._made.values():
            made.free()
        self._closed = True

    def __enter__(self) -> Mesh[C]:
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
        state = ", freed" if self._closed else ""
        return f"<Mesh {self._title}: {self.shape}, at {self.coords}{state}>"

    def _number(self, axis: Any) -> int:
        if not isinstance(axis, str) or axis not in self._names:
            raise UsageError(
                f"mesh: unknown axis {shown(axis)}{suggest(axis, self._names)}"
            )
        return self._names.index(axis)

    def _along(self, names: tuple[str, ...]) -> C:
        if names not in self._made:
            dims = [self._number(name) for name in names]
            ranks = ranks_along(self._grid, dims, self._coords)
            text = ",".join(names)
            self._made[names] = self._make(
                ranks, f"{self._label}/{text}", f"{self._title}[{text}]"
            )
        return self._made[names]


def parse_axes(size: int, axes: Any) -> dict[str, int]:
    """Return the ranks along each axis that ``mesh`` is asked for, or UsageError."""
    items = as_items(iter(axes.items()) if isinstance(axes, Mapping) else axes)
    pairs = [as_items(item) for item in items or ()]
    named = [(*pair,) for pair in pairs if pair is not None and len(pair) == 2]
    if not named or items is None or len(named) != len(items):
        raise UsageError(
            f"mesh: axes={shown(axes)} must be names with numbers of ranks, such as "
            f"{{'data': 2, 'tensor': 4}}"
        )
    names = tuple(name for name, _ in named)
    sizes = tuple(size for _, size in named)
    for name in names:
        if not isinstance(name, str) or not name.isidentifier():
            raise UsageError(f"mesh: axis {shown(name)} must be a name, such as 'data'")
        if names.count(name) > 1:
            raise UsageError(
                f"mesh: axis {shown(name)} is named twice; expected once each"
            )
    return dict(zip(names, fill_dims("mesh", size, sizes), strict=True))
