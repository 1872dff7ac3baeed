# SPDX-License-Identifier: Apache-2.0
"""The interface of far memories, and the thread in which transfers of a host run."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from queue import SimpleQueue
from statistics import median
from typing import Any, Protocol, TypeAlias

import torch

from commrt.errors import (
    BackendError,
    ClosedError,
    CommError,
    MemoryError_,
    UsageError,
    shown,
)
from commrt.layers.out_of_core.costs import Link

__all__ = ["Clock", "FarMemory", "Job", "Lane", "RealClock", "Transfer", "is_in_lane"]

Tensor: TypeAlias = torch.Tensor


class Clock(Protocol):
    """Time, as a far memory has it."""

    def now(self) -> float:
        """Return seconds."""

    def wait_until(self, then: float) -> None:
        """Return when it is later than ``then``."""


class RealClock:
    """The machine's clock."""

    def now(self) -> float:
        """Return seconds."""
        return time.perf_counter()

    def wait_until(self, then: float) -> None:
        """Sleep until then."""
        while (left := then - time.perf_counter()) > 0:
            time.sleep(left)


class Transfer(Protocol):
    """A copy under way."""

    def is_done(self) -> bool:
        """Return whether it has come to its end, well or not."""

    def wait(self) -> None:
        """Return at its end; raise its error."""

    def order(self) -> None:
        """Let what the caller computes next come after it; raise its error."""


class FarMemory(ABC):
    """Memory to which saved tensors are swapped.

    Transfers of one direction end in the order of their calls. Not for several threads
    at a time, but ``drop`` may be called by any.

    Args:
        limit_nbytes: most bytes; None: as many as there are.

    Raises UsageError for a limit that is no number from 1.
    """

    def __init__(self, limit_nbytes: int | None = None) -> None:
        is_none = limit_nbytes is None
        if not is_none and (type(limit_nbytes) is not int or limit_nbytes < 1):
            raise UsageError(
                f"{type(self).__name__}: limit_nbytes={shown(limit_nbytes)}: expected "
                f"an integer from 1, or None"
            )
        self.clock: Clock = RealClock()
        self._limit_nbytes = limit_nbytes
        self._lock = threading.Lock()
        self._in_use = 0

    @property
    def in_use(self) -> int:
        """Bytes that are stored."""
        return self._in_use

    @abstractmethod
    def store(self, source: Tensor) -> tuple[Any, Transfer]:
        """Start to copy bytes out; return where they will be, and the transfer.

        ``source`` is a vector of bytes, which does not change until the end.
        """

    @abstractmethod
    def load(self, slot: Any, target: Tensor) -> Transfer:
        """Start to copy bytes into ``target``; the slot stays."""

    @abstractmethod
    def drop(self, slot: Any) -> None:
        """Free a slot, also one whose transfer is under way."""

    def speeds(self) -> Link:
        """Return the speeds, measured by a few transfers."""
        nbytes = _MEASURED_NBYTES
        if self._limit_nbytes is not None:
            nbytes = max(1, min(nbytes, self._limit_nbytes - self._in_use))
        small, large = self._round_s(1), self._round_s(nbytes)
        latency_s = min(small)
        out_s, in_s = (max(each - latency_s, 1e-9) for each in large)
        return Link(nbytes / out_s, nbytes / in_s, latency_s)

    @abstractmethod
    def close(self) -> None:
        """Free all that it holds; idempotent."""

    def __enter__(self) -> FarMemory:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _round_s(self, nbytes: int) -> tuple[float, float]:
        """Return the median seconds of a transfer out, and of one in."""
        source = torch.zeros(nbytes, dtype=torch.uint8)
        outs, ins = [], []
        for _ in range(5):
            begin = self.clock.now()
            slot, transfer = self.store(source)
            transfer.wait()
            middle = self.clock.now()
            self.load(slot, source).wait()
            ins.append(self.clock.now() - middle)
            outs.append(middle - begin)
            self.drop(slot)
        return median(outs), median(ins)

    def _take(self, nbytes: int) -> None:
        """Count bytes; raise MemoryError_ beyond the limit."""
        with self._lock:
            limit = self._limit_nbytes
            if limit is not None and self._in_use + nbytes > limit:
                raise MemoryError_(
                    f"{type(self).__name__}: {nbytes} bytes more beside {self._in_use} "
                    f"are beyond limit_nbytes={limit}; give more, or a plan that "
                    f"recomputes"
                )
            self._in_use += nbytes

    def _give(self, nbytes: int) -> None:
        with self._lock:
            self._in_use -= nbytes


_MEASURED_NBYTES = 8 << 20


class Job:
    """Work of a lane."""

    def __init__(self, work: Callable[[], None], what: str) -> None:
        self._work, self._what = work, what
        self._end = threading.Event()
        self._error: BaseException | None = None

    def run(self) -> None:
        """Do the work, once, and keep its error."""
        try:
            self._work()
        except BaseException as error:  # noqa: BLE001 - whoever waits raises it
            self._error = error
        self._work = _nothing  # it holds the tensors
        self._end.set()

    def is_done(self) -> bool:
        """Return whether it has come to its end."""
        return self._end.is_set()

    def wait(self) -> None:
        """Return at its end; raise its error, a CommError."""
        self._end.wait()
        if self._error is None:
            return
        if isinstance(self._error, CommError):
            raise self._error
        raise BackendError(f"{self._what}: {self._error}") from self._error

    order = wait


def _nothing() -> None:
    pass


_lanes = threading.local()


def is_in_lane() -> bool:
    """Return whether this thread does transfers, for which others may wait."""
    return getattr(_lanes, "is_one", False)


class Lane:
    """A thread that does jobs in their order; it starts with the first."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def do(self, work: Callable[[], None], what: str) -> Job:
        """Return a job that is done after all before it."""
        if self._is_closed:
            raise ClosedError(f"{what}: the far memory is closed")
        job = Job(work, what)
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._run, name=self._name, daemon=True
            )
            self._thread.start()
        self._jobs.put(job)
        return job

    def close(self) -> None:
        """End the thread, after its jobs; idempotent."""
        self._is_closed = True
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        _lanes.is_one = True
        while (job := self._jobs.get()) is not None:
            job.run()
            del job
