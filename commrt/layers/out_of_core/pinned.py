# SPDX-License-Identifier: Apache-2.0
"""Pinned memory of the host as far memory of a CUDA device."""

from __future__ import annotations

from typing import Any, TypeAlias

import torch

from commrt.errors import UsageError
from commrt.layers.out_of_core.costs import Link
from commrt.layers.out_of_core.far import FarMemory

__all__ = ["PinnedMemory"]

Tensor: TypeAlias = torch.Tensor


class PinnedMemory(FarMemory):
    """Pinned memory of the host, with a CUDA stream for each direction.

    The stream that computes waits for what it uses, and the host waits only for memory
    that is to become free. torch caches pinned memory, so freed slots cost nothing.

    Args:
        device: whose tensors are swapped; None: the present one.
        limit_nbytes: most bytes; None: as many as the host has.

    Raises UsageError without a CUDA device.
    """

    def __init__(self, device: Any = None, *, limit_nbytes: int | None = None) -> None:
        super().__init__(limit_nbytes)
        if not torch.cuda.is_available():
            raise UsageError(
                "PinnedMemory: there is no CUDA device; use FileFar or ThrottledCopy"
            )
        index = torch.cuda.current_device() if device is None else device
        self._device = torch.device("cuda", index) if type(index) is int else index
        self._device = torch.device(self._device)
        self._out = torch.cuda.Stream(self._device)
        self._in = torch.cuda.Stream(self._device)

    def store(self, source: Tensor) -> tuple[Tensor, _Copied]:
        """Start to copy bytes out, after what the present stream has to do."""
        self._take(source.numel())
        try:
            slot = torch.empty(source.numel(), dtype=torch.uint8, pin_memory=True)
        except BaseException:
            self._give(source.numel())
            raise
        return slot, _copy(slot, source, self._out, source)

    def load(self, slot: Tensor, target: Tensor) -> _Copied:
        """Start to copy bytes in, after what the present stream has to do.

        The target's memory may be what the present stream still uses for another
        tensor, which is freed.
        """
        return _copy(target, slot, self._in, target)

    def drop(self, slot: Tensor) -> None:
        """Free a slot."""
        self._give(slot.numel())

    def speeds(self) -> Link:
        """Return the speeds, measured by events of the streams."""
        nbytes = _MEASURED_NBYTES
        if self._limit_nbytes is not None:
            nbytes = max(1, min(nbytes, self._limit_nbytes - self._in_use))
        there = torch.zeros(nbytes, dtype=torch.uint8, device=self._device)
        speeds = []
        slot, transfer = self.store(there)
        transfer.wait()  # the first pins the memory
        for stream, target, source in (
            (self._out, slot, there),
            (self._in, there, slot),
        ):
            begin = torch.cuda.Event(enable_timing=True)
            begin.record(stream)
            end = _copy(target, source, stream, there, timed=True)
            end.wait()
            speeds.append(nbytes / max(begin.elapsed_time(end.event) / 1e3, 1e-9))
        self.drop(slot)
        return Link(speeds[0], speeds[1], _LATENCY_S)

    def close(self) -> None:
        """Wait for both streams."""
        self._out.synchronize()
        self._in.synchronize()


_MEASURED_NBYTES = 64 << 20
_LATENCY_S = 10e-6
"""Of a copy's launch, about."""


class _Copied:
    """A copy on a stream."""

    def __init__(self, event: Any, device: torch.device) -> None:
        self.event, self._device = event, device

    def is_done(self) -> bool:
        """Return whether it has come to its end."""
        return bool(self.event.query())

    def wait(self) -> None:
        """Let the host wait."""
        self.event.synchronize()

    def order(self) -> None:
        """Let the present stream wait."""
        torch.cuda.current_stream(self._device).wait_event(self.event)


def _copy(
    target: Tensor, source: Tensor, stream: Any, used: Tensor, *, timed: bool = False
) -> _Copied:
    """Copy on a stream, behind the present one; return its end.

    Args:
        target, source: of equal length, one of the device and one pinned.
        stream: of the copy.
        used: the device's, whose memory is not given away before the end.
        timed: the end's time is asked for.
    """
    stream.wait_stream(torch.cuda.current_stream(used.device))
    with torch.cuda.stream(stream):
        target.copy_(source, non_blocking=True)
        used.record_stream(stream)
        event = torch.cuda.Event(enable_timing=timed)
        event.record(stream)
    return _Copied(event, used.device)
