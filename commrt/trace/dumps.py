# SPDX-License-Identifier: Apache-2.0
"""Dumps: files of each rank's last operations, for a job that hangs or fails.

    COMMRT_DUMP=dumps torchrun --nproc-per-node 2 train.py
    python -m commrt analyze dumps

The engine keeps the last operations of each communicator anyway. With COMMRT_DUMP a
rank writes them when an operation times out, when ranks' calls differ, when a peer has
died, when an exception or a signal ends the process, and at SIGUSR1. At a fault it asks
the other ranks, and a thread of theirs writes, too (native/engine/flight_files.hpp).
Without it, ``commrt.trace.dump(folder)`` writes them when the program wants it.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import socket
import sys
import threading
import time
import weakref
from functools import lru_cache
from pathlib import Path
from types import TracebackType
from typing import Any

from commrt import _native, env
from commrt.errors import UsageError, shown
from commrt.group import faults
from commrt.job.world import World

__all__ = ["dump"]

_MOST_TEXT = 4000
"""Most characters of a fault's text in a file."""
_MOST_EVENTS = 8
"""Most faults that a file tells; the first ones say most."""
_LEAST_PAUSE_S = 1.0
"""Between two writings because of faults: a program may try again and again."""
_LONGEST_WAIT_S = 0.5
"""For the files of others: they take milliseconds."""


def dump(folder: str | os.PathLike[str]) -> list[Path]:
    """Write the last operations of this process's ranks into a folder, which is made.

    Returns the files: one for each world of the process, which most programs have one
    of. UsageError where the folder cannot be made, OSError where a file cannot be
    written.
    """
    made = _made(folder)
    paths = []
    for world in faults.worlds():
        path = _path(made, world)
        _write(world, path, _facts(world, ()), "request", "commrt.trace.dump()")
        paths.append(path)
    return paths


def _made(folder: str | os.PathLike[str]) -> Path:
    try:
        path = Path(os.fsdecode(folder)).absolute()
        str(path).encode()  # the engine writes UTF-8
        path.mkdir(parents=True, exist_ok=True)
    except (TypeError, ValueError, OSError) as error:
        said = getattr(error, "strerror", None) or error
        raise UsageError(
            f"the folder {shown(folder)} for dumps cannot be made: {said}; name one "
            f"that this process may write to"
        ) from error
    return path


def _path(folder: Path, world: World) -> Path:
    return folder / f"dump-{world.job or 'job'}-rank{world.rank}.json"


def _facts(world: World, events: tuple[dict[str, Any], ...]) -> str:
    """Return the fields of a file that say whose it is, as the engine takes them."""
    facts = {
        "job": world.job,
        "rank": world.rank,
        "size": world.size,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "events": [*events],
    }
    return json.dumps(facts)[1:-1]


def _write(world: World, path: Path, facts: str, reason: str, message: str) -> None:
    text = message.encode("utf-8", "replace").decode()[:_MOST_TEXT]
    _native.write_flight(
        world.engine, world.number, os.fspath(path), facts, reason, text
    )


class _Asked:
    """Writes the dumps that COMMRT_DUMP asks for."""

    def __init__(self) -> None:
        self._pid = 0
        self._folder: Path | None = None
        self._events: dict[int, list[dict[str, Any]]] = {}
        self._written_s: dict[int, float] = {}
        self._warned = False
        self._lock = threading.RLock()
        self._hook: Any = None

    def began(self, world: World) -> None:
        """Keep a file ready for a world, for signals, too."""
        with self._lock:
            if self._pid != os.getpid():
                path = env.read_str("COMMRT_DUMP")
                self._folder = None if path is None else _made(path)
                self._pid = os.getpid()
            if self._folder is None:
                return
            path_of = _path(self._folder, world)
            _native.keep_flight(world.number, os.fspath(path_of), _facts(world, ()))
            weakref.finalize(world, _native.forget_flight, world.number)
            _native.write_flight_at_signals()
            if world.size > 1 and not world.in_process:
                bells = None if world.bells is None else world.bells.native
                _native.write_flight_when_asked(bells)
                _finish_at_exit()
            if self._hook is None:
                self._hook, sys.excepthook = sys.excepthook, self._raised

    def failed(self, world: World, reason: str, message: str) -> None:
        """Write what led to a fault."""
        folder = self._folder
        if folder is None or self._pid != os.getpid():
            return
        with self._lock:
            events = self._events.setdefault(world.number, [])
            if len(events) < _MOST_EVENTS:
                told = {"reason": reason, "message": message[:_MOST_TEXT]}
                events.append({**told, "time_ns": time.time_ns()})
            now = time.monotonic()
            if now - self._written_s.get(world.number, -_LEAST_PAUSE_S) < (
                _LEAST_PAUSE_S
            ):
                return
            path, facts = _path(folder, world), _facts(world, (*events,))
            # A signal that comes later tells of the faults before it, too.
            _native.keep_flight(world.number, os.fspath(path), facts)
            try:
                _write(world, path, facts, reason, message)
            except OSError as error:  # the fault's own error is what matters
                self._warn(path, error)
            self._written_s[world.number] = time.monotonic()
            self._ask_others(world)

    def _ask_others(self, world: World) -> None:
        """Have the other ranks of the job write, too, whatever their programs do.

        Those of this node have written when this returns, but for one that is stopped.
        """
        if world.in_process:
            others = [each for each in faults.worlds() if each.job == world.job]
            for each in others:
                self._write_asked(each, world.rank)
            return
        if world.relay is not None:
            world.relay.ask_for_dumps()
        if world.inquiries is not None:
            here = world.beside(world.rank)
            away = [rank for rank in range(world.size) if rank not in here]
            world.inquiries.ask_for_dumps(away)
        if world.bells is not None:
            living = [
                member
                for rank, member in world.bells.member_of.items()
                if rank != world.rank and _may_write(world, rank)
            ]
            limit_s = _LONGEST_WAIT_S
            _native.ask_for_flights(world.bells.native, living, world.rank, limit_s)

    def _write_asked(self, world: World, by: int) -> None:
        """Write for a rank that is a thread of this process, unless it just has."""
        now, then = time.monotonic(), self._written_s.get(world.number)
        if self._folder is None or (then is not None and now - then < _LEAST_PAUSE_S):
            return
        path, facts = _path(self._folder, world), _facts(world, ())
        with contextlib.suppress(OSError):
            _write(world, path, facts, "asked", f"rank {by} of the job asked for it")

    def _warn(self, path: Path, error: OSError) -> None:
        if not self._warned:
            said = error.strerror or error
            sys.stderr.write(f"commrt: no dump is written to {path}: {said}\n")
        self._warned = True

    def _raised(
        self,
        kind: type[BaseException],
        error: BaseException,
        traceback: TracebackType | None,
    ) -> None:
        """Write before an exception ends the process, or the whole job."""
        self._written_s.clear()
        for world in faults.worlds():
            self.failed(world, "exception", f"{kind.__name__}: {error}")
        self._hook(kind, error, traceback)


def _may_write(world: World, rank: int) -> bool:
    """Return whether a rank of this node would answer."""
    if world.liveness is None:
        return True
    native = world.liveness.native
    return not (native.how(rank) or native.is_stopped(rank))


@lru_cache(maxsize=1)
def _finish_at_exit() -> None:
    """Let the end of the process wait for a file that is half written."""
    atexit.register(_native.finish_flights)


faults.add_watcher(_Asked())
