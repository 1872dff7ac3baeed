# SPDX-License-Identifier: Apache-2.0
"""Kill ranks of a training at random moments; see that the others go on rightly.

    python tests/support/chaos_campaign.py --kills 1000 --seed 1

Each job has 4 to 8 ranks, which die one after the other until two are left. After each
kill the others must go on, and each must have named the rank that died. The state with
which they go on is given to ranks that are threads: their next steps must have the
same bits. In the end no process and no memory of the job may be left.
"""

from __future__ import annotations

import argparse
import logging
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from elastic_training import Training
from kill_loop import (
    AFTER,
    Diary,
    Kill,
    has_taken_steps,
    kill_one,
    lines_of,
    steps_of,
    taken_again,
    wait_for,
)

import commrt
from commrt import elastic
from commrt.comm import Communicator
from commrt.launch.mpiexec import child_environment

DEADLINE_S = 240.0


def rank(folder: Path) -> None:
    """Train until a file says that it is enough; say what happens, line by line."""
    comm = commrt.init(deterministic=True)
    training = Training(comm.rank)
    diary = Diary(folder, comm.rank)

    class Noted(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            diary.say(error=record.getMessage())

    def changed(comm: Communicator) -> None:
        diary.enter(comm.name, comm.rank, comm.size, training)

    def step(comm: Communicator, number: int) -> None:
        training.step(comm, number)
        if diary.left:
            diary.step(number, training)
        elif number % 200 == 0:
            is_enough = comm.rank == 0 and (folder / "enough").exists()
            if comm.allreduce(np.array([float(is_enough)]))[0]:
                raise StopIteration

    logging.getLogger("commrt.elastic").addHandler(Noted())
    try:
        elastic.run(step, training.state, until=10**9, on_change=changed)
    except StopIteration:
        diary.say(end=True)
    finally:
        diary.close()


@dataclass
class Job:
    """The kills of one job, and how long the others took."""

    size: int
    kills: list[Kill] = field(default_factory=list)
    recovered_s: list[float] = field(default_factory=list)
    """From each kill to the first step of all others."""


def run_job(draw: random.Random, folder: Path, most: int) -> Job:
    """Run one job, kill its ranks, and look at all it leaves."""
    job = Job(draw.randint(4, 8))
    words = ["-n", str(job.size), "--keep-going", __file__, "--rank", str(folder)]
    launched = subprocess.Popen(
        [sys.executable, "-m", "commrt.run", *words],
        env=child_environment(sys.executable),
        cwd=os.sep,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        living = list(range(job.size))
        names = ["world"]
        wait_for(
            lambda: has_taken_steps(folder, living, names[-1]), "began", DEADLINE_S
        )
        while len(living) > 2 and len(job.kills) < most:
            job.kills.append(kill_one(draw, folder, living))
            names.append(f"world.{len(names) + 1}")
            wait_for(
                lambda: has_taken_steps(folder, living, names[-1]),
                "went on",
                DEADLINE_S,
            )
        (folder / "enough").touch()
        _, words_said = launched.communicate(timeout=DEADLINE_S)
        assert launched.returncode == 0, words_said
    finally:
        launched.kill()
        launched.wait()
    check(job, folder, living, names)
    return job


def check(job: Job, folder: Path, living: list[int], names: list[str]) -> None:
    """Compare what each rank has said with what it must."""
    said = {number: lines_of(folder, number) for number in range(job.size)}
    alive = list(range(job.size))
    for name, kill in zip(names[1:], job.kills, strict=True):
        alive.remove(kill.rank)
        begun, errors = {}, {}
        for number in alive:
            found = [each for each in said[number] if each.get("world") == name]
            begun[number] = found[0]
            steps = found[1:]
            at = said[number].index(found[0])
            before = [each["error"] for each in said[number][:at] if "error" in each]
            errors[number] = before[-1]
            assert [each["left"] for each in steps] == list(range(AFTER, 0, -1))
        dumps = [begun[number] for number in alive]
        assert [each["rank"] for each in dumps] == list(range(len(alive)))
        named = re.compile(rf"process {kill.pid} |call shrink|shrink\(\)")
        assert all(named.search(text) for text in errors.values()), errors
        assert any(f"process {kill.pid} " in text for text in errors.values()), errors
        first = {number: steps_of(said[number], name) for number in alive}
        numbers = {steps[0]["step"] for steps in first.values()}
        assert len(numbers) == 1, numbers
        again = taken_again([each["state"] for each in dumps], numbers.pop())
        for place, number in enumerate(alive):
            assert [each["bits"] for each in first[number]] == again[place], number
        last = max(steps[0]["at"] for steps in first.values())
        job.recovered_s.append(last - kill.at)
    assert alive == living
    for lines in said.values():
        assert not Path(f"/proc/{lines[0]['pid']}").exists()


def campaign(kills: int, seed: int) -> Iterator[Job]:
    """Run jobs until so many ranks were killed."""
    draw = random.Random(seed)
    while kills > 0:
        with tempfile.TemporaryDirectory() as folder:
            before = {*Path("/dev/shm").glob("*commrt*")}
            job = run_job(draw, Path(folder), kills)
            assert {*Path("/dev/shm").glob("*commrt*")} <= before
        kills -= len(job.kills)
        yield job


def main() -> None:
    """Run a campaign, and print how long the others took to go on."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--rank", type=Path)
    said = parser.parse_args()
    if said.rank is not None:
        rank(said.rank)
        return
    times: list[float] = []
    begun = time.monotonic()
    for job in campaign(said.kills, said.seed):
        times += job.recovered_s
        middle, most = statistics.median(times), max(times)
        sys.stdout.write(
            f"seed {said.seed}: {len(times)} of {said.kills} ranks killed, first step "
            f"after {middle:.3f} s (median), {most:.3f} s (maximum), "
            f"{time.monotonic() - begun:.0f} s\n"
        )
        sys.stdout.flush()


if __name__ == "__main__":
    main()
