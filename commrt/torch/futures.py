# SPDX-License-Identifier: Apache-2.0
"""Futures of operations: who completes them, and where callbacks run.

A callback of a future may call further collectives, as PowerSGD's do, and wait for
them. Two things must hold then. Nobody whom such a wait needs may be running the
callback; so no thread that makes progress does. And all ranks must make these calls in
the same order, between the same other calls. NCCL keeps that by running callbacks at
once, in the call of ``then``, and so does commrt: a future that Python asks for is
complete, which means that ``get_future()`` waits for the operation.

DDP's reducer, in C++, asks for futures while gradients are still being computed, looks
at them at the end, and attaches nothing of Python's. It gets one that a thread of the
group completes later, where the operation makes progress by itself meanwhile. Elsewhere
the end of the backward pass completes it, just before DDP looks: so no rank waits at
each bucket for the slowest.

An operation that runs out of time is still in flight, and those that were started after
it wait for the same ranks. So while it is, their futures are given its error and do not
wait as long each: else a backward pass would fail after as many limits as it has
buckets, and not after one.

An error has to be an error of C++: what ``Future.set_exception`` stores is a value to
C++, and DDP crashes on it. An error that a callback raises is one, so futures that may
have one are what ``then`` made of another one.

And to DDP's hooks in C++ the value has to be a list of tensors of C++, which in a
future that Python completes is an object of Python. One that is complete when it is
made, as ``torch.jit.fork`` makes them, has a value of C++.
"""

from __future__ import annotations

import queue
import sys
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import Variable, graph

from commrt.errors import TimeoutError_

if TYPE_CHECKING:
    from commrt.torch.work import CommrtWork

__all__ = ["Completer", "future_of"]

_BACKWARD = graph._engine_run_backward.__code__
_typed = torch._C.fork
"""The function behind ``torch.jit.fork``: it runs a function, and returns its value in
a future."""


def future_of(work: CommrtWork, completer: Completer | None = None) -> Any:
    """Return a future of the work's outputs.

    It is complete, but for DDP's reducer where there is a thread for it.
    """
    outputs = work.result()
    wait = _waited_for if completer is None else completer.waited_for
    devices = {each.device for each in outputs if each.device.type != "cpu"}
    source: torch.futures.Future[None] = torch.futures.Future(devices=[*devices])
    from_cpp = not devices and _called_from_cpp() and not _is_compressed(outputs)
    if from_cpp and not work.is_completed():
        later = _deferred(completer)
        if later is not None:
            public = source.then(lambda _: wait(work))
            later(work, source)
            return public
    error: Exception | None = None
    if outputs and not devices:
        try:
            return _typed(lambda: wait(work))
        except Exception as raised:  # noqa: BLE001  what waits for the future raises it
            error = raised

    def outcome(_: Any) -> list[torch.Tensor]:
        if error is not None:
            raise error
        return wait(work)

    public = source.then(outcome)
    source.set_result(None)
    return public


def _deferred(completer: Completer | None) -> Callable[[CommrtWork, Any], None] | None:
    """Return the function that completes a future later; None: complete it now."""
    if completer is not None and completer.has_thread:
        return completer.complete
    if torch._C._current_autograd_node() is None:
        return None  # the backward pass has come to its end
    return _at_end_of_backward


def _at_end_of_backward(_: CommrtWork, source: Any) -> None:
    # DDP's own callback, which waits for the futures, is queued after its last one.
    Variable._execution_engine.queue_callback(lambda: source.set_result(None))


def _waited_for(work: CommrtWork) -> list[torch.Tensor]:
    work.wait()
    return work.result()


def _is_compressed(outputs: Sequence[torch.Tensor]) -> bool:
    """Return whether the work may be that of a hook in C++: only those send float16.

    Other works with float16 wait, too, where they need not.
    """
    return any(each.dtype is torch.float16 for each in outputs)


def _called_from_cpp() -> bool:
    """Return whether ``Work.get_future`` was called by no function of Python's.

    Then the frame above it is that of ``backward()``, or there is none. To be wrong
    about that only means to wait at another place.
    """
    frame = sys._getframe(2).f_back  # _called_from_cpp, future_of, get_future
    return frame is None or frame.f_code is _BACKWARD


class Completer:
    """Ends a group's futures, by a thread in the operations' order or by the waiter."""

    def __init__(self, name: str, has_thread: bool = True) -> None:
        """Make it.

        Args:
            name: the group's.
            has_thread: whether there is to be a thread, which waits while the program
                computes.
        """
        self._name = name
        self.has_thread = has_thread
        self._late: tuple[CommrtWork, TimeoutError_] | None = None
        self._todo: queue.SimpleQueue[tuple[CommrtWork, Any] | None] = (
            queue.SimpleQueue()
        )
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def waited_for(self, work: CommrtWork) -> list[torch.Tensor]:
        """Wait for an operation, and return its outputs.

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
            return _waited_for(work)
        except TimeoutError_ as error:
            self._late = work, error
            raise

    def complete(self, work: CommrtWork, source: Any) -> None:
        """Complete ``source`` once ``work`` has ended."""
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name=f"commrt-futures-{self._name}", daemon=True
                )
                self._thread.start()
        self._todo.put((work, source))

    def close(self) -> None:
        """Complete what there is, and end the thread."""
        with self._lock:
            thread, self._thread = self._thread, None
        if thread is not None and thread is not threading.current_thread():
            self._todo.put(None)
            thread.join()

    def _run(self) -> None:
        while (item := self._todo.get()) is not None:
            _, source = item
            source.set_result(None)  # runs ``outcome``, which waits
