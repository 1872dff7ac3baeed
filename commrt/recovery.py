# SPDX-License-Identifier: Apache-2.0
"""Going on after a fault: revoke, agree, shrink.

The words are those of ULFM, MPI's user-level failure mitigation ("Post-failure recovery
of MPI communication capability", Bland et al., 2013).
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Generic, TypeVar

import numpy as np

from commrt.backends.catalog import catalog
from commrt.bootstrap.base import Bootstrap
from commrt.calls.channel import Channel
from commrt.errors import BackendError, CommError, UsageError, shown
from commrt.job.world import World, connect_world
from commrt.vocabulary.checks import as_integer, check_name
from commrt.vocabulary.limits import deadline_after

__all__ = ["Recovery"]


Plain = TypeVar("Plain", bound=Channel)
_MADE = b"made"
_LARGEST = 2**63 - 1


class Recovery(Generic[Plain]):
    """Ends one communicator on all ranks, and founds another of those that remain.

    Args:
        comm: the communicator.
        make: makes one, from a world, its ranks, a name and an identity.
        descendants: returns the recovery of communicators made from this one.
    """

    def __init__(
        self,
        comm: Plain,
        make: Callable[..., Plain],
        descendants: Callable[[], Sequence[Recovery[Any]]],
    ) -> None:
        # The communicator owns this.
        self._ref = weakref.ref(comm)
        self._make, self._descendants = make, descendants
        self._number = 0
        """Agreements so far; equal on ranks that made the same calls."""

    @property
    def _comm(self) -> Plain:
        comm = self._ref()
        assert comm is not None
        return comm

    def revoke(self, why: str = "") -> None:
        """End the communicator on all of its ranks, as one of them sees fit. Local.

            except commrt.errors.TimeoutError_:
                comm.revoke("step 17 hangs")
                comm = comm.shrink()

        All operations in flight and all later ones raise RevokedError, here and on the
        other ranks, and so do those of communicators that were made from this one.
        Then ``shrink()`` gives a new one. Where it has failed already, nothing changes
        here; the other ranks are told.
        """
        comm = self._comm
        comm.check_open()
        if not isinstance(why, str):
            raise UsageError(f"revoke: why={shown(why)} must be a text")
        self.end(f"revoke() was called{f': {why}' if why else ''}")

    def end(self, why: str) -> None:
        """End the communicator and those made from it, on all of their ranks."""
        comm = self._comm
        if comm.is_over:
            return
        for each in self._descendants():
            each.end(why)
        comm.end_on_all_ranks(why)
        comm.give_up(why)

    def agree(self, flag: int = True, *, timeout_s: float | None = None) -> int:
        """Return the bitwise AND of the ``flag`` of all ranks that live.

            if not comm.agree(is_right):
                ...  # some rank found its result wrong

        All ranks that return have the same result, whoever dies meanwhile, and also
        where the communicator has failed. Ranks whose process has ended are left out.
        It costs milliseconds. Collective over the ranks that live.

        Raises:
            TimeoutError_: a rank neither came nor ended in time; all may call again.
            UsageError: ``flag`` is no integer of 64 bits.
        """
        comm = self._comm
        comm.check_open()
        number = as_integer(int(flag) if isinstance(flag, bool | np.bool_) else flag)
        if number is None or not -_LARGEST - 1 <= number <= _LARGEST:
            raise UsageError(f"agree: flag={shown(flag)} must be an integer of 64 bits")
        limit_s = comm.limit("agree", timeout_s)
        made, said = self._regroup("agree", str(number).encode(), limit_s)
        made.close()
        result = -1
        for blob in said.values():
            result &= int(blob)
        return result

    def shrink(
        self, *, name: str | None = None, timeout_s: float | None = None
    ) -> Plain:
        """Return a communicator of the ranks that live, in their order.

            try:
                comm.allreduce(gradients)
            except (PeerFailedError, RevokedError):
                comm = comm.shrink()

        It first revokes this one, so that ranks that wait for others hear of it. Then
        it waits until each rank has come here, or its process has ended. Ranks may die
        meanwhile. Where all ranks live, as after a deadline, all of them are in the new
        communicator. Nothing of the old one is needed any more: free it.

        Collective over the ranks that live.

        Raises:
            UsageError: the communicator has not failed; ``revoke()`` ends one.
            TimeoutError_: a rank neither came nor ended in time; all may call again.
            RevokedError: the others go on without this rank.
        """
        comm = self._comm
        comm.check_open()
        own_name = check_name("shrink", name)
        limit_s = comm.limit("shrink", timeout_s)
        if not comm.why_over():
            raise UsageError(
                f"shrink: {comm.name} has not failed, and all of its ranks can use it; "
                f"call revoke() first to replace it all the same"
            )
        deadline = deadline_after(limit_s)
        self.end("a rank called shrink()")
        peers, _ = self._regroup("shrink", b"", limit_s)
        return self.found(peers, own_name or f"{comm.name}.shrink", deadline)

    def found(self, peers: Bootstrap, name: str, deadline: float) -> Plain:
        """Return a communicator of these ranks, or of those of them that live.

        All that return have the same one: no rank uses it before all have made it.
        """
        while True:
            made: Plain | None = None
            said = _MADE
            failure: CommError | None = None
            left_s = max(0.0, deadline - time.monotonic())
            try:
                made = self._founded(peers, name)
            except CommError as error:
                failure, said = error, f"{type(error).__name__}: {error}".encode()
            rest, all_said = peers.regroup(range(peers.size), "made", said, left_s)
            if len(all_said) == peers.size:
                wrong = [rank for rank, blob in all_said.items() if blob != _MADE]
                if made is not None and not wrong:
                    rest.close()
                    return made
                if failure is None:
                    why = all_said[wrong[0]].decode()
                    failure = BackendError(f"rank {wrong[0]} of {name}: {why}")
                raise failure
            if made is not None:  # somebody has died meanwhile
                made.give_up("a rank died before all had made it")
                made.free()
            peers = rest

    def _founded(self, peers: Bootstrap, name: str) -> Plain:
        comm = self._comm
        world = _world_of(peers, comm.world)
        everybody = range(world.size)
        wish = comm.deterministic
        identity = world.agree_id(everybody, "world", f"deterministic={wish}")
        made = self._make(
            world,
            everybody,
            name,
            identity,
            deterministic=wish,
            native_comm=world.mpi,
            settings=comm.settings,
        )
        made.timeout_s = comm.timeout_s
        return made

    def _regroup(
        self, what: str, blob: bytes, limit_s: float
    ) -> tuple[Bootstrap, dict[int, bytes]]:
        comm = self._comm
        key = f"comm{comm.identity}/{what}/{self._number}"
        found = comm.world.bootstrap.regroup(comm.world_ranks, key, blob, limit_s)
        self._number += 1
        return found


def _world_of(peers: Bootstrap, old: World) -> World:
    """Return the world of some ranks of an old one; collective over them."""
    world = connect_world(
        peers,
        replace(old.launch, rank=peers.rank, size=peers.size),
        catalog(),
        in_process=old.in_process,
        engine=old.engine,
        timeout_s=old.timeout_s,
    )
    world.chaos = old.chaos  # which goes on counting
    return world
