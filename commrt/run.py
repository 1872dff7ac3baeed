# SPDX-License-Identifier: Apache-2.0
"""``python -m commrt.run -n 4 train.py``: ranks on this machine, without MPI.

The ranks get torchrun's variables (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, ...) and
a folder in which they meet. They need neither MPI nor torch. When one fails, the others
are ended, and the launcher ends with that one's exit status. No rank outlives it. With
``--keep-going`` the others go on without a rank that was killed, and with
``--restarts`` another process is started for it, which may join them.

``python -m commrt.run --hosts h1:2,h2:2 train.py`` starts ranks on several hosts
through a remote shell.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import IO

from commrt.bootstrap.claim import claims_of
from commrt.bootstrap.directory import DirectoryStore
from commrt.bootstrap.launcher_words import ENDED, text_of
from commrt.bootstrap.newcomers import Reception
from commrt.commands.console import until_reader_leaves
from commrt.errors import CommError, UsageError
from commrt.launch.mpiexec import child_environment
from commrt.launch.rank_process import Process
from commrt.running.cores import shares_of_cores
from commrt.running.endings import KEPT_NBYTES, describe_end, status_of_job
from commrt.running.folders import meeting_folder
from commrt.running.job_on_hosts import Launch
from commrt.running.options_of_hosts import (
    add_options_of_hosts,
    check_no_hosts,
    run_on_hosts,
    variables_for_hosts,
)
from commrt.running.processes import (
    ENDING,
    FORWARDED,
    NO_PORT,
    end_group,
    free_port,
    send_signal,
    start_bound_to_this,
    variables_of_rank,
)
from commrt.vocabulary.limits import capped

__all__ = ["main"]

_READ_NBYTES = 1 << 16


def main(argv: Sequence[str] | None = None) -> int:
    """Run the ranks; return the exit status."""
    parser = _parser()
    said = parser.parse_args(argv)
    if said.ranks is None and said.hosts is None:
        parser.error(
            "say how many ranks, by -n, or which hosts they run on, by --hosts"
        )
    if said.ranks is not None and said.ranks < 1:
        parser.error(f"-n {said.ranks}: at least one rank is needed")
    if not said.grace >= 0:
        parser.error(f"--grace {said.grace}: a number of seconds from 0 on is needed")
    program = [said.program, *said.arguments]
    words = [*(["-m"] if said.module else []), *program]
    if said.restarts < 0:
        parser.error(f"--restarts {said.restarts}: a number from 0 on is needed")
    try:
        if said.hosts is not None:
            return _on_hosts(said, words)
        check_no_hosts(said)
    except UsageError as error:
        parser.error(str(error))
    except CommError as error:
        sys.stderr.write(f"commrt.run: {error}\n")
        return 1
    command = [sys.executable, *words]
    job = _Job(command, said.ranks, said.prefix, said.bind, capped(said.grace))
    return job.run(keep_going=said.keep_going or said.restarts, restarts=said.restarts)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m commrt.run",
        description="Run a Python program on several ranks of this machine. They need "
        "neither MPI nor torch; programs for torchrun find its variables.",
    )
    parser.add_argument(
        "-n",
        "--ranks",
        type=int,
        help="how many processes; with --hosts, all that there is room for",
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
    add_options_of_hosts(parser)
    return parser


def _on_hosts(said: argparse.Namespace, words: Sequence[str]) -> int:
    launch = Launch(
        words,
        variables_for_hosts(said.variables or []),
        prefix=said.prefix,
        bind=said.bind,
        grace_s=capped(said.grace),
        keep_going=said.keep_going,
    )
    return run_on_hosts(said, launch)


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
        self._cores = shares_of_cores(size) if bind else None
        self._grace_s = grace_s
        self._ranks: dict[int, _Rank] = {}
        self._restarts = 0
        """How many ranks may still be started again."""
        self._ended: dict[int, str] = {}
        """Processes of ranks that have ended, by their first numbers."""
        self._signal = 0
        """The first one that told this job to end."""
        self._printing = threading.Lock()

    def run(self, *, keep_going: bool = False, restarts: int = 0) -> int:
        """Start the ranks, and wait for their end; return the exit status.

        ``keep_going``: one that fails does not end the others. ``restarts``: so many
        that fail are started again.
        """
        self._restarts = restarts
        with meeting_folder() as rendezvous:
            before = {one: signal.signal(one, self._forward) for one in FORWARDED}
            before[signal.SIGALRM] = signal.signal(signal.SIGALRM, self._kill)
            try:
                environ = _environment(self._size)
                for number in range(self._size):
                    self._start(number, environ, rendezvous)
                return self._wait(keep_going, environ, rendezvous)
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
                self._kill()
                for one, handler in before.items():
                    signal.signal(one, handler)

    def _start(self, number: int, environ: dict[str, str], rendezvous: str) -> _Rank:
        own = variables_of_rank(number, self._size, number, self._size, 0, rendezvous)
        process = start_bound_to_this(
            self._command,
            {**environ, **own},
            cores=() if self._cores is None else self._cores[number],
            # One of them may read what is typed.
            stdin=None if number == 0 else subprocess.DEVNULL,
            stdout=subprocess.PIPE if self._prefix else None,
        )
        rank = self._ranks[process.pid] = _Rank(number, process)
        self._pass_on(rank)
        return rank

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
                    rank.tail = (rank.tail + piece)[-KEPT_NBYTES:]
                if self._prefix:
                    piece = head + piece.rstrip(b"\n") + b"\n"
                with self._printing, contextlib.suppress(OSError, ValueError):
                    to.write(piece)
                    to.flush()

    def _wait(self, keep_going: bool, environ: dict[str, str], rendezvous: str) -> int:
        """Wait for all ranks; return the launcher's exit status.

        ``environ``: variables of those that are started again.
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
            again = code != 0 and self._restarts and living and not self._signal
            if again and not rank.is_ended and not self._has_come(rank, rendezvous):
                self._restarts -= 1
                self._report(rank, code, "; it is started again, before the others met")
                living.add(self._start(rank.number, environ, rendezvous).process.pid)
                continue
            if living and not rank.joins:
                self._say_ended(rank, rendezvous)
            if code == 0 or rank.is_ended:
                self._end_those_left(living, rendezvous)
                continue
            if again:
                self._restarts -= 1
                self._report(rank, code, "; it is started again, to join the others")
                joins = self._start(
                    rank.number, dict(environ, COMMRT_JOIN="1"), rendezvous
                )
                joins.joins = True
                living.add(joins.process.pid)
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
        return status_of_job(
            [code for _, code in failed],
            self._size,
            forgives_kills=bool(keep_going and not self._signal),
        )

    def _has_come(self, rank: _Rank, rendezvous: str) -> bool:
        """Return whether a rank has come to ``init``, where others count on it."""
        store = self._store(rendezvous)
        return rank.joins or store is None or store.check([claims_of(rank.number)])

    def _say_ended(self, rank: _Rank, rendezvous: str) -> None:
        """Tell ranks that wait in ``init`` that one comes no more."""
        process = f"process {rank.process.pid} on {socket.gethostname()}"
        self._ended.setdefault(rank.number, process)
        store = self._store(rendezvous)
        with contextlib.suppress(OSError):  # a full disk must not end those that run
            if store is not None:
                store.set(ENDED, text_of(self._ended))

    def _store(self, rendezvous: str) -> DirectoryStore | None:
        """Return where the ranks meet; None where somebody has removed the folder."""
        with contextlib.suppress(CommError):
            return DirectoryStore(rendezvous, self._size)
        return None

    def _end_those_left(self, living: set[int], rendezvous: str) -> None:
        """End the processes that wait to join, once nobody is left who could ask them.

        One that was asked is a rank.
        """
        left = [self._ranks[pid] for pid in living]
        if not left or not all(rank.joins and not rank.is_ended for rank in left):
            return
        store = self._store(rendezvous)
        asked = set() if store is None else Reception(store).invited()
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
        said = describe_end(
            rank.number,
            self._size,
            f"process {rank.process.pid}",
            code,
            rank.tail,
            self._signal,
        )
        sys.stderr.write(f"commrt.run: {said}{others}\n")
        sys.stderr.flush()

    def _forward(self, number: int, frame: FrameType | None) -> None:
        """Give a signal to all ranks; runs between two steps of the main thread."""
        if number in ENDING:
            self._signal = self._signal or number
            signal.setitimer(signal.ITIMER_REAL, max(self._grace_s, 1e-3))
        for rank in self._ranks.values():
            send_signal(rank.process, number)

    def _end(self, living: set[int]) -> None:
        """Tell ranks to end, and end them if they do not."""
        for pid in living:
            send_signal(self._ranks[pid].process, signal.SIGTERM)
        signal.setitimer(signal.ITIMER_REAL, max(self._grace_s, 1e-3))

    def _kill(self, *_: object) -> None:
        """End all ranks, and what they have started."""
        for rank in self._ranks.values():
            end_group(rank.process)


def _environment(size: int) -> dict[str, str]:
    """Return the variables that all ranks have in common."""
    environ = child_environment(sys.executable)
    cores = len(os.sched_getaffinity(0))
    environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // size)))
    port = free_port()
    if port is None:
        raise SystemExit(f"commrt.run: {NO_PORT}")
    environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    return environ


if __name__ == "__main__":
    sys.exit(until_reader_leaves(main))
