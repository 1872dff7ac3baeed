# SPDX-License-Identifier: Apache-2.0
"""Kill ranks of trainings with torch at random moments; see that others go on rightly.

    python tests/support/chaos_torch.py --kills 300 --seed 1 --kinds ddp,hsdp,tensor

Each job has 4 to 8 ranks and loses one after the other. Now and then processes start
anew, join, and get their part of the model; kills come then, too. After each kill the
others must go on, and must have named the rank that died. A fresh world takes the steps
of each world again, from its dumped state: the first ones must have the same bits, and
so must the state with which the next world begins. In the end no process and no memory
of the job may be left, and no survivor may hold more than before.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from chaos_torch_checks import (
    check_bits,
    check_errors,
    check_held,
    next_of,
    recovery_s,
    worlds_of,
)
from kill_loop import Kill, wait_for
from nursery import Nursery

__all__ = ["KINDS", "Outcome", "campaign"]

KINDS = ("ddp", "hsdp", "tensor")
DEADLINE_S = 240.0
LARGEST = 8
KILLS_OF_A_JOB = 12
_MOST_FAILURES = 5
"""Jobs that may fail before a campaign ends."""
_MODULE = "chaos_torch_ranks"
_ENDS = ("left", "refused", "end")
_LEAVES = ("its replica lacks other ranks", "it is one too many")


@dataclass
class Outcome:
    """The kills of one job, and how long the others took."""

    kind: str
    size: int
    undo: str
    kills: list[Kill] = field(default_factory=list)
    recovered_s: list[float] = field(default_factory=list)
    """From kills of ranks to the first step of all others."""
    growing_s: list[float] = field(default_factory=list)
    """Times of kills that came while newcomers were on their way."""
    joined: int = 0
    left: int = 0
    """Survivors that were not needed."""
    refused: int = 0
    """Newcomers that a kill kept from joining."""
    worlds: int = 0
    replayed: int = 0
    """Steps that were taken again."""
    growth: list[str] = field(default_factory=list)
    """Where a process held more than before."""


class Process:
    """One process of a job, and what it has written so far."""

    def __init__(self, folder: Path, number: int, pid: int) -> None:
        self.number, self.pid = number, pid
        self.lines: list[dict[str, Any]] = []
        self.world: dict[str, Any] | None = None
        """Its line as it entered its last world."""
        self.is_settled = False
        """True once it has taken its first steps there."""
        self.end = ""
        self._path = folder / f"rank{number}.jsonl"
        self._seen = 0

    def read(self) -> None:
        """Read on."""
        if not self._path.exists():
            return
        with open(self._path) as file:
            file.seek(self._seen)
            whole, newline, _ = file.read().rpartition("\n")
        self._seen += len(whole + newline)
        for text in whole.splitlines():
            line = json.loads(text)
            self.lines.append(line)
            if "state" in line:
                self.world, self.is_settled = line, False
            elif "held" in line:
                self.is_settled = True
            else:
                self.end = next((word for word in _ENDS if word in line), self.end)

    @property
    def runs(self) -> bool:
        """True while it runs."""
        return Path(f"/proc/{self.pid}").exists()


class Job:
    """The processes of one training."""

    def __init__(
        self, nursery: Nursery, draw: random.Random, folder: Path, kind: str
    ) -> None:
        self._nursery, self._draw, self._folder = nursery, draw, folder
        self.step = 1 if kind == "ddp" else 2
        size = draw.choice(range(4, LARGEST + 1, self.step))
        undo = draw.choice(["copy", "optimizer"]) if kind == "ddp" else "copy"
        self.outcome = Outcome(kind, size, undo)
        self.processes: list[Process] = []
        self.living: list[Process] = []
        self.growing: list[bool] = []
        """For each kill, whether newcomers were on their way."""
        (folder / "meeting").mkdir()
        self._meeting = {
            "COMMRT_MEETING": str(folder / "meeting"),
            "WORLD_SIZE": str(size),
            "LOCAL_WORLD_SIZE": str(size),
            "GROUP_RANK": "0",
        }
        for _ in range(size):
            self._start(len(self.processes), {})

    def _start(self, rank: int, environ: dict[str, str]) -> None:
        number = len(self.processes)
        pid = self._nursery.start(
            "train",
            {**self._meeting, "RANK": str(rank), "LOCAL_RANK": str(rank), **environ},
            self._folder / f"log{number}",
            folder=str(self._folder),
            number=number,
            kind=self.outcome.kind,
            undo=self.outcome.undo,
        )
        process = Process(self._folder, number, pid)
        self.processes.append(process)
        self.living.append(process)

    def join(self, count: int) -> None:
        """Start processes that want to join."""
        for _ in range(count):
            self._start(self._draw.randrange(self.outcome.size), {"COMMRT_JOIN": "1"})
        self.outcome.joined += count

    def look(self) -> None:
        """Read on, and take those out that have ended as they may."""
        for each in [*self.living]:
            runs = each.runs
            each.read()
            if each.end:
                self.living.remove(each)
                self._judge_end(each)
            elif not runs:
                raise AssertionError(f"process {each.number} ended: {self.describe()}")

    def _judge_end(self, process: Process) -> None:
        last = process.lines[-1]
        if process.end == "left":
            self.outcome.left += 1
            assert self.step > 1, last
            assert any(words in last["left"] for words in _LEAVES), last
        elif process.end == "refused":
            # Ranks that would have taken it in have died, or failed.
            self.outcome.refused += 1
            assert self.growing[-1:] == [True], last

    @property
    def waiting(self) -> list[Process]:
        """Processes that are in no world yet."""
        return [each for each in self.living if each.world is None]

    def members(self) -> int:
        """Return how many processes are in a world."""
        return len(self.living) - len(self.waiting)

    def is_settled(self) -> bool:
        """Return whether all that live are in one world, and took their steps there."""
        self.look()
        inside = [each for each in self.living if each.world is not None]
        worlds = {each.world["world"] for each in inside if each.world}
        sizes = {each.world["size"] for each in inside if each.world}
        return (
            len(self.waiting) < self.step
            and len(worlds) == 1
            and sizes == {len(inside)}
            and all(each.is_settled for each in inside)
        )

    def settle(self, what: str) -> None:
        """Wait until the ranks have gone on."""
        try:
            wait_for(self.is_settled, what, DEADLINE_S)
        except AssertionError as error:
            for each in self.living:
                with suppress(ProcessLookupError):
                    os.kill(each.pid, signal.SIGUSR1)
            time.sleep(1.0)
            raise AssertionError(f"{error}: {self.describe()}") from None

    def describe(self) -> str:
        """Return the end of what each process that lives has said and printed."""
        texts = []
        for each in self.living:
            log = self._folder / f"log{each.number}"
            printed = log.read_text()[-6000:] if log.exists() else ""
            last = [str(line)[-300:] for line in each.lines[-3:]]
            texts.append(f"process {each.number}: {last}\n{printed}")
        kills = f"kills {self.outcome.kills}, growing {self.growing}\n"
        return f"{self.outcome.kind} of {self.outcome.size}: {kills}" + "\n".join(texts)

    def kill(self, within_s: float) -> None:
        """Kill one process that lives, at a random moment."""
        time.sleep(self._draw.uniform(0.0, within_s))
        self.look()
        victim = self._draw.choice(self.living)
        grows = bool(self.waiting) or not self.is_settled() or self._recovers()
        self.growing.append(grows)
        kill = Kill(victim.number, time.monotonic(), victim.pid)
        os.kill(victim.pid, signal.SIGKILL)
        self.living.remove(victim)
        self.outcome.kills.append(kill)
        wait_for(lambda: not victim.runs, "ended", DEADLINE_S)
        victim.read()

    def _recovers(self) -> bool:
        """Return whether the last kill, during growth, may not be over for all."""
        if not self.growing or not self.growing[-1]:
            return False
        at = self.outcome.kills[-1].at
        return any(each.world and each.world["at"] < at for each in self.living)

    def run(self, most: int) -> None:
        """Kill ranks, and let others join, until there were enough kills."""
        self.settle("began")
        least = 2 * self.step
        while len(self.outcome.kills) < min(most, KILLS_OF_A_JOB):
            room = LARGEST - len(self.living)
            within_s = 0.2
            is_small = self.members() <= least
            if room >= self.step and (is_small or self._draw.random() < 0.3):
                count = self._draw.choice(range(self.step, room + 1, self.step))
                self.join(count - len(self.waiting))
                is_least = self.members() < 2 * self.step
                if is_least or self._draw.random() < 0.5:
                    self.settle("took newcomers in")
                else:
                    within_s = 1.5
            self.kill(within_s)
            self.settle("went on")
        (self._folder / "enough").touch()
        for each in self.waiting:
            os.kill(each.pid, signal.SIGKILL)
            self.living.remove(each)
        wait_for(self._has_ended, "ended", DEADLINE_S)

    def _has_ended(self) -> bool:
        self.look()
        return not self.living and not self._nursery.children()

    def check(self) -> None:
        """Compare what the processes said with what they must."""
        found = self.outcome
        said = {each.number: each.lines for each in self.processes}
        worlds = worlds_of(said)
        found.worlds = len(worlds)
        chained = found.undo == "copy"  # else ranks may get the state of others
        check_bits(worlds, self._again(worlds), chained=chained)
        for kill, grows in zip(found.kills, self.growing, strict=True):
            check_errors(kill, worlds, said, grows=grows)
            if (seconds := recovery_s(kill, worlds)) is not None:
                (found.growing_s if grows else found.recovered_s).append(seconds)
        found.growth = check_held(said)

    def _again(self, worlds: Sequence[Any]) -> dict[str, list[list[str]]]:
        """Return what fresh worlds make of the dumps."""
        whole = [each for each in worlds if each.is_whole]
        orders = []
        for world in whole:
            following = next_of(world, worlds)
            orders.append(world.order(0 if following is None else following.first))
        size = max(each.size for each in whole)
        (self._folder / "again").mkdir()
        for rank in range(size):
            self._nursery.start(
                "replay",
                {
                    **self._meeting,
                    "COMMRT_MEETING": str(self._folder / "again"),
                    "WORLD_SIZE": str(size),
                    "LOCAL_WORLD_SIZE": str(size),
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank),
                },
                self._folder / f"log-again{rank}",
                folder=str(self._folder),
                kind=self.outcome.kind,
                orders=orders,
            )
        files = [self._folder / f"replay{rank}" for rank in range(size)]
        wait_for(lambda: not self._nursery.children(), "replayed", 4 * DEADLINE_S)
        logs = [*self._folder.glob("log-again*")]
        words = "\n".join(log.read_text()[-1500:] for log in logs)
        assert all(file.exists() for file in files), words
        taken = [json.loads(file.read_text()) for file in files]
        self.outcome.replayed = sum(order["end"] - order["begin"] for order in orders)
        return {
            world.name: [taken[rank][place] for rank in range(world.size)]
            for place, world in enumerate(whole)
        }


def campaign(kinds: Sequence[str], kills: int, seed: int) -> Iterator[Outcome]:
    """Run jobs until so many ranks were killed; the kinds take turns."""
    draw = random.Random(seed)
    with Nursery(_MODULE) as nursery:
        number = 0
        while kills > 0:
            before = {*Path("/dev/shm").glob("*commrt*")}
            folder = Path(tempfile.mkdtemp(prefix="chaos-torch-"))
            job = Job(nursery, draw, folder, kinds[number % len(kinds)])
            try:
                job.run(kills)
                job.check()
                wait_for(
                    lambda at=before: {*Path("/dev/shm").glob("*commrt*")} <= at,
                    "freed the memory",
                    DEADLINE_S,
                )
            except AssertionError as error:
                error.add_note(f"seed {seed}, job {number}; diaries are in {folder}")
                raise
            shutil.rmtree(folder)
            kills -= len(job.outcome.kills)
            number += 1
            yield job.outcome


def _figures(times: Sequence[float]) -> str:
    if not times:
        return "no times"
    return f"{statistics.median(times):.3f} s (median), {max(times):.3f} s (maximum)"


def main() -> None:
    """Run a campaign, and print how long the others took to go on."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--kinds", default=",".join(KINDS), help="names with commas")
    said = parser.parse_args()
    kinds = said.kinds.split(",")
    outcomes: list[Outcome] = []
    begun, failures = time.monotonic(), 0
    while (left := said.kills - _killed(outcomes)) > 0:
        try:
            # Another seed after a failure, whose job would fail again.
            for outcome in campaign(kinds, left, said.seed + failures):
                outcomes.append(outcome)
                _report(outcomes, kinds, said.seed, time.monotonic() - begun)
        except AssertionError:
            failures += 1
            traceback.print_exc()
            sys.stderr.flush()
            if failures == _MOST_FAILURES:
                break
    if failures:
        sys.exit(f"{failures} jobs failed")
    if any(each.growth for each in outcomes):
        sys.exit("some processes hold more than before")


def _killed(outcomes: Sequence[Outcome]) -> int:
    return sum(len(each.kills) for each in outcomes)


def _report(
    outcomes: Sequence[Outcome], kinds: Sequence[str], seed: int, seconds: float
) -> None:
    """Print what the last job gave, and what all of a kind did."""
    last = outcomes[-1]
    sys.stdout.write(
        f"{last.kind} ({last.undo}) of {last.size}: {len(last.kills)} "
        f"kills, {last.joined} joined, {last.left} left, {last.refused} "
        f"refused, {last.worlds} worlds, {last.replayed} steps again, "
        f"{last.growth or 'nothing grew'}, load {os.getloadavg()[0]:.0f}\n"
    )
    for kind in kinds:
        mine = [each for each in outcomes if each.kind == kind]
        times = [each for one in mine for each in one.recovered_s]
        growing = [each for one in mine for each in one.growing_s]
        sys.stdout.write(
            f"    seed {seed}: {kind}: {_killed(mine)} killed, first step after "
            f"{_figures(times)}; while others joined {_figures(growing)}; "
            f"{seconds:.0f} s\n"
        )
    sys.stdout.flush()


if __name__ == "__main__":
    main()
