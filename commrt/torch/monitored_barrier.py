# SPDX-License-Identifier: Apache-2.0
"""A barrier that says who did not come: torch's ``monitored_barrier``, as gloo has it.

Every rank tells rank 0 that it has come, and waits for rank 0's verdict. Rank 0 waits
for so long as it was asked to, then tells all ranks who is missing: those that came
raise an error that names them at once, and a rank that comes later finds the verdict
waiting. The error begins with gloo's words, which programs look for.

Calls are counted, as messages of a call that some ranks gave up may still be there. A
rank that has left calls out goes on with the count of rank 0, and rank 0 with the
highest that it hears of.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import numpy as np

from commrt import _native
from commrt.errors import TimeoutError_, UsageError
from commrt.vocabulary.limits import (
    NO_LIMIT_S,
    capped,
    deadline_after,
    timedelta_seconds,
)

if TYPE_CHECKING:
    from commrt.core import Core

__all__ = ["MonitoredBarrier", "limit_of"]

_TAG = -3
"""Tag of the messages; users' tags are not negative, and ``fused`` has -2."""
_LEFT, _HERE = range(2)
"""Codes by which a rank tells its state in a call: it waits no more, or has come."""
_NOBODY = "No ranks successfully processed in monitoredBarrier."
_Numbers = np.ndarray[Any, np.dtype[np.int64]]


def limit_of(timeout: Any, default_s: float) -> float:
    """Return a limit in seconds: torch's timedelta or seconds, negative for none."""
    if timeout is None:
        return default_s
    try:
        is_delta = isinstance(timeout, timedelta)
        limit = capped(timedelta_seconds(timeout) if is_delta else timeout)
        if math.isnan(limit):
            raise ValueError
    except OverflowError:  # an integer that no float can hold
        return NO_LIMIT_S if timeout > 0 else default_s
    except (TypeError, ValueError):
        raise UsageError(
            f"monitored_barrier: timeout={timeout!r} must be a timedelta, or seconds"
        ) from None
    return default_s if limit < 0 else limit


class MonitoredBarrier:
    """One group's barriers of this kind, in their order."""

    def __init__(self, comm: Core) -> None:
        self._comm = comm
        self._number = 0

    def run(self, limit_s: float, wait_all_ranks: bool) -> None:
        """Return once all ranks have come; raise TimeoutError_ where some do not.

        Args:
            limit_s: how long rank 0 waits. The others wait for rank 0, as long as
                calls of the group do, or this long if that is more: they are not to
                give up before it has said who is missing.
            wait_all_ranks: whether all ranks that are missing are named, not only
                the first.
        """
        self._comm.check_usable()
        self._number += 1
        if self._comm.rank == 0:
            self._watch(limit_s, wait_all_ranks)
        else:
            self._follow(max(limit_s, self._comm.timeout_s))

    # -- rank 0 ------------------------------------------------------------------

    def _watch(self, limit_s: float, wait_all_ranks: bool) -> None:
        comm, begun = self._comm, self._number
        missing = set(range(1, comm.size))
        self._look_until(lambda: self._all_came(missing, begun), limit_s)
        named = sorted(missing) if wait_all_ranks else sorted(missing)[:1]
        verdict = np.zeros(2 + comm.size, np.int64)
        verdict[:2] = self._number, round(limit_s * 1000)
        verdict[2:][named] = 1
        # Those that do not come, too: their message waits for them.
        sent = {rank: self._send(verdict, rank) for rank in range(1, comm.size)}
        if named:
            if limit_s > 0 or wait_all_ranks:
                raise TimeoutError_(self._failure(verdict))
            raise TimeoutError_(self._no_time(missing))
        for request in sent.values():
            request.wait()

    def _all_came(self, missing: set[int], begun: int) -> bool:
        """Take what ranks have sent; whether no rank is missing any more."""
        while (rank := self._comm.waiting_source(_TAG, 0)) >= 0:
            number, is_here = self._receive(np.zeros(2, np.int64), rank).tolist()
            if number < begun:
                continue  # of a call that this rank has given up
            self._number = max(self._number, number)
            (missing.discard if is_here else missing.add)(rank)
        return not missing

    def _no_time(self, missing: set[int]) -> str:
        came = sorted({*range(1, self._comm.size)} - missing)
        ranks = ", ".join(map(str, came))
        found = f"Successfully processed ranks: {ranks}" if came else _NOBODY
        return f"[Rank 0]: Rank 0 timed out in monitoredBarrier after 0 ms.\n {found}"

    # -- the others --------------------------------------------------------------

    def _follow(self, limit_s: float) -> None:
        self._send(np.array([self._number, _HERE], np.int64), 0)
        verdict = np.zeros(2 + self._comm.size, np.int64)

        def is_told() -> bool:
            while self._comm.waiting_source(_TAG, 0) == 0:
                self._receive(verdict, 0)
                if verdict[0] >= self._number:  # else of a call that was given up
                    self._number = int(verdict[0])
                    return True
            return False

        if not self._look_until(is_told, limit_s):
            self._send(np.array([self._number, _LEFT], np.int64), 0)
            why = f"rank 0 has not answered within {limit_s:g} s"
        elif verdict[2:].any():
            why = self._failure(verdict)
        else:
            return
        raise TimeoutError_(
            f"[Rank {self._comm.rank}]: Rank {self._comm.rank} successfully reached "
            f"monitoredBarrier, but received errors while waiting for send/recv from "
            f"rank 0. Please check rank 0 logs for faulty rank.\n"
            f" Original exception: \n{why}"
        )

    # -- both --------------------------------------------------------------------

    def _failure(self, verdict: _Numbers) -> str:
        named = np.flatnonzero(verdict[2:]).tolist()
        ranks = ", ".join(map(str, named))
        plural, have = ("s", "have") if len(named) > 1 else ("", "has")
        return (
            f"[Rank 0]: Rank{plural} {ranks} failed to pass monitoredBarrier in "
            f"{verdict[1]} ms: on {self._comm.name}, rank{plural} {ranks} {have} not "
            f"come to call #{verdict[0]} of monitored_barrier"
        )

    def _look_until(self, is_over: Callable[[], bool], limit_s: float) -> bool:
        """Look until it is over; False where the limit has passed before."""
        comm, end = self._comm, deadline_after(limit_s)
        engine = comm.world.engine
        backoff = _native.Backoff(engine)
        pause = backoff.rest if comm.is_relayed else backoff.pause
        while not is_over():
            left_s = end - time.monotonic()
            if left_s <= 0:
                return False
            comm.check_usable()
            if not engine.step():
                pause(left_s)
        return True

    def _send(self, said: _Numbers, rank: int) -> Any:
        comm = self._comm
        where = said.ctypes.data, said.nbytes, rank, _TAG, said
        request = comm.send_bytes(*where, "monitored_barrier", True, comm.timeout_s)
        request.be_quiet()  # a rank that does not come receives nothing
        return request

    def _receive(self, into: _Numbers, rank: int) -> _Numbers:
        comm = self._comm
        where = into.ctypes.data, into.nbytes, rank, _TAG, into
        comm.recv_bytes(*where, into, "monitored_barrier", False, comm.timeout_s)
        return into
