# SPDX-License-Identifier: Apache-2.0
"""Host memory behind a link of a given speed: a device's far memory, emulated."""

from __future__ import annotations

from typing import TypeAlias

import torch

from commrt.layers.out_of_core.costs import Link
from commrt.layers.out_of_core.far import Clock, FarMemory, Job, Lane

__all__ = ["ThrottledCopy"]

Tensor: TypeAlias = torch.Tensor


class ThrottledCopy(FarMemory):
    """Host memory, with transfers that take as long as those of a slower link.

    A transfer of n bytes ends ``latency_s + n / bytes_per_s`` after it begins, and
    begins when the one before it, of its direction, has ended. A thread copies the
    bytes at once.

    Args:
        bytes_per_s: of each direction.
        latency_s: of each transfer.
        limit_nbytes: most bytes; None: as many as there are.
        clock: other than the machine's.
    """

    def __init__(
        self,
        bytes_per_s: float,
        latency_s: float = 0.0,
        *,
        limit_nbytes: int | None = None,
        clock: Clock | None = None,
    ) -> None:
        super().__init__(limit_nbytes)
        self._link = Link(bytes_per_s, bytes_per_s, latency_s)
        if clock is not None:
            self.clock = clock
        self._lane = Lane("commrt-throttled-copy")
        self._free = {"store": 0.0, "load": 0.0}

    def speeds(self) -> Link:
        """Return the speeds that were given."""
        return self._link

    def store(self, source: Tensor) -> tuple[Tensor, _Delayed]:
        """Start to copy bytes out."""
        self._take(source.numel())
        try:
            slot = torch.empty(source.numel(), dtype=torch.uint8)
            return slot, self._delayed("store", slot, source)
        except BaseException:
            self._give(source.numel())
            raise

    def load(self, slot: Tensor, target: Tensor) -> _Delayed:
        """Start to copy bytes in."""
        return self._delayed("load", target, slot)

    def drop(self, slot: Tensor) -> None:
        """Free a slot."""
        self._give(slot.numel())

    def close(self) -> None:
        """End the thread."""
        self._lane.close()

    def _delayed(self, kind: str, target: Tensor, source: Tensor) -> _Delayed:
        job = self._lane.do(lambda: _copy(target, source), f"ThrottledCopy.{kind}")
        link = self._link
        seconds = link.latency_s + source.numel() / link.out_bytes_per_s
        self._free[kind] = max(self._free[kind], self.clock.now()) + seconds
        return _Delayed(job, self.clock, self._free[kind])


def _copy(target: Tensor, source: Tensor) -> None:
    target.copy_(source)


class _Delayed:
    """A copy that ends at a given time."""

    def __init__(self, job: Job, clock: Clock, end: float) -> None:
        self._job, self._clock, self._end = job, clock, end

    def is_done(self) -> bool:
        """Return whether its time has come."""
        if self._clock.now() < self._end:
            return False
        self._job.wait()  # a copy takes less than the link
        return True

    def wait(self) -> None:
        """Return at its end."""
        self._job.wait()
        self._clock.wait_until(self._end)

    order = wait
