# SPDX-License-Identifier: Apache-2.0
"""Other programs on the cores of the ranks, as the kernel accounts for them.

A repetition is worth nothing if a rank was ready to run and something else ran instead.
The kernel counts that time for each thread, to the nanosecond. Where ranks share cores
they wait for each other all the time; there the time that all processes took is
compared with the ranks' own. Time that a hypervisor took from a virtual machine counts
in both cases.

Ranks on several nodes sleep until a message comes. The kernel then needs some 10 us to
50 us to run the thread again, also on an idle machine. That belongs to the call, so a
``WaitingTime`` can leave it out. Another program takes 200 us to 1300 us at a time.
"""

from __future__ import annotations

import contextlib
import os
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

__all__ = ["WAKE_UP_US", "CoreTime", "Reference", "WaitingTime", "others_share"]

WAKE_UP_US = 60.0
"""Longest that a thread waits for its core after it slept, where nothing else runs."""
_SCHEDSTAT = "/proc/thread-self/schedstat"
_STAT = "/proc/stat"
_LONGEST_LINE = 128
_SHORTEST_S = 0.1
"""The kernel counts the time of all processes in hundredths of a second."""
_BUSY = (0, 1, 2)
"""Columns of ``/proc/stat`` that are work of processes: user, nice, and system."""
_INTERRUPTS = (5, 6)
_STOLEN = 7
_REFERENCE_NBYTES = 2 << 20
_REFERENCE_TIMES = 3


class WaitingTime:
    """Time for which the thread that made this was ready, and did not run.

    Where the kernel does not count that, all time counts in which it did not run.

    Args:
        wake_up_us: what does not count each time the thread came to run.
    """

    def __init__(self, wake_up_us: float = 0.0) -> None:
        self._wake_up_us = wake_up_us
        self._file: int | None = None
        with contextlib.suppress(OSError):
            self._file = os.open(_SCHEDSTAT, os.O_RDONLY | os.O_CLOEXEC)
            weakref.finalize(self, os.close, self._file)
        if self._file is not None:
            try:
                self._counted_us()
            except (OSError, ValueError, IndexError):
                self._file = None

    def us(self) -> float:
        """Return microseconds since some moment in the past.

        With ``wake_up_us`` it falls where the thread came to run sooner than that.
        """
        if self._file is None:
            return (time.perf_counter_ns() - time.thread_time_ns()) / 1000.0
        return self._counted_us()

    def _counted_us(self) -> float:
        assert self._file is not None
        words = os.pread(self._file, _LONGEST_LINE, 0).split()
        return int(words[1]) / 1000.0 - self._wake_up_us * int(words[2])


@dataclass(frozen=True)
class _Moment:
    """Seconds so far."""

    wall_s: float
    busy_s: float
    stolen_s: float
    own_s: float


class CoreTime:
    """How the time of this process's cores was shared, from one moment to another.

    Args:
        of_interrupts: False: time in which the kernel handled interrupts is nobody's.
            Between nodes it is the ranks' own messages that cause them.
    """

    def __init__(self, *, of_interrupts: bool = True) -> None:
        self._cores = sorted(os.sched_getaffinity(0))
        self._columns = _BUSY + _INTERRUPTS if of_interrupts else _BUSY
        self._since = self._now()

    def start(self) -> None:
        """Begin anew."""
        self._since = self._now()

    def row(self) -> list[float]:
        """Return seconds of all cores: passed, used, and stolen; and used by this
        process."""
        now, since, cores = self._now(), self._since, len(self._cores)
        return [
            (now.wall_s - since.wall_s) * cores,
            now.busy_s - since.busy_s,
            now.stolen_s - since.stolen_s,
            now.own_s - since.own_s,
        ]

    def _now(self) -> _Moment:
        busy, stolen = _ticks(self._cores, self._columns)
        tick_s = 1 / os.sysconf("SC_CLK_TCK")
        return _Moment(
            time.monotonic(), busy * tick_s, stolen * tick_s, time.process_time()
        )


def _ticks(cores: Sequence[int], columns: Sequence[int]) -> tuple[int, int]:
    """Return the ticks that these cores worked and that were stolen from them."""
    names = {f"cpu{core}" for core in cores}
    busy = stolen = 0
    try:
        with open(_STAT) as file:
            for line in file:
                name, *words = line.split()
                if name in names:
                    counts = [int(word) for word in words]
                    busy += sum(counts[column] for column in columns)
                    stolen += counts[_STOLEN]
    except (OSError, ValueError, IndexError):
        return 0, 0
    return busy, stolen


def others_share(
    rows: Sequence[Sequence[float]],
    *,
    share_cores: bool,
    machines: Sequence[int] | None = None,
) -> float:
    """Return the share of the cores' time that the ranks did not get.

    Args:
        rows: what ``CoreTime.row`` said on each rank.
        share_cores: whether ranks of a machine run on the same cores. Otherwise only
            the time counts that was stolen from all processes alike.
        machines: the number of each rank's machine; None: all are on one. The worst
            machine counts.
    """
    if machines is not None and len(set(machines)) > 1:
        apart = [
            [row for row, one in zip(rows, machines, strict=True) if one == machine]
            for machine in sorted(set(machines))
        ]
        return max(others_share(each, share_cores=share_cores) for each in apart)
    passed_s = max(row[0] for row in rows)
    if passed_s < _SHORTEST_S:
        return 0.0
    taken_s = max(row[2] for row in rows)
    if share_cores:
        taken_s += max(0.0, max(row[1] for row in rows) - sum(row[3] for row in rows))
    return taken_s / passed_s


class Reference:
    """A fixed piece of work: what it takes says how fast the machine is now.

    A copy that no cache of a core holds: it is slower where others use the memory.
    """

    def __init__(self) -> None:
        self._x = np.ones(_REFERENCE_NBYTES, np.uint8)
        self._out = np.zeros(_REFERENCE_NBYTES, np.uint8)

    def us(self) -> float:
        """Return the least of a few times."""
        took = []
        for _ in range(_REFERENCE_TIMES):
            start = time.perf_counter_ns()
            np.copyto(self._out, self._x)
            took.append((time.perf_counter_ns() - start) / 1000.0)
        return min(took)
