# SPDX-License-Identifier: Apache-2.0
"""What real tuning runs beside other programs are worth, on this machine.

    python tests/support/tuned_beside_hogs.py [--budget 60] [--judge 240] [--seed 1]

Run it on a machine that is quiet otherwise. A long run comes first: it judges. Then
come runs of ``commrt-tune``: alone, and beside programs that take one core, or both,
for random seconds. Printed is what each one's table costs, and the model alone.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from disturbed_tunings import ShortRun, cost_of

from commrt.tuning.recording_reader import load_recording
from commrt.tuning.samples import Recording

__all__ = ["main"]

_HOG = """
import os, random, sys, time
core, seed = int(sys.argv[1]), sys.argv[2]
os.sched_setaffinity(0, {core})
chance = random.Random(seed)
while os.getppid() == int(sys.argv[3]):
    end = time.monotonic() + chance.expovariate(1 / 4)
    while time.monotonic() < end:
        pass
    time.sleep(chance.expovariate(1 / 4))
"""


@contextlib.contextmanager
def _hogs(cores: list[int], seed: int) -> Iterator[None]:
    """Run a program on each of these cores, for random seconds, every now and then."""
    parent = str(os.getpid())
    running = [
        subprocess.Popen(
            [sys.executable, "-c", _HOG, str(core), f"{seed} {core}", parent]
        )
        for core in cores
    ]
    try:
        yield
    finally:
        for one in running:
            one.kill()
            one.wait()


def _tuned(folder: Path, name: str, budget_s: float, seed: int) -> Recording:
    """Return what a run of the tuner measured."""
    raw = folder / f"{name}.json.gz"
    command = ["run", "--ranks", "2", "--budget", f"{budget_s:g}", "--seed", str(seed)]
    command += ["--raw", str(raw), "--out", str(folder / f"{name}.yaml")]
    subprocess.run(
        [sys.executable, "-m", "commrt.tuning.cli", *command],
        cwd=folder,
        stdout=subprocess.DEVNULL,
        check=False,  # a machine that is too busy for a table is one of the answers
    )
    return load_recording(raw)


def _judged_by(truth: Recording) -> Recording:
    """Return all launches as such that say what times are right."""
    shaping = {
        at: replace(launch, held_out=False) for at, launch in truth.launches.items()
    }
    return replace(truth, launches=shaping)


def main() -> None:
    """Measure, and print a line per run and class of links."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--budget", type=float, default=60.0)
    parser.add_argument("--judge", type=float, default=240.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", type=Path, help="folder for the recordings")
    asked = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))[:2]
    with contextlib.ExitStack() as stack:
        folder = asked.keep or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        truth = _judged_by(_tuned(folder, "judge", asked.judge, asked.seed))
        print(f"{'beside':<12}{'links':<8}table: regret, worst    model: regret, worst")
        for name, taken in (("nothing", 0), ("one core", 1), ("both cores", 2)):
            with _hogs(cores[:taken], asked.seed):
                mine = _tuned(folder, f"beside {taken}", asked.budget, asked.seed + 1)
            for group in truth.groups():
                if not ShortRun(mine, truth, group).has_judges:
                    continue
                table, model = cost_of(ShortRun(mine, truth, group))
                print(
                    f"{name:<12}{group.link_class:<8}{table.regret:.3f}, "
                    f"{table.worst:.2f}{'':<14}{model.regret:.3f}, {model.worst:.2f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
