# SPDX-License-Identifier: Apache-2.0
"""The launcher's end of a remote shell, behind which ranks of a host run."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import shlex
import shutil
import subprocess
import threading
from dataclasses import dataclass
from queue import SimpleQueue
from typing import IO, Any

from commrt.bootstrap.kept_values import KeptValues
from commrt.errors import BackendError, UsageError
from commrt.launch.mpiexec import last_words
from commrt.running.endings import KEPT_NBYTES
from commrt.running.frames import HELLO, Frames, Kind, frame
from commrt.running.hosts import Host
from commrt.running.processes import end_group, start_bound_to_this

__all__ = ["Event", "Remote", "Shell"]

_READ_NBYTES = 1 << 16
_MOST_WORDS_NBYTES = 1 << 16
"""A shell may print so much before the host's process says hello."""
_LAST_S = 5.0
"""Seconds in which a shell that is told to end does."""


@dataclass(frozen=True)
class Shell:
    """How to start a program on a host."""

    command: tuple[str, ...]
    """The remote shell, in front of the host's name and one word for the command."""
    python: str
    """The interpreter on each host."""
    interface: str | None
    silence_s: float
    """A host that says nothing for so long is lost."""

    @classmethod
    def of(
        cls, text: str, python: str, interface: str | None, silence_s: float
    ) -> Shell:
        """Return the shell that a user names; raise UsageError where there is none."""
        try:
            words = shlex.split(text)
        except ValueError as error:
            raise UsageError(f"--ssh {text!r}: {error}") from error
        found = shutil.which(words[0]) if words else None
        if found is None:
            raise UsageError(
                f"--ssh {text!r}: there is no such program; install an ssh client, or "
                f"name another remote shell that takes a host and a command"
            )
        return cls((found, *words[1:]), python, interface, silence_s)

    def line(self) -> str:
        """Return the command for the host. It says nothing that is secret."""
        words = [self.python, "-m", "commrt.running.agent"]
        words += ["--silence", f"{self.silence_s:g}"]
        if self.interface:
            words += ["--interface", self.interface]
        return f"exec {shlex.join(words)}"


@dataclass(frozen=True)
class Event:
    """A frame of a host, or the end of its shell (``kind`` None)."""

    host: Host
    kind: Kind | None
    number: int = 0
    data: bytes = b""

    @property
    def json(self) -> Any:
        """The data, where they are JSON."""
        return json.loads(self.data)


class Remote:
    """A remote shell: frames of the host become events, in the order of their coming.

    Questions to the store are answered at once.
    """

    def __init__(
        self,
        host: Host,
        shell: Shell,
        values: KeptValues,
        events: SimpleQueue[Any],
        errors: IO[bytes],
    ) -> None:
        self.host = host
        self._values, self._events, self._errors = values, events, errors
        self._silence_s = shell.silence_s
        self._tail = b""
        self._to_write: SimpleQueue[bytes | None] = SimpleQueue()
        self._has_begun = False
        self._process = start_bound_to_this(
            [*shell.command, host.name, shell.line()],
            os.environ,
            stdin=subprocess.PIPE,
        )
        self._threads = [
            threading.Thread(target=do, daemon=True)
            for do in (self._read, self._write, self._copy_errors)
        ]
        for thread in self._threads:
            thread.start()

    def send(self, kind: Kind, number: int = 0, data: bytes = b"") -> None:
        """Send a frame; wait for nothing."""
        self._to_write.put(frame(kind, number, data))

    def leave(self) -> None:
        """Want no more of the host: its process ends what is left there."""
        self._to_write.put(None)

    def end(self, limit_s: float) -> None:
        """Wait until the shell has ended, and end it where it does not."""
        self.leave()
        try:
            self._process.wait(limit_s)
        except subprocess.TimeoutExpired:
            end_group(self._process)
            self._process.wait()

    def why_ended(self) -> str:
        """Return why the shell has ended, as far as it has said."""
        try:
            code = self._process.wait(_LAST_S)
        except subprocess.TimeoutExpired:
            return "it closed its output"
        self._threads[-1].join(_LAST_S)
        how = f"exit status {code}" if code >= 0 else f"signal {-code}"
        words = last_words(self._tail.decode(errors="replace"))
        return f"{how}{f': {words}' if words else ''}"

    def _read(self) -> None:
        """Turn what comes into events, and into answers of the store."""
        source = self._process.stdout
        assert source is not None
        lost = ""
        try:
            self._read_frames(source.fileno())
        except (BackendError, OSError, ValueError) as error:
            lost = str(error)
        self._events.put(Event(self.host, None, data=lost.encode()))

    def _read_frames(self, source: int) -> None:
        frames, words = Frames(), b""
        with selectors.DefaultSelector() as selector:
            selector.register(source, selectors.EVENT_READ)
            ended = os.pidfd_open(self._process.pid)
            selector.register(ended, selectors.EVENT_READ)
            try:
                while True:
                    found = {key.fd for key, _ in selector.select(self._silence_s)}
                    if not found:
                        raise BackendError(
                            f"it has said nothing for {self._silence_s:g} s"
                        )
                    if source not in found:
                        return  # the shell has ended, whoever holds its output
                    piece = os.read(source, _READ_NBYTES)
                    if not piece:
                        return
                    if not self._has_begun:
                        words += piece
                        before, hello, piece = words.partition(HELLO)
                        if not hello:
                            if len(words) > _MOST_WORDS_NBYTES:
                                raise ValueError("it prints other things than frames")
                            continue
                        self._has_begun = True
                        self._print(before)
                    for kind, number, data in frames.feed(piece):
                        if kind == Kind.ASK:
                            said = self._values.answer(data)
                            self.send(Kind.ANSWER, number, said)
                        elif kind != Kind.ALIVE:
                            self._events.put(Event(self.host, kind, number, data))
            finally:
                os.close(ended)

    def _write(self) -> None:
        target = self._process.stdin
        assert target is not None
        with contextlib.suppress(OSError, ValueError), target:
            while (piece := self._to_write.get()) is not None:
                target.write(piece)
                target.flush()

    def _copy_errors(self) -> None:
        source = self._process.stderr
        assert source is not None
        with source:
            while piece := os.read(source.fileno(), _READ_NBYTES):
                self._tail = (self._tail + piece)[-KEPT_NBYTES:]
                self._print(piece)

    def _print(self, words: bytes) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._errors.write(words)
            self._errors.flush()
