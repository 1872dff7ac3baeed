# SPDX-License-Identifier: Apache-2.0
"""Processes that do not outlive the one that starts them, and variables of ranks."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence

__all__ = [
    "ENDING",
    "FORWARDED",
    "NO_PORT",
    "end_group",
    "free_port",
    "send_signal",
    "start_bound_to_this",
    "variables_of_rank",
]

_PREPARE = """
import ctypes, os, signal, sys
launcher, cores, *command = sys.argv[1:]
PR_SET_PDEATHSIG = 1
ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
if os.getppid() != int(launcher):  # it has ended before it would have sent the signal
    os._exit(1)
if cores:
    os.sched_setaffinity(0, map(int, cores.split(",")))
os.execv(command[0], command)
"""
"""Runs in the process of a rank, which no launcher outlives, before its program."""
FORWARDED = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
)
"""Signals that a launcher passes on to its ranks."""
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
"""Those after which ranks have to end."""
_PORTS = range(20000, 32000)
"""Linux gives none of these to whoever asks for any port."""
NO_PORT = (
    f"no port of this machine is free; expected one in {_PORTS.start}.."
    f"{_PORTS.stop - 1}: end a program that holds one"
)


def start_bound_to_this(
    command: Sequence[str],
    environ: Mapping[str, str],
    *,
    cores: Iterable[int] = (),
    stdin: int | None = subprocess.DEVNULL,
    stdout: int | None = subprocess.PIPE,
) -> subprocess.Popen[bytes]:
    """Start a program that is killed when this process ends; errors go to a pipe.

    Args:
        command: the program, with its whole path, and its arguments.
        environ: its variables.
        cores: where it may run; everywhere if there are none.
        stdin: as ``subprocess.Popen`` has it.
        stdout: likewise.
    """
    # A program of its own does it: this one may have threads when it starts a rank
    # again, and what runs in a copy of them may wait for locks that nobody gives.
    prepared = [sys.executable, "-I", "-S", "-c", _PREPARE, str(os.getpid())]
    return subprocess.Popen(
        [*prepared, ",".join(map(str, sorted(cores))), *command],
        env={**environ},
        stdin=stdin,
        stdout=stdout,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


def variables_of_rank(
    rank: int, size: int, local: int, num_local: int, host: int, meeting: str
) -> dict[str, str]:
    """Return what tells a rank who it is, in torchrun's words and commrt's.

    Args:
        rank: its number.
        size: ranks in all.
        local: its number on its host.
        num_local: ranks of its host.
        host: the number of its host.
        meeting: the folder in which it meets the others.
    """
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(local),
        "LOCAL_WORLD_SIZE": str(num_local),
        "GROUP_RANK": str(host),
        "COMMRT_MEETING": meeting,
    }


def free_port() -> int | None:
    """Return a port that nobody listens on now; None where all are taken."""
    for port in random.sample(_PORTS, len(_PORTS)):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with contextlib.suppress(OSError):
                probe.bind(("127.0.0.1", port))
                return port
    return None


def send_signal(process: subprocess.Popen[bytes], number: int) -> None:
    """Send a signal to a process, if it has not ended."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, number)


def end_group(process: subprocess.Popen[bytes]) -> None:
    """Kill a process that was started here, and what it has started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
