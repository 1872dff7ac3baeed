# SPDX-License-Identifier: Apache-2.0
"""Run millions of mixed calls on a few processes; see that memory stays flat.

    python -m commrt.run -n 4 tests/support/soak.py --small 10000000 --large 10000

Each rank samples its own memory, what it can share, and its open descriptors. The
first tenth of the calls warms up, and at least 60,000 calls do: tables and the heap
reach their size only then. The job ends with status 1 if a rank's memory grows
by more than 1 % after that, if a rank has more descriptors than then, or if a result is
wrong.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import commrt
from commrt.comm import Communicator

SAMPLES = 100
WARM_UP = 10
"""Samples of the warm-up."""
LEAST_WARM_UP = 60_000
"""Calls of it; a shorter one is made longer."""
MOST_GROWTH = 0.01
SMALL = (1, 3, 16, 100, 512)
LARGE = (100_003, 262_144, 500_000)
CHECKED_EVERY = 997
PART_EVERY = 20_011
"""Calls between two communicators that are made and freed."""


@dataclass
class Arrays:
    """The arrays of one rank, made once."""

    comm: Communicator
    sent: dict[int, Any] = field(default_factory=dict)
    taken: dict[int, Any] = field(default_factory=dict)
    gathered: dict[int, Any] = field(default_factory=dict)
    plans: dict[int, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        comm = self.comm
        for count in (*SMALL, *LARGE):
            self.sent[count] = np.full(count, comm.rank + 1.0)
            self.taken[count] = np.zeros(count)
            self.gathered[count] = np.zeros((comm.size, count))
            sent, taken = self.sent[count], self.taken[count]
            self.plans[count] = comm.plan.allreduce(sent, out=taken)

    def check(self, got: Any, want: Any) -> None:
        """Compare a result of every element with what it must be."""
        if not np.array_equal(got, np.broadcast_to(want, np.shape(got))):
            raise AssertionError(f"rank {self.comm.rank}: {got}, expected {want}")


def blocking_sum(a: Arrays, count: int, turn: int) -> None:
    """Sum over all ranks."""
    a.comm.allreduce(a.sent[count], out=a.taken[count])
    if turn % CHECKED_EVERY == 0:
        a.check(a.taken[count], a.comm.size * (a.comm.size + 1) / 2)


def pending_sum(a: Arrays, count: int, turn: int) -> None:
    """Sum over all ranks, with a barrier beside it."""
    request = a.comm.allreduce(a.sent[count], out=a.taken[count], nonblocking=True)
    other = a.comm.barrier(nonblocking=True)
    request.wait()
    other.wait()
    if turn % CHECKED_EVERY == 0:
        a.check(a.taken[count], a.comm.size * (a.comm.size + 1) / 2)


def planned_sum(a: Arrays, count: int, turn: int) -> None:
    """Sum over all ranks by a persistent plan."""
    a.plans[count]()
    if turn % CHECKED_EVERY == 0:
        a.check(a.taken[count], a.comm.size * (a.comm.size + 1) / 2)


def gather(a: Arrays, count: int, turn: int) -> None:
    """Gather on all ranks."""
    a.comm.allgather(a.sent[count], out=a.gathered[count])
    if turn % CHECKED_EVERY == 0:
        a.check(a.gathered[count].T, np.arange(1.0, a.comm.size + 1))


def copy(a: Arrays, count: int, turn: int) -> None:
    """Copy a root's array."""
    root = turn % a.comm.size
    x = a.sent[count] if a.comm.rank == root else a.taken[count]
    a.comm.bcast(x, root=root)
    if turn % CHECKED_EVERY == 0:
        a.check(x, root + 1.0)


def ring(a: Arrays, count: int, turn: int) -> None:
    """Send to the next rank, receive from the one before."""
    comm = a.comm
    before, behind = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
    comm.sendrecv(a.sent[count], behind, a.taken[count], before)
    if turn % CHECKED_EVERY == 0:
        a.check(a.taken[count], before + 1.0)


def messages(a: Arrays, count: int, turn: int) -> None:
    """Send and receive with a tag, both nonblocking."""
    comm, tag = a.comm, turn % 1000
    before, behind = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
    got = comm.recv(a.taken[count], before, tag, nonblocking=True)
    sent = comm.send(a.sent[count], behind, tag, nonblocking=True)
    sent.wait()
    got.wait()
    if turn % CHECKED_EVERY == 0:
        a.check(a.taken[count], before + 1.0)


CALLS = (blocking_sum, pending_sum, planned_sum, gather, copy, ring, messages)


def part(comm: Communicator, turn: int) -> None:
    """Make a communicator of some ranks, use and free it."""
    made = comm.split(comm.rank % 2 if turn % 2 else 0, key=turn % 3)
    total = made.allreduce(np.ones(3))
    assert total.tolist() == [made.size] * 3
    made.free()


def own_nbytes() -> int:
    """Return the memory of this process's own that is in RAM.

    Memory that ranks share is not in it: a page counts for a process from when it first
    touches it, and a communicator gets what part of that memory is free.
    """
    _, resident, shared, *_ = Path("/proc/self/statm").read_text().split()
    return (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE")


def shared_nbytes() -> int:
    """Return the memory that this process can share with others."""
    found = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        where, rights, *_ = line.split()
        if rights.startswith("rw") and rights.endswith("s"):
            begin, end = (int(part, 16) for part in where.split("-"))
            found += end - begin
    return found


def main() -> None:
    """Run the calls, and compare the samples."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--small", type=int, default=10_000_000)
    parser.add_argument("--large", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    said = parser.parse_args()
    comm = commrt.init()
    a = Arrays(comm)
    rng = random.Random(said.seed)  # the same on all ranks
    each = max(1, said.small // SAMPLES)
    missing = LEAST_WARM_UP - WARM_UP * each
    more = max(0, -(-missing // each))  # samples that nobody looks at
    large_every = max(1, said.small // max(1, said.large))
    samples: list[Sample] = []
    begun, turn, larges, parts = time.monotonic(), 0, 0, 0
    order = [(rng.choice(CALLS), rng.choice(SMALL)) for _ in range(5003)]
    for number in range(SAMPLES + more):
        for _ in range(each):
            call, count = order[turn % len(order)]
            call(a, count, turn)
            turn += 1
            if turn % large_every == 0:
                CALLS[larges % len(CALLS)](a, LARGE[larges % len(LARGE)], turn)
                larges += 1
            if turn % PART_EVERY == 0 or (each < PART_EVERY and turn % each == 0):
                part(comm, turn)
                parts += 1
        samples.append(Sample.taken())
        if comm.rank == 0 and (number + 1) % 10 == 0:
            sys.stdout.write(f"{turn} calls, {time.monotonic() - begun:.0f} s\n")
            sys.stdout.flush()
    everybody = comm.allgather_object(samples[more:])
    are_flat = all([is_flat(each) for each in everybody])
    if comm.rank == 0:
        for rank, each_samples in enumerate(everybody):
            sys.stdout.write(describe(rank, each_samples) + "\n")
        sys.stdout.write(
            f"{turn} small and {larges} large calls, {parts} communicators, "
            f"{comm.size} ranks, {time.monotonic() - begun:.0f} s: "
            f"{'flat' if are_flat else 'NOT flat'}\n"
        )
    comm.free()
    sys.exit(0 if are_flat else 1)


@dataclass(frozen=True)
class Sample:
    """What a rank holds at one moment."""

    own_nbytes: int
    shared_nbytes: int
    descriptors: int

    @classmethod
    def taken(cls) -> Sample:
        """Return that of this moment."""
        gc.collect()
        return cls(own_nbytes(), shared_nbytes(), len(os.listdir("/proc/self/fd")))


def is_flat(samples: list[Sample]) -> bool:
    """Return whether a rank held no more in the end than after the warm-up."""
    first, *later = samples[WARM_UP:]
    return (
        max(each.own_nbytes for each in later) <= (1 + MOST_GROWTH) * first.own_nbytes
        and max(each.shared_nbytes for each in later)
        <= (1 + MOST_GROWTH) * first.shared_nbytes
        and max(each.descriptors for each in later) <= first.descriptors
    )


def describe(rank: int, samples: list[Sample]) -> str:
    """Return a rank's samples in a line."""
    after = samples[WARM_UP:]
    quarters = [after[(len(after) - 1) * n // 4] for n in range(5)]
    own = ", ".join(f"{each.own_nbytes / 2**20:.2f}" for each in quarters)
    shared = ", ".join(f"{each.shared_nbytes / 2**20:.1f}" for each in quarters)
    return (
        f"rank {rank}, after the warm-up and each quarter: own MiB {own}; shared MiB "
        f"{shared}; {quarters[0].descriptors} to {quarters[-1].descriptors} descriptors"
    )


if __name__ == "__main__":
    main()
