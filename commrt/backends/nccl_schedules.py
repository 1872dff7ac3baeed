# SPDX-License-Identifier: Apache-2.0
"""Schedules on NCCL: closed rounds of grouped messages, and kernels between them.

schedules = NcclSchedules(nccl_comm, device)
plan = nccl_program(spec, rank, size, nodes)   # once
schedules.run(plan, x=..., out=..., stream=..., what="allreduce")
"""

from __future__ import annotations

from typing import Any

from commrt.backends.stream_programs import StreamPlan
from commrt.errors import CaptureError
from commrt.nccl import NcclComm

__all__ = ["NcclSchedules"]


class NcclSchedules:
    """Runs programs on one communicator, with scratch memory that they share.

    Programs may go to any streams: each first waits, on the device, for the one before
    it, as far as both use scratch memory.
    """

    def __init__(self, comm: NcclComm, device: Any) -> None:
        self.comm, self.device = comm, device
        self._scratch = self._scratch_nbytes = 0
        self._used: int | None = None  # an event: the latest use of scratch memory

    def run(
        self,
        plan: StreamPlan,
        *,
        x: int,
        out: int,
        stream: int,
        what: str,
        timeout_s: float | None = None,
    ) -> None:
        """Put a program into ``stream``; the host does not wait for it.

        ``x`` and ``out`` are addresses on the device, and may be the same where the
        operation works in place. Raises CaptureError, before anything is given, where
        a stream is captured and the program needs scratch memory: the graph would use
        it at times that nobody knows.
        """
        shares = plan.scratch_nbytes > 0
        if shares:
            self._prepare(plan.scratch_nbytes, stream, what)
        try:
            self.comm.run_program(
                plan.program,
                device=self.device,
                x=x,
                out=out,
                scratch=self._scratch,
                stream=stream,
                what=what,
                timeout_s=timeout_s,
            )
        finally:
            if shares and self._used is not None:
                self.device.event_record(self._used, stream)

    def _prepare(self, nbytes: int, stream: int, what: str) -> None:
        if self.device.is_capturing(stream):
            raise CaptureError(
                f"{what} on {self.comm.name}: this schedule needs {nbytes} bytes of "
                f"scratch memory, which later calls use, too, so that a graph may not "
                f"hold it. Use algorithm='native' in captures, or call it outside",
                "capturing",
            )
        if self._used is None:
            self._used = self.device.event_create()
        else:
            self.device.stream_wait_event(stream, self._used)
        if nbytes > self._scratch_nbytes:
            before, self._scratch = self._scratch, self.device.alloc(nbytes)
            self._scratch_nbytes = nbytes
            if before:
                self.device.free(before)  # waits for who uses it

    def close(self) -> None:
        """Give scratch memory back, once the device is done with it. Idempotent."""
        if self._used is not None:
            self.device.event_destroy(self._used)
            self._used = None
        if self._scratch:
            self.device.free(self._scratch)
            self._scratch = self._scratch_nbytes = 0
