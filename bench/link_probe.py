# SPDX-License-Identifier: Apache-2.0
"""Flags in memory that ranks share: a barrier, and how far apart the ranks are.

Beside ``timing_loop``, and like it loaded by path where there is no commrt.
"""

from __future__ import annotations

import math
import mmap
import os
import time
from itertools import repeat

__all__ = [
    "PROBE_STEP",
    "FlagBarrier",
    "SharedFlags",
    "link_class_of",
    "probe_link",
]

_LINE = 64
NEAR_BELOW_NS = 200.0
"""One-way flag latency, measured from Python, that separates near from far links."""

_SPINS = 3000
"""Polls, some 100 µs, before a rank that waits lets others have its CPU: longer than a
peer with a CPU of its own is late, and far below what a scheduler gives at a time."""
PROBE_STEP = 2000
"""Least growth of the flag values of ``probe_link`` from probe to probe."""
_PROBE_NS, _PROBE_MOST_NS = 2_000_000, 20_000_000
"""Time for one pair; where other programs leave it no undisturbed batch, at most."""
_PROBE_BATCHES, _PROBE_ROUNDS = 19, 100
_DISTURBED_NS = 5000.0
"""One way; no two CPUs are as far apart, so one of the ranks was not on its own."""


class SharedFlags:
    """Lines of 64 bytes in shared memory: for the barrier, and for two-way probes."""

    def __init__(self, path: str, size: int) -> None:
        self.size = size
        with open(path, "r+b") as file:
            self._map = mmap.mmap(file.fileno(), 3 * size * _LINE)
        self.words = memoryview(self._map).cast("Q")

    @staticmethod
    def create(path: str, size: int) -> None:
        """Write the zeroed file that ``size`` ranks will map."""
        with open(path, "wb") as file:
            file.write(bytes(3 * size * _LINE))

    def word(self, kind: int, rank: int) -> int:
        """Return the index of a rank's word: kind 0 barrier, 1 ping, 2 pong."""
        return (kind * self.size + rank) * (_LINE // 8)


class FlagBarrier:
    """A barrier of flags: each rank writes its own line and reads all others.

    Args:
        flags: the shared lines.
        rank: this one's.
        oversubscribed: whether ranks outnumber CPUs.
        spins: polls before a rank that waits lets others have its CPU.
    """

    def __init__(
        self,
        flags: SharedFlags,
        rank: int,
        oversubscribed: bool,
        spins: int = _SPINS,
    ) -> None:
        self._words = flags.words
        self._mine = flags.word(0, rank)
        self._others = [flags.word(0, r) for r in range(flags.size) if r != rank]
        # A rank without a CPU of its own must let the others run at once; one with a
        # CPU may have to share it with other programs.
        self._spins = 0 if oversubscribed else spins
        self._epoch = 0

    def __call__(self) -> None:
        """Return once every rank has called."""
        words = self._words
        self._epoch = epoch = self._epoch + 1
        words[self._mine] = epoch
        for other in self._others:
            for _ in repeat(None, self._spins):
                if words[other] >= epoch:
                    break
            else:
                while words[other] < epoch:
                    os.sched_yield()


def probe_link(flags: SharedFlags, rank: int, start: int) -> float:
    """Return the worst one-way flag latency in ns between rank 0 and another rank.

    A ping-pong on two lines of shared memory, written in Python: some 50 ns of the
    figure are the interpreter's. Every rank takes part, each with a CPU of its own;
    ``start`` must grow by ``PROBE_STEP`` from probe to probe. Right on rank 0, 0
    elsewhere; -1 if a pair was hardly on two CPUs at once for 20 ms.
    """
    if rank != 0:
        _echo(flags, rank, start)
        return 0.0
    found = [_ping_pong(flags, other, start) for other in range(1, flags.size)]
    return -1.0 if math.inf in found else max(found, default=0.0)


def _ping_pong(flags: SharedFlags, other: int, start: int) -> float:
    """Return rank 0's best batch, infinity without any; the time is its to keep."""
    words, ping = flags.words, flags.word(1, other)
    begin_ns, best = time.perf_counter_ns(), math.inf
    end_ns = begin_ns + _PROBE_MOST_NS
    for batch in range(_PROBE_BATCHES):
        first = start + 1 + batch * _PROBE_ROUNDS
        found = _batch(words, ping, flags.word(2, other), first, end_ns)
        best = min(best, found if found < _DISTURBED_NS else math.inf)
        most_ns = _PROBE_NS if best < math.inf else _PROBE_MOST_NS
        if time.perf_counter_ns() - begin_ns >= most_ns:
            break
    words[ping] = start + PROBE_STEP - 1  # the other one's sign to leave
    return best


def _batch(
    words: memoryview[int], ping: int, pong: int, first: int, end_ns: int
) -> float:
    """Return ns one way, infinity if time ran out before the last answer."""
    polls = repeat(None, _SPINS)  # for all rounds together: one undisturbed needs few
    begin_ns = time.perf_counter_ns()
    for value in range(first, first + _PROBE_ROUNDS):
        words[ping] = value
        for _ in polls:
            if words[pong] == value:
                break
        else:
            while words[pong] != value:
                if time.perf_counter_ns() >= end_ns:
                    return math.inf
                os.sched_yield()
    return (time.perf_counter_ns() - begin_ns) / (2 * _PROBE_ROUNDS)


def _echo(flags: SharedFlags, rank: int, start: int) -> None:
    """Answer what rank 0 asks, until it is done or out of time."""
    words, ping, pong = flags.words, flags.word(1, rank), flags.word(2, rank)
    value, last = start, start + PROBE_STEP - 1
    while value != last:
        for _ in repeat(None, _SPINS):
            asked = words[ping]
            if asked > value:
                words[pong] = value = asked
                break
        else:
            os.sched_yield()


def link_class_of(latency_ns: float, ranks: int, cpus: int) -> str:
    """Return near, far or oversubscribed; unknown where the probe ran out of time."""
    if ranks > cpus:
        return "oversubscribed"
    if latency_ns < 0:
        return "unknown"
    return "near" if latency_ns < NEAR_BELOW_NS else "far"
