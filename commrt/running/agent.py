# SPDX-License-Identifier: Apache-2.0
"""``python -m commrt.running.agent``: the process of ``commrt.run --hosts`` on a host.

A remote shell starts it. It reads frames from its input, and writes frames to its
output: it starts ranks, passes on what they print and what they ask the launcher's
store, and says how they end. No rank outlives it, and it does not outlive its input.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from commrt.bootstrap.kept_values import socket_in
from commrt.errors import CommError
from commrt.launch.mpiexec import child_environment
from commrt.running.cores import shares_of_cores
from commrt.running.folders import meeting_folder
from commrt.running.frames import HELLO, Frames, Kind, frame
from commrt.running.processes import (
    NO_PORT,
    end_group,
    free_port,
    send_signal,
    start_bound_to_this,
    variables_of_rank,
)
from commrt.tcp.addresses import address_of_interface

__all__ = ["ALIVE_EVERY_S", "main"]

ALIVE_EVERY_S = 5.0
"""Each side says so often that it is there, where it has nothing else to say."""
_READ_NBYTES = 1 << 16
_MOST_WAITING_NBYTES = 1 << 20
"""With so much to write, ranks have to wait with what they print."""
_LENGTH_NBYTES = 4
_HEARD = selectors.EVENT_READ


def main(argv: Sequence[str] | None = None) -> int:
    """Serve the launcher to its end; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m commrt.running.agent")
    parser.add_argument("--interface")
    parser.add_argument("--silence", type=float, required=True)
    said = parser.parse_args(argv)
    # Nothing that this process prints may come between frames.
    output = os.dup(1)
    os.dup2(2, 1)
    # A terminal's signals are the launcher's, which passes them on.
    for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    with meeting_folder() as folder:
        agent = _Agent(folder, output, said.silence)
        try:
            return agent.serve(said.interface)
        finally:
            agent.close()


@dataclass
class _Rank:
    """A rank that runs, or has run."""

    number: int
    process: subprocess.Popen[bytes]
    pipes: dict[int, Kind] = field(default_factory=dict)
    """Descriptors by which it prints, while they are open."""


@dataclass
class _Client:
    """A rank's connection with the store."""

    socket: socket.socket
    heard: bytearray = field(default_factory=bytearray)


class _Agent:
    """The ranks of this host, from their start to their end."""

    def __init__(self, folder: str, output: int, silence_s: float) -> None:
        self._folder, self._output, self._silence_s = folder, output, silence_s
        self._selector = selectors.DefaultSelector()
        self._frames = Frames()
        self._to_send = bytearray(HELLO)
        self._ranks: list[_Rank] = []
        self._num_living = 0
        self._clients: dict[int, _Client] = {}
        self._num_clients = 0
        self._grace_s = 0.0
        self._kill_at: float | None = None
        self._is_over = False
        """True once the launcher is gone, or wants no more."""
        self._paused: list[tuple[int, Callable[[], None]]] = []
        os.set_blocking(output, False)
        os.set_blocking(0, False)
        self._watch(0, self._hear)
        # A signal that comes between a look and a sleep wakes the sleeper by this.
        self._woken, waker = socket.socketpair()
        self._waker = waker
        waker.setblocking(False)
        self._woken.setblocking(False)
        signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.signal(signal.SIGTERM, self._stop)
        self._watch(self._woken.fileno(), self._look_at_ranks)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        inside = os.open(folder, os.O_PATH | os.O_DIRECTORY)
        try:
            name = f"/proc/self/fd/{inside}/{socket_in('.').name}"
            self._listener.bind(name)
        finally:
            os.close(inside)
        self._listener.listen(128)
        self._listener.setblocking(False)
        self._watch(self._listener.fileno(), self._accept)

    def serve(self, interface: str | None) -> int:
        """Do what the launcher asks for, until it wants no more or is gone."""
        self._say_place(interface)
        heard_at = said_at = time.monotonic()
        while not self._is_over or self._to_send:
            now = time.monotonic()
            if now - said_at > ALIVE_EVERY_S and not self._is_over:
                self._send(Kind.ALIVE)
                said_at = now
            if self._kill_at is not None and now >= self._kill_at:
                self._kill()
                self._kill_at = None
            until = min(said_at + ALIVE_EVERY_S, self._kill_at or now + ALIVE_EVERY_S)
            found = self._selector.select(max(0.0, until - now) + 1e-3)
            for key, _ in found:
                if key.fd == 0:
                    heard_at = time.monotonic()
                now_there = self._selector.get_map().get(key.fd)
                # A handler before it in this list may have read it to its end.
                if now_there is not None and now_there.data is key.data:
                    key.data()
            if time.monotonic() - heard_at > self._silence_s:
                return 1  # nobody is there any more; the ranks end with this process
        return 0

    def close(self) -> None:
        """End all ranks, and what they have started."""
        self._kill()
        for rank in self._ranks:
            rank.process.wait()

    def _stop(self, *_: object) -> None:
        self._is_over = True
        self._to_send.clear()

    def _watch(self, descriptor: int, do: Callable[[], None]) -> None:
        self._selector.register(descriptor, _HEARD, do)

    def _send(self, kind: Kind, number: int = 0, data: bytes = b"") -> None:
        self._to_send += frame(kind, number, data)
        self._flush()

    def _flush(self) -> None:
        """Write what can be written now."""
        try:
            while self._to_send:
                sent = os.write(self._output, self._to_send[:_READ_NBYTES])
                del self._to_send[:sent]
        except BlockingIOError:
            if self._output not in self._selector.get_map():
                self._selector.register(
                    self._output, selectors.EVENT_WRITE, self._flush
                )
        except OSError:
            self._stop()
        if not self._to_send:
            if self._output in self._selector.get_map():
                self._selector.unregister(self._output)
            for descriptor, do in self._paused:
                self._watch(descriptor, do)
            self._paused.clear()

    def _say_place(self, interface: str | None) -> None:
        try:
            address = address_of_interface(interface) if interface else ""
        except CommError as error:
            return self._send(Kind.FAILED, data=f"--interface: {error}".encode())
        port = free_port()
        if port is None:
            return self._send(Kind.FAILED, data=NO_PORT.encode())
        name = socket.gethostname()
        place = {"address": address, "port": port, "host": name, "process": os.getpid()}
        return self._send(Kind.PLACE, data=json.dumps(place).encode())

    def _hear(self) -> None:
        """Read what the launcher says."""
        try:
            piece = os.read(0, _READ_NBYTES)
        except BlockingIOError:
            return
        if not piece:
            self._stop()
            return
        for kind, number, data in self._frames.feed(piece):
            if kind == Kind.START:
                self._start(json.loads(data))
            elif kind == Kind.SIGNAL:
                for rank in self._ranks:
                    send_signal(rank.process, number)
            elif kind == Kind.END:
                for rank in self._ranks:
                    send_signal(rank.process, number)
                self._kill_at = time.monotonic() + self._grace_s
            elif kind == Kind.ANSWER and number in self._clients:
                self._answer(number, data)

    def _start(self, said: Mapping[str, Any]) -> None:
        """Start the ranks of this host."""
        self._grace_s = said["grace_s"]
        try:
            os.chdir(said["folder"])
        except OSError as error:
            why = f"no folder {said['folder']} to run in: {error.strerror}"
            return self._send(Kind.FAILED, data=why.encode())
        begin, end = said["ranks"]
        environ = child_environment(sys.executable)
        count = max(1, len(os.sched_getaffinity(0)) // (end - begin))
        environ = {"OMP_NUM_THREADS": str(count), **environ, **said["environ"]}
        cores = shares_of_cores(end - begin) if said["bind"] else None
        for local, number in enumerate(range(begin, end)):
            own = variables_of_rank(
                number,
                said["size"],
                local,
                end - begin,
                said["host"],
                self._folder,
            )
            process = start_bound_to_this(
                [sys.executable, *said["command"]],
                {**environ, **own},
                cores=() if cores is None else cores[local],
            )
            rank = _Rank(number, process)
            self._ranks.append(rank)
            self._num_living += 1
            for pipe, kind in (process.stdout, Kind.OUT), (process.stderr, Kind.ERR):
                assert pipe is not None
                os.set_blocking(pipe.fileno(), False)
                rank.pipes[pipe.fileno()] = kind
                self._watch(pipe.fileno(), self._printer(rank, pipe.fileno()))
        pids = {str(rank.number): rank.process.pid for rank in self._ranks}
        return self._send(Kind.STARTED, data=json.dumps(pids).encode())

    def _printer(self, rank: _Rank, pipe: int) -> Callable[[], None]:
        def pass_on() -> None:
            if len(self._to_send) > _MOST_WAITING_NBYTES:
                self._selector.unregister(pipe)
                self._paused.append((pipe, pass_on))
                return
            self._pass_on(rank, pipe)

        return pass_on

    def _pass_on(self, rank: _Rank, pipe: int) -> bool:
        """Send a piece of what a rank has printed; return whether there was one."""
        try:
            piece = os.read(pipe, _READ_NBYTES)
        except BlockingIOError:
            return False
        if not piece:
            self._paused = [one for one in self._paused if one[0] != pipe]
            if pipe in self._selector.get_map():
                self._selector.unregister(pipe)
            del rank.pipes[pipe]
            return False
        self._send(rank.pipes[pipe], rank.number, piece)
        return True

    def _look_at_ranks(self) -> None:
        """Say which ranks have ended, and what they have printed before."""
        with contextlib.suppress(BlockingIOError):
            while self._woken.recv(_READ_NBYTES):
                pass
        for rank in self._ranks:
            if rank.process.returncode is None and rank.process.poll() is not None:
                for pipe in [*rank.pipes]:
                    # A process that it has started may print on and on.
                    for _ in range(2 * _MOST_WAITING_NBYTES // _READ_NBYTES):
                        if not self._pass_on(rank, pipe):
                            break
                code = str(rank.process.returncode)
                self._num_living -= 1
                self._send(Kind.ENDED, rank.number, code.encode())

    def _kill(self) -> None:
        for rank in self._ranks:
            end_group(rank.process)

    def _accept(self) -> None:
        try:
            made, _ = self._listener.accept()
        except OSError:
            return
        number = self._num_clients
        self._num_clients += 1
        self._clients[number] = _Client(made)
        self._watch(made.fileno(), lambda: self._ask(number))

    def _ask(self, number: int) -> None:
        """Pass a question of a rank on to the launcher's store."""
        client = self._clients.get(number)
        if client is None:  # an answer has found it gone
            return
        try:
            piece = client.socket.recv(_READ_NBYTES)
        except OSError:
            piece = b""
        if not piece:
            self._drop(number)
            return
        client.heard += piece
        while len(client.heard) >= _LENGTH_NBYTES:
            end = _LENGTH_NBYTES + int.from_bytes(client.heard[:_LENGTH_NBYTES], "big")
            if len(client.heard) < end:
                return
            self._send(Kind.ASK, number, bytes(client.heard[_LENGTH_NBYTES:end]))
            del client.heard[:end]

    def _answer(self, number: int, data: bytes) -> None:
        try:
            # The rank waits for it, and so reads it.
            length = len(data).to_bytes(_LENGTH_NBYTES, "big")
            self._clients[number].socket.sendall(length + data)
        except OSError:
            self._drop(number)

    def _drop(self, number: int) -> None:
        client = self._clients.pop(number)
        self._selector.unregister(client.socket)
        client.socket.close()


if __name__ == "__main__":
    sys.exit(main())
