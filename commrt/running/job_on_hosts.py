# SPDX-License-Identifier: Apache-2.0
"""A job of ``commrt.run --hosts``: ranks on several hosts, from start to end.

Nothing starts before each host has answered. When a rank fails or a host is lost, the
others are ended. The launcher keeps the values by which the ranks meet.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from types import FrameType
from typing import Any

from commrt.bootstrap.kept_values import KeptValues
from commrt.bootstrap.launcher_words import ENDED, text_of
from commrt.errors import BackendError
from commrt.running.agent import ALIVE_EVERY_S
from commrt.running.endings import KEPT_NBYTES, describe_end, status_of_job
from commrt.running.frames import Kind
from commrt.running.hosts import Host
from commrt.running.processes import ENDING, FORWARDED
from commrt.running.remote import Event, Remote, Shell

__all__ = ["JobOnHosts", "Launch"]

_LAST_S = 10.0
"""Seconds beside their grace in which ranks are said to have ended."""
_LOST = 1
"""The exit status where a host is lost."""


@dataclass(frozen=True)
class Launch:
    """Ranks to start on each host, and how."""

    command: Sequence[str]
    """Arguments of the interpreter."""
    environ: Mapping[str, str]
    """Variables that ranks get beside those of their host."""
    prefix: bool
    bind: bool
    grace_s: float
    keep_going: bool


@dataclass
class _Rank:
    """A rank, as far as the launcher knows it."""

    number: int
    host: Host
    process: int = 0
    tail: bytes = b""
    code: int | None = None
    """How it has ended; None while it runs."""
    why_lost: str = ""
    """Why the launcher knows nothing of it any more."""
    begun: dict[Kind, bytes] = field(default_factory=dict)
    """Lines that are not whole yet, with ``--prefix``."""


class JobOnHosts:
    """The ranks of one launch on several hosts."""

    def __init__(self, hosts: Sequence[Host], shell: Shell, launch: Launch) -> None:
        self._hosts, self._shell, self._launch = hosts, shell, launch
        self._ranks = {n: _Rank(n, host) for host in hosts for n in host.ranks}
        self._events: SimpleQueue[Any] = SimpleQueue()
        self._values = KeptValues()
        self._remotes: dict[int, Remote] = {}
        self._alive_at = 0.0
        self._signal = 0
        """The first one that told this job to end."""
        self._told_until: float | None = None
        """When the hosts that have not said that their ranks have ended are left."""
        self._failed: list[_Rank] = []

    def run(self) -> int:
        """Start the ranks, and wait for their end; return the exit status.

        Raises BackendError where a host does not answer.
        """
        before = {one: signal.signal(one, self._forward) for one in FORWARDED}
        try:
            for host in self._hosts:
                self._remotes[host.number] = Remote(
                    host, self._shell, self._values, self._events, sys.stderr.buffer
                )
            places = self._meet_hosts()
            if not self._signal:
                self._start(places)
                self._wait()
            return self._status()
        finally:
            for remote in self._remotes.values():
                remote.leave()
            for remote in self._remotes.values():
                remote.end(self._launch.grace_s)
            for one, handler in before.items():
                signal.signal(one, handler)

    def _next(self) -> Event | int | None:
        """Return what comes next: of a host, or a signal; None: nothing did soon."""
        if time.monotonic() - self._alive_at > ALIVE_EVERY_S:
            self._alive_at = time.monotonic()
            for remote in self._remotes.values():
                remote.send(Kind.ALIVE)
        left = ALIVE_EVERY_S
        if self._told_until is not None:
            left = min(left, max(0.0, self._told_until - time.monotonic()))
        try:
            found: Event | int = self._events.get(timeout=left)
        except Empty:
            return None
        return found

    def _meet_hosts(self) -> dict[int, Any]:
        """Return what each host has said when it answered."""
        places: dict[int, Any] = {}
        while len(places) < len(self._hosts) and not self._signal:
            event = self._next()
            if isinstance(event, int):
                self._note(event)
            elif event is not None:
                if event.kind != Kind.PLACE:
                    raise BackendError(
                        f"{self._why_lost(event)}; no rank was started. Look whether "
                        f"{self._try(event.host)} works, without a question, and "
                        f"prints nothing else"
                    )
                places[event.host.number] = event.json
        return places

    def _try(self, host: Host) -> str:
        shell = " ".join([*self._shell.command, host.name])
        return f"{shell} '{self._shell.python} -c \"import commrt\"'"

    def _why_lost(self, event: Event) -> str:
        said = event.data.decode(errors="replace")
        if event.kind == Kind.FAILED:
            return f"host {event.host.name}: {said}"
        remote = self._remotes[event.host.number]
        why = said or f"the remote shell has ended ({remote.why_ended()})"
        return f"host {event.host.name} is lost: {why}"

    def _start(self, places: Mapping[int, Any]) -> None:
        first = places[0]
        told = {
            "MASTER_ADDR": first["address"] or self._hosts[0].address,
            "MASTER_PORT": str(first["port"]),
            **(
                {"GLOO_SOCKET_IFNAME": self._shell.interface}
                if first["address"]
                else {}
            ),
            **self._launch.environ,
        }
        for host in self._hosts:
            said = {
                "ranks": [host.ranks.start, host.ranks.stop],
                "size": len(self._ranks),
                "host": host.number,
                "folder": os.getcwd(),
                "command": [*self._launch.command],
                "environ": told,
                "bind": self._launch.bind,
                "grace_s": self._launch.grace_s,
            }
            text = json.dumps(said).encode()
            self._remotes[host.number].send(Kind.START, data=text)

    def _living(self) -> list[_Rank]:
        return [one for one in self._ranks.values() if one.code is None]

    def _wait(self) -> None:
        """Do what ranks and signals ask for, until all ranks have ended."""
        while self._living():
            event = self._next()
            if isinstance(event, int):
                self._note(event)
                for remote in self._remotes.values():
                    remote.send(Kind.END if event in ENDING else Kind.SIGNAL, event)
            elif event is not None:
                self._take(event)
            elif self._told_until is not None and time.monotonic() >= self._told_until:
                for rank in self._living():
                    self._lose(rank, "it does not say that its ranks have ended")

    def _take(self, event: Event) -> None:
        """Take in what a host says."""
        if event.kind in (Kind.OUT, Kind.ERR):
            self._print(self._ranks[event.number], event.kind, event.data)
        elif event.kind == Kind.STARTED:
            for number, process in event.json.items():
                self._ranks[int(number)].process = process
        elif event.kind == Kind.ENDED:
            self._end_of(self._ranks[event.number], int(event.data))
        elif event.kind in (Kind.FAILED, None):
            lost = [one for one in self._living() if one.host is event.host]
            why = self._why_lost(event) if lost else ""
            for rank in lost:
                self._lose(rank, why)

    def _lose(self, rank: _Rank, why: str) -> None:
        rank.why_lost = why
        self._end_of(rank, -signal.SIGKILL)

    def _end_of(self, rank: _Rank, code: int) -> None:
        rank.code = code
        ended = {
            one.number: f"process {one.process} on {one.host.name}"
            for one in self._ranks.values()
            if one.code is not None
        }
        self._values.set(ENDED, text_of(ended))
        for kind in [*rank.begun]:
            self._print(rank, kind, b"\n")
        if code == 0:
            return
        self._failed.append(rank)
        if self._launch.keep_going and not self._signal:
            self._report(rank, "; the others go on" if self._living() else "")
        elif len(self._failed) == 1 and not self._signal:
            self._told_until = time.monotonic() + self._launch.grace_s + _LAST_S
            for remote in self._remotes.values():
                remote.send(Kind.END, signal.SIGTERM)

    def _note(self, number: int) -> None:
        """Take in that a signal has come."""
        if number in ENDING:
            self._signal = self._signal or number
            self._told_until = time.monotonic() + self._launch.grace_s + _LAST_S

    def _status(self) -> int:
        if self._signal and not self._failed:
            return 0 if self._ranks and not self._living() else 128 + self._signal
        if self._failed and not (self._launch.keep_going and not self._signal):
            others = "; the others were ended" if len(self._ranks) > 1 else ""
            self._report(self._failed[0], others)
            if self._failed[0].why_lost and not self._signal:
                return _LOST
        return status_of_job(
            [one.code or 0 for one in self._failed],
            len(self._ranks),
            forgives_kills=self._launch.keep_going and not self._signal,
        )

    def _report(self, rank: _Rank, others: str) -> None:
        said = f"{rank.why_lost}; with it rank {rank.number} of {len(self._ranks)}"
        if not rank.why_lost:
            said = describe_end(
                rank.number,
                len(self._ranks),
                f"process {rank.process} on {rank.host.name}",
                rank.code or 0,
                rank.tail,
                self._signal,
            )
        sys.stderr.write(f"commrt.run: {said}{others}\n")
        sys.stderr.flush()

    def _print(self, rank: _Rank, kind: Kind, piece: bytes) -> None:
        """Print what a rank has printed: pieces, or whole lines behind its number."""
        if kind == Kind.ERR:
            rank.tail = (rank.tail + piece)[-KEPT_NBYTES:]
        if self._launch.prefix:
            whole, end, rest = (rank.begun.pop(kind, b"") + piece).rpartition(b"\n")
            if rest:
                rank.begun[kind] = rest
            lines = whole.split(b"\n") if end else []
            piece = b"".join(b"[%d] %s\n" % (rank.number, line) for line in lines)
        to = (sys.stdout if kind == Kind.OUT else sys.stderr).buffer
        with contextlib.suppress(OSError, ValueError):
            to.write(piece)
            to.flush()

    def _forward(self, number: int, frame: FrameType | None) -> None:
        """Note a signal; runs between two steps of the main thread."""
        self._events.put(number)
