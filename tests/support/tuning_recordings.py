# SPDX-License-Identifier: Apache-2.0
"""Invented measurements: known curves with the noise that real launches show."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping

from commrt.select.facts import Candidate, CommFacts
from commrt.tuning.job import Job, sizes
from commrt.tuning.samples import Launch, Recording, Sample

Truth = Mapping[Candidate, Callable[[float], float]]

NATIVE = Candidate("mpi", "native")
DIRECT = Candidate("shm", "direct")
DOUBLING = Candidate("shm", "recursive_doubling")
RING = Candidate("shm", "ring", {"store": "stream"})

TRUTH: Truth = {
    NATIVE: lambda n: 0.75 + 1.1e-4 * n,
    DIRECT: lambda n: 0.20 + 6e-5 * n,
    DOUBLING: lambda n: 0.15 + 9e-5 * n,
    RING: lambda n: 5.00 + 4e-5 * n,
}
"""Crossings: doubling to direct at 1667 B, direct to ring at 240 000 B."""

NEAR = CommFacts(size=2, nodes=1, ppn=2, cores=2, link_class="near")


def record(
    seed: int,
    truth: Truth = TRUTH,
    *,
    launches: int = 3,
    held_out: int = 1,
    facts: CommFacts = NEAR,
    op: str = "allreduce",
) -> Recording:
    """Return a run with launch-to-launch shifts of 3 % and skewed repetition noise."""
    noise = random.Random(seed)
    recording = Recording(orders={op: list(truth)}, software={"commrt": "0"})
    for index in range(launches + held_out):
        off = index >= launches
        recording.launches[index] = Launch(index, facts, off)
        job = Job((op,), "float32", 32 << 20, off, seed, 1.0)
        for candidate, us in truth.items():
            for nbytes in sizes(op, facts.size, job):
                level = us(nbytes) * (1 + noise.gauss(0, 0.03))
                times = [
                    level
                    * (1 + abs(noise.gauss(0, 0.04)) + 0.5 * (noise.random() < 0.05))
                    for _ in range(15)
                ]
                sample = Sample(index, op, nbytes, candidate, tuple(times))
                recording.samples.append(sample)
    return recording
