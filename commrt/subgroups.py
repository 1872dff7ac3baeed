# SPDX-License-Identifier: Apache-2.0
"""New communicators from one: split, dup, create_group, cart, graph, mesh."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

from commrt import _native
from commrt.calls.channel import Channel
from commrt.errors import MismatchError, UsageError, shown
from commrt.grids.geometry import Grid, make_grid, ranks_along, times
from commrt.grids.mesh import parse_axes
from commrt.grids.neighbor_arguments import make_neighborhood
from commrt.group.calls_of_some import CallsOfSome
from commrt.group.compare import Comparison
from commrt.vocabulary.checks import as_integer, as_items, check_flag, check_name

__all__ = ["Kinds", "Subgroups"]

_LARGEST = 2**63 - 1
Plain = TypeVar("Plain", bound=Channel)
Cart = TypeVar("Cart", bound=Channel)
Graph = TypeVar("Graph", bound=Channel)
Made = TypeVar("Made", bound=Channel)
Agree = Callable[[str, str], int]

_FEW = 16
"""So many entries may be of communicators that are gone."""


@dataclass(frozen=True)
class Kinds(Generic[Plain, Cart, Graph]):
    """Classes of the communicators to make."""

    plain: Callable[..., Plain]
    cart: Callable[..., Cart]
    graph: Callable[..., Graph]


class Descendants:
    """Communicators that were made from one, and those of these that are gone."""

    def __init__(self) -> None:
        # A list: the garbage collector may add to it while somebody looks at it.
        self._known: list[weakref.ref[Any]] = []
        self._most = _FEW
        """With more entries than that, those that are gone are dropped."""
        self.heir: Descendants | None = None
        """Has them in place of this one, whose communicator is gone."""

    def add(self, made: Any) -> None:
        """Take note of one."""
        self._known.append(weakref.ref(made))
        if len(self._known) > self._most:
            self._known[:] = [each for each in self._known if each() is not None]
            self._most = 2 * len(self._known) + _FEW

    def living(self) -> list[Any]:
        """Return those that are in use."""
        found = [each() for each in tuple(self._known)]
        return [each for each in found if each is not None and not each.is_over]

    def leave_to(self, heir: Descendants) -> None:
        """Give them to what their maker was made from, or to who has its own now."""
        while heir.heir is not None:
            heir = heir.heir
        for each in self.living():
            heir.add(each)
        self.heir = heir


class Subgroups(Generic[Plain, Cart, Graph]):
    """Makes communicators of some or all ranks of one communicator.

    Args:
        comm: the communicator.
        comparison: lets its ranks compare their calls.
        kinds: classes to make.
    """

    def __init__(
        self, comm: Plain, comparison: Comparison, kinds: Kinds[Plain, Cart, Graph]
    ) -> None:
        self._comm, self._comparison, self._kinds = comm, comparison, kinds
        self._descendants = Descendants()
        self._calls_of_some = CallsOfSome(comm)

    @property
    def made(self) -> list[Any]:
        """Communicators that were made from this one, and are still in use.

        Those are among them, too, whose maker was made from this one and is gone.
        """
        return self._descendants.living()

    def begin_under(self, origin: Descendants) -> None:
        """Leave what is made here to ``origin``, once this communicator is gone."""
        leave = self._descendants.leave_to
        weakref.finalize(self, leave, origin).atexit = False

    def split(
        self,
        color: int | None,
        key: int = 0,
        *,
        name: str | None = None,
        deterministic: bool | None = None,
    ) -> Plain | None:
        """Return the communicator of the ranks that passed the same ``color``.

        Collective over all ranks. Ranks are ordered by ``key``, then by rank here.
        With ``color=None`` a rank takes part and gets None. ``deterministic``: results
        are bitwise the same whatever algorithm runs; None: as here.
        """
        self._comm.check_usable()

        def check() -> tuple[str | None, bool, int | None, int]:
            return (
                check_name("split", name),
                self._wish("split", deterministic),
                None if color is None else _check_integer("split", "color", color),
                _check_integer("split", "key", key),
            )

        own_name, wish, mine, place = self._comparison.together("split", check)
        said = self._comparison.meet("split", [mine, place])
        label, title = self._comparison.label("split")
        if mine is None:
            return None
        chosen = sorted((at, r) for r, (other, at) in enumerate(said) if other == mine)
        ranks = [self._comm.world_ranks[rank] for _, rank in chosen]
        title = f"{title}[{mine}]"
        return self._derive(ranks, f"{label}[{mine}]", own_name or title, wish)

    def dup(
        self, *, name: str | None = None, deterministic: bool | None = None
    ) -> Plain:
        """Return a communicator of the same ranks with a sequence of its own.

        ``deterministic``: results are bitwise the same whatever algorithm runs; None:
        as here.
        """
        label, title, wish = self._meet_for_dup(name, deterministic)
        return self._derive(self._comm.world_ranks, label, title, wish)

    def _meet_for_dup(
        self, name: str | None, deterministic: bool | None
    ) -> tuple[str, str, bool]:
        """Return label, name and whether results are deterministic; collective."""
        self._comm.check_usable()

        def check() -> tuple[str | None, bool]:
            return check_name("dup", name), self._wish("dup", deterministic)

        own_name, wish = self._comparison.together("dup", check)
        self._comparison.meet("dup", None)
        label, title = self._comparison.label("dup")
        return label, own_name or title, wish

    def create_group(
        self,
        ranks: Sequence[int],
        *,
        name: str | None = None,
        deterministic: bool | None = None,
    ) -> Plain:
        """Return the communicator of ``ranks`` (ranks of this one, in that order).

        Collective over ``ranks`` only: other ranks must not call it.
        ``deterministic``: results are bitwise the same whatever algorithm runs; None:
        as here. Where a process of another rank has ended, those that remain can
        still make one.
        """
        if not self._comm.failed_by_death:
            self._comm.check_usable()
        self._comm.check_open()
        calls = self._calls_of_some
        with calls.telling_all():
            ranks = self._check_group(ranks)
        if self._comm.rank not in ranks:  # it is a call of others
            raise UsageError(
                f"create_group: ranks={ranks} must contain the caller's rank "
                f"{self._comm.rank}"
            )
        with calls.telling([*dict.fromkeys(ranks)]):
            if len({*ranks}) != len(ranks):
                raise UsageError(f"create_group: ranks={ranks} must be distinct")
            own_name = check_name("create_group", name)
            wish = self._wish("create_group", deterministic)
        world_ranks = [self._comm.world_ranks[rank] for rank in ranks]
        label = f"comm{self._comm.identity}/group{ranks}"
        title = own_name or f"{self._comm.name}.group{ranks}"
        agree = partial(calls.agree, ranks)
        return self._derive(world_ranks, label, title, wish, agree)

    def _check_group(self, given: Any) -> list[int]:
        ranks = as_items(given)
        if ranks is None:
            raise UsageError(
                f"create_group: ranks={shown(given)} must be a sequence of ranks, such "
                f"as [0, 1]"
            )
        return [self._comm.check_rank("create_group", "ranks", rank) for rank in ranks]

    def cart(
        self,
        dims: Sequence[int],
        periodic: bool | Sequence[bool] = False,
        *,
        name: str | None = None,
    ) -> Cart:
        """Return a communicator of the same ranks in a Cartesian grid.

            grid = comm.cart((0, 0), periodic=(True, False))
            source, dest = grid.shift(0)

        The product of ``dims`` is the number of ranks; every 0 is chosen so, and as
        evenly as can be. Ranks stay as they are, the last coordinate fastest.
        Collective over all ranks, with equal arguments.
        """
        self._comm.check_usable()

        def check() -> tuple[str | None, Grid]:
            return (
                check_name("cart", name),
                make_grid(self._comm.size, dims, periodic),
            )

        own_name, grid = self._comparison.together("cart", check)
        self._comparison.meet_equal(
            "cart", f"dims={grid.dims}, periodic={grid.periodic}"
        )
        label, title = self._comparison.label("cart")
        ranks = range(self._comm.size)
        return self._derive_cart(grid, ranks, label, own_name or title)

    def sub_cart(self, grid: Grid, dims: int | Sequence[int], name: str | None) -> Cart:
        """Return the part of a grid of all ranks along ``dims`` through this rank."""
        self._comm.check_usable()
        numbers = as_items(dims)

        def check() -> tuple[str | None, list[int]]:
            own_name = check_name("sub", name)
            kept = [
                grid.check_dim("sub", number)
                for number in ((dims,) if numbers is None else numbers)
            ]
            if len({*kept}) != len(kept) or not kept:
                raise UsageError(
                    f"sub: dims={shown(dims)} must be one or more different dimensions "
                    f"of {times(grid.dims)}"
                )
            return own_name, kept

        own_name, kept = self._comparison.together("sub", check)
        self._comparison.meet_equal("sub", f"dims={kept}")
        part = Grid(
            tuple(grid.dims[dim] for dim in kept),
            tuple(grid.periodic[dim] for dim in kept),
        )
        ranks = ranks_along(grid, kept, grid.coords_of(self._comm.rank))
        label, title = self._comparison.label(f"sub{kept}")
        return self._derive_cart(part, ranks, label, own_name or title)

    def dup_cart(
        self, grid: Grid, name: str | None, deterministic: bool | None
    ) -> Cart:
        """Return a communicator over the same grid of all ranks."""
        label, title, wish = self._meet_for_dup(name, deterministic)
        ranks = range(self._comm.size)
        return self._derive_cart(grid, ranks, label, title, wish)

    def graph(
        self,
        sources: Sequence[int],
        destinations: Sequence[int],
        *,
        name: str | None = None,
    ) -> Graph:
        """Return a communicator of the same ranks that knows who sends to whom.

            tree = comm.graph([parent], children)
            tree.neighbor_alltoall(parts, out=mine)

        Each rank says whom it receives from and whom it sends to, itself and any rank
        several times included; the k-th edge from one to another is the k-th for both.
        Collective over all ranks, which must agree on every edge.
        """
        self._comm.check_usable()

        def check() -> tuple[str | None, list[list[int]]]:
            return check_name("graph", name), [
                self._check_ranks("sources", sources),
                self._check_ranks("destinations", destinations),
            ]

        own_name, lists = self._comparison.together("graph", check)
        self._check_edges(*lists)
        label, title = self._comparison.label("graph")
        return self._make(
            self._kinds.graph,
            self._comm.world_ranks,
            label,
            own_name or title,
            around=make_neighborhood(*lists),
        )

    def _check_ranks(self, argument: str, given: Any) -> list[int]:
        ranks = as_items(given)
        if ranks is None:
            raise UsageError(
                f"graph: {argument}={shown(given)} must be a sequence of ranks"
            )
        return [self._comm.check_rank("graph", argument, rank) for rank in ranks]

    def _check_edges(self, sources: list[int], destinations: list[int]) -> None:
        """Raise the same MismatchError on all ranks unless both ends know each edge."""
        known = self._comparison.meet("graph", [sources, destinations])
        for rank, (_, to) in enumerate(known):
            for peer, (come, _) in enumerate(known):
                if to.count(peer) != come.count(rank):
                    raise MismatchError(
                        f"graph on {self._comm.name}: the ranks disagree: rank {rank} "
                        f"names rank {peer} {to.count(peer)} times among its "
                        f"destinations, and rank {peer} names rank {rank} "
                        f"{come.count(rank)} times among its sources"
                    )

    def mesh(
        self, axes: Mapping[str, int] | Sequence[tuple[str, int]]
    ) -> tuple[dict[str, int], str, str, Callable[[Sequence[int], str, str], Plain]]:
        """Return shape, label and name of a mesh, and what makes its parts.

        Collective over all ranks, with equal arguments.
        """
        self._comm.check_usable()
        shape = self._comparison.together(
            "mesh", lambda: parse_axes(self._comm.size, axes)
        )
        self._comparison.meet_equal("mesh", str(shape))
        label, title = self._comparison.label("mesh")
        return shape, label, title, self._derive_from

    def _wish(self, what: str, deterministic: bool | None) -> bool:
        """Return what is asked for, or else what holds here."""
        if deterministic is None:
            return self._comm.deterministic
        return check_flag(what, "deterministic", deterministic)

    def _derive(
        self,
        ranks: Sequence[int],
        label: str,
        name: str,
        deterministic: bool | None = None,
        agree: Agree | None = None,
    ) -> Plain:
        wish = self._comm.deterministic if deterministic is None else deterministic
        return self._make(
            self._kinds.plain, ranks, label, name, agree, deterministic=wish
        )

    def _derive_cart(
        self,
        grid: Grid,
        ranks: Sequence[int],
        label: str,
        name: str,
        deterministic: bool | None = None,
    ) -> Cart:
        """Return a communicator over a grid of ``ranks`` of this one."""
        world_ranks = [self._comm.world_ranks[rank] for rank in ranks]
        wish = self._comm.deterministic if deterministic is None else deterministic
        return self._make(
            self._kinds.cart, world_ranks, label, name, deterministic=wish, grid=grid
        )

    def _derive_from(self, ranks: Sequence[int], label: str, name: str) -> Plain:
        """Return a communicator of ``ranks`` of this one; collective over them."""
        return self._derive(
            [self._comm.world_ranks[rank] for rank in ranks], label, name
        )

    def _make(
        self,
        kind: Callable[..., Made],
        ranks: Sequence[int],
        label: str,
        name: str,
        agree: Agree | None = None,
        **given: Any,
    ) -> Made:
        """Return a communicator of ranks of the world; collective over them.

        ``agree`` returns its identity, given the label and what all ranks must say.
        None: these ranks have never used the label, and never will again.
        """
        world, limit = self._comm.world, self._comm.timeout_s
        same = f"deterministic={given.get('deterministic')}"
        comm = self._comm
        places = [comm.world_ranks.index(rank) for rank in ranks]
        # Where a rank had died before, those that remain make one all the same.
        deaths = not (comm.failed_by_death or comm.who_died())
        with comm.making(places, deaths=deaths):
            if agree is None:
                identity = world.agree_id(ranks, label, same, limit, once=True)
            else:
                identity = agree(label, same)
            given = {"settings": comm.settings.inherited(), **given}
            made: Any = kind(world, ranks, name, identity, timeout_s=limit, **given)
        made.timeout_s = limit
        self.adopt(made)
        found: Made = made
        return found

    def adopt(self, made: Any) -> None:
        """Let a communicator of some of these ranks end where this one is ended."""
        self._descendants.add(made)
        made.subgroups.begin_under(self._descendants)
        _native.end_together(made, self._comm)


def _check_integer(what: str, argument: str, value: Any) -> int:
    found = as_integer(value)
    if found is None or not -_LARGEST <= found <= _LARGEST:
        optional = " or None" if argument == "color" else ""
        raise UsageError(
            f"{what}: {argument}={shown(value)} must be an integer of 64 bits{optional}"
        )
    return found
