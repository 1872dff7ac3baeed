# SPDX-License-Identifier: Apache-2.0
"""Kill ranks of a training under commrt, gloo and torchft, by the same script.

    python tests/support/chaos_peers.py --kills 40 --seed 1 --json peers.json.gz

Jobs and kills are drawn as by ``chaos_campaign.py``: 4 to 8 ranks, of which one after
the other is killed until two are left. A recovery ends when all ranks that live have
taken their first steps with each other. It went on rightly if these have the bits of a
fresh world that begins with their state; it hung if that takes longer than a minute; it
crashed if a process of a rank that should live ended. A job ends with its first
recovery that hung or crashed. The systems take turns, job by job.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kill_loop import (
    AFTER,
    Kill,
    kill_one,
    lines_of,
    steps_of,
    taken_again,
    wait_for,
)

from commrt.launch.mpiexec import child_environment

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
RECOVERY_S = 60.0
START_S = 300.0
ELASTIC = "commrt.elastic"
USUAL = [
    ELASTIC,
    *("commrt-word", "gloo-word", "commrt-error", "gloo-error"),
    *("torchft", "torchft-commrt"),
]
TORCH_PYTHON = ROOT / ".venv-torch-2.14.1" / "bin" / "python"


HEAD = """\
| system | kills | right | hung | wrong | crashed | median, s | maximum, s |
|---|---|---|---|---|---|---|---|
"""


@dataclass(frozen=True)
class System:
    """A system by which a training goes on."""

    name: str
    python: Path
    program: str = ""
    words: tuple[str, ...] = ()

    def host(self, folder: Path) -> list[str]:
        """Return the command of what no rank may host; none for commrt.elastic."""
        if not self.program:
            return []
        return [str(self.python), str(HERE / self.program), "--host", str(folder)]

    def ranks(self, folder: Path, size: int) -> list[list[str]]:
        """Return the commands that start the ranks."""
        if not self.program:
            campaign = [str(HERE / "chaos_campaign.py"), "--rank", str(folder)]
            launch = ["-m", "commrt.run", "-n", str(size), "--keep-going"]
            return [[str(self.python), *launch, *campaign]]
        words = [str(HERE / self.program), *self.words, "--size", str(size)]
        return [
            [str(self.python), *words, "--rank", str(number), str(folder)]
            for number in range(size)
        ]


def systems(torch: Path) -> dict[str, System]:
    """Return all systems by their names."""
    found = [System(ELASTIC, Path(sys.executable))]
    for way in ("word", "error", "default"):
        for backend in ("commrt", "gloo"):
            words = ("--backend", backend, "--way", way)
            name = f"{backend}-{way}"
            found.append(System(name, torch, "peer_reconfigure.py", words))
    for name, backend in {"torchft": "torchft", "torchft-commrt": "commrt"}.items():
        words = ("--backend", backend)
        found.append(System(name, torch, "peer_torchft.py", words))
    return {each.name: each for each in found}


@dataclass
class Recovery:
    """The outcome of one kill."""

    system: str
    job: int
    survivors: int
    outcome: str
    seconds: float | None = None
    """From the kill to the first step of all survivors."""
    detail: str = ""
    load: float = 0.0
    """The machine's load average of the last minute."""


class Running:
    """The processes of a job."""

    def __init__(self, system: System, folder: Path, size: int) -> None:
        self._system, self._folder = system, folder
        self._processes: list[subprocess.Popen[str]] = []
        if host := system.host(folder):
            self._start(host)
            there = (folder / "address").exists
            wait_for(there, f"hosts {system.name}", START_S)
        for command in system.ranks(folder, size):
            self._start(command)

    def _start(self, command: list[str]) -> None:
        with open(self._folder / "stderr", "a") as log:
            self._processes.append(
                subprocess.Popen(
                    command,
                    env={**child_environment(command[0]), "OMP_NUM_THREADS": "1"},
                    cwd=os.sep,
                    stdout=log,
                    stderr=log,
                    text=True,
                )
            )

    def reap(self) -> None:
        """Take note of the processes that have ended."""
        for process in self._processes:
            process.poll()

    def end(self) -> None:
        """Kill all that is left."""
        for process in self._processes:
            process.kill()
            process.wait()


def tell(folder: Path, generation: int, living: list[int]) -> None:
    """Say which ranks live, as the controller of a job would."""
    whole = folder / "word.new"
    whole.write_text(json.dumps(sorted(living)))
    whole.rename(folder / f"word{generation}.json")


def common_world(folder: Path, living: list[int]) -> str | None:
    """Return the first world of just these ranks in which all took their steps."""
    said = {number: lines_of(folder, number) for number in living}
    for line in said[living[0]]:
        name = line.get("world")
        if line.get("size") == len(living) and all(
            len(steps_of(lines, name)) == AFTER for lines in said.values()
        ):
            return str(name)
    return None


def recover(running: Running, folder: Path, living: list[int]) -> tuple[str, str]:
    """Wait for a world of the ranks that live; return it, or say what went wrong."""
    pids = {number: lines_of(folder, number)[0]["pid"] for number in living}
    deadline = time.monotonic() + RECOVERY_S
    while time.monotonic() < deadline:
        if (name := common_world(folder, living)) is not None:
            return name, ""
        running.reap()
        for number, pid in pids.items():
            if not Path(f"/proc/{pid}").exists():
                return "", f"crashed: rank {number}"
        time.sleep(0.02)
    return "", "hung"


def run_job(
    system: System, number: int, draw: random.Random, folder: Path, most: int
) -> list[Recovery]:
    """Run one job, and kill its ranks until two are left or something goes wrong."""
    size = draw.randint(4, 8)
    living = list(range(size))
    found: list[Recovery] = []
    running = Running(system, folder, size)
    try:
        tell(folder, 1, living)
        wait_for(lambda: common_world(folder, living), f"began {system.name}", START_S)
        while len(living) > 2 and len(found) < most:
            kill = kill_one(draw, folder, living)
            tell(folder, size - len(living) + 1, living)
            name, trouble = recover(running, folder, living)
            what = Recovery(system.name, number, len(living), trouble.split(":")[0])
            what.load = os.getloadavg()[0]
            found.append(what)
            if trouble:
                what.detail = f"{trouble}; {last_words(folder, living)}"
                break
            check(what, kill, folder, living, name, system.name != ELASTIC)
    finally:
        running.end()
    return found


def last_words(folder: Path, living: list[int]) -> dict[int, Any]:
    """Return the end of each rank's last line."""
    return {number: str(lines_of(folder, number)[-1])[-200:] for number in living}


def check(
    what: Recovery,
    kill: Kill,
    folder: Path,
    living: list[int],
    name: str,
    rounded: bool,
) -> None:
    """Compare the first steps with those of a fresh world."""
    begun, steps = [], []
    for number in living:
        lines = lines_of(folder, number)
        found = [each for each in lines if each.get("world") == name]
        begun.append(next(each for each in found if "state" in each))
        steps.append(steps_of(found, name))
    what.seconds = max(each[0]["at"] for each in steps) - kill.at
    ranks = [each["rank"] for each in begun]
    numbers = {each[0]["step"] for each in steps}
    models = {
        json.dumps([each["state"]["weights"], each["state"]["velocity"]])
        for each in begun
    }
    what.outcome = "wrong"
    if sorted(ranks) != [*range(len(living))]:
        what.detail = f"ranks {ranks}"
    elif len(numbers) != 1:
        what.detail = f"first steps {numbers}"
    elif len(models) != 1:
        what.detail = "the models differ at the beginning"
    else:
        dumps = [each["state"] for each in sorted(begun, key=lambda each: each["rank"])]
        again = taken_again(dumps, numbers.pop(), rounded=rounded)
        bits = [[step["bits"] for step in each] for each in steps]
        if bits == [again[rank] for rank in ranks]:
            what.outcome = "right"
        else:
            what.detail = "other bits than a fresh world's"


def campaign(system: System, kills: int, seed: int) -> Iterator[list[Recovery]]:
    """Run jobs until so many ranks were killed."""
    draw = random.Random(seed)
    number = 0
    while kills > 0:
        folder = Path(tempfile.mkdtemp())
        try:
            found = run_job(system, number, draw, folder, kills)
        except BaseException:
            sys.stderr.write((folder / "stderr").read_text()[-4000:])
            raise
        finally:
            shutil.rmtree(folder)
        kills -= len(found)
        number += 1
        yield found


def row(name: str, found: list[Recovery]) -> str:
    """Return a row of the table."""
    outcomes = [each.outcome for each in found]
    counts = [outcomes.count(each) for each in ("right", "hung", "wrong", "crashed")]
    times = [each.seconds for each in found if each.seconds is not None]
    middle = f"{statistics.median(times):.2f}" if times else "-"
    most = f"{max(times):.2f}" if times else "-"
    cells = [f"`{name}`", str(len(found)), *map(str, counts), middle, most]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Run the campaigns, and print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=40)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--systems", help="names with commas")
    parser.add_argument("--torch", type=Path, default=TORCH_PYTHON, help="a Python")
    parser.add_argument("--json", type=Path, help="write all recoveries there")
    said = parser.parse_args()
    known = systems(said.torch)
    names = said.systems.split(",") if said.systems else USUAL
    table: dict[str, list[Recovery]] = {name: [] for name in names}
    running = {name: campaign(known[name], said.kills, said.seed) for name in names}
    while running:
        for name in [*running]:
            found = next(running[name], None)
            if found is None:
                del running[name]
                continue
            table[name] += found
            for each in found:
                sys.stderr.write(f"{asdict(each)}\n")
    sys.stdout.write(HEAD)
    for name, found in table.items():
        sys.stdout.write(f"{row(name, found)}\n")
    if said.json:
        all_of_them = [asdict(each) for found in table.values() for each in found]
        text = json.dumps({"seed": said.seed, "recoveries": all_of_them})
        said.json.write_bytes(gzip.compress(text.encode(), mtime=0))


if __name__ == "__main__":
    main()
