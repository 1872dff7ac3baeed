# SPDX-License-Identifier: Apache-2.0
"""``python -m commrt.run -n 4 train.py``: ranks on this machine, without MPI.

The ranks get torchrun's variables (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, ...) and
a folder in which they meet. They need neither MPI nor torch. When one fails, the others
are ended, and the launcher ends with that one's exit status. No rank outlives it. With
``--keep-going`` the others go on without a rank that was killed, and with
``--restarts`` another process is started for it, which may join them.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import IO

from commrt.bootstrap.directory import DirectoryStore
from commrt.bootstrap.newcomers import Reception
from commrt.commands.console import until_reader_leaves
from commrt.launch.mpiexec import child_environment, last_words
from commrt.launch.rank_process import Process
from commrt.vocabulary.limits import capped

__all__ = ["main"]

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
_FORWARDED = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
)
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_PORTS = range(20000, 32000)
"""Linux gives none of these to whoever asks for any port."""
_KEPT_NBYTES = 8192
_READ_NBYTES = 1 << 16
_FOLDER = "commrt-run-"
_NEW_S = 60.0
"""A folder so young may belong to a launcher that has yet to lock it."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the ranks; return the exit status."""
    parser = _parser()
    said = parser.parse_args(argv)
    if said.ranks < 1:
        parser.error(f"-n {said.ranks}: at least one rank is needed")
    if not said.grace >= 0:
        parser.error(f"--grace {said.grace}: a number of seconds from 0 on is needed")
    program = [said.program, *said.arguments]
    command = [sys.executable, *(["-m"] if said.module else []), *program]
    if said.restarts < 0:
        parser.error(f"--restarts {said.restarts}: a number from 0 on is needed")
    job = _Job(command, said.ranks, said.prefix, said.bind, capped(said.grace))
    return job.run(keep_going=said.keep_going or said.restarts, restarts=said.restarts)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m commrt.run",
        description="Run a Python program on several ranks of this machine. They need "
        "neither MPI nor torch; programs for torchrun find its variables.",
    )
    parser.add_argument(
        "-n", "--ranks", type=int, required=True, help="how many processes"
    )
    parser.add_argument(
        "-m", "--module", action="store_true", help="PROGRAM is a module, as python -m"
    )
    parser.add_argument(
        "--prefix",
        action="store_true",
        help="begin each line that a rank prints with its number",
    )
    parser.add_argument(
        "--bind",
        action="store_true",
        help="give each rank cores of its own, an equal share of those available",
    )
    parser.add_argument(
        "--grace",
        type=float,
        default=5.0,
        metavar="SECONDS",
        help="how long ranks may take to end once they are told to (default 5)",
    )
    parser.add_argument("program", metavar="PROGRAM", help="script, or module with -m")
    parser.add_argument(
        "--keep-going",
        action="store_true",
        help="when a rank fails, do not end the others; the exit status is 0 if all "
        "that were not killed by a signal end with 0",
    )
    parser.add_argument(
        "--restarts",
        type=int,
        default=0,
        metavar="N",
        help="as --keep-going; and start a rank that fails anew, N times in all: its "
        "commrt.init() waits until the others call grow() (default 0)",
    )
    parser.add_argument(
        "arguments", nargs=argparse.REMAINDER, metavar="...", help="its arguments"
    )
    return parser


@dataclass
class _Rank:
    """One process that was started."""

    number: int
    process: subprocess.Popen[bytes]
    copiers: list[threading.Thread] = field(default_factory=list)
    tail: bytes = b""
    """The end of what it printed as errors."""
    joins: bool = False
    """True if it was started to join the others."""
    is_ended: bool = False
    """True once this launcher has ended it, since nobody was left to join."""


class _Job:
    """The ranks of one launch, from their start to their end."""

    def __init__(
        self, command: list[str], size: int, prefix: bool, bind: bool, grace_s: float
    ) -> None:
        self._command = command
        self._size = size
        self._prefix = prefix
        self._cores = _shares(size) if bind else None
        self._grace_s = grace_s
        self._ranks: dict[int, _Rank] = {}
        self._restarts = 0
        """How many ranks may still be started again."""
        self._signal = 0
        """The first one that told this job to end."""
        self._printing = threading.Lock()

    def run(self, *, keep_going: bool = False, restarts: int = 0) -> int:
        """Start the ranks, and wait for their end; return the exit status.

        ``keep_going``: one that fails does not end the others. ``restarts``: so many
        that fail are started again.
        """
        self._restarts = restarts
        _remove_leftovers(Path(tempfile.gettempdir()))
        rendezvous = tempfile.mkdtemp(prefix=_FOLDER)
        lock = _lock_of(Path(rendezvous))
        before = {one: signal.signal(one, self._forward) for one in _FORWARDED}
        before[signal.SIGALRM] = signal.signal(signal.SIGALRM, self._kill)
        try:
            environ = _environment(self._size, rendezvous)
            joins = dict(environ, COMMRT_JOIN="1")
            for number in range(self._size):
                rank = self._start(number, environ)
                self._ranks[rank.process.pid] = rank
                self._pass_on(rank)
            return self._wait(keep_going, joins, rendezvous)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            self._kill()
            for one, handler in before.items():
                signal.signal(one, handler)
            shutil.rmtree(rendezvous, ignore_errors=True)
            os.close(lock)

    def _start(self, number: int, environ: dict[str, str]) -> _Rank:
        cores = () if self._cores is None else sorted(self._cores[number])
        # A program of its own does it: this one may have threads when it starts a rank
        # again, and what runs in a copy of them may wait for locks that nobody gives.
        prepared = [sys.executable, "-I", "-S", "-c", _PREPARE, str(os.getpid())]
        own = {"RANK": str(number), "LOCAL_RANK": str(number)}
        process = subprocess.Popen(
            [*prepared, ",".join(map(str, cores)), *self._command],
            env={**environ, **own},
            # One of them may read what is typed.
            stdin=None if number == 0 else subprocess.DEVNULL,
            stdout=subprocess.PIPE if self._prefix else None,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        return _Rank(number, process)

    def _pass_on(self, rank: _Rank) -> None:
        """Start to copy what a rank prints."""
        process = rank.process
        for source, to in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
            if source is not None:
                copier = threading.Thread(
                    target=self._copy, args=(rank, source, to.buffer), daemon=True
                )
                copier.start()
                rank.copiers.append(copier)

    def _copy(self, rank: _Rank, source: IO[bytes], to: IO[bytes]) -> None:
        """Pass on what a rank prints."""
        is_error = source is rank.process.stderr
        head = f"[{rank.number}] ".encode()
        with source:
            while True:
                if self._prefix:
                    piece = source.readline()
                else:
                    piece = os.read(source.fileno(), _READ_NBYTES)
                if not piece:
                    return
                if is_error:
                    rank.tail = (rank.tail + piece)[-_KEPT_NBYTES:]
                if self._prefix:
                    piece = head + piece.rstrip(b"\n") + b"\n"
                with self._printing, contextlib.suppress(OSError, ValueError):
                    to.write(piece)
                    to.flush()

    def _wait(self, keep_going: bool, joins: dict[str, str], rendezvous: str) -> int:
        """Wait for all ranks; return the launcher's exit status.

        ``joins``: variables of those that are started again.
        """
        failed: list[tuple[_Rank, int]] = []
        living = set(self._ranks)
        while living:
            pid, status = os.waitpid(-1, 0)
            if pid not in living:
                continue
            living.discard(pid)
            rank = self._ranks[pid]
            code = os.waitstatus_to_exitcode(status)
            rank.process.returncode = code
            if code == 0 or rank.is_ended:
                self._end_those_left(living, rendezvous)
                continue
            if self._restarts and living and not self._signal:
                self._restarts -= 1
                self._report(rank, code, "; it is started again, to join the others")
                again = self._start(rank.number, joins)
                again.joins = True
                self._ranks[again.process.pid] = again
                self._pass_on(again)
                living.add(again.process.pid)
                continue
            failed.append((rank, code))
            self._end_those_left(living, rendezvous)
            if keep_going:
                self._report(rank, code, "; the others go on" if living else "")
            elif len(failed) == 1:
                self._end(living)
        for rank in self._ranks.values():
            # Another process that holds the pipe may keep it open.
            for copier in rank.copiers:
                copier.join(self._grace_s)
        if not keep_going and failed:
            others = "; the others were ended" if self._size > 1 else ""
            self._report(*failed[0], others)
        codes = [code for _, code in failed]
        if keep_going and not self._signal:
            own = [code for code in codes if code > 0]
            codes = own if own or len(failed) < self._size else codes
        return _exit_status(codes[0]) if codes else 0

    def _end_those_left(self, living: set[int], rendezvous: str) -> None:
        """End the processes that wait to join, once nobody is left who could ask them.

        One that was asked is a rank.
        """
        left = [self._ranks[pid] for pid in living]
        if not left or not all(rank.joins and not rank.is_ended for rank in left):
            return
        asked = Reception(DirectoryStore(rendezvous, self._size)).invited()
        if any(Process(rank.process.pid).name in asked for rank in left):
            return
        for rank in left:
            rank.is_ended = True
            numbers = f"rank {rank.number} of {self._size} (process {rank.process.pid})"
            sys.stderr.write(
                f"commrt.run: {numbers} waits to join, and no other rank is left: it "
                f"is ended\n"
            )
        sys.stderr.flush()
        self._end({rank.process.pid for rank in left})

    def _report(self, rank: _Rank, code: int, others: str) -> None:
        """Say that a rank failed, why, and what becomes of the others."""
        if self._signal:
            how = f"ended after {signal.Signals(self._signal).name} was forwarded to it"
        elif code < 0:
            name = signal.Signals(-code).name
            how = f"was killed by signal {-code} ({name})"
        else:
            how = f"ended with exit status {code}"
        text = rank.tail.decode(errors="replace")
        why = "" if code < 0 or self._signal else last_words(text)
        sys.stderr.write(
            f"commrt.run: rank {rank.number} of {self._size} (process "
            f"{rank.process.pid}) {how}{f': {why}' if why else ''}{others}\n"
        )
        sys.stderr.flush()

    def _forward(self, number: int, frame: FrameType | None) -> None:
        """Give a signal to all ranks; runs between two steps of the main thread."""
        if number in _ENDING:
            self._signal = self._signal or number
            signal.setitimer(signal.ITIMER_REAL, max(self._grace_s, 1e-3))
        for rank in self._ranks.values():
            _signal_to(rank, number)

    def _end(self, living: set[int]) -> None:
        """Tell ranks to end, and end them if they do not."""
        for pid in living:
            _signal_to(self._ranks[pid], signal.SIGTERM)
        signal.setitimer(signal.ITIMER_REAL, max(self._grace_s, 1e-3))

    def _kill(self, *_: object) -> None:
        """End all ranks, and what they have started."""
        for rank in self._ranks.values():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(rank.process.pid, signal.SIGKILL)


def _exit_status(code: int) -> int:
    return 128 - code if code < 0 else code


def _signal_to(rank: _Rank, number: int) -> None:
    if rank.process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(rank.process.pid, number)


def _lock_of(folder: Path) -> int:
    """Return a descriptor of the folder's lock, which this process holds to its end."""
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        raise
    return lock


def _remove_leftovers(parent: Path) -> None:
    """Remove the folders of this user's launchers that were killed.

    A launcher that lives holds its folder's lock, in whatever container it runs.
    """
    for folder in parent.glob(f"{_FOLDER}*"):
        with contextlib.suppress(OSError):
            status = folder.lstat()
            is_new = time.time() - status.st_mtime < _NEW_S
            if status.st_uid != os.geteuid() or is_new:
                continue
            lock = _lock_of(folder)
            shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)


def _environment(size: int, rendezvous: str) -> dict[str, str]:
    """Return the variables that all ranks have in common."""
    environ = child_environment(sys.executable)
    cores = len(os.sched_getaffinity(0))
    environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // size)))
    environ.update(
        WORLD_SIZE=str(size),
        LOCAL_WORLD_SIZE=str(size),
        GROUP_RANK="0",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(_free_port()),
        COMMRT_MEETING=rendezvous,
    )
    return environ


def _free_port() -> int:
    """Return a port that nobody listens on now."""
    for port in random.sample(_PORTS, len(_PORTS)):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with contextlib.suppress(OSError):
                probe.bind(("127.0.0.1", port))
                return port
    raise SystemExit(
        "commrt.run: no port of this machine is free; expected one in "
        f"{_PORTS.start}..{_PORTS.stop - 1}: end a program that holds one"
    )


def _shares(size: int) -> list[set[int]]:
    """Return the cores of each rank: neighbours, and threads of a core together."""
    cores = sorted(os.sched_getaffinity(0), key=_place)
    if len(cores) < size:
        sys.stderr.write(
            f"commrt.run: --bind: {size} ranks on {len(cores)} cores: some share one\n"
        )
        return [{cores[number % len(cores)]} for number in range(size)]
    ends = [number * len(cores) // size for number in range(size + 1)]
    return [{*cores[a:b]} for a, b in pairwise(ends)]


def _place(cpu: int) -> tuple[int, int, int]:
    """Return a processor's socket, core and own number."""
    folder = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology")
    found = []
    for name in ("physical_package_id", "core_id"):
        try:
            found.append(int((folder / name).read_text()))
        except (OSError, ValueError):
            found.append(cpu)
    return found[0], found[1], cpu


if __name__ == "__main__":
    sys.exit(until_reader_leaves(main))
