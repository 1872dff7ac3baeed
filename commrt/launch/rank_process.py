# SPDX-License-Identifier: Apache-2.0
"""Tell a rank from the processes that it starts.

A child inherits the variables by which a launcher tells a rank who it is. If it took
them for its own, two processes would be the same rank. So a rank marks its environment
with its own process and with what the launcher calls it. A process that finds the same
names beside another process is a child. One that was started by a launcher of its own,
within a rank, finds other names.

A child may come to ``init`` before its parent has marked anything. Then the parent is
recognised by what it has: the same names, and an MPI library or commrt's engine. A
shell or another program that starts the rank has neither.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import re
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path

from commrt import env
from commrt.errors import UsageError

__all__ = [
    "MPI_SOURCES",
    "VARIABLE",
    "Inherited",
    "Process",
    "inherited",
    "is_running",
    "mark_rank",
]

VARIABLE = "COMMRT_RANK_PROCESS"

_SAID_BY_HAND = ("COMMRT_LAUNCH", "COMMRT_JOIN")
"""A process that a rank starts with one of these is what they say."""
_DESCRIPTOR = "PMI_FD"

_NAMES: dict[str, tuple[str, ...]] = {
    "Open MPI": (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "PMIX_NAMESPACE",
        "PMIX_RANK",
    ),
    "MPICH or Intel MPI": ("PMI_RANK", "PMI_SIZE", "PMI_PORT", "PMI_ID", _DESCRIPTOR),
    "MVAPICH": (
        "MV2_COMM_WORLD_RANK",
        "MV2_COMM_WORLD_SIZE",
        "PMI_PORT",
        "PMI_ID",
        _DESCRIPTOR,
    ),
    "PMIx": ("PMIX_NAMESPACE", "PMIX_RANK"),
    # Whoever starts ranks within one leaves the folder, and sets the other names anew.
    "commrt.run": ("COMMRT_MEETING",),
    "torchrun": (
        "MASTER_ADDR",
        "MASTER_PORT",
        "TORCHELASTIC_RUN_ID",
        "TORCHELASTIC_RESTART_COUNT",
        "RANK",
        "WORLD_SIZE",
    ),
    "Slurm": ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_PROCID"),
}
"""The variables that name one rank of one launch, by whose they are."""

MPI_SOURCES = ("Open MPI", "MPICH or Intel MPI", "MVAPICH", "PMIx")
"""Those of ``_NAMES`` whose ranks start MPI."""

_LIBMPI = re.compile(r"/libmpi(ch|_[a-z]+)?(-\w+)?\.so")
_ENGINE = re.compile(r"/commrt/_native[\w.-]*\.so")
_STATE, _PPID, _START = 0, 1, 19
"""Places in /proc/PID/stat, counted behind the name of the program."""


class Process:
    """A process of this machine, as /proc shows it; what cannot be read is empty."""

    def __init__(self, pid: int, proc: Path = Path("/proc")) -> None:
        self.pid = pid
        self._proc = proc
        self._folder = proc / str(pid)

    @property
    def name(self) -> str:
        """Its number and its start, which no other process of this boot has both."""
        stat = self._stat()  # once: it may end between two looks
        return f"{self.pid}-{stat[_START]}" if stat else ""

    @property
    def parent(self) -> Process | None:
        """The process that started it, if it can be seen."""
        stat = self._stat()
        pid = int(stat[_PPID]) if stat else 0
        return Process(pid, self._proc) if pid > 0 else None

    @property
    def runs(self) -> bool:
        """True if it runs; a process that has ended does not, waited for or not."""
        stat = self._stat()
        return bool(stat) and stat[_STATE] not in ("Z", "X")

    def ancestors(self) -> Iterator[Process]:
        """Yield its parent, the parent of that, and so on."""
        process = self.parent
        while process is not None:
            yield process
            process = process.parent

    def environ(self) -> dict[str, str]:
        """Return the variables that it was started with."""
        text = os.fsdecode(self._read("environ"))
        pairs = (entry.partition("=") for entry in text.split("\0"))
        return {name: value for name, equals, value in pairs if equals}

    def descriptor(self, number: str) -> str:
        """Return what an open descriptor leads to, as in ``socket:[4711]``."""
        try:
            return os.readlink(self._folder / "fd" / number)
        except OSError:
            return ""

    def maps(self, files: re.Pattern[str]) -> bool:
        """Return whether a file of that name is loaded in it."""
        return files.search(os.fsdecode(self._read("maps"))) is not None

    def _stat(self) -> list[str]:
        # The program's name, in parentheses, may contain anything.
        return os.fsdecode(self._read("stat")).rpartition(")")[2].split()

    def _read(self, file: str) -> bytes:
        try:
            return (self._folder / file).read_bytes()
        except OSError:
            return b""


def is_running(name: str) -> bool:
    """Return whether the process of that ``Process.name`` runs on this machine."""
    process = Process(int(name.partition("-")[0]))
    return process.name == name and process.runs


@dataclass(frozen=True)
class Inherited:
    """Why a launcher's variables are those of another process."""

    words: str
    """The words of messages for that process."""
    is_certain: bool = True
    """False if the other one may still leave the rank to this process."""


def mark_rank(environ: MutableMapping[str, str] | None = None) -> None:
    """Note in the environment that this process is the rank that launchers name.

    Children inherit the note. Nothing is noted where no launcher names a rank.
    """
    environ = os.environ if environ is None else environ
    me = Process(os.getpid())
    names = {source: _identity(source, environ, me) for source in _NAMES}
    named = {source: names[source] for source in names if names[source]}
    if named:
        environ[VARIABLE] = json.dumps({"process": me.name, **named})


def inherited(
    source: str, environ: Mapping[str, str], me: Process | None = None
) -> Inherited | None:
    """Return why the variables of ``source`` are another process's; else None.

    ``me`` is the process that asks, this one unless it is given.
    """
    me = Process(os.getpid()) if me is None else me
    mine = _identity(source, environ, me)
    marked = _marked(environ)
    rank = marked.get("process", "")
    if rank and rank == me.name:
        return None
    if mine and marked.get(source) == mine:
        return Inherited(f"process {rank.partition('-')[0]} is that rank")
    descriptor = environ.get(_DESCRIPTOR, "")
    if _DESCRIPTOR in _NAMES[source] and descriptor and not _is_open(descriptor, me):
        return Inherited(
            f"the connection to its launcher ({_DESCRIPTOR}={descriptor}) is not open "
            f"here"
        )
    for ancestor in me.ancestors():
        if _identity(source, ancestor.environ(), ancestor) != mine:
            return None
        if source in MPI_SOURCES and ancestor.maps(_LIBMPI):
            return Inherited(f"process {ancestor.pid} has the same rank, and uses MPI")
        if ancestor.maps(_ENGINE):
            return Inherited(
                f"process {ancestor.pid} has the same rank, and has imported commrt",
                is_certain=multiprocessing.parent_process() is not None,
            )
    return None


def _is_open(descriptor: str, of: Process) -> bool:
    return of.descriptor(descriptor).startswith("socket:")


def _identity(source: str, environ: Mapping[str, str], of: Process) -> str:
    """Return what a launcher calls a process; empty where it calls it nothing.

    A descriptor counts by what it leads to, as its number may be the same in another
    launch. What is said by hand belongs to it, so a child that sets it is heard.
    """
    values = [environ.get(name, "") for name in _NAMES[source]]
    if not any(values):
        return ""
    if _DESCRIPTOR in _NAMES[source]:
        at = _NAMES[source].index(_DESCRIPTOR)
        values[at] = of.descriptor(values[at]) if values[at] else ""
    return "|".join([*values, *(environ.get(name, "") for name in _SAID_BY_HAND)])


def _marked(environ: Mapping[str, str]) -> dict[str, str]:
    text = env.value(VARIABLE, environ)
    if text is None:
        return {}
    try:
        said = json.loads(text)
        return {str(name): str(value) for name, value in said.items()}
    except (ValueError, AttributeError, RecursionError):
        raise UsageError(
            f"{VARIABLE}={text!r} is not what commrt sets for the processes that a "
            f"rank starts: unset it"
        ) from None
