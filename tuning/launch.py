# SPDX-License-Identifier: Apache-2.0
"""Starts real ranks for one job and listens to rank 0; a hang costs only itself."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

from commrt.bench.timing_loop import SharedFlags
from commrt.errors import UsageError
from commrt.files.write import write_file
from commrt.launch.mpiexec import Launcher, find_launcher, kill_tree, launch_command
from commrt.tuning.job import Job, Turn

__all__ = ["Ended", "Message", "Start", "choose_launcher", "listen", "start_ranks"]

Message = Mapping[str, Any]
Start = Callable[[Job, int, Callable[[Message], None]], "Ended"]
"""Runs a job on that many ranks, hands over every message, returns how it ended."""

_STARTUP_S = 60.0
_END_S = 10.0
_LOOKS = 10
"""Number of looks for signs of life within the longest silence allowed."""


@dataclass(frozen=True)
class Ended:
    """End of a launch."""

    ok: bool
    """True if rank 0 said that it was done."""
    reason: str
    """Otherwise: what happened."""
    turn: int | None = None
    """Number of the item that ran last, where that is known."""


def choose_launcher(mpiexec: str | None) -> Launcher:
    """Return the launcher: ``mpiexec`` if given, else the one of this interpreter."""
    if mpiexec is None:
        return find_launcher()
    found = find_launcher(mpiexec)
    if Path(found.mpiexec).parent != Path(os.path.abspath(mpiexec)).parent:
        raise UsageError(f"--mpiexec {mpiexec}: there is no mpiexec in that folder")
    return found


def start_ranks(
    job: Job,
    ranks: int,
    on_message: Callable[[Message], None],
    *,
    launcher: Launcher,
    hang_s: float,
) -> Ended:
    """Run the job; kill all ranks when no turn of theirs ends within ``hang_s``.

    A turn is one call, or a few within milliseconds. However long a size takes as a
    whole, its turns are signs of life.

    The existing tables and overrides of the user do not reach the ranks: tuning must
    also work where the table to be replaced is broken.
    """
    with tempfile.TemporaryDirectory(prefix="commrt-tune-") as folder:
        flags = str(Path(folder) / "flags")
        SharedFlags.create(flags, ranks)
        turn = str(Path(folder) / "turn")
        Turn.create(turn)
        work = Path(folder) / "job.json"
        write_file(work, replace(job, flags=flags, turn=turn).to_json())
        argv, environ = launch_command(
            sys.executable,
            ranks,
            ["-m", "commrt.tuning.worker", str(work)],
            env={
                "XDG_CONFIG_HOME": folder,
                "COMMRT_TABLE": "",
                "COMMRT_ALGORITHM": "",
            },
            launcher=launcher,
        )
        ended = listen(argv, environ, on_message, hang_s, lambda: Turn.read(turn))
        return replace(ended, turn=Turn.read(turn)[0])


def listen(
    argv: Sequence[str],
    environ: Mapping[str, str],
    on_message: Callable[[Message], None],
    hang_s: float,
    alive: Callable[[], object] = lambda: None,
) -> Ended:
    """Run a command, hand over its messages; no descendant of it survives.

    It hangs when for ``hang_s`` no message has come and ``alive`` has not changed.
    """
    with tempfile.TemporaryFile() as errors:
        return _listen(argv, environ, errors, on_message, hang_s, alive)


def _listen(
    argv: Sequence[str],
    environ: Mapping[str, str],
    errors: IO[bytes],
    on_message: Callable[[Message], None],
    hang_s: float,
    alive: Callable[[], object],
) -> Ended:
    process = subprocess.Popen(
        argv,
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=errors,
        start_new_session=True,
    )
    assert process.stdout is not None
    lines: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
    reader = threading.Thread(
        target=_pump, args=(process.stdout, lines), daemon=True, name="tune-reader"
    )
    try:
        reader.start()
        reason = _follow(lines, on_message, hang_s, alive)
        if reason == "end":
            _wait(process)
            return Ended(True, "")
        status = process.poll()
        if reason == "closed":
            status = _wait(process)
            reason = f"the ranks ended with status {status}"
        return Ended(False, f"{reason}{_tail(errors)}")
    finally:
        kill_tree(process)
        if reader.is_alive():
            reader.join(_END_S)


def _follow(
    lines: queue.SimpleQueue[bytes | None],
    on_message: Callable[[Message], None],
    hang_s: float,
    alive: Callable[[], object],
) -> str:
    """Hand over messages until the end, a silence, or the closed pipe; say which."""
    patience_s, started = max(_STARTUP_S, hang_s), False
    heard_s, sign = time.monotonic(), alive()
    while True:
        try:
            raw = lines.get(timeout=patience_s / _LOOKS)
        except queue.Empty:
            if (now := alive()) != sign:
                heard_s, sign = time.monotonic(), now
            elif time.monotonic() - heard_s >= patience_s:
                return _silence(patience_s, started)
            continue
        if raw is None:
            return "closed"
        message = _message(raw)
        if message is None:
            continue
        on_message(message)
        if message["tune"] == "end":
            return "end"
        heard_s, patience_s, started = time.monotonic(), hang_s, True


def _silence(patience_s: float, started: bool) -> str:
    if not started:
        return f"the ranks did not start within {patience_s:g} s"
    return (
        f"no call ended within {patience_s:g} s (raise --hang if one may take that "
        f"long)"
    )


def _message(raw: bytes) -> Message | None:
    """Return the line as a message; None for what libraries print."""
    try:
        message = json.loads(raw)
    except ValueError:
        return None
    return message if isinstance(message, dict) and "tune" in message else None


def _pump(stream: IO[bytes], lines: queue.SimpleQueue[bytes | None]) -> None:
    with stream:
        for raw in stream:
            lines.put(raw)
    lines.put(None)


def _wait(process: subprocess.Popen[bytes]) -> int | None:
    try:
        return process.wait(_END_S)
    except subprocess.TimeoutExpired:
        return None


def _tail(errors: IO[bytes]) -> str:
    """Return the last lines that the ranks wrote to standard error."""
    errors.seek(0)
    text = errors.read().decode(errors="replace").strip()
    return ":\n" + "\n".join(text.splitlines()[-15:]) if text else ""
