# SPDX-License-Identifier: Apache-2.0
"""Channel: a group of ranks that runs collectives on host arrays."""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from commrt import _native
from commrt.backends.attaching import attach_all
from commrt.calls.collectives import Collectives
from commrt.calls.families import Families
from commrt.calls.host_route import HostRoute
from commrt.calls.methods import method_of
from commrt.calls.selection import Selection
from commrt.calls.settings import Settings
from commrt.devices.arrays import may_free
from commrt.errors import BackendError, UsageError
from commrt.group.compare import Comparison
from commrt.group.group import Group
from commrt.group.native_mpi import NativeMpi
from commrt.group.stepped import SteppedRequest
from commrt.job.arena import Arena
from commrt.job.network import measured_network
from commrt.job.private_places import Place, Places
from commrt.job.world import World
from commrt.vocabulary.operations import OPERATIONS

if TYPE_CHECKING:
    from mpi4py import MPI

    from commrt.vocabulary.signatures import Operations
else:
    Operations = object

__all__ = ["Channel", "Part"]


class Part(Protocol):
    """A service of a channel that has channels of its own."""

    def free(self) -> None:
        """Free what it has; UsageError while one of its operations has not ended."""
        ...

    def give_up(self, why: str) -> None:
        """End the waits of other ranks for this one."""
        ...

    def end_on_all_ranks(self, why: str) -> None:
        """End its calls in flight and all later ones, on all ranks."""
        ...


def _refuse(*_: Any, **__: Any) -> NoReturn:
    raise UsageError(
        "a private channel runs calls on host arrays only; this one needs a device: "
        "make it on the communicator"
    )


class Channel(Group, Operations):
    """A group of ranks that runs collectives on host arrays.

    Services use channels for their own exchanges (``private``); ``Communicator`` adds
    devices and services, and is what users get. The engine runs the calls that it has
    seen before (``native/calls/operation.cpp``), and asks ``_call`` for all others.
    """

    joined: range = range(0)
    """The ranks that came by the ``grow`` that made this one."""
    lasting: frozenset[str] = frozenset(("settings", "table", "wishes"))
    """Attributes beside a group's that it keeps once it is freed: they refer to no
    service."""
    _released: frozenset[str] = frozenset()
    """Attributes that it had until it was freed."""

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
        stager: Callable[[Any], _native.Stager] = _refuse,
        sendrecv: Callable[..., Any] = _refuse,
        place: Place | None = None,
    ) -> None:
        """Connect ``ranks`` (ranks of the world); collective unless it has a ``place``.

        Args:
            world: the job.
            ranks: who takes part, in the order of this group.
            name: what messages call it.
            identity: a number that the ranks agreed on, and nobody else has.
            deterministic: results shall not depend on the algorithm.
            native_comm: an mpi4py communicator of these ranks where nobody else runs
                collectives; None where there is none yet.
            timeout_s: limit of every wait in here, not of later ones.
            settings: the group's own choices, equal on all ranks.
            stager: returns what runs calls on a device through pinned memory.
            sendrecv: sends one message and receives one; for backends.
            place: its memory, where it is a private one.
        """
        super().__init__(
            world,
            ranks,
            name,
            identity,
            deterministic=deterministic,
            limit_s=timeout_s,
            place=place,
        )
        self._place = place
        self._sendrecv = sendrecv
        self.places = Places(identity, self.arena)
        """Identities and memory of its private channels."""
        self.settings = mine = settings or Settings()
        """Its own choices; a communicator that replaces it has them, too."""
        self.table = mine.table or world.table
        self.wishes = mine.all_wishes(world.wishes)
        """Wishes of the group and of the job; the first that applies holds."""
        self.parts: list[Part] = []
        """Services that end with it."""
        self.privates: weakref.WeakSet[Channel] = weakref.WeakSet()
        """Channels of the same ranks that services use."""
        self.native_mpi = NativeMpi(self, native_comm)
        self._resources.callback(self.native_mpi.give_back)
        self.attached = attach_all(
            self,
            self.table,
            self.wishes,
            self.native_mpi,
            stager,
            sendrecv,
            lambda: self._calls_apart(native_comm),
        )
        self._resources.callback(self._close_backends)
        """Its backends, by name."""
        self.selection = Selection(self, self.attached, self.table, self.wishes)
        self.policy = self.selection.policy
        self.comparison = Comparison(self)
        self.families = Families(self)
        """The facts that calls of different lengths share."""
        self.host = HostRoute(self, self.selection, self.families)
        self.collectives = Collectives(self, self.comparison, (self.host,))

    # -- making ------------------------------------------------------------------

    def private(self, purpose: str) -> Channel:
        """Return a channel of the same ranks for commrt's own use; local.

        Other ranks make theirs when they come to it. BackendError where there is no
        memory for it.
        """
        place = self.places.of(purpose)
        made = Channel(
            self.world,
            self.world_ranks,
            f"{self.name}.{purpose}",
            place.identity,
            place=place,
        )
        self.adopt(made)
        return made

    def adopt(self, made: Channel) -> None:
        """See to it that a private channel ends as this one does."""
        made.nan_check = False  # the program's arrays are looked at in its call
        self.privates.add(made)
        _native.end_together(made, self)

    def room(self) -> Arena:
        """Map the memory of a private channel beside that of its messages; local.

        Each rank maps it at most once, and closes it. BackendError where it cannot.
        """
        if self._place is None:
            raise BackendError(f"{self.name} is no private channel")
        return self._place.room()

    @contextmanager
    def _calls_apart(self, native_comm: MPI.Intracomm | None) -> Iterator[Collectives]:
        """Give collectives of the same ranks that leave nothing behind here."""
        key = f"comm{self.identity}/measuring"
        identity = self.world.agree_id(self.world_ranks, key)
        made = Channel(
            self.world,
            self.world_ranks,
            f"{self.name}.measuring",
            identity,
            native_comm=native_comm,
        )
        made.has_checksums = False  # a library's collectives are measured, too
        try:
            yield made.collectives
        finally:
            made.free()

    def settle(self) -> None:
        """Let the backends measure what their choices go by; collective."""
        asks = self.table is not None and self.table.names_networks
        # MPI's collectives are timed only where no table knows which is quicker.
        if asks and self.world.native_comms is not None:
            self.find_network()
        for attached in self.attached.values():
            attached.measure()
        if asks:
            self.find_network()

    def find_network(self) -> None:
        """Measure what lies between the nodes, once in a job, and choose by it.

        Collective over all ranks of the job; without effect on one node.
        """
        world = self.world
        if self.facts.nodes == 1:
            return
        if world.network is None and self.size == world.size:
            world.network = measured_network(world, self._sendrecv)
        self.facts = self.policy.facts = replace(self.facts, network=world.network)

    # -- running -----------------------------------------------------------------

    def _call(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a collective that the engine did not recognise at a glance."""
        return self.collectives.run(name, args, kwargs)

    def keep(self, request: SteppedRequest) -> SteppedRequest:
        """Let the steps of a nonblocking call go on by themselves; return it."""
        return self.world.stepping.keep(request)

    def refuse_call(self, name: str, error: BaseException) -> None:
        """Let the other ranks know of an error in a call that the engine knew."""
        if isinstance(error, Exception):
            self.comparison.refuse(name, error, None)

    def look_at_calls(self, *, always: bool) -> None:
        """Let Python look at every call, or at those that the engine does not know."""
        self._slow = always or self.closed is not None

    # -- ending ------------------------------------------------------------------

    def free(self) -> None:
        """Release the channel; local, idempotent. Wait for its requests first.

        In a forked process it does nothing: memory and messages are the parent's.
        Where it failed and operations hang in it, its memory stays for them.
        """
        if self.is_over:
            return
        at_rest = self._come_to_rest()
        for part in self.parts:
            part.free()
        self._end(at_rest=at_rest)

    @property
    def is_over(self) -> bool:
        """True if it has ended, or belongs to the parent of a forked process."""
        return self.closed is not None or os.getpid() != self.pid

    def _come_to_rest(self) -> bool:
        """Wait for what is in flight; False where operations hang in a failed group."""
        at_rest = self.comes_to_rest()
        if not at_rest and not self.failure:
            _native.end_stand_ins(self)
            at_rest = self.comes_to_rest()
        if not at_rest and not self.failure:
            raise UsageError(
                f"{self.name} cannot be freed: operations are in flight; wait() for "
                f"their requests first"
            )
        return at_rest

    def _end(self, *, at_rest: bool) -> None:
        """Refuse calls from here on, and release what no operation uses any more."""
        self.closed = "freed"
        self._slow = True
        self._forget_plans()
        self.host.forget()
        if at_rest:
            self._resources.close()
            self._release_services()

    def _release_services(self) -> None:
        """Let go of the services, which refer to this channel as it does to them.

        Only the garbage collector would find that nobody else does.
        """
        self.attached.clear()
        self.selection.remarks.clear()
        names = vars(self).keys() - self.of_group - self.lasting
        self._released = frozenset(names)
        for name in names:
            del vars(self)[name]

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if name in self._released:
                self.check_open()
            raise AttributeError(
                f"{type(self).__name__} has no attribute {name!r}", name=name, obj=self
            )

    def _close_backends(self) -> None:
        for attached in self.attached.values():
            attached.close(may_call=self.closed != "dropped")

    def __del__(self) -> None:
        # Its making may have failed on the way; a forked process owns nothing.
        if hasattr(self, "_resources") and not self.is_over:
            self.let_go()

    def let_go(self) -> None:
        """Give memory back of a channel that was dropped without ``free()``.

        Operations in flight, and with them the peers, need it to their end.
        """
        if sys.is_finalizing():
            return
        if not (self.idle and may_free()):
            self.world.lingering.append(self)
            return
        self.closed = "dropped"
        self._resources.close()

    def give_up(self, why: str) -> None:
        """Make it unusable, here and for ranks of this node that wait."""
        self.set_failure(why)
        for part in self.parts:
            part.give_up(why)

    def end_on_all_ranks(self, why: str) -> None:
        """End all operations in flight and all later ones, on all ranks."""
        super().end_on_all_ranks(why)
        for part in self.parts:
            part.end_on_all_ranks(why)


for _spec in OPERATIONS:
    setattr(Channel, _spec.name, method_of(_spec))
