# SPDX-License-Identifier: Apache-2.0
"""New communicators from old ones: split, dup, create_group, cart, mesh."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from commrt.calls import as_integer
from commrt.errors import MismatchError, UsageError
from commrt.grids import Grid, make_grid
from commrt.mesh import Mesh, parse_axes
from commrt.sparse.methods import SparseMethods

if TYPE_CHECKING:
    from commrt.comm import CartCommunicator, Communicator

__all__ = ["GroupCreation"]


# A chain of bases: a native class can be reached through one base only.
class GroupCreation(SparseMethods):
    """The methods of a communicator that make others."""

    _identity: int
    _derived: int
    _plain: ClassVar[type[Communicator]]
    _cart: ClassVar[type[CartCommunicator]]

    def split(
        self, color: int | None, key: int = 0, *, name: str | None = None
    ) -> Communicator | None:
        """Return the communicator of the ranks that passed the same ``color``.

        Collective over all ranks. Ranks are ordered by ``key``, then by rank here.
        With ``color=None`` a rank takes part and gets None.
        """
        self._check_usable()
        if color is not None:
            color = _check_integer("split", "color", color)
        key = _check_integer("split", "key", key)
        label, title = self._label("split")
        mine = f"{'' if color is None else color}/{key}".encode()
        said = self._world.bootstrap.exchange(self._ranks, label, mine, self.timeout_s)
        chosen: list[tuple[int, int]] = []
        for rank, text in enumerate(said):
            other, other_key = text.decode().split("/")
            if color is not None and other == str(color):
                chosen.append((int(other_key), rank))
        if color is None:
            return None
        ranks = [self._ranks[rank] for _, rank in sorted(chosen)]
        return self._derive(ranks, f"{label}[{color}]", name or f"{title}[{color}]")

    def dup(self, *, name: str | None = None) -> Communicator:
        """Return a communicator of the same ranks with a sequence of its own."""
        self._check_usable()
        label, title = self._label("dup")
        return self._derive(self._ranks, label, name or title)

    def create_group(
        self, ranks: Sequence[int], *, name: str | None = None
    ) -> Communicator:
        """Return the communicator of ``ranks`` (ranks of this one, in that order).

        Collective over ``ranks`` only: other ranks must not call it.
        """
        self._check_usable()
        try:
            given = list(ranks)
        except TypeError:
            raise UsageError(
                f"create_group: ranks={ranks!r} must be a sequence of ranks, such as "
                f"[0, 1]"
            ) from None
        ranks = [self._check_rank("create_group", "ranks", rank) for rank in given]
        if len(set(ranks)) != len(ranks) or self.rank not in ranks:
            raise UsageError(
                f"create_group: ranks={ranks} must be distinct and contain the "
                f"caller's rank {self.rank}"
            )
        world_ranks = [self._ranks[rank] for rank in ranks]
        label = f"comm{self._identity}/group{ranks}"
        return self._derive(world_ranks, label, name or f"{self.name}.group{ranks}")

    def cart(
        self,
        dims: Sequence[int],
        periodic: bool | Sequence[bool] = False,
        *,
        name: str | None = None,
    ) -> CartCommunicator:
        """Return a communicator of the same ranks in a Cartesian grid.

            grid = comm.cart((0, 0), periodic=(True, False))
            source, dest = grid.shift(0)

        The product of ``dims`` is the number of ranks; every 0 is chosen so, and as
        evenly as can be. Ranks stay as they are, the last coordinate fastest.
        Collective over all ranks, with equal arguments.
        """
        self._check_usable()
        grid = make_grid(self.size, dims, periodic)
        label, title = self._label("cart")
        self._check_equal("cart", label, f"dims={grid.dims}, periodic={grid.periodic}")
        return self._derive_cart(grid, range(self.size), label, name or title)

    def mesh(self, axes: Mapping[str, int] | Sequence[tuple[str, int]]) -> Mesh:
        """Return the ranks as a grid with named axes, and communicators along them.

            mesh = comm.mesh({"data": 0, "tensor": 4})
            mesh["tensor"].allreduce(x)

        The product of the numbers is the number of ranks; a 0 is chosen so. The last
        axis is the fastest. Collective over all ranks, with equal arguments.
        """
        self._check_usable()
        shape = parse_axes(self.size, axes)
        label, title = self._label("mesh")
        self._check_equal("mesh", label, str(shape))
        whole: Any = self  # a Communicator, which this class is a base of
        return Mesh(whole, shape, label, title)

    def _check_equal(self, what: str, label: str, mine: str) -> None:
        """Raise the same MismatchError on all ranks unless all of them say the same."""
        said = self._world.bootstrap.exchange(
            self._ranks, f"{label}/equal", mine.encode(), self.timeout_s
        )
        texts = [each.decode() for each in said]
        if len({*texts}) > 1:
            lines = [f"  rank {rank}: {text}" for rank, text in enumerate(texts)]
            raise MismatchError(
                f"{what} on {self.name}: the ranks disagree; pass equal arguments:\n"
                + "\n".join(lines)
            )

    def _label(self, how: str) -> tuple[str, str]:
        """Return the key under which the ranks meet, and the new name for people.

        Names are the user's and may differ across ranks; the key may not.
        """
        self._derived += 1
        key = f"comm{self._identity}/{how}{self._derived}"
        return key, f"{self.name}.{how}{self._derived}"

    def _derive(self, ranks: Sequence[int], label: str, name: str) -> Communicator:
        identity = self._world.agree_id(ranks, label)
        return self._plain(self._world, ranks, name, identity)

    def _derive_cart(
        self, grid: Grid, ranks: Sequence[int], label: str, name: str
    ) -> CartCommunicator:
        """Return a communicator over a grid of ``ranks`` of this one."""
        world_ranks = [self._ranks[rank] for rank in ranks]
        identity = self._world.agree_id(world_ranks, label)
        made = self._cart(self._world, world_ranks, name, identity)
        made.grid = grid
        return made

    def _derive_from(self, ranks: Sequence[int], label: str, name: str) -> Communicator:
        """Return a communicator of ``ranks`` of this one."""
        return self._derive([self._ranks[rank] for rank in ranks], label, name)


def _check_integer(what: str, argument: str, value: Any) -> int:
    found = as_integer(value)
    if found is None:
        optional = " or None" if argument == "color" else ""
        raise UsageError(f"{what}: {argument}={value!r} must be an integer{optional}")
    return found
