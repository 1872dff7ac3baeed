# SPDX-License-Identifier: Apache-2.0
"""Torch's Work over commrt's requests, returned by calls with ``async_op``.

torch reaches a Work in two ways: Python programs call its methods, and C++ (DDP's
reducer, functional collectives) only ``wait`` and ``get_future``. An output that is not
contiguous is copied to where it belongs by the first who learns of the end.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from commrt._native import Request
from commrt.device_calls.requests import DeviceRequest
from commrt.errors import CommError, TimeoutError_
from commrt.torch.completer import Completer
from commrt.torch.errors import as_torch_error
from commrt.torch.futures import future_of
from commrt.torch.operands import CopyBack
from commrt.torch.profiling import profiled
from commrt.vocabulary.limits import deadline_after, timedelta_seconds

__all__ = ["CommrtWork", "JoinedWork", "seconds", "wait_for"]

Complete = Callable[["CommrtWork"], None]


def seconds(timeout: timedelta | None) -> float | None:
    """Return a limit in seconds, None for what torch means by "the default"."""
    if timeout is None:
        return None
    limit = timedelta_seconds(timeout)
    return limit if limit > 0 else None


def wait_for(request: Any, limit: float | None) -> None:
    """Wait for a request; of CUDA tensors, without a limit, only the stream waits."""
    if limit is None:
        request.wait()
    elif isinstance(request, DeviceRequest):
        request.synchronize(timeout_s=limit)
        request.wait()
    else:
        request.wait(timeout_s=limit)


class CommrtWork(dist.Work):  # type: ignore[misc]  # torch is not looked into
    """One started operation of a group."""

    def __init__(
        self,
        request: Any,
        outputs: Sequence[torch.Tensor],
        back: CopyBack | None = None,
        completer: Completer | None = None,
    ) -> None:
        """Take over a request.

        Args:
            request: commrt's; None for an operation that has ended.
            outputs: what ``result`` and the future give.
            back: to be called once, after the end: copies results to where they belong.
            completer: what completes the group's futures; None: it has none.
        """
        super().__init__()
        if type(request) is Request:
            request.be_quiet()  # torch's own code drops some, as other backends allow
        self._request = request
        self._outputs = list(outputs)
        self._back = back
        self._completer = completer
        self._future: Any = None
        self._error: CommError | None = None
        self._source = -1
        self._lock = threading.Lock() if back is not None else None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for the end; of CUDA tensors, let the current stream wait for it.

        Raises the operation's error. After a TimeoutError_ it is still in flight, and
        may be waited for again.
        """
        request = self._request
        if request is not None:
            self._wait_for(request, seconds(timeout))
        if self._error is not None:
            raise self._error
        return True

    def _wait_for(self, request: Any, limit: float | None) -> None:
        try:
            with profiled("wait"):
                wait_for(request, limit)
        except TimeoutError_ as error:
            if limit is None:  # the operation's own
                self._notice(error)
            raise as_torch_error(error) from error.__cause__
        except CommError as error:
            self._fail(error)
        # Work on a device has not ended yet: its stream goes on.
        self._settle(request)

    def _settle(self, request: Any) -> None:
        """Give results to whom they belong; the operation is over."""
        if self._lock is not None:
            with self._lock:
                back, self._back = self._back, None
                if back is not None and self._error is None:
                    back()
        self._source = getattr(request, "source", -1)
        self._request = None
        if self._future is not None and self._completer is not None:
            self._completer.wake()

    def synchronize(self) -> None:
        """Wait for the end, like ``wait``."""
        self.wait()

    def is_completed(self) -> bool:
        """Return whether it has ended, after a little progress."""
        request = self._request
        if request is None:
            return True
        try:
            if not request.test():
                return False
        except CommError as error:
            self._fail(error)
        self._settle(request)
        return True

    def _fail(self, error: CommError) -> None:
        self._error = as_torch_error(error)
        self._notice(error)
        # Its frames hold the work, and with it a group that has failed.
        error.__traceback__ = None

    def _notice(self, error: CommError) -> None:
        """Tell the group's abort hooks, if it is the first such error."""
        if self._completer is not None:
            self._completer.faults.notice(error)

    def is_success(self) -> bool:
        """Return whether it has ended without an error."""
        return self.is_completed() and self._error is None

    def exception(self) -> CommError | None:
        """Return the operation's error; None where there is none so far."""
        self.is_completed()
        return self._error

    def result(self) -> list[torch.Tensor]:
        """Return the outputs; they are worth something after ``wait``."""
        return self._outputs

    def source_rank(self) -> int:
        """Return whose message a receive took, -1 before it has."""
        self.is_completed()
        return self._source

    _source_rank = source_rank

    def get_future(self) -> Any:
        """Return a future of the outputs, a list of tensors."""
        if self._future is None:
            assert self._completer is not None, "a Work of no group has no future"
            self._future = future_of(self, self._completer)
        return self._future

    # -- for who completes the future --------------------------------------------

    def requests(self) -> list[Request] | None:
        """Return the engine's requests that it consists of; None: it has others."""
        request = self._request
        if isinstance(request, _Joined):
            return request.requests()
        return [request] if type(request) is Request else None

    def limit_s(self) -> float:
        """Return the limit of its wait, in seconds."""
        request = self._request
        if isinstance(request, _Joined):
            return request.limit_s()
        limit: float = getattr(request, "timeout_s", 0.0)
        return limit

    def raise_if_late(self, limit_s: float) -> None:
        """Raise what a wait that began so long ago would raise, unless it has ended."""
        request = self._request
        if request is None:
            return
        try:
            request.raise_if_late(limit_s)
        except TimeoutError_ as error:
            self._notice(error)
            raise as_torch_error(error) from error.__cause__

    def block_current_stream(self) -> None:
        """Let the current stream wait; of CPU tensors the caller waits."""
        self.wait()

    def __repr__(self) -> str:
        state = "done" if self._request is None else repr(self._request)
        return f"<commrt.torch.Work: {state}>"


class JoinedWork(CommrtWork):
    """Several started operations as one."""

    def __init__(
        self, works: Sequence[CommrtWork], completer: Completer | None = None
    ) -> None:
        outputs = [output for work in works for output in work.result()]
        super().__init__(_Joined(works), outputs, completer=completer)


class _Joined:
    """Works, seen as a request; each of them is ended even where some fail."""

    def __init__(self, works: Sequence[CommrtWork]) -> None:
        self._works = list(works)

    def wait(self, *, timeout_s: float | None = None) -> None:
        """Wait for all; the limit is that of all together.

        Once one has run into it, the others are looked at, and not waited for.
        """
        end = None if timeout_s is None else deadline_after(timeout_s)
        errors: list[CommError] = []
        late: CommError | None = None
        for work in self._works:
            if late is not None:
                work.is_completed()
                continue
            left = None if end is None else _rounded(end - time.monotonic())
            try:
                work.wait(None if left is None else timedelta(seconds=left))
            except TimeoutError_ as error:
                late = error
            except CommError as error:
                errors.append(error)
        if late is not None:
            raise late
        if errors:
            raise errors[0]

    def test(self) -> bool:
        if not all([work.is_completed() for work in self._works]):
            return False
        for work in self._works:
            work.wait()
        return True

    def requests(self) -> list[Request] | None:
        """Return the engine's requests of all works; None: some have others."""
        each = [work.requests() for work in self._works if not work.is_completed()]
        if not each or None in each:
            return None
        return [request for some in each for request in some or ()]

    def limit_s(self) -> float:
        """Return the longest of the works' limits."""
        return max((work.limit_s() for work in self._works), default=0.0)

    def raise_if_late(self, limit_s: float) -> None:
        """Raise what the first work that has not ended raises."""
        for work in self._works:
            if not work.is_completed():
                work.raise_if_late(limit_s)


def _rounded(seconds_left: float) -> float:
    """Return the rest of a limit, in whole milliseconds, as messages show it."""
    return max(1e-3, round(seconds_left, 3))
