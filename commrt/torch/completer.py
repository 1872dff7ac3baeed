# SPDX-License-Identifier: Apache-2.0
"""The thread that completes a group's futures as their operations end.

There is none before the first future of an operation that has not ended. It sleeps
without the GIL, and makes progress meanwhile (``native/calls/end_watch.hpp``).

A callback that this thread runs may ask for futures and wait for them. The thread could
not complete these, so they have a thread of their own.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from commrt import _native
from commrt.errors import ClosedError, CommError, TimeoutError_
from commrt.torch.errors import as_torch_error
from commrt.torch.faults import GroupFaults
from commrt.vocabulary.limits import deadline_after

if TYPE_CHECKING:
    from commrt.torch.work import CommrtWork

__all__ = ["Completer"]

_Source = Any
"""A ``torch.futures.Future[None]``: what is completed, and the public one follows."""


class _Open:
    """A future that is to be completed."""

    def __init__(self, work: CommrtWork, source: _Source, holds_calls: bool) -> None:
        self.work = work
        self.source = source
        self.holds_calls = holds_calls
        self.requests = work.requests()
        """What the engine watches for it; None: it must be asked again and again."""
        self.limit_s = work.limit_s()
        self.deadline = deadline_after(self.limit_s)
        self.error: Exception | None = None

    def outcome(self, _: Any) -> list[torch.Tensor]:
        """Return the outputs, or raise the error; the operation is over."""
        if self.error is not None:
            raise self.error
        self.work.wait()
        return self.work.result()

    def request(self) -> Any:
        """Return a request that has not ended; one that has where all have."""
        requests = self.requests
        assert requests is not None
        while len(requests) > 1 and requests[-1].done:
            requests.pop()
        return requests[-1]

    def has_ended(self) -> bool:
        """Return whether the operation has ended, or run out of time."""
        try:
            if self.work.is_completed():
                return True
            if time.monotonic() >= self.deadline:
                self.work.raise_if_late(self.limit_s)
        except Exception as error:  # noqa: BLE001  what waits for the future raises it
            self.error = error
            return True
        return False


class _Nobody:
    """Stands for the future of a work that nobody has asked for one."""

    def set_result(self, _: None) -> None:
        """Do nothing."""


class Completer:
    """Completes the futures of one group, as their operations end."""

    def __init__(
        self,
        name: str,
        engine: Any,
        has_core: bool = False,
        faults: GroupFaults | None = None,
    ) -> None:
        """Make it.

        Args:
            name: the group's.
            engine: makes progress.
            has_core: whether a thread has a core to itself while the program computes.
            faults: hears of the works' errors.
        """
        self.faults = GroupFaults() if faults is None else faults
        self._name = name
        self._engine = engine
        self.has_core = has_core
        self._watch = _native.EndWatch(engine, has_core)
        self._late: tuple[CommrtWork, TimeoutError_] | None = None
        self._todo: queue.SimpleQueue[_Open | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._is_over = False
        self._inner: Completer | None = None
        self._lock = threading.Lock()
        self._let_go = threading.Condition()
        self.holding: dict[int, _Open] = {}
        """Futures that the group's next collective of a backward pass waits for."""
        self.tell: Callable[[], None] = lambda: None
        """Called when there are some, or none any more."""

    # -- for those who ask -------------------------------------------------------

    def completed(
        self, work: CommrtWork, source: _Source, holds_calls: bool = False
    ) -> Any:
        """Return a future that is complete once ``work`` has ended; it has callbacks.

        Args:
            work: an operation that has not ended.
            source: a future of nothing, from which the returned one is made.
            holds_calls: whether ``settle`` waits for it and its callbacks.
        """
        here = self._of_this_thread()
        if here is not None:
            return here.for_callbacks().completed(work, source)
        item = _Open(work, source, holds_calls)
        public = source.then(item.outcome)
        with self._lock:
            is_over = self._is_over
            if not is_over:
                if holds_calls:
                    self.holding[id(item)] = item
                    self.tell()
                self._start()
                self._todo.put(item)
        if is_over:
            item.error = self._closed()
            source.set_result(None)
        else:
            self._watch.wake()
        return public

    def watch(self, work: CommrtWork) -> None:
        """See how a work ends, also where nobody waits for it."""
        if work.is_completed():
            return
        with self._lock:
            if self._is_over:
                return
            self._start()
            self._todo.put(_Open(work, _Nobody(), holds_calls=False))
        self._watch.wake()

    def settle(self) -> None:
        """Wait for the futures that hold calls, and for their callbacks."""
        if self._of_this_thread() is not None:
            return
        for item in list(self.holding.values()):
            with contextlib.suppress(CommError):  # the future has it
                item.work.wait()
            with self._let_go:
                while id(item) in self.holding:
                    self._let_go.wait()

    def wake(self) -> None:
        """Tell the thread that an operation has ended."""
        self._watch.wake()

    def waited_for(self, work: CommrtWork) -> list[torch.Tensor]:
        """Wait for an operation on this thread, and return its outputs.

        Where an earlier one has run out of time and is still in flight, this one is
        looked at and not waited for.
        """
        late = self._late
        if late is not None and late[0] is not work:
            if late[0].is_completed():
                self._late = None
            elif not work.is_completed():
                raise late[1]
        try:
            work.wait()
        except TimeoutError_ as error:
            self._late = work, error
            raise
        return work.result()

    def close(self, *, joins: bool = True) -> None:
        """Complete what there is, and end the thread.

        Futures of operations that have not ended get an error. A callback that is under
        way is waited for, unless it has called this itself.
        """
        with self._lock:
            self._is_over = True
            thread, inner = self._thread, self._inner
            self._todo.put(None)
        self._watch.wake()
        if joins and thread is not None and thread is not threading.current_thread():
            thread.join()
        if inner is not None:
            inner.close(joins=joins)

    # -- the thread --------------------------------------------------------------

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._run, name=f"commrt-futures-{self._name}", daemon=True
            )
            self._thread.start()

    def _of_this_thread(self) -> Completer | None:
        """Return the completer whose thread calls, this or an inner one, if any."""
        found: Completer | None = self
        while found is not None and found._thread is not threading.current_thread():
            found = found._inner
        return found

    def for_callbacks(self) -> Completer:
        """Return what completes the futures that callbacks of this one ask for."""
        with self._lock:
            if self._inner is None:
                self._inner = Completer(
                    self._name, self._engine, self.has_core, self.faults
                )
                self._inner._is_over = self._is_over
            return self._inner

    def _run(self) -> None:
        items: dict[int, _Open] = {}
        while True:
            if not items:
                if (first := self._todo.get()) is None:
                    return
                items[id(first)] = first
                self._complete_ended(items, [first])
            while not self._todo.empty():
                if (item := self._todo.get()) is None:
                    self._give_up([*items.values()])
                    return
                items[id(item)] = item
                self._complete_ended(items, [item])
            if items:
                self._complete_ended(items, self._watched(items))

    def _watched(self, items: dict[int, _Open]) -> list[_Open]:
        """Wait; return those that are worth a look, in the order of asking."""
        asked = [each for each in items.values() if each.requests is None]
        watched = [each for each in items.values() if each.requests is not None]
        deadline = min(each.deadline for each in items.values())
        ended = self._watch.wait(
            [each.request() for each in watched],
            is_curious=bool(asked),
            limit_s=max(0.0, deadline - time.monotonic()),
        )
        if time.monotonic() >= deadline:
            return list(items.values())
        # The look at one request also does what others need Python for.
        found = {id(watched[i]) for i in ended} or {*map(id, watched[:1])}
        return [
            each
            for each in items.values()
            if each.requests is None or id(each) in found
        ]

    def _complete_ended(self, items: dict[int, _Open], looked_at: list[_Open]) -> None:
        for item in looked_at:
            if item.has_ended():
                del items[id(item)]
                self._complete(item)

    def _complete(self, item: _Open) -> None:
        item.source.set_result(None)  # runs ``outcome``, and the callbacks
        if item.holds_calls:
            with self._let_go:
                self.holding.pop(id(item), None)
                self.tell()
                self._let_go.notify_all()

    def _give_up(self, items: Sequence[_Open]) -> None:
        for item in items:
            if not item.has_ended():
                item.error = self._closed()
            self._complete(item)

    def _closed(self) -> CommError:
        return as_torch_error(
            ClosedError(
                f"the process group {self._name!r} was destroyed before an operation "
                f"had ended whose future is still open: wait for the future first"
            )
        )
