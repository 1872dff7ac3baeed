# SPDX-License-Identifier: Apache-2.0
"""Streams, events and memory of communicators that failed.

As one is closed, its streams may still hold copies, and the host messages of which
peers bring the rest. All of it is given back once that is over for sure
(``StagedWork::give_rest_back``, ``LeftBuckets``): the ranks look as they make or close
such work.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from commrt import _native
from commrt.device_calls.bucket_copies import BucketCopies
from commrt.errors import DeviceError

if TYPE_CHECKING:
    from commrt.world import World

__all__ = ["LeftBuckets", "LeftWork", "StagedWork", "give_back", "leave"]

StagedWork = (
    _native.Stager | _native.MessageStager | _native.MpiWork | _native.HostedWork
)
_LATER, _GIVEN, _NEVER = 0, 1, 2


class LeftWork(Protocol):
    """Closed work that may have left something."""

    @property
    def failed(self) -> bool:
        """Whether it has."""
        ...

    def give_rest_back(self) -> int:
        """Give it back where nobody uses it any more; 0: later, 1: done, 2: never."""
        ...


class LeftBuckets:
    """What buckets of arrays had that were under way as their communicator failed.

    Four may still use it: the stream that gathers, the one that puts back, what runs
    the collectives, on their memory, and an MPI library that these gave it to.
    """

    failed = True
    """It is made for what has."""

    def __init__(
        self,
        engine: Any,
        copies: BucketCopies,
        runners: Sequence[StagedWork],
        kept: Any,
        *,
        is_known: bool,
    ) -> None:
        """Nobody gives ``copies`` anything from here on.

        ``runners`` have collectives whose end no stream of ``copies`` waits for, and
        are closed. ``kept`` are the arrays. ``is_known`` is False where nobody can say
        when the device is done with the collectives.
        """
        self._engine, self._copies, self._kept = engine, copies, kept
        self._runners, self._is_known = runners, is_known
        self._ends: list[Any] = []
        with copies.outside_captures():
            for stream in (copies.gathers, copies.puts_back):
                self._ends.append(copies.note(stream.handle))

    def give_rest_back(self) -> int:
        """Give it back where nobody uses it any more; 0: later, 1: done, 2: never."""
        if not self._is_known:
            return _NEVER
        try:
            rest = self._rest_of_runners()
            if rest != _GIVEN:
                return rest
            if not (self._streams_are_done() and self._may_free()):
                return _LATER
            self._ends.clear()
            self._kept = None
            self._copies.close()
        except DeviceError:  # the device is gone, and has taken its memory along
            return _NEVER
        return _GIVEN

    def _rest_of_runners(self) -> int:
        """Return whether they are done; one that did not fail was closed at rest."""
        found = [each.give_rest_back() for each in self._runners if each.failed]
        return _NEVER if _NEVER in found else min(found, default=_GIVEN)

    def _may_free(self) -> bool:
        """Whether no call needs this thread, as to free waits for the whole device."""
        return bool(self._engine.idle)

    def _streams_are_done(self) -> bool:
        return all(self._copies.has_come(each) for each in self._ends)


def leave(world: World, work: Iterable[LeftWork]) -> None:
    """Give closed work back that failed, now or at a later call."""
    world.left_behind.extend(each for each in work if each.failed)
    give_back(world)


def give_back(world: World) -> None:
    """Give back what nobody uses any more; what MPI may use for ever is forgotten."""
    left, world.left_behind = world.left_behind, []
    world.left_behind.extend(each for each in left if each.give_rest_back() == _LATER)
