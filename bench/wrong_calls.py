# SPDX-License-Identifier: Apache-2.0
"""Show how commrt, mpi4py and gloo answer when one rank calls something else.

    python -m commrt.bench.wrong_calls --torch-python .venv-torch/bin/python

Three ranks make 400 calls, and the last of them makes the sixth one otherwise, or
leaves it out. The program starts the ranks of each system, ends what does not end by
itself, and prints a table in Markdown: for each fault how the ranks end.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from commrt.files.write import write_file
from commrt.launch.mpiexec import launch_command

__all__ = ["main"]

SIZE, AT, CALLS = 3, 5, 400
FAULTS = ("reduction", "root", "type", "length", "order", "missing")
SYSTEMS = {
    "mpi4py": "mpi4py",
    "gloo": "gloo",
    "gloo, DETAIL": "gloo",
    "commrt, schedules": "commrt",
    "commrt, mpi/native": "native",
    "commrt, check mode": "commrt",
}
_MORE = {
    "gloo, DETAIL": {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"},
    "commrt, check mode": {"COMMRT_DEBUG": "check"},
}
_WORKER = Path(__file__).resolve().parent / "wrong_calls_worker.py"


def _commands(
    kind: str, torch_python: str, fault: str, out: str
) -> list[tuple[list[str], dict[str, str]]]:
    """Return what to start, and the variables of each."""
    tail = [str(_WORKER), kind, fault, out]
    if kind in ("mpi4py", "native"):
        return [launch_command(sys.executable, SIZE, tail)]
    if kind == "commrt":
        run = [sys.executable, "-m", "commrt.run", "-n", str(SIZE), "--keep-going"]
        return [([*run, *tail], {})]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    meet = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(SIZE)}
    return [([torch_python, *tail], {**meet, "RANK": str(r)}) for r in range(SIZE)]


def _outcomes(
    name: str, torch_python: str, fault: str, deadline_s: float
) -> list[dict[str, Any]]:
    """Run a system with a fault; return how each rank ended."""
    with tempfile.TemporaryDirectory() as folder:
        jobs = [
            subprocess.Popen(
                command,
                env={**os.environ, **_MORE.get(name, {}), **more},
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
            for command, more in _commands(SYSTEMS[name], torch_python, fault, folder)
        ]
        hangs = False
        for job in jobs:
            try:
                job.wait(deadline_s)
            except subprocess.TimeoutExpired:
                hangs = True
                os.killpg(job.pid, signal.SIGKILL)
                job.wait()
        found = []
        for rank in range(SIZE):
            file = Path(folder) / f"{rank}.json"
            text = file.read_text() if file.exists() else ""
            nothing = {"end": "hangs" if hangs else "crashes"}
            found.append(json.loads(text) if text else nothing)
        return found


def summary(found: Sequence[dict[str, Any]]) -> str:
    """Return how the ranks of one run ended, in words."""
    ends = [each["end"] for each in found]
    texts = {each.get("text") for each in found}
    wrong = any(each.get("wrong") for each in found)
    words = []
    for end in ("error", "timeout", "hangs", "crashes"):
        count = ends.count(end)
        if not count:
            continue
        kinds = sorted({one["kind"] for one in found if "kind" in one})
        name = f"{' or '.join(kinds)} " if end == "error" else ""
        who = "on all ranks" if count == SIZE else f"on {count} of {SIZE}"
        same = ", the same text" if end == "error" and len(texts) == 1 else ""
        word = {"error": "", "timeout": "time runs out "}.get(end, f"{end} ")
        words.append(f"{name}{word}{who}{same}")
    if wrong:
        words.append("wrong results")
    return "; ".join(words) or "nothing is noticed"


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m commrt.bench.wrong_calls")
    parser.add_argument("--torch-python", help="a Python that has torch; for gloo")
    parser.add_argument("--deadline", type=float, default=40.0, help="s a run (40)")
    parser.add_argument("--out", help="write what each rank said (JSON) to this file")
    args = parser.parse_args(argv)
    names = [n for n in SYSTEMS if args.torch_python or not n.startswith("gloo")]
    raw: dict[str, Any] = {}
    print("| one rank's call has another | " + " | ".join(names) + " |")
    print("|---" * (len(names) + 1) + "|")
    for fault in FAULTS:
        cells = []
        for name in names:
            found = _outcomes(name, args.torch_python or "", fault, args.deadline)
            raw.setdefault(fault, {})[name] = found
            cells.append(summary(found))
        print(f"| {fault} | " + " | ".join(cells) + " |", flush=True)
    if args.out:
        write_file(args.out, json.dumps(raw, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
