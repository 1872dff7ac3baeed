# SPDX-License-Identifier: Apache-2.0
"""Dumps: files of each rank's last operations, for a job that hangs or fails.

    COMMRT_DUMP=dumps torchrun --nproc-per-node 2 train.py
    python -m commrt analyze dumps

The engine keeps the last operations of each communicator anyway. With COMMRT_DUMP a
rank writes them when an operation times out, when ranks' calls differ, when a peer has
died, when an exception or a signal ends the process, and at SIGUSR1. Without it,
``commrt.trace.dump(folder)`` writes them when the program wants it.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
import weakref
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


faults.add_watcher(_Asked())
