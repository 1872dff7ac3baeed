# SPDX-License-Identifier: Apache-2.0
"""Recording a part of a program: ``record()``, ``start()`` and ``stop()``."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from commrt.errors import UsageError
from commrt.trace.folder import Folder
from commrt.trace.log import Log, Span, logs_of
from commrt.trace.recorder import now, recorder
from commrt.trace.traced import Traced
from commrt.trace.volumes import Volume

if TYPE_CHECKING:
    import torch.distributed as dist

__all__ = ["Recording", "label", "record", "start", "stop"]


class Recording:
    """A recording of the calls of this process's ranks, from its start to its end."""

    def __init__(self, folder: str | os.PathLike[str] | None = None) -> None:
        """Begin. ``folder``: where the logs are written at the end; None: nowhere."""
        to = recorder()
        self._folder = None if folder is None else Folder(folder, to)
        self._pid = os.getpid()
        self._span = Span(now(), to.num_made)
        if self._folder is not None:
            self._folder.span = self._span
            to.failures.append(self._folder.failed)
        to.begin()

    def stop(self) -> None:
        """End, and write the logs where there is a folder. Idempotent.

        In a forked process it does nothing: the recording is the parent's.
        """
        if self._span.until_ns is not None or self._pid != os.getpid():
            return
        to = recorder()
        self._span.until_ns, self._span.num_until = now(), to.num_made
        to.end()
        if self._folder is not None:
            if self._folder.failed in to.failures:
                to.failures.remove(self._folder.failed)
            self._folder.keep()

    def logs(self) -> list[Log]:
        """Return a log for each rank of this process that has called something."""
        return logs_of(recorder(), self._span)

    def log(self) -> Log:
        """Return this rank's log so far.

        Raises UsageError where nothing was called, and where ranks are threads of this
        process: ``logs()`` has all of them.
        """
        logs = self.logs()
        if len(logs) != 1:
            raise UsageError(
                f"log(): {len(logs)} ranks of this process have called something "
                f"since the recording began; expected one: use logs()"
            )
        return logs[0]

    def volume(
        self, by: Sequence[str] = ("dimension", "op")
    ) -> dict[tuple[str, ...], Volume]:
        """Return calls and bytes so far, by some of ``commrt.trace.log.KEYS``."""
        logs = self.logs()
        return logs[0].volume(by) if len(logs) == 1 else self.log().volume(by)


_STARTED: list[Recording] = []


@contextmanager
def record(folder: str | os.PathLike[str] | None = None) -> Iterator[Recording]:
    """Record all that is called within the context, on this rank.

    Communicators and process groups that exist already are recorded, too. For files of
    all ranks that can be joined, let all ranks begin between the same operations.

    Args:
        folder: where to write the logs at the end; None: only in memory.
    """
    recording = Recording(folder)
    try:
        yield recording
    finally:
        recording.stop()


def start(folder: str | os.PathLike[str] | None = None) -> Recording:
    """Record until ``stop()``, as ``record()`` does."""
    recording = Recording(folder)
    _STARTED.append(recording)
    return recording


def stop() -> Recording:
    """End the recording that the latest ``start()`` began, and return it."""
    if not _STARTED:
        raise UsageError(
            "commrt.trace.stop(): nothing was started with start(): call start() first"
        )
    recording = _STARTED.pop()
    recording.stop()
    return recording


def label(group: Traced | dist.ProcessGroup, dimension: str) -> None:
    """Say which parallel dimension a communicator or process group is, as in "tp".

    Groups of a DeviceMesh with named dimensions have their names by themselves. It
    counts for all logs that are written from now on.
    """
    recorder().label(group, dimension)
