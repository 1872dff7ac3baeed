# SPDX-License-Identifier: Apache-2.0
"""New communicators from old ones: split, dup, create_group, cart, mesh."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from commrt.calls import as_integer, check_flag
from commrt.errors import MismatchError, UsageError
from commrt.grids import Grid, make_grid
from commrt.mesh import Mesh, parse_axes
from commrt.neighbors import make_neighborhood
from commrt.sparse.methods import SparseMethods

if TYPE_CHECKING:
    from commrt.comm import CartCommunicator, Communicator, GraphCommunicator

__all__ = ["GroupCreation"]


# A chain of bases: a native class can be reached through one base only.
class GroupCreation(SparseMethods):
    """The methods of a communicator that make others."""

    _identity: int
    _derived: int
    _deterministic: bool
    _plain: ClassVar[type[Communicator]]
    _cart: ClassVar[type[CartCommunicator]]
    _graph: ClassVar[type[GraphCommunicator]]

    def split(
        self,
        color: int | None,
        key: int = 0,
        *,
        name: str | None = None,
        deterministic: bool | None = None,
    ) -> Communicator | None:
        """Return the communicator of the ranks that passed the same ``color``.

        Collective over all ranks. Ranks are ordered by ``key``, then by rank here.
        With ``color=None`` a rank takes part and gets None. ``deterministic``: results
        are bitwise the same whatever algorithm runs; None: as here.
        """
        self._check_usable()
        wish = self._wish("split", deterministic)
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
        title = f"{title}[{color}]"
        return self._derive(ranks, f"{label}[{color}]", name or title, wish)

    def dup(
        self, *, name: str | None = None, deterministic: bool | None = None
    ) -> Communicator:
        """Return a communicator of the same ranks with a sequence of its own.

        ``deterministic``: results are bitwise the same whatever algorithm runs; None:
        as here.
        """
        self._check_usable()
        wish = self._wish("dup", deterministic)
        label, title = self._label("dup")
        return self._derive(self._ranks, label, name or title, wish)

    def create_group(
        self,
        ranks: Sequence[int],
        *,
        name: str | None = None,
        deterministic: bool | None = None,
    ) -> Communicator:
        """Return the communicator of ``ranks`` (ranks of this one, in that order).

        Collective over ``ranks`` only: other ranks must not call it.
        ``deterministic``: results are bitwise the same whatever algorithm runs; None:
        as here.
        """
        self._check_usable()
        wish = self._wish("create_group", deterministic)
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
        title = f"{self.name}.group{ranks}"
        return self._derive(world_ranks, label, name or title, wish)

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

    def graph(
        self,
        sources: Sequence[int],
        destinations: Sequence[int],
        *,
        name: str | None = None,
    ) -> GraphCommunicator:
        """Return a communicator of the same ranks that knows who sends to whom.

            tree = comm.graph([parent], children)
            tree.neighbor_alltoall(parts, out=mine)

        Each rank says whom it receives from and whom it sends to, itself and any rank
        several times included; the k-th edge from one to another is the k-th for both.
        Collective over all ranks, which must agree on every edge.
        """
        self._check_usable()
        lists = []
        for argument, given in (("sources", sources), ("destinations", destinations)):
            try:
                ranks = list(given)
            except TypeError:
                raise UsageError(
                    f"graph: {argument}={given!r} must be a sequence of ranks"
                ) from None
            lists.append([self._check_rank("graph", argument, rank) for rank in ranks])
        label, title = self._label("graph")
        self._check_edges(label, *lists)
        identity = self._world.agree_id(self._ranks, label)
        made = self._graph(self._world, self._ranks, name or title, identity)
        made.neighborhood = make_neighborhood(*lists)
        return made

    def _check_edges(
        self, label: str, sources: list[int], destinations: list[int]
    ) -> None:
        """Raise the same MismatchError on all ranks unless both ends know each edge."""
        said = self._world.bootstrap.exchange(
            self._ranks,
            f"{label}/edges",
            json.dumps([sources, destinations]).encode(),
            self.timeout_s,
        )
        known = [json.loads(text) for text in said]
        for rank, (_, to) in enumerate(known):
            for peer, (come, _) in enumerate(known):
                if to.count(peer) != come.count(rank):
                    raise MismatchError(
                        f"graph on {self.name}: the ranks disagree: rank {rank} names "
                        f"rank {peer} {to.count(peer)} times among its destinations, "
                        f"and rank {peer} names rank {rank} {come.count(rank)} times "
                        f"among its sources"
                    )

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

    def _wish(self, what: str, deterministic: bool | None) -> bool:
        if deterministic is None:
            return self._deterministic
        return check_flag(what, "deterministic", deterministic)

    def _derive(
        self,
        ranks: Sequence[int],
        label: str,
        name: str,
        deterministic: bool | None = None,
    ) -> Communicator:
        wish = self._deterministic if deterministic is None else deterministic
        identity = self._world.agree_id(ranks, label, f"deterministic={wish}")
        return self._plain(self._world, ranks, name, identity, deterministic=wish)

    def _derive_cart(
        self,
        grid: Grid,
        ranks: Sequence[int],
        label: str,
        name: str,
        deterministic: bool | None = None,
    ) -> CartCommunicator:
        """Return a communicator over a grid of ``ranks`` of this one."""
        world_ranks = [self._ranks[rank] for rank in ranks]
        wish = self._deterministic if deterministic is None else deterministic
        identity = self._world.agree_id(world_ranks, label, f"deterministic={wish}")
        made = self._cart(self._world, world_ranks, name, identity, deterministic=wish)
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
