# SPDX-License-Identifier: Apache-2.0
"""Runs programs on hosts to their end, and ends all that they have started."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from commrt.cluster import kernel
from commrt.cluster.entering import OF_TERMINAL, SIGNALS, enter_host
from commrt.errors import CommError

__all__ = ["Program", "run_programs"]

_GRACE_S = 5.0
"""Programs that are told to end may take so long."""
_LOOK_S = 0.2


@dataclass(frozen=True)
class Program:
    """A program for a host."""

    host: str
    argv: tuple[str, ...]
    environ: Mapping[str, str]


def run_programs(programs: Sequence[Program], processes: Mapping[str, int]) -> int:
    """Return the status of programs that run side by side: the first one that is not 0.

    It runs in a process that ``run_inside`` has made. When a program fails, or a signal
    tells this process to end, the others are told to end. Nothing that a program has
    started outlives them.

    Args:
        programs: what to run.
        processes: the process that holds each host.
    """
    kernel.adopt_orphans()
    alive, held = os.pipe()
    running = {_start(one, processes[one.host], alive, held) for one in programs}
    os.close(alive)
    try:
        return _wait(running)
    finally:
        _end_all()
        os.close(held)


def _start(program: Program, holder: int, alive: int, held: int) -> int:
    child = os.fork()
    if child == 0:
        os.close(held)
        _become(program, holder, alive)
    return child


def _become(program: Program, holder: int, alive: int) -> NoReturn:
    status = 126
    try:
        kernel.end_with_parent(alive)
        enter_host(holder)
        for number in (signal.SIGINT, signal.SIGPIPE):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {*SIGNALS, signal.SIGCHLD})
        os.execvpe(program.argv[0], program.argv, dict(program.environ))
    except FileNotFoundError:
        status = 127
        _complain(f"{program.argv[0]}: there is no such program on host {program.host}")
    except (OSError, CommError) as error:
        _complain(f"{program.argv[0]} on host {program.host}: {error}")
    finally:
        os._exit(status)


def _complain(text: str) -> None:
    os.write(sys.stderr.fileno(), f"commrt cluster: {text}\n".encode())


def _wait(running: set[int]) -> int:
    watched = {*SIGNALS, signal.SIGCHLD}
    status = told = 0
    until: float | None = None
    while running:
        left = _LOOK_S if until is None else until - time.monotonic()
        if left <= 0:
            break
        found = signal.sigtimedwait(watched, min(left, _LOOK_S))
        if found is not None and found.si_signo != signal.SIGCHLD:
            told = told or found.si_signo
            if found.si_code != OF_TERMINAL:  # else programs have it already
                _send(running, found.si_signo)
            until = until or time.monotonic() + _GRACE_S
        for code in _ended(running):
            if code and not status and not told:
                status = code
                _send(running, signal.SIGTERM)
                until = until or time.monotonic() + _GRACE_S
    return 128 + told if told else status


def _ended(running: set[int]) -> list[int]:
    """Return the statuses of programs that have ended, as a shell has them."""
    statuses: list[int] = []
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return statuses
        if pid == 0:
            return statuses
        if pid in running:  # else an orphan
            running.discard(pid)
            code = os.waitstatus_to_exitcode(status)
            statuses.append(code if code >= 0 else 128 - code)


def _send(pids: set[int], number: int) -> None:
    for pid in pids:
        os.kill(pid, number)  # a child that nobody has waited for: it is there


def _end_all() -> None:
    """End every descendant; those of one that has ended become children here."""
    while children := _descendants(os.getpid()):
        for pid in children:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def _descendants(root: int) -> set[int]:
    parents = {}
    for entry in os.listdir("/proc"):
        if entry.isdecimal():
            try:
                stat = Path("/proc", entry, "stat").read_bytes()
            except OSError:
                continue
            parents[int(entry)] = int(stat.rpartition(b")")[2].split()[1])
    found = {root}
    while more := {pid for pid, up in parents.items() if up in found} - found:
        found |= more
    return found - {root}
