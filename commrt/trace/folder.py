# SPDX-License-Identifier: Apache-2.0
"""Logs in a folder: begun by COMMRT_TRACE, kept at the end and where a call fails.

Each rank has a log, ``trace-JOB-rankN.jsonl``, and the latest of it as torch's flight
recorder has it, ``flight-JOB/rank_N``. They are written when torch's process group is
destroyed, when the process ends, before an uncaught exception ends it, and as soon as a
call fails: what waits for ever is then in the file.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from commrt import env
from commrt.errors import UsageError, shown
from commrt.trace.flight_recorder import write_flight
from commrt.trace.log import Log, Span, logs_of, write_log
from commrt.trace.recorder import Recorder, recorder

__all__ = ["Folder", "begin_where_asked", "keep_files"]

_LEAST_PAUSE_S = 1.0
"""Between two writings because of failures."""


class Folder:
    """The folder of a recording's logs."""

    def __init__(self, path: str | os.PathLike[str], to: Recorder) -> None:
        """Make the folder; UsageError where it cannot be."""
        try:
            self.path = Path(os.fsdecode(path))
            os.fsencode(self.path)
        except (TypeError, ValueError) as error:
            raise UsageError(
                f"folder={shown(path)} for logs is no path: {error}"
            ) from error
        self.span = Span()
        self._to = to
        self._error = ""
        self._kept_s = 0.0
        self._writes = threading.RLock()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except (OSError, ValueError) as error:  # ValueError: a null character
            said = getattr(error, "strerror", None) or error
            raise UsageError(
                f"the folder {self.path} for logs cannot be made: {said}"
            ) from error

    def keep(self) -> list[Log]:
        """Write the logs of this process's ranks; return them."""
        with self._writes:  # calls of two threads may fail at the same time
            logs = logs_of(self._to, self.span)
            for log in logs:
                log.error = self._error
                write_log(log, self.path / f"trace-{log.job}-rank{log.rank}.jsonl")
                write_flight(log, self.path / f"flight-{log.job}")
            self._kept_s = time.monotonic()
            return logs

    def failed(self, said: str) -> None:
        """Keep the logs with what a call has failed with."""
        self._error = self._error or said
        if time.monotonic() - self._kept_s > _LEAST_PAUSE_S:
            with suppress(OSError):  # the call's own error is what matters
                self.keep()


class _Asked:
    """The folder of COMMRT_TRACE, once it was looked for."""

    def __init__(self) -> None:
        self.pid = 0
        self.folder: Folder | None = None
        self.hook: Any = None


_ASKED = _Asked()


def begin_where_asked() -> None:
    """Begin to record if COMMRT_TRACE says so; the first communicator asks."""
    if _ASKED.pid == os.getpid():
        return
    path = env.read_str("COMMRT_TRACE")
    if path is None:
        _ASKED.pid, _ASKED.folder = os.getpid(), None
        return
    folder = Folder(path, recorder())
    recorder().begin(int(env.read_float("COMMRT_TRACE_RECORDS")))
    recorder().failures.append(folder.failed)
    # Not before: what could not begin is said to each communicator.
    _ASKED.pid, _ASKED.folder = os.getpid(), folder
    if _ASKED.hook is None:
        atexit.register(keep_files)
        _ASKED.hook, sys.excepthook = sys.excepthook, _keep_and_show


def keep_files() -> None:
    """Write the logs that COMMRT_TRACE asks for."""
    folder = _ASKED.folder
    if folder is None or _ASKED.pid != os.getpid():
        return
    try:
        folder.keep()
    except OSError as error:
        sys.stderr.write(f"commrt: logs are not written to {folder.path}: {error}\n")


def _keep_and_show(
    kind: type[BaseException],
    error: BaseException,
    traceback: TracebackType | None,
) -> None:
    """Write the logs before an exception ends the process, or the whole job."""
    if _ASKED.folder is not None and _ASKED.pid == os.getpid():
        _ASKED.folder.failed(f"{kind.__name__}: {error}")
    _ASKED.hook(kind, error, traceback)
