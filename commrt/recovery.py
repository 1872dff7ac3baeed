# SPDX-License-Identifier: Apache-2.0
"""Going on after a fault: revoke, agree, shrink.

The words are those of ULFM, MPI's user-level failure mitigation ("Post-failure recovery
of MPI communication capability", Bland et al., 2013).
"""

from __future__ import annotations

import re
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, NoReturn, TypeVar

import numpy as np

from commrt.bootstrap.base import Bootstrap
from commrt.calls.channel import Channel
from commrt.errors import MismatchError, RevokedError, UsageError, shown
from commrt.founding import Founder
from commrt.vocabulary.checks import as_integer, check_name
from commrt.vocabulary.limits import deadline_after

__all__ = ["Recovery", "name_after"]


Plain = TypeVar("Plain", bound=Channel)
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
        """How often the ranks have met here; equal on all of them."""

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
        Where a rank of such a communicator has died, they raise PeerFailedError.
        Then ``shrink()`` gives a new one. Where it has failed already, nothing changes
        here; the other ranks are told.
        """
        comm = self._comm
        comm.check_open()
        if not isinstance(why, str):
            raise UsageError(f"revoke: why={shown(why)} must be a text")
        said = why.encode(errors="backslashreplace").decode()
        self.end(f"revoke() was called{f': {said}' if said else ''}")

    def end(self, why: str) -> None:
        """End the communicator and those made from it, on all of their ranks."""
        comm = self._comm
        if comm.is_over:
            return
        for each in self._descendants():
            each.end(why)
        comm.end_on_all_ranks(why)

    def agree(self, flag: int = True, *, timeout_s: float | None = None) -> int:
        """Return the bitwise AND of the ``flag`` of all ranks that live.

            if not comm.agree(is_right):
                ...  # some rank found its result wrong

        All ranks that return have the same result, whoever dies meanwhile, and also
        where the communicator has failed. Ranks whose process has ended are left out.
        It costs milliseconds. Collective over the ranks that live.

        Raises:
            TimeoutError_: a rank neither came nor ended in time; all may call again.
            RevokedError: a rank has called ``shrink()`` instead; call it here, too.
            UsageError: ``flag`` is no integer of 64 bits.
        """
        comm = self._comm
        comm.check_open()
        number = as_integer(int(flag) if isinstance(flag, bool | np.bool_) else flag)
        if number is None or not -_LARGEST - 1 <= number <= _LARGEST:
            raise UsageError(f"agree: flag={shown(flag)} must be an integer of 64 bits")
        limit_s = comm.limit("agree", timeout_s)
        made, said = self.regroup("agree", str(number).encode(), limit_s)
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
            UsageError: neither the communicator has failed, nor has a rank died in one
                that was made from it; ``revoke()`` ends one.
            TimeoutError_: a rank neither came nor ended in time; all may call again.
            RevokedError: the others go on without this rank.
        """
        comm = self._comm
        comm.check_open()
        own_name = check_name("shrink", name)
        limit_s = comm.limit("shrink", timeout_s)
        if not self.has_ended():
            raise UsageError(
                f"shrink: {comm.name} has not failed, and all of its ranks can use it; "
                f"call revoke() first to replace it all the same"
            )
        deadline = deadline_after(limit_s)
        self.end("a rank called shrink()")
        peers, _ = self.regroup("shrink", b"", limit_s)
        new_name = own_name or name_after(comm.name)
        made, _ = self.founder(new_name).found(peers, deadline)
        return made

    def has_ended(self) -> bool:
        """Return whether the communicator has failed, as far as this rank knows.

        It has, too, where only a channel has that one of its services uses.
        """
        channels: list[Channel] = [self._comm, *self._comm.privates]
        ends = [each for each in channels if not each.is_over and each.known_end()[0]]
        return bool(ends) or self.has_lost_a_rank()

    def has_lost_a_rank(self) -> bool:
        """Return whether a rank's death is known, here or in what was made from this.

        Where a death is told by messages, a part of the ranks may hear of it first.
        """
        comm = self._comm
        if comm.is_over:
            return False
        is_known = bool(comm.who_died()) or comm.known_end()[1]
        return is_known or any(each.has_lost_a_rank() for each in self._descendants())

    def founder(self, name: str) -> Founder[Plain]:
        """Return what makes a communicator that is like this one."""
        comm = self._comm
        return Founder(
            self._make,
            name,
            comm.world.launch,
            comm.world.engine,
            comm.world.in_process,
            comm.deterministic,
            comm.settings,
            comm.timeout_s,
            comm.world.node_of(comm.world.rank),
            comm.world.chaos,
        )

    def regroup(
        self, what: str, blob: bytes, limit_s: float
    ) -> tuple[Bootstrap, dict[int, bytes]]:
        """Return the bootstrap of the ranks that live, and what each of them said.

        All of them call ``what``. Where one calls shrink() instead, for it found the
        communicator failed, the others raise RevokedError, and meet it in theirs.
        """
        comm = self._comm
        deadline = deadline_after(limit_s)
        while True:
            left_s = max(0.0, deadline - time.monotonic())
            key = f"comm{comm.identity}/regroup/{self._number}"
            mine = what.encode() + b" " + blob
            peers, texts = comm.world.bootstrap.regroup(
                comm.world_ranks, key, mine, left_s
            )
            self._number += 1
            parts = {rank: text.partition(b" ") for rank, text in texts.items()}
            calls = {rank: part[0].decode() for rank, part in parts.items()}
            if {*calls.values()} == {what}:
                return peers, {rank: part[2] for rank, part in parts.items()}
            peers.close()
            if what != "shrink":
                self._raise_for(what, calls)

    def _raise_for(self, what: str, calls: Mapping[int, str]) -> NoReturn:
        """Raise the error of a rank that others do not meet in its call."""
        comm = self._comm
        said = ", ".join(f"rank {rank} {call}()" for rank, call in calls.items())
        text = f"{what} on {comm.name}, rank {comm.rank}: the ranks call {said}"
        if "shrink" in calls.values():
            self.end(f"a rank called shrink() while this one called {what}()")
            raise RevokedError(f"{text}: call shrink() here, too")
        raise MismatchError(f"{text}: make the same call on all ranks")


def name_after(name: str) -> str:
    """Return the name of a communicator that replaces another: world.2, world.3."""
    found = re.fullmatch(r"(.*)\.(\d{1,9})", name)
    return f"{name}.2" if found is None else f"{found[1]}.{int(found[2]) + 1}"
