# SPDX-License-Identifier: Apache-2.0
"""Resources of buckets that were under way as their communicator failed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from commrt import _native
from commrt.errors import DeviceError
from commrt.fusion.device_copies import BucketCopies
from commrt.group.deferred_release import LATER, NEVER, RELEASED, StagedWork

__all__ = ["FailedBuckets"]


class FailedBuckets:
    """Resources of buckets that were under way when their communicator failed.

    Four may still use it: the stream that gathers, the one that puts back, what runs
    the collectives, on their memory, and an MPI library that these gave it to.
    """

    failed = True
    """Constant True: this class stands for buckets that have failed."""

    def __init__(
        self,
        engine: _native.Engine,
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

    def release_rest(self) -> int:
        """Give it back where nobody uses it any more; 0: later, 1: done, 2: never."""
        if not self._is_known:
            return NEVER
        try:
            rest = self._rest_of_runners()
            if rest != RELEASED:
                return rest
            if not (self._streams_are_done() and self._may_free()):
                return LATER
            self._ends.clear()
            self._kept = None
            self._copies.close()
        except DeviceError:  # the device is gone, and has taken its memory along
            return NEVER
        return RELEASED

    def _rest_of_runners(self) -> int:
        """Return whether they are done; one that did not fail was closed at rest."""
        found = [each.release_rest() for each in self._runners if each.failed]
        return NEVER if NEVER in found else min(found, default=RELEASED)

    def _may_free(self) -> bool:
        """Return whether this thread may wait, as freeing waits for the device."""
        return bool(self._engine.idle)

    def _streams_are_done(self) -> bool:
        return all(self._copies.has_come(each) for each in self._ends)
