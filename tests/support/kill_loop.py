# SPDX-License-Identifier: Apache-2.0
"""Diaries, kills and the check of campaigns that kill ranks of a training.

Each rank keeps a diary, a file of JSON lines: its process, each world it is in with the
state it has there, and the bits of its first steps in that world.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elastic_training import Rounded, Training

from commrt import local
from commrt.comm import Communicator

__all__ = [
    "AFTER",
    "Diary",
    "Kill",
    "has_taken_steps",
    "kill_one",
    "lines_of",
    "steps_of",
    "taken_again",
    "wait_for",
]

AFTER = 5
"""Steps after a change that are taken again."""


class Diary:
    """This rank's lines."""

    def __init__(self, folder: Path, first: int) -> None:
        self._log = open(folder / f"rank{first}.jsonl", "w")  # noqa: SIM115
        self._world = ""
        self.left = 0
        """Steps of this world that are still to be written."""
        self.say(pid=os.getpid())

    def say(self, **what: Any) -> None:
        """Write a line."""
        self._log.write(json.dumps(what) + "\n")
        self._log.flush()

    def enter(self, world: str, rank: int, size: int, training: Training) -> None:
        """Write that this rank is in another world, and in which state."""
        self._world, self.left = world, AFTER
        self.say(world=world, rank=rank, size=size, state=training.dump())

    def step(self, number: int, training: Training) -> None:
        """Write the model after a step, if it is one of the first."""
        if self.left:
            now = time.monotonic()
            bits = training.hexadecimal()
            self.say(step=number, world=self._world, bits=bits, at=now, left=self.left)
            self.left -= 1

    def close(self) -> None:
        """End the diary."""
        self._log.close()


@dataclass
class Kill:
    """One rank that was killed."""

    rank: int
    at: float
    pid: int


def lines_of(folder: Path, number: int) -> list[dict[str, Any]]:
    """Return what a rank has written so far."""
    path = folder / f"rank{number}.jsonl"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.split("\n")[:-1]]


def steps_of(lines: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    """Return a rank's lines about its steps in one world."""
    return [each for each in lines if each.get("world") == name and "step" in each]


def has_taken_steps(folder: Path, living: list[int], name: str) -> bool:
    """Return whether each of these ranks has taken its first steps in this world."""
    return all(
        len(steps_of(lines_of(folder, number), name)) == AFTER for number in living
    )


def wait_for(condition: Callable[[], Any], what: str, deadline_s: float) -> Any:
    """Wait until the condition is true; return what it says."""
    deadline = time.monotonic() + deadline_s
    while not (found := condition()):
        assert time.monotonic() < deadline, f"nobody {what}"
        time.sleep(0.005)
    return found


def kill_one(draw: random.Random, folder: Path, living: list[int]) -> Kill:
    """Kill one of the ranks, at a random moment, and take it out of the list."""
    time.sleep(draw.uniform(0.0, 0.2))
    number = draw.choice(living)
    pid = lines_of(folder, number)[0]["pid"]
    living.remove(number)
    kill = Kill(number, time.monotonic(), pid)
    os.kill(pid, signal.SIGKILL)
    return kill


def taken_again(
    dumps: list[dict[str, Any]], begin: int, *, rounded: bool = False
) -> list[list[list[str]]]:
    """Return the bits of the steps that a fresh world takes from the dumps.

    ``rounded``: with sums that are exact, so that any library's order gives their bits.
    """

    def main(comm: Communicator) -> list[list[str]]:
        exact = comm.dup(deterministic=True)
        ranks = Rounded(exact.rank, exact.size, exact.allreduce) if rounded else exact
        training = Training.from_dump(dumps[comm.rank])
        bits = []
        for number in range(begin, begin + AFTER):
            training.step(ranks, number)
            bits.append(training.hexadecimal())
        return bits

    return local.run(len(dumps), main)
