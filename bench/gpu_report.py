# SPDX-License-Identifier: Apache-2.0
"""All that is to be measured on a GPU, in one run: ``bench gpu-report``.

Each part is a process of its own with a time limit. If one fails, the report says so,
and the others run. Their output is kept as it is, beside a report that ends with the
wanted figures: reached, missed, or not run and why.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

from commrt.bench.device_memory import number_of_devices
from commrt.bench.gpu_goals import LONG_NBYTES, OVERLAP_NBYTES, Outcome, goals_table
from commrt.bench.machine import describe_machine
from commrt.errors import UsageError
from commrt.files.write import open_stream, write_file

__all__ = ["Part", "main", "parts", "run_parts"]

_BENCH = ("-m", "commrt.bench")
_MPS = "nvidia-cuda-mps-control"
_END_S = 10.0


@dataclass(frozen=True)
class Part:
    """One process of a report."""

    name: str
    command: tuple[str, ...]
    """Arguments of Python."""
    under_mps: bool = False
    """True if CUDA's MPS serves it, started for it."""
    why_not: str = ""
    """Reason why it cannot run here; empty if it can."""
    quick: tuple[str, ...] = field(default=(), compare=False)
    """Arguments that make it short; of options that are there twice the last counts."""


def parts(device: str) -> list[Part]:
    """Return the parts of a report, in this order."""
    on = ("-d", device)
    # Ranks that share a GPU without MPS take turns of 2.4 ms: these hide all else.
    alone = (*on, "--ranks", "1")
    no_peers = "" if device == "cuda" else "processes share no device of threads"
    few = ("--budget-s", "0.02", "-i", "3")
    less = ("-m", "65536:65536", *few)
    peers = (
        *(*_BENCH, "allreduce", *on, "--ranks", "2", "-m"),
        *(f"{LONG_NBYTES}:{LONG_NBYTES}", "--algorithm", "ipc/direct"),
    )
    short = (*_BENCH, "allreduce", *alone, "-m", "8:16384", "--algorithm")
    overlap = (
        *("--nonblocking", "-m", f"{OVERLAP_NBYTES}:{OVERLAP_NBYTES}"),
        *("--algorithm", "staged/direct", "--format", "json"),
    )
    no_mps = no_peers or _no_mps()
    tests = Path("tests/gpu").absolute()
    no_tests = "" if find_spec("pytest") else "pytest is not installed"
    if not tests.is_dir():
        no_tests = "there is no tests/gpu here: start it in a checkout"
    no_card = "" if device == "cuda" else "questions are for a GPU"
    found = [
        Part("info", ("-m", "commrt", "info")),
        Part("questions", (str(tests / "questions.py"),), why_not=no_card or no_tests),
        Part(
            "tests",
            ("-m", "pytest", str(tests), "-q", "-rs", "-p", "no:cacheprovider"),
            why_not=no_tests,
        ),
        Part(
            "submit",
            (*_BENCH, "submit", *alone, "--format", "json"),
            quick=("--iterations", "5"),
        ),
        Part(
            "parts",
            (*_BENCH, "parts", *on, "--format", "json"),
            quick=("-m", "65536", "-i", "2"),
        ),
        Part("peers", (*peers, "--format", "json"), why_not=no_peers, quick=less),
        Part(
            "peers under MPS",
            (*peers, "--format", "json"),
            under_mps=True,
            why_not=no_mps,
            quick=less,
        ),
        Part(
            "peers as nccl-tests",
            (*peers, "--format", "nccl"),
            why_not=no_peers,
            quick=less,
        ),
        Part("short by kernels", (*short, "staged/direct{copies=kernel}"), quick=few),
        Part("short by copy engines", (*short, "staged/direct"), quick=few),
        Part("overlap", (*_BENCH, "allreduce", *alone, *overlap), quick=less),
        Part(
            "overlap of two ranks under MPS",
            (*_BENCH, "allreduce", *on, "--ranks", "2", *overlap),
            under_mps=True,
            why_not=no_mps,
            quick=less,
        ),
        Part(
            "leaks",
            (*_BENCH, "leaks", *on, "--format", "json"),
            quick=("-n", "400"),
        ),
        Part(
            "compare",
            (*_BENCH, "compare", *on, "--out", "raw.json"),
            quick=("--sizes", "64", "--launches", "1", "--budget-s", "0.02"),
        ),
        Part(
            "tune",
            (
                *("-m", "commrt.tuning.cli", "run", *on, "--budget", "60"),
                *("--out", "table.yaml"),
            ),
            quick=("--budget", "4", "--max-bytes", "64", "--ops", "allreduce"),
        ),
    ]
    return found


def _no_mps() -> str:
    if shutil.which(_MPS) is None:
        return f"{_MPS} is not installed"
    return ""


def main(args: argparse.Namespace) -> int:
    """Write a report; return 1 where a part failed, and 0 otherwise."""
    number_of_devices(args.device)
    chosen = parts(args.device)
    names = [each.name for each in chosen]
    unknown = [name for name in args.only or () if name not in names]
    if unknown:
        raise UsageError(f"--only {unknown[0]}: no such part; there are {names}")
    folder = Path(args.out or time.strftime("gpu-report-%Y%m%d-%H%M%S")).absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--out {args.out}: {error}") from None
    failed = run_parts(
        chosen,
        folder,
        only=args.only,
        quick=args.quick,
        timeout_s=args.timeout_s,
        no_use=_no_use(args),
    )
    return 1 if failed else 0


def _no_use(args: argparse.Namespace) -> str:
    if args.device != "cuda":
        return "figures of a device of threads mean nothing"
    return "--quick measures too little" if args.quick else ""


def run_parts(
    chosen: Sequence[Part],
    folder: Path,
    *,
    only: Sequence[str] | None = None,
    quick: bool = False,
    timeout_s: float = 600.0,
    no_use: str = "",
) -> list[str]:
    """Run parts one after the other and write the report; return those that failed."""
    report = folder / "report.md"
    texts = [_head()]
    found: dict[str, Outcome] = {}
    failed = []
    for number, part in enumerate(chosen, 1):
        why_not = part.why_not
        if only is not None and part.name not in only:
            why_not = "not asked for"
        if why_not:
            found[part.name] = Outcome(why_not=why_not)
            texts.append(f"## {part.name}\n\nNot run: {why_not}.\n")
            continue
        print(f"{part.name} ...", end=" ", flush=True)
        outcome, text = _run(part, number, folder, quick, timeout_s)
        print(outcome.why_not or "done", flush=True)
        found[part.name] = outcome
        texts.append(text)
        if outcome.why_not:
            failed.append(part.name)
        # Whatever ends this run, what was measured is there.
        write_file(report, "\n".join(texts))
    table = goals_table(found, no_use)
    texts.append(f"## What was wanted\n\n{table}\n")
    write_file(report, "\n".join(texts))
    print(f"\n{table}\n\nreport: {report}", flush=True)
    return failed


def _head() -> str:
    lines = [f"- {name}: {value}" for name, value in describe_machine().items()]
    if shutil.which("nvidia-smi"):
        asked = "--query-gpu=name,driver_version,memory.total,pcie.link.gen.current"
        with suppress(OSError, subprocess.SubprocessError):
            said = subprocess.run(
                ["nvidia-smi", asked, "--format=csv,noheader"],
                capture_output=True,
                text=True,
                timeout=_END_S,
            )
            lines += [f"- GPU: {line}" for line in said.stdout.splitlines()]
    return "# Measured by `commrt.bench gpu-report`\n\n" + "\n".join(lines) + "\n"


def _run(
    part: Part, number: int, folder: Path, quick: bool, timeout_s: float
) -> tuple[Outcome, str]:
    """Run one; return what became of it, and its section of the report."""
    words = [*part.command, *(part.quick if quick else ())]
    kept = folder / f"{number:02d}-{part.name.replace(' ', '-')}.txt"
    shown = shlex.join(["python", *words])
    start = time.monotonic()
    with _mps(part) as (env, why_not):
        if not why_not:
            why_not = _run_process([sys.executable, *words], kept, env, timeout_s)
    took = time.monotonic() - start
    said = kept.read_text(errors="replace") if kept.exists() else ""
    verdict = why_not or "done"
    outcome = Outcome(said, _in_words(why_not, said))
    body = said if len(said) < 20_000 else said[:20_000] + f"\n... (all: {kept.name})"
    text = f"## {part.name}\n\n`{shown}`: {verdict}, {took:.1f} s\n"
    return outcome, f"{text}\n```\n{body.rstrip()}\n```\n"


def _in_words(why_not: str, said: str) -> str:
    """Return why a part has no figures, with its own last words."""
    last = [line for line in said.splitlines() if line.strip()][-1:]
    return "; ".join([why_not, *last]) if why_not else ""


def _run_process(
    command: Sequence[str], kept: Path, env: Mapping[str, str], timeout_s: float
) -> str:
    """Run a command, its words into a file; return why it did not end well."""
    with open_stream(kept) as file:
        try:
            process = subprocess.Popen(
                command,
                # The part writes its files beside its output. In a checkout Python
                # would find the folder commrt, which has no engine.
                cwd=kept.parent,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=env,
                start_new_session=True,
            )
        except OSError as error:
            return f"it did not start: {error}"
        try:
            status = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return f"it was ended after {timeout_s:g} s"
        finally:
            _end(process)
    return "" if status == 0 else f"it ended with {status}"


def _end(process: subprocess.Popen[bytes]) -> None:
    """End what it has started, too."""
    if process.poll() is not None:
        return
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_END_S)
            return


@contextmanager
def _mps(part: Part) -> Iterator[tuple[dict[str, str], str]]:
    """Serve a part by CUDA's MPS in a place of its own; yield why that cannot be."""
    env = dict(os.environ)
    if not part.under_mps:
        yield env, ""
        return
    with tempfile.TemporaryDirectory() as place:
        env |= {"CUDA_MPS_PIPE_DIRECTORY": place, "CUDA_MPS_LOG_DIRECTORY": place}
        why_not = _control(["-d"], env, "")
        try:
            yield env, f"MPS does not start: {why_not}" if why_not else ""
        finally:
            if not why_not:
                _control([], env, "quit\n")


def _control(words: Sequence[str], env: Mapping[str, str], said: str) -> str:
    """Tell MPS something; return what it says against it."""
    try:
        done = subprocess.run(
            [_MPS, *words],
            input=said,
            env=env,
            capture_output=True,
            text=True,
            timeout=_END_S,
        )
    except (OSError, subprocess.SubprocessError) as error:
        return str(error)
    if done.returncode == 0:
        return ""
    return (done.stderr or done.stdout).strip() or f"status {done.returncode}"
