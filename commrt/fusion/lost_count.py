# SPDX-License-Identifier: Apache-2.0
"""Ranks that have lost count of buckets, and how they come into step again.

A rank that has refused a call of ``fused()`` may not know how long that call is on
other ranks, or of which reduction: so it does not know their buckets any more. Nothing
that it calls in the context is sent. At the end of the context it learns from others
which operation follows (``native/engine/context_ends.hpp``).
"""

from __future__ import annotations

import time
from collections.abc import Callable

from commrt import _native
from commrt.calls.channel import Channel
from commrt.errors import RefusedError, RevokedError, TimeoutError_, UsageError
from commrt.vocabulary.limits import deadline_after

__all__ = ["LostCount"]


class LostCount:
    """Knows whether this rank has lost count in the open context, and why."""

    def __init__(self, group: Channel, take_place: Callable[[Exception], None]) -> None:
        """Have lost nothing; local.

        ``take_place`` refuses the group's next operation, whatever it is.
        """
        self._group, self._take_place = group, take_place
        self._why = ""
        self._has_asked = False
        """True once the others are asked where the context ends."""

    @property
    def is_lost(self) -> bool:
        """True until the context ends."""
        return bool(self._why)

    def refuse(self, error: Exception) -> None:
        """Lose count by a call that was refused here.

        The others have an operation in its place, if not more: they hear of it there.
        """
        if not self.is_lost:
            why = str(error).encode(errors="backslashreplace").decode()
            self.lose(self._group.rank, why)
            self._take_place(error)

    def lose(self, rank: int, why: str) -> None:
        """Fail the open calls, and all others until the context ends.

        ``rank`` has refused a call, because of ``why``.
        """
        if not self.is_lost:
            self._why = f"rank {rank} has refused a call in fused(): {why}"
            _native.lose_count_in_fusion(self._group, self.error())

    def error(self) -> RefusedError:
        """Return the error of a call in the context."""
        return RefusedError(
            f"fused() on {self._group.name}, rank {self._group.rank}: nothing is "
            f"delivered any more until the context ends, since {self._why}"
        )

    def regain(self) -> None:
        """Come into step with the other ranks, at the end of the context.

        It waits until a rank has come to the end, or all have that do not know it
        either. What any of them begins until then is refused. Where that fails, the
        communicator ends, and the error is raised.
        """
        group, why = self._group, self._why
        try:
            if group.closed is None and not group.failure:
                self._wait_for_end()
                _native.regain_context_end(group)
        except BaseException:
            group.give_up(f"the ranks are not in step, since {why}")
            raise
        finally:
            self._why, self._has_asked = "", False

    def keep_up(self) -> bool:
        """Refuse what others have begun; return whether the context has ended there.

        To be called only once this rank makes no more calls in it.
        """
        group = self._group
        if not self._has_asked:
            self._has_asked = True
            _native.lose_context_end(group)
        number, is_end = _native.find_context_end(group)
        while group.next_seq < number and not group.failure:
            self._take_place(UsageError(self._why))
        if number < 0 or (is_end and number != group.next_seq):
            raise RevokedError(
                f"fused() on {group.name}, rank {group.rank}: no rank can tell any "
                f"more which operation follows the context"
            )
        return bool(is_end)

    def _wait_for_end(self) -> None:
        group = self._group
        engine, limit_s = group.world.engine, group.timeout_s
        deadline, backoff = deadline_after(limit_s), _native.Backoff(engine)
        while not self.keep_up():
            group.heed_end()
            group.heed_deaths(None)
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise TimeoutError_(
                    f"fused() on {group.name}, rank {group.rank}: no rank that knows "
                    f"where it ended came to its end within {limit_s:g} s"
                )
            if not engine.step():
                backoff.pause(left_s)
