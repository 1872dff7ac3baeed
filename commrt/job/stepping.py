# SPDX-License-Identifier: Apache-2.0
"""A thread that goes on with nonblocking operations of several steps.

    return stepping.keep(request)  # a SteppedRequest, which the program may wait for

The next step of such an operation is Python. Were it to begin only in the program's own
``test()`` and ``wait()``, another rank would wait for it as long as this one does
something else: another operation, perhaps one that the other rank is yet to come to.

The thread looks after what nobody waits for. It is there while there is such an
operation, and for a moment after: then the next call need not start it.
"""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from commrt import _native

__all__ = ["Stepping"]

_TICK_S = 5e-3
"""Most operations are over sooner, or waited for: the thread looks so often at first.
"""
_LONGEST_TICK_S = 0.05
_LONGEST_S = 0.1
_IDLE_S = 1.0
"""The thread ends after so long without an operation."""


class Stepped(Protocol):
    """An operation of several steps."""

    @property
    def done(self) -> bool:
        """True if it has ended."""

    @property
    def is_waited_for(self) -> bool:
        """True if somebody waits for it, and begins its steps."""

    @property
    def awaited(self) -> Sequence[_native.Request]:
        """Requests that have to end before its next step."""

    def go_on(self) -> bool:
        """Begin the steps that can begin; True once it has ended."""
        ...


S = TypeVar("S", bound=Stepped)


class Stepping:
    """Goes on with the operations of one rank.

    Args:
        engine: moves their messages.
        may_run: returns whether a thread may do that.
    """

    def __init__(self, engine: Any, may_run: Callable[[], bool]) -> None:
        self._may_run = may_run
        self._watch = _native.EndWatch(engine, has_core=False)
        self._open: list[weakref.ref[Stepped]] = []
        self._lock = threading.Lock()
        self._has_ended, self._look = threading.Event(), threading.Event()
        self._tick_s = _TICK_S
        self._thread: threading.Thread | None = None

    def keep(self, request: S) -> S:
        """Go on with a request as long as the program keeps it; return it."""
        if request.done or not self._may_run():
            return request
        with self._lock:
            if self._has_ended.is_set():
                return request
            self._open.append(weakref.ref(request))
            if self._tick_s > _TICK_S:
                self._tick_s = _TICK_S
                self._look.set()
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._serve, name="commrt-steps", daemon=True
                )
                self._thread.start()
        return request

    def close(self) -> None:
        """End the thread."""
        with self._lock:
            self._has_ended.set()
            thread = self._thread
        self._look.set()
        self._watch.wake()
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _serve(self) -> None:
        atexit.register(self.close)  # no thread is in the engine as the process ends
        last = time.monotonic()
        while not self._has_ended.is_set():
            self._look.wait(self._tick_s)
            self._look.clear()
            self._tick_s = min(2 * self._tick_s, _LONGEST_TICK_S)
            if self._go_on():
                last = time.monotonic()
            elif time.monotonic() - last > _IDLE_S and self._ends():
                break
        atexit.unregister(self.close)

    def _ends(self) -> bool:
        """Return whether the thread is to end, as there is nothing left."""
        with self._lock:
            if not self._open:
                self._thread = None
            return not self._open

    def _go_on(self) -> bool:
        """Go on with what nobody waits for, to its end; True if there is any left."""
        while not self._has_ended.is_set():
            awaited = self._left()
            if not awaited:
                break
            self._tick_s = _TICK_S
            self._watch.wait(awaited, is_curious=False, limit_s=_LONGEST_S)
        return bool(self._open)

    def _left(self) -> list[_native.Request]:
        """Begin the steps that can begin; return what the others wait for."""
        awaited: list[_native.Request] = []
        left = []
        for reference in self._taken():
            request = reference()
            if request is None or _has_ended(request):
                continue
            left.append(reference)
            if not request.is_waited_for:
                awaited += request.awaited
        with self._lock:
            self._open = [*left, *self._open]
        return awaited

    def _taken(self) -> list[weakref.ref[Stepped]]:
        with self._lock:
            taken, self._open = self._open, []
        return taken


def _has_ended(request: Stepped) -> bool:
    """Begin the steps that can begin; True at the end, and where that fails."""
    try:
        return request.go_on()
    except Exception:  # noqa: BLE001  who waits for it meets that, too
        return True
