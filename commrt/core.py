# SPDX-License-Identifier: Apache-2.0
"""The insides of communicators: a channel of the program, with all services over it.

Programs hold a ``Communicator`` (``commrt/comm.py``), which has a core and shows none
of its parts. Parts of commrt that need more than a program does work on the core.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NoReturn

from commrt import _native
from commrt.arrays.host import HostView, view_anywhere
from commrt.boxes.compared import ComparedBoxes
from commrt.boxes.redistribution import Redistributions
from commrt.boxes.stand_ins import BoxStandIns
from commrt.boxes.words import BOXES
from commrt.calls import arguments
from commrt.calls.bound_call import Binders
from commrt.calls.channel import Channel
from commrt.calls.check_mode import Checker
from commrt.calls.collectives import Collectives
from commrt.calls.forwarding import forwarded
from commrt.calls.selection import Selection
from commrt.calls.settings import Settings
from commrt.compression.compressed import Compression
from commrt.device_calls.collectives import DeviceCollectives
from commrt.errors import CommError, UsageError
from commrt.fusion.fused import Fusion
from commrt.grids.geometry import Grid
from commrt.grids.halo_arguments import HALO_CALLS
from commrt.grids.halos import Halos
from commrt.grids.neighbor_arguments import Neighborhood, grid_neighborhood
from commrt.grids.neighbors import NeighborCalls
from commrt.group.compare import Refusing
from commrt.group.stepped import SteppedRequest
from commrt.group.symmetric import SymmetricMemory
from commrt.growing import Growth
from commrt.job.chaos import inject_faults
from commrt.job.world import World
from commrt.messages.bound import message_binders
from commrt.messages.point_to_point import Messages
from commrt.mpi import library
from commrt.objects.service import Objects
from commrt.recovery import Recovery
from commrt.sparse.bound import sparse_binders
from commrt.sparse.sums import SparseSums
from commrt.subgroups import Kinds, Subgroups
from commrt.trace.nvtx import wanted_ranges
from commrt.vocabulary.operations import FUSED, names_of

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["CartCore", "CommStats", "Core", "GraphCore"]


@dataclass(frozen=True)
class CommStats:
    """Counters of one communicator."""

    name: str
    """Its name in messages."""
    operations: int
    """Collectives started."""
    plans: int
    """Plans in the dispatcher's cache."""
    in_flight: bool
    """True if operations are in flight."""


_Subgroups = Subgroups["Core", "CartCore", "GraphCore"]
_MAY_FUSE = frozenset(("x", "out", "op", "nonblocking", "timeout_s", "stream"))
"""Arguments of calls that may go into a bucket."""


@dataclass(frozen=True)
class _InBucket:
    """Carries a refused call that other ranks have in a bucket."""

    fusion: Fusion
    x: HostView
    op: Any

    def refuse(self, error: Exception) -> None:
        """Take the place of a call that was refused here."""
        self.fusion.refuse_in_bucket(self.x, self.op, error)


class Core(Channel):
    """A channel of the program: collectives on devices, too, and every service."""

    devices: DeviceCollectives
    fusion: Fusion
    checker: Checker | None = None
    when_replaced: Callable[[Core], None] | None = None
    """Is told of the core that replaces this one after a fault, and moves on to it."""

    def __init__(
        self,
        world: World,
        ranks: Sequence[int],
        name: str,
        identity: int,
        *,
        deterministic: bool = False,
        native_comm: MPI.Intracomm | None = None,
        timeout_s: float | None = None,
        settings: Settings | None = None,
    ) -> None:
        """Connect ``ranks`` (ranks of the world); collective over them.

        ``native_comm``: an mpi4py communicator of these ranks where nobody else runs
        collectives. ``timeout_s``: limit of every wait in here, not of later ones.
        ``settings``: what this communicator has of its own, equal on all ranks.
        """
        super().__init__(
            world,
            ranks,
            name,
            identity,
            deterministic=deterministic,
            native_comm=native_comm,
            timeout_s=timeout_s,
            settings=settings,
            # These two are made below, and need the channel themselves.
            stager=lambda device: self.devices.stager(device),
            sendrecv=lambda *args, **kwargs: self.sendrecv(*args, **kwargs),
        )
        limit = self.timeout_s if timeout_s is None else timeout_s
        self.compression = Compression(self, self.selection, self.private)
        self.selection.remarks.append(self.compression.explained)
        self.devices = DeviceCollectives(
            self, self._host_channel, self.compression.bind
        )
        self.fusion = Fusion(
            self,
            self.devices,
            choose=self.selection.choose,
            plan=self.host.plan,
            may_compress=lambda: self.compression.is_open,
            take_place=self._take_next,
        )
        self.symmetric = SymmetricMemory(self, self._forget_reach)
        self._resources.callback(self.symmetric.close)
        self._resources.callback(self.devices.close)
        self.comparison.meeting = self._meeting
        self.messages = Messages(self, self.devices, self.comparison)
        self.collectives = Collectives(
            self,
            self.comparison,
            on_host=(self.fusion, self.compression, self.host),
            on_device=(self.fusion, self.devices),
            carrier=self._carrier,
        )
        self.sparse = SparseSums(self, self.devices, self.comparison, self.private)
        self.objects = Objects(self, self.comparison, self.private)
        self.parts += [self.sparse, self.compression, self.objects]
        self.subgroups = _Subgroups(self, self.comparison, _KINDS)
        self.recovery: Recovery[Core] = Recovery(
            self, Core, lambda: [each.recovery for each in self.subgroups.made]
        )
        self.growth: Growth[Core] = Growth(self, self.recovery)
        self.box_plans = ComparedBoxes(self)
        box_stand_ins = BoxStandIns(self, self.devices, self.box_plans)
        self.devices.refused.makers[BOXES] = box_stand_ins.make
        self.redistributions = Redistributions(
            self, self.devices, self.comparison, self.box_plans, self.families
        )
        self.binders: Binders = {
            **self.collectives.binders,
            **message_binders(self.messages),
            **sparse_binders(self, self.sparse),
            **self.redistributions.binders,
        }
        for attached in self.attached.values():
            attached.join(limit)
        checks = None if settings is None else settings.checks
        checks = Checker.is_wanted() if checks is None else checks
        self.settle()
        if self.size > 1 and checks:
            self.checker = Checker(self, self.private("check"), self.table_digest)
            self.parts.append(self.checker)
            self.call_check = self.checker.numbers
            self.guards_arrays = True
        inject_faults(self)
        self.ranges = wanted_ranges()
        """Shows calls to a profiler; None where nobody asks for it."""

    # -- making ------------------------------------------------------------------

    def _carrier(
        self, name: str, args: tuple[Any, ...], arguments: dict[str, Any]
    ) -> Refusing | None:
        """Return what carries a call that was refused; None: this channel."""
        if self.fusion.nbytes is not None and name in FUSED:
            fused = self._as_fused(args, arguments)
            if fused is not None:
                return fused
        on_host = self.devices.carrier_on_host(args, arguments)
        self.devices.refused.notice(args, arguments)
        return on_host or self.compression.carrier(name, args, arguments)

    def _as_fused(
        self, args: tuple[Any, ...], arguments: dict[str, Any]
    ) -> Refusing | None:
        """Return what carries a refused call that others may have in a bucket.

        None: they have not. Its arguments may be wrong.
        """
        asked = {name for name, value in arguments.items() if value is not None}
        if arguments.get("nonblocking") is not True or not asked <= _MAY_FUSE:
            return None
        try:
            x = view_anywhere(args[0] if args else arguments["x"], "x")
        except Exception:  # noqa: BLE001  of an object that is not ours
            return self.fusion
        if not self.fusion.would_take(x):
            return None
        return _InBucket(self.fusion, x, arguments.get("op"))

    def refuse(self, error: Exception) -> None:
        """Take the place of a call that was refused here, behind open buckets.

        The other ranks send theirs, too, before such a call.
        """
        with suppress(CommError):
            self._cut_buckets()
        if not self.fusion.is_lost:
            self._take_place(error)

    def _take_place(self, error: Exception) -> None:
        """Refuse the next operation, whatever it is on other ranks."""
        refused = self.devices.refused
        if refused.may_concern:
            refused.refuse(error, super().refuse)
        else:
            super().refuse(error)

    def _take_next(self, error: Exception) -> None:
        """Do the same, and wait until it has its place."""
        self._take_place(error)
        self.devices.refused.settle()

    def _call(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a collective that the engine did not recognise at a glance."""
        number = self.next_seq
        made = super()._call(name, args, kwargs)
        self.devices.refused.raise_untold(number, made)
        return made

    def check_usable(self) -> None:
        """Raise the error of its end unless it can be used; come to the next call."""
        super().check_usable()
        self.devices.refused.settle()

    @contextmanager
    def _meeting(self) -> Iterator[None]:
        """Send open buckets before the ranks meet for an operation."""
        is_fused = self.fusion.nbytes is not None
        if is_fused:
            self.fusion.make_way()
            _native.meet_in_context(self, begins=True)
        try:
            yield
        finally:
            if is_fused:
                _native.meet_in_context(self, begins=False)

    def _cut_buckets(self) -> None:
        """Send open buckets before what is in none of them."""
        if self.fusion.nbytes is not None:
            self.fusion.make_way()

    def _host_channel(self) -> HostCalls:
        """Return what runs the host's parts of calls on device arrays; local."""
        made = HostCalls(self, "host")
        self.adopt(made)
        return made

    # -- ending ------------------------------------------------------------------

    def replaced_by(self, core: Core) -> None:
        """Let who follows this communicator go on with one that takes its place."""
        tell, self.when_replaced = self.when_replaced, None
        if tell is not None:
            tell(core)
        core.when_replaced = tell

    def free(self) -> None:
        """Release the communicator; local, idempotent. Wait for its requests first.

        In a forked process it does nothing: memory and messages are the parent's.
        Where it failed and operations hang in it, its memory stays for them.
        """
        if self.is_over:
            return
        if self.fusion.context is not None:
            raise UsageError(
                f"{self.name} cannot be freed: a fused() of it is open; leave it first"
            )
        super().free()

    def _end(self, *, at_rest: bool) -> None:
        super()._end(at_rest=at_rest)
        if not at_rest:
            self.devices.close()  # nobody looks at its devices any more

    def _release_services(self) -> None:
        self.devices.users.clear()
        super()._release_services()

    def give_up(self, why: str) -> None:
        """Make the communicator unusable, here and for ranks of this node that wait."""
        super().give_up(why)
        self.devices.give_up(why)

    def end_on_all_ranks(self, why: str) -> None:
        """End all operations in flight and all later ones, on all ranks."""
        super().end_on_all_ranks(why)
        self.devices.end_on_all_ranks(why)

    # -- what it is --------------------------------------------------------------

    @property
    def mpi(self) -> Any:
        """mpi4py's communicator over these ranks, or None without MPI.

        On the communicator of all ranks it is the one commrt was started on (MPI's
        world, or what ``init`` was given). A sub-communicator makes one when first
        asked: that first access is collective over its ranks. It is the caller's, who
        may ``Free()`` it; ``free()`` leaves it alone.
        """
        return self.native_mpi.for_caller()

    @property
    def mpi_library(self) -> str | None:
        """Name and version of the MPI library in use, None without MPI."""
        if self.world.mpi is None:
            return None
        return library.library_name(library.load())

    @property
    def table_digest(self) -> str | None:
        """Digest of the selection table in force, None without one."""
        return None if self.table is None else self.table.digest

    @property
    def carriers_agreed(self) -> bool:
        """True if the ranks have agreed on what carries device arrays."""
        return self.devices.is_agreed

    def stats(self) -> CommStats:
        """Return counters of this communicator."""
        self.check_process()
        return CommStats(self.name, self.next_seq, self.num_plans, not self.idle)

    def abort(self, code: int = 1) -> NoReturn:
        """End the whole job with exit status ``code``."""
        from commrt.job.abort import end_job

        end_job(self.world, code)

    def __repr__(self) -> str:
        state = f", {self.closed}" if self.closed else ""
        return f"<Core {self.name}: rank {self.rank} of {self.size}{state}>"

    # -- symmetric memory --------------------------------------------------------

    empty = forwarded(SymmetricMemory.empty, "symmetric")

    @property
    def has_heap(self) -> bool:
        """True if there is symmetric memory; the same on all ranks of a node."""
        return self.symmetric.heap is not None

    def _forget_reach(self) -> None:
        """Forget plans, which do not know what peers may reach from now on."""
        self.host.forget()
        self.devices.forget_plans()

    # -- selection ---------------------------------------------------------------

    candidates = forwarded(Selection.candidates, "selection")
    explain = forwarded(Selection.explain, "selection")

    # -- messages ----------------------------------------------------------------

    send = forwarded(Messages.send, "messages")
    recv = forwarded(Messages.recv, "messages")
    sendrecv = forwarded(Messages.sendrecv, "messages")
    multi_sendrecv = forwarded(Messages.multi_sendrecv, "messages")

    sparse_allreduce = forwarded(SparseSums.sparse_allreduce, "sparse")

    fused = forwarded(Fusion.fused, "fusion")

    # -- running -----------------------------------------------------------------

    def plan_alone(self, call: arguments.Call, bound: arguments.Bound) -> Any:
        """Return the plan of a call by a schedule, which this rank makes alone."""
        return self.host.plan_alone(call, bound)


class HostCalls(Channel):
    """Runs the host's parts of one communicator's calls on device arrays.

    It has what such parts use beside collectives: compression and sparse sums.
    """

    def __init__(self, comm: Core, purpose: str) -> None:
        """Connect the ranks of ``comm``; local, as ``Channel.private``."""
        place = comm.places.of(purpose)
        super().__init__(
            comm.world,
            comm.world_ranks,
            f"{comm.name}.{purpose}",
            place.identity,
            deterministic=comm.deterministic,
            place=place,
        )
        self.places = comm.places.within(purpose)
        self.compression = Compression(self, self.selection, self.private)
        self.collectives = Collectives(
            self, self.comparison, (self.compression, self.host)
        )
        self.sparse = SparseSums(self, comm.devices, self.comparison, self.private)
        self.sparse.made_for = weakref.ref(comm.sparse)
        self.parts += [self.sparse, self.compression]
        inject_faults(self)

    sparse_allreduce = forwarded(SparseSums.sparse_allreduce, "sparse")
    topk_allreduce = forwarded(SparseSums.topk_allreduce, "sparse")

    def keep(self, request: SteppedRequest) -> SteppedRequest:
        """Return a request whose steps the host's thread begins."""
        return request

    def carrier_of(self, service: str | None) -> Refusing:
        """Return what calls of a service begin on."""
        if service is None:
            return self
        return self.sparse.open() if service == "sparse" else self.compression.open()


class CartCore(Core):
    """A core whose ranks lie in a grid."""

    lasting = Core.lasting | {"grid", "neighbors"}

    def __init__(self, *args: Any, grid: Grid, **kwargs: Any) -> None:
        """Connect the ranks; collective over them."""
        super().__init__(*args, **kwargs)
        self.grid = grid
        """Its geometry, without ranks."""
        around = grid_neighborhood(self.neighbors)
        self.around = NeighborCalls(
            self, around, self.devices, self.comparison, self.families
        )
        services = self.devices, self.comparison, self.box_plans, self.families
        self.halos = Halos(self, grid, *services)
        self.binders = {
            **self.binders,
            **self.around.binders,
            **self.halos.binders,
        }

    def sent_to_neighbors(
        self, what: str, args: tuple[Any, ...], more: dict[str, Any]
    ) -> int:
        """Return the bytes that a call with these arguments sends to other ranks."""
        if what in HALO_CALLS:
            return self.halos.sent_nbytes(what, *args, **more)
        return self.around.sent_nbytes(what, args, more)

    @cached_property
    def neighbors(self) -> tuple[int | None, ...]:
        """The ranks beside this one: -x, +x, -y, +y, …; None beyond an open end."""
        return self.grid.neighbors(self.rank)


class GraphCore(Core):
    """A core whose ranks know their neighbours."""

    lasting = Core.lasting | {"neighborhood"}

    def __init__(self, *args: Any, around: Neighborhood, **kwargs: Any) -> None:
        """Connect the ranks; collective over them."""
        super().__init__(*args, **kwargs)
        self.neighborhood = around
        """The ranks beside this one."""
        self.around = NeighborCalls(
            self, around, self.devices, self.comparison, self.families
        )
        self.binders = {**self.binders, **self.around.binders}

    def sent_to_neighbors(
        self, what: str, args: tuple[Any, ...], more: dict[str, Any]
    ) -> int:
        """Return the bytes that a call with these arguments sends to other ranks."""
        return self.around.sent_nbytes(what, args, more)


_KINDS = Kinds(Core, CartCore, GraphCore)

for _kind, _name in enumerate(names_of("message")):
    _method = _native.make_message_method(_name, _kind, getattr(Core, _name))
    setattr(Core, _name, _method)
