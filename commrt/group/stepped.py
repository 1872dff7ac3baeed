# SPDX-License-Identifier: Apache-2.0
"""Operations of several steps in Python, between which messages are on their way.

The steps are a generator: it starts messages, yields their requests, and goes on once
all of them are complete. Its return value is the operation's output. Steps run in the
calls that start, test or wait for the operation; the engine moves the messages of one
step by itself, as ever. The next step begins in the program's own test() or wait(), or
in a thread, where there is one (``stepping.py``).
"""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable, Generator, Sequence
from typing import Any, Protocol, TypeAlias, TypeVar

from commrt import _native
from commrt.errors import CommError, RevokedError, TimeoutError_, UsageError
from commrt.vocabulary.limits import check_timeout, deadline_after
from commrt.vocabulary.request import Request

__all__ = ["Awaited", "SteppedRequest", "Steps"]

T = TypeVar("T")


class Awaited(Protocol):
    """Something that has to end before the next step: a request, or another's turn."""

    def test(self) -> bool:
        """Run a little progress; True once it has ended."""
        ...

    def wait(self, *, timeout_s: float) -> Any:
        """Return once it has ended; TimeoutError_ where time runs out before."""
        ...

    def be_quiet(self) -> None:
        """Warn of nothing when it is dropped before its end."""
        ...


Steps: TypeAlias = Generator[Sequence[Awaited], None, T]


class SteppedRequest(Request):
    """One started operation of several steps."""

    def __init__(
        self,
        steps: Steps[Any],
        what: str,
        operation: str,
        timeout_s: float,
        ended: Callable[[BaseException | None], None],
    ) -> None:
        """Run the first step.

        Args:
            steps: what is to be done.
            what: names the operation in messages.
            operation: its name.
            timeout_s: default limit of waits.
            ended: called at the end, with the error if there is one.
        """
        self._steps = steps
        self._what = what
        self._operation = operation
        self._timeout_s = timeout_s
        self._ended = ended
        self.num_steps = 0
        """Steps that were begun."""
        self._waiting: Sequence[Awaited] = ()
        self._output: Any = None
        self._error: BaseException | None = None
        self._done = False
        self._lock = threading.Lock()
        self._num_waits = 0
        self._advance()

    def wait(self, *, stream: Any = None, timeout_s: float | None = None) -> Any:
        """Return the output once the operation is complete; see ``Request.wait``."""
        if stream is not None:
            raise UsageError(
                f"{self._what}: wait(stream=...) is for device arrays; this operation "
                f"is on host memory, call wait() without a stream"
            )
        if timeout_s is None:
            limit = self._timeout_s
        else:
            limit = check_timeout(self._what, timeout_s)
        deadline = deadline_after(limit)
        self._num_waits += 1
        try:
            with self._lock:
                while not self._done:
                    for request in self._waiting:
                        self._wait_for(request, deadline, limit)
                        if self._done:
                            break
                    else:
                        self._advance()
        finally:
            self._num_waits -= 1
        return self._outcome()

    def synchronize(self, *, timeout_s: float | None = None) -> Any:
        """Block the host until complete; for host arrays the same as ``wait``."""
        return self.wait(timeout_s=timeout_s)

    def test(self) -> bool:
        """Run a little progress; True once complete. Raises the operation's error.

        A step whose messages have come is run to its end: what it computes, too.
        """
        if not self.go_on():
            return False
        self._outcome()
        return True

    def go_on(self) -> bool:
        """Do as ``test``, and leave the error to who waits."""
        if not self._lock.acquire(blocking=False):
            return False
        try:
            while not self._done:
                try:
                    if not all([request.test() for request in self._waiting]):
                        return False
                except CommError as error:
                    self._fail(error)
                    break
                self._advance()
        finally:
            self._lock.release()
        return True

    @property
    def is_waited_for(self) -> bool:
        """True if a thread is in ``wait()``, which begins the steps."""
        return self._num_waits > 0

    @property
    def awaited(self) -> list[_native.Request]:
        """Requests of the engine that have to end before the next step."""
        return [each for each in self._waiting if type(each) is _native.Request]

    def advance_for(self, limit_s: float) -> bool:
        """Run steps for so long; True once complete. Raises the operation's error."""
        try:
            self.wait(timeout_s=limit_s)
        except TimeoutError_:
            if not self._done:
                return False
            raise
        return True

    def give_up(self, why: str) -> None:
        """End it where it is: the communicator has failed, and nobody waits for it."""
        with self._lock:
            if not self._done:
                self._fail(RevokedError(f"{self._what}: {why}"))

    @property
    def done(self) -> bool:
        """True if the operation has ended, without progress."""
        return self._done

    @property
    def operation(self) -> str:
        """Name of the operation."""
        return self._operation

    @property
    def timeout_s(self) -> float:
        """Default limit of its waits, in seconds."""
        return self._timeout_s

    def __repr__(self) -> str:
        state = "pending"
        if self._done:
            state = "done" if self._error is None else "failed"
        return f"<commrt.Request {self._what}: {state}>"

    def __del__(self) -> None:
        if not getattr(self, "_done", True):
            warnings.warn(
                f"{self._what}: the request was dropped before it was complete; its "
                f"steps end here, and the other ranks wait: keep it, and wait() for it",
                ResourceWarning,
                stacklevel=2,
            )

    def raise_if_late(self, limit_s: float) -> None:
        """Raise what a wait that began so long ago would raise, unless it has ended."""
        try:
            self.wait(timeout_s=1e-3)
        except TimeoutError_ as error:
            if self._done:
                raise
            raise self._late(limit_s, error.__cause__ or error) from error.__cause__

    def _wait_for(self, request: Awaited, deadline: float, limit: float) -> None:
        try:
            request.wait(timeout_s=max(1e-3, deadline - time.monotonic()))
        except TimeoutError_ as error:
            raise self._late(limit, error) from error
        except CommError as error:
            self._fail(error)

    def _late(self, limit: float, error: BaseException) -> TimeoutError_:
        late = TimeoutError_(
            f"{self._what}: not complete within {limit:g} s; it stays in flight: "
            f"wait() for it again (the request is in the error's .request). It "
            f"waits for {error}"
        )
        late.request = self
        late.ranks = getattr(error, "ranks", ())
        return late

    def _advance(self) -> None:
        self.num_steps += 1
        try:
            self._waiting = next(self._steps)
        except StopIteration as end:
            self._output = end.value
            self._end()
        except BaseException as error:  # noqa: BLE001  raised by wait and test
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        for request in self._waiting:
            request.be_quiet()  # the program has not seen it: this one tells all
        self._error = error
        self._end()

    def _end(self) -> None:
        self._done = True
        self._waiting = ()
        self._ended(self._error)

    def _outcome(self) -> Any:
        if self._error is not None:
            raise self._error
        return self._output
