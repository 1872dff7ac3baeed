# SPDX-License-Identifier: Apache-2.0
"""The cases of ``cases`` on the memory of a device of threads, which hosts can read."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
from cases import Attempt, Case

from commrt.devices import DeviceArray
from commrt.errors import CommError
from commrt.vocabulary.operations import operation


class Borrowed(DeviceArray):
    """An array over device memory that belongs to somebody else."""

    def __init__(self, device: Any, view: np.ndarray[Any, Any]) -> None:
        self.device = device
        self.dtype, self.shape, self.readonly = view.dtype, view.shape, False
        self.nbytes = view.nbytes
        self._address = view.ctypes.data
        self.owner = view

    def _give_back(self) -> None:
        """It is not ours."""


class DeviceAttempt(Attempt):
    """One rank's part of a case, with everything on a device."""

    def __init__(self, case: Case, rank: int, device: Any, stream: int) -> None:
        self.device, self.stream = device, stream
        self.allocated: list[int] = []
        super().__init__(case, rank, self._memory)

    def _memory(self, nbytes: int) -> np.ndarray[Any, Any]:
        address = self.device.alloc(max(1, nbytes))
        self.allocated.append(address)
        raw = (ctypes.c_uint8 * nbytes).from_address(address)
        return np.frombuffer(raw, np.uint8)

    def start(self, comm: Any, *, nonblocking: bool = False) -> Any:
        """Make the call, and wait until the device has done it."""
        arguments: dict[str, Any] = self.case.arguments(self.rank)
        if self.case.coll == "barrier":
            return comm.barrier(stream=self.stream, **arguments)
        x = Borrowed(self.device, self.x)
        out = None if self.out is None else Borrowed(self.device, self.out)
        in_place = self.out is self.x and operation(self.case.coll).in_place
        if out is not None and not in_place:
            arguments["out"] = out
        returned = getattr(comm, self.case.coll)(
            x, nonblocking=nonblocking, **arguments
        )
        if nonblocking:
            request, returned = returned, returned.wait()
            request.synchronize()
        self.settle()
        expected = x if in_place else out
        self.result = self.out if returned is expected else returned
        return returned

    def settle(self) -> None:
        """Wait until the device has done what the stream was given."""
        self.device.stream_synchronize(self.stream)

    def free(self) -> None:
        """Give the memory back."""
        for address in self.allocated:
            self.device.free(address)


def run_on_device(
    comm: Any, device: Any, stream: int, cases: Iterable[Case], piece: int | None
) -> list[str]:
    """Run cases on one rank, one after the other; return what was wrong."""
    wrong = []
    for number, case in enumerate(cases):
        if piece is not None:
            case = replace(case, params={**case.params, "piece": piece})
        attempt = DeviceAttempt(case, comm.rank, device, stream)
        try:
            attempt.start(comm, nonblocking=number % 2 == 1)
        except CommError as error:
            raise AssertionError(f"{case}: {error}") from error
        if (verdict := attempt.verdict()) is not None:
            wrong.append(f"rank {comm.rank}: {verdict} ({case})")
        attempt.free()
    return wrong
