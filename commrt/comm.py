# SPDX-License-Identifier: Apache-2.0
"""Communicator: a group of ranks and every operation among them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from types import TracebackType
from typing import Any, Concatenate, NoReturn, ParamSpec, TypeVar, cast

from commrt import _native
from commrt.boxes.redistribution import Redistributions
from commrt.calls.methods import method_of
from commrt.calls.selection import Selection
from commrt.core import CartCore, CommStats, Core, GraphCore
from commrt.errors import UsageError, shown
from commrt.fusion.fused import Fusion
from commrt.grids.geometry import Coords, Grid, times
from commrt.grids.halos import Halos
from commrt.grids.mesh import Mesh
from commrt.grids.neighbors import NeighborCalls
from commrt.grids.plans import CartPlans, NeighborPlans
from commrt.group.symmetric import SymmetricMemory
from commrt.growing import Growth
from commrt.messages.point_to_point import Messages
from commrt.objects.service import Objects
from commrt.plans import Plans
from commrt.recovery import Recovery
from commrt.select.facts import CommFacts
from commrt.sparse.allreduce import SparseReport
from commrt.sparse.sums import SparseSums
from commrt.subgroups import Subgroups
from commrt.trace.methods import follow_communicator
from commrt.trace.nvtx import plans_with_ranges, put_ranges
from commrt.vocabulary.checks import as_integer
from commrt.vocabulary.names_elsewhere import OF_COMMUNICATORS, Elsewhere
from commrt.vocabulary.operations import OPERATIONS, names_of
from commrt.vocabulary.signatures import Operations

__all__ = ["CartCommunicator", "Communicator", "GraphCommunicator", "core_of"]

P = ParamSpec("P")
R = TypeVar("R")
Made = TypeVar("Made")
Method = TypeVar("Method", bound=Callable[..., Any])


def _served(
    method: Callable[Concatenate[Any, P], R], service: str
) -> Callable[Concatenate[Any, P], R]:
    """Return a method that calls ``method`` of the core's attribute ``service``.

    It has the signature and the docstring of the service's method.
    """

    def forward(self: Any, *args: P.args, **kwargs: P.kwargs) -> R:
        return method(getattr(self._core, service), *args, **kwargs)

    # The type that wraps() declares binds no instance: this cast corrects it.
    return cast(Callable[Concatenate[Any, P], R], wraps(method)(forward))


def _derived(
    method: Callable[Concatenate[Any, P], Any], hold: Callable[[Any], Made]
) -> Callable[Concatenate[Any, P], Made]:
    """Return a method that makes a core by the service of sub-groups, and holds it."""

    def forward(self: Any, *args: P.args, **kwargs: P.kwargs) -> Made:
        return hold(method(self._core.subgroups, *args, **kwargs))

    return cast(Callable[Concatenate[Any, P], Made], wraps(method)(forward))


def _held(core: Core | None) -> Communicator | None:
    return None if core is None else Communicator(core)


def _described_by(other: Callable[..., Any]) -> Callable[[Method], Method]:
    """Give a method the text of what it calls."""

    def describe(method: Method) -> Method:
        method.__doc__ = other.__doc__
        return method

    return describe


class Communicator(_native.Front, Operations):
    """A group of ranks. Get one from ``commrt.init()``, ``split`` or ``create_group``.

    Collectives must be called by all ranks of the communicator in the same order.
    Calls from several threads are serialised; the order is then the caller's duty.
    """

    def __init__(self, core: Core) -> None:
        """Hold a core; users call ``commrt.init`` and methods of communicators."""
        super().__init__(core)
        self._core = core
        put_ranges(self, core)
        follow_communicator(self, core)

    # -- ending ------------------------------------------------------------------

    def free(self) -> None:
        """Release the communicator; local, idempotent. Wait for its requests first.

        In a forked process it does nothing: memory and messages are the parent's.
        Where it failed and operations hang in it, its memory stays for them.
        """
        self._core.free()

    def __enter__(self) -> Communicator:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            self.free()

    def abort(self, code: int = 1) -> NoReturn:
        """End the whole job with exit status ``code``."""
        self._core.abort(code)

    # -- what it is --------------------------------------------------------------

    @property
    def nodes(self) -> list[list[int]]:
        """Its ranks on each node."""
        return self._core.nodes

    @property
    def facts(self) -> CommFacts:
        """The facts of the group that select, besides those of the call."""
        return self._core.facts

    @property
    def deterministic(self) -> bool:
        """True if results are bitwise the same whatever algorithm runs."""
        return self._core.deterministic

    @property
    def timeout_s(self) -> float:
        """Default limit of a wait, in seconds."""
        return self._core.timeout_s

    @timeout_s.setter
    def timeout_s(self, timeout_s: float) -> None:
        self._core.timeout_s = timeout_s

    @property
    def nan_check(self) -> bool:
        """True if calls whose arrays have NaN or infinity are refused on this rank."""
        return self._core.nan_check

    @nan_check.setter
    def nan_check(self, wanted: bool) -> None:
        self._core.nan_check = wanted

    @property
    def mpi(self) -> Any:
        """mpi4py's communicator over these ranks, or None without MPI.

        On the communicator of all ranks it is the one commrt was started on (MPI's
        world, or what ``init`` was given). A sub-communicator makes one when first
        asked: that first access is collective over its ranks. It is the caller's, who
        may ``Free()`` it; ``free()`` leaves it alone.
        """
        return self._core.native_mpi.for_caller()

    @property
    def mpi_library(self) -> str | None:
        """Name and version of the MPI library in use, None without MPI."""
        return self._core.mpi_library

    @property
    def table_digest(self) -> str | None:
        """Digest of the selection table in force, None without one."""
        return self._core.table_digest

    def stats(self) -> CommStats:
        """Return counters of this communicator."""
        return self._core.stats()

    def __dir__(self) -> list[str]:
        return [name for name in super().__dir__() if name not in OF_COMMUNICATORS]

    def __repr__(self) -> str:
        core = self._core
        state = f", {core.closed}" if core.closed else ""
        return f"<Communicator {self.name}: rank {self.rank} of {self.size}{state}>"

    # -- planning and choosing ---------------------------------------------------

    @property
    def plan(self) -> Plans:
        """Persistent plans: ``comm.plan.allreduce(x, ...)`` returns a bound call."""
        return self._plans_of(Plans)

    def _plans_of(self, kind: type[AnyPlans]) -> AnyPlans:
        core = self._core
        return plans_with_ranges(kind(core, core.binders, self), core)

    candidates = _served(Selection.candidates, "selection")
    explain = _served(Selection.explain, "selection")

    # -- new communicators -------------------------------------------------------

    split = _derived(Subgroups.split, lambda core: _held(core))
    dup = _derived(Subgroups.dup, lambda core: Communicator(core))
    create_group = _derived(Subgroups.create_group, lambda core: Communicator(core))
    cart = _derived(Subgroups.cart, lambda core: CartCommunicator(core))
    graph = _derived(Subgroups.graph, lambda core: GraphCommunicator(core))

    def mesh(
        self, axes: Mapping[str, int] | Sequence[tuple[str, int]]
    ) -> Mesh[Communicator]:
        """Return the ranks as a grid with named axes, and communicators along them.

            mesh = comm.mesh({"data": 0, "tensor": 4})
            mesh["tensor"].allreduce(x)

        The product of the numbers is the number of ranks; a 0 is chosen so. The last
        axis is the fastest. Collective over all ranks, with equal arguments.
        """
        shape, label, title, make = self._core.subgroups.mesh(axes)

        def held(ranks: Sequence[int], label: str, name: str) -> Communicator:
            return Communicator(make(ranks, label, name))

        return Mesh(self, shape, label, title, held)

    # -- going on after a fault --------------------------------------------------

    revoke = _served(Recovery.revoke, "recovery")
    agree = _served(Recovery.agree, "recovery")

    num_waiting = _served(Growth.num_waiting, "growth")

    @property
    def joined(self) -> range:
        """The ranks that came by the ``grow`` that made this one; empty for others."""
        return self._core.joined

    def _replaced_by(self, core: Core) -> Communicator:
        self._core.replaced_by(core)
        return Communicator(core)

    @_described_by(Recovery.shrink)
    def shrink(
        self, *, name: str | None = None, timeout_s: float | None = None
    ) -> Communicator:
        made = self._core.recovery.shrink(name=name, timeout_s=timeout_s)
        return self._replaced_by(made)

    @_described_by(Growth.grow)
    def grow(
        self,
        count: int | None = None,
        *,
        program: Sequence[str] | None = None,
        name: str | None = None,
        timeout_s: float | None = None,
    ) -> Communicator:
        made = self._core.growth.grow(
            count, program=program, name=name, timeout_s=timeout_s
        )
        if made is self._core:
            return self
        return self._replaced_by(made)

    # -- symmetric memory --------------------------------------------------------

    empty = _served(SymmetricMemory.empty, "symmetric")

    # -- messages ----------------------------------------------------------------

    send = _served(Messages.send, "messages")
    recv = _served(Messages.recv, "messages")
    probe = _served(Messages.probe, "messages")
    sendrecv = _served(Messages.sendrecv, "messages")
    multi_sendrecv = _served(Messages.multi_sendrecv, "messages")

    # -- objects -----------------------------------------------------------------

    bcast_object = _served(Objects.bcast_object, "objects")
    allgather_object = _served(Objects.allgather_object, "objects")
    gather_object = _served(Objects.gather_object, "objects")
    scatter_object = _served(Objects.scatter_object, "objects")
    send_object = _served(Objects.send_object, "objects")
    recv_object = _served(Objects.recv_object, "objects")

    # -- sparse sums, redistribution, fusion -------------------------------------

    sparse_allreduce = _served(SparseSums.sparse_allreduce, "sparse")
    topk_allreduce = _served(SparseSums.topk_allreduce, "sparse")

    @property
    def sparse_report(self) -> SparseReport | None:
        """Report of this rank's latest sparse operation; None before the first."""
        return self._core.sparse.report

    redistribute = _served(Redistributions.redistribute, "redistributions")
    fused = _served(Fusion.fused, "fusion")


AnyPlans = TypeVar("AnyPlans", bound=Plans)


class CartCommunicator(Communicator):
    """A communicator whose ranks lie in a grid; get one from ``comm.cart``."""

    _core: CartCore

    halo_exchange = _served(Halos.halo_exchange, "halos")
    halo_reduce = _served(Halos.halo_reduce, "halos")
    neighbor_allgather = _served(NeighborCalls.neighbor_allgather, "around")
    neighbor_allgatherv = _served(NeighborCalls.neighbor_allgatherv, "around")
    neighbor_alltoall = _served(NeighborCalls.neighbor_alltoall, "around")
    neighbor_alltoallv = _served(NeighborCalls.neighbor_alltoallv, "around")

    @property
    def grid(self) -> Grid:
        """Its geometry, without ranks."""
        return self._core.grid

    @property
    def dims(self) -> tuple[int, ...]:
        """Ranks in each dimension."""
        return self._core.grid.dims

    @property
    def periodic(self) -> tuple[bool, ...]:
        """True if each dimension's ends are neighbours."""
        return self._core.grid.periodic

    @property
    def plan(self) -> CartPlans:
        """Persistent plans; those of halos are here besides."""
        return self._plans_of(CartPlans)

    @property
    def coords(self) -> Coords:
        """Coordinates of this rank."""
        return self._core.grid.coords_of(self.rank)

    @property
    def neighbors(self) -> tuple[int | None, ...]:
        """The ranks beside this one: -x, +x, -y, +y, …; None beyond an open end."""
        return self._core.neighbors

    def coords_of(self, rank: int) -> Coords:
        """Return where ``rank`` lies; local."""
        return self._core.grid.coords_of(rank)

    def rank_at(self, coords: Sequence[int]) -> int:
        """Return who lies at ``coords``; periodic dimensions wrap around. Local."""
        return self._core.grid.rank_at(coords)

    def shift(self, dim: int, disp: int = 1) -> tuple[int | None, int | None]:
        """Return (source, dest) of a message that moves ``disp`` places along ``dim``.

        Each is None beyond an open end. Local.
        """
        moved, grid = as_integer(disp), self._core.grid
        if moved is None:
            raise UsageError(f"shift: disp={shown(disp)} must be an integer")
        return grid.shift(self.rank, grid.check_dim("shift", dim), moved)

    def sub(
        self, dims: int | Sequence[int], *, name: str | None = None
    ) -> CartCommunicator:
        """Return the grid along ``dims`` (numbers of dimensions) through this rank.

        Its ranks have the other coordinates in common with this one; its dimensions
        are in the order given. Collective over all ranks: each gets its own.
        """
        core = self._core
        return CartCommunicator(core.subgroups.sub_cart(core.grid, dims, name))

    def dup(
        self, *, name: str | None = None, deterministic: bool | None = None
    ) -> CartCommunicator:
        """Return a communicator over the same grid with a sequence of its own."""
        core = self._core
        made = core.subgroups.dup_cart(core.grid, name, deterministic)
        return CartCommunicator(made)

    def __repr__(self) -> str:
        plain = super().__repr__().removesuffix(">")
        return f"{plain}, at {self.coords} of {times(self.dims)}>"


class GraphCommunicator(Communicator):
    """A communicator whose ranks know their neighbours; from ``comm.graph``."""

    _core: GraphCore

    neighbor_allgather = _served(NeighborCalls.neighbor_allgather, "around")
    neighbor_allgatherv = _served(NeighborCalls.neighbor_allgatherv, "around")
    neighbor_alltoall = _served(NeighborCalls.neighbor_alltoall, "around")
    neighbor_alltoallv = _served(NeighborCalls.neighbor_alltoallv, "around")

    @property
    def plan(self) -> NeighborPlans:
        """Persistent plans; those among neighbours are here besides."""
        return self._plans_of(NeighborPlans)

    @property
    def sources(self) -> tuple[int, ...]:
        """The ranks that this one receives from, in order."""
        around = self._core.neighborhood
        return tuple(rank for rank in around.sources if rank is not None)

    @property
    def destinations(self) -> tuple[int, ...]:
        """The ranks that this one sends to, in order."""
        around = self._core.neighborhood
        return tuple(rank for rank in around.destinations if rank is not None)


def core_of(comm: Communicator) -> Core:
    """Return what a communicator has inside, for parts of commrt that work on that."""
    return comm._core


for _spec in OPERATIONS:
    setattr(Communicator, _spec.name, method_of(_spec))
for _kind, _name in enumerate(names_of("message")):
    _method = _native.make_message_method(_name, _kind, getattr(Communicator, _name))
    setattr(Communicator, _name, _method)
for _name, _instead in OF_COMMUNICATORS.items():
    setattr(Communicator, _name, Elsewhere(_name, _instead))
