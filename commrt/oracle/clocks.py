# SPDX-License-Identifier: Apache-2.0
"""Clocks of measurements: the wall's, and that of cores.

Time on the wall is what a training takes. Other programs on the machine add to it. The
clock of cores counts only what this job's processes run. Where ranks outnumber cores,
they take turns, so a rank's share of the time is multiplied by ranks over cores. On a
machine without other programs both agree, but for what a rank sleeps.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np

from commrt.errors import UsageError, shown
from commrt.select.fingerprint import available_cores

if TYPE_CHECKING:
    from commrt.comm import Communicator

__all__ = ["ClockName", "Stopwatch"]

ClockName: TypeAlias = Literal["wall", "cores"]
_READ: dict[str, Callable[[], float]] = {
    "wall": time.perf_counter,
    "cores": time.process_time,
}


class Stopwatch:
    """Times calls on all ranks at one time.

    Args:
        comm: the ranks; None: this process alone.
        clock: ``wall`` or ``cores``.
        window_s: seconds of a measurement on the wall; longer where ranks share cores.
        rounds: measurements, of which the least counts: other programs only add time.

    Raises:
        UsageError: the clock is unknown, or a number is not above 0.
    """

    def __init__(
        self,
        comm: Communicator | None,
        *,
        clock: ClockName = "wall",
        window_s: float = 0.02,
        rounds: int = 3,
    ) -> None:
        if clock not in _READ:
            raise UsageError(f"clock is {shown(clock)}; expected wall or cores")
        if not (window_s > 0 and type(rounds) is int and rounds > 0):
            raise UsageError(
                f"window_s is {shown(window_s)} and rounds {shown(rounds)}; expected "
                f"numbers above 0"
            )
        self._comm, self._clock, self._rounds = comm, clock, rounds
        self._ranks = 1 if comm is None else comm.size
        self._crowd = max(1.0, self._ranks / available_cores())
        self._window_s = window_s * self._crowd

    def mean_s(self, call: Callable[[], object]) -> float:
        """Return the seconds of a call that ranks make independently; collective.

        Ranks that share cores get turns on them, and one may have a core for itself for
        a whole window. So ranks count how many calls they make in all.
        """
        read = _READ[self._clock]
        call()
        rates = np.zeros(self._rounds)
        for number in range(self._rounds):
            if self._comm is not None:
                self._comm.barrier()
            start, begin, count = read(), time.perf_counter(), 0
            while time.perf_counter() - begin < self._window_s or not count:
                call()
                count += 1
            rates[number] = count / max(read() - start, 1e-9)
        if self._comm is not None:
            self._comm.allreduce(rates)
            rates /= self._ranks
        return self._counted(float(1 / rates.max()))

    def together_s(self, call: Callable[[], object], most: int = 1000) -> float:
        """Return the seconds of a call that ranks make together; collective.

        Args:
            call: what all ranks take part in.
            most: calls of one measurement.
        """
        comm, read = self._comm, _READ[self._clock]
        call()
        begin = time.perf_counter()
        call()
        one = np.array([time.perf_counter() - begin])
        if comm is not None:
            comm.allreduce(one, op="max")
        count = max(1, min(most, int(self._window_s / max(one[0], 1e-7))))
        found = []
        for _ in range(self._rounds):
            if comm is not None:
                comm.barrier()
            start = read()
            for _ in range(count):
                call()
            found.append(self._slowest((read() - start) / count))
        return min(found)

    def _counted(self, seconds: float) -> float:
        """Return a rank's seconds with its turns on a core counted."""
        return seconds * (self._crowd if self._clock == "cores" else 1.0)

    def _slowest(self, seconds: float) -> float:
        """Return the seconds of the slowest rank, or of cores that all share."""
        if self._comm is None:
            return seconds
        most, mean = np.array([seconds]), np.array([seconds])
        self._comm.allreduce(most, op="max")
        self._comm.allreduce(mean)
        shared = self._counted(float(mean[0]) / self._ranks)
        return max(float(most[0]), shared if self._clock == "cores" else 0.0)
