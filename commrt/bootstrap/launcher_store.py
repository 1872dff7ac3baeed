# SPDX-License-Identifier: Apache-2.0
"""A store that the launcher keeps, for ranks of several hosts: no torch, MPI or port.

On each host a process of ``commrt.run`` listens at a socket in a folder that only its
user may enter. It passes questions on to the launcher through the remote shell. The
methods are those of a torch Store that ``StoreBootstrap`` uses.
"""

from __future__ import annotations

import os
import socket
import struct
import threading
from collections.abc import Sequence
from typing import Any

from commrt import env
from commrt.bootstrap.base import poll_until
from commrt.bootstrap.directory import DirectoryStore
from commrt.bootstrap.kept_values import pack, socket_in, unpack
from commrt.bootstrap.torch_store import tcp_store
from commrt.errors import BackendError

__all__ = ["LauncherStore", "store_of_run"]

_LENGTH = struct.Struct("!I")
_PORT = "commrt/torch/port"
_HOSTED: dict[str, tuple[int, Any]] = {}
"""torch's store of each job of this process, and the process that has made it."""


def store_of_run(folder: str, size: int, rank: int) -> DirectoryStore | LauncherStore:
    """Return the store in which ranks of ``commrt.run`` meet, by COMMRT_MEETING.

    ``rank`` is this process's, or below 0 for one that is no rank yet.
    """
    if socket_in(folder).is_socket():
        return LauncherStore(folder, size, rank)
    return DirectoryStore(folder, size)


class LauncherStore:
    """Keys and values in the launcher's memory; threads may share one."""

    def __init__(self, folder: str, size: int, rank: int) -> None:
        self._folder, self._size, self._rank = folder, size, rank
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._owner = 0

    def set(self, key: str, value: bytes | str) -> None:
        """Write a value."""
        self._ask(b"set", key.encode(), _as_bytes(value))

    def get(self, key: str) -> bytes:
        """Return a value that is there."""
        return self._ask(b"get", key.encode())

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all keys have values."""
        return self._ask(b"check", *(key.encode() for key in keys)) == b"1"

    def add(self, key: str, amount: int) -> int:
        """Add to a counter that begins at 0; return what it is then."""
        return int(self._ask(b"add", key.encode(), b"%d" % amount))

    def compare_set(
        self, key: str, expected: bytes | str, desired: bytes | str
    ) -> bytes:
        """Write ``desired`` if the value is ``expected``, "" where there is none.

        Return the value then.
        """
        words = key.encode(), _as_bytes(expected), _as_bytes(desired)
        return self._ask(b"compare_set", *words)

    def delete_key(self, key: str) -> bool:
        """Forget a value; return whether it was there."""
        return self._ask(b"delete", key.encode()) == b"1"

    def for_torch(self, purpose: str) -> Any:
        """Return a store of torch, which rank 0 hosts; one part for each purpose.

        torch's gloo takes no store that is written in Python.
        """
        from torch.distributed import PrefixStore

        return PrefixStore(purpose, self._hosted_by_rank_0())

    def _hosted_by_rank_0(self) -> Any:
        limit_s = env.read_float("COMMRT_TIMEOUT_S")
        host, hosts = os.environ.get("MASTER_ADDR", ""), self._rank == 0
        found = _HOSTED.get(self._folder)
        if found is None or found[0] != os.getpid():
            port = 0
            if not hosts:
                if not poll_until(lambda: self.check([_PORT]), limit_s):
                    raise BackendError(
                        f"rank 0 has said no port of its store of torch within "
                        f"{limit_s:g} s; look whether it runs, and has torch"
                    )
                port = int(self.get(_PORT))
            source = "MASTER_ADDR is the first host of --hosts, or as --interface says"
            where = host, port
            made = tcp_store(where, self._rank, self._size, hosts, limit_s, source)
            if hosts:
                self.set(_PORT, str(made.port))
            found = _HOSTED[self._folder] = os.getpid(), made
        return found[1]

    def _ask(self, *words: bytes) -> bytes:
        text = pack(words)
        with self._lock:
            try:
                made = self._connected()
                made.sendall(_LENGTH.pack(len(text)) + text)
                (length,) = _LENGTH.unpack(_received(made, _LENGTH.size))
                said = unpack(_received(made, length))
            except BaseException as error:
                # Also by Ctrl-C: an answer that comes later is none to what is asked
                # next.
                if self._socket is not None:
                    self._socket.close()
                    self._socket = None
                if not isinstance(error, OSError):
                    raise
                raise BackendError(
                    f"the process of commrt.run on this host does not answer "
                    f"({error.strerror or error}): it has ended, and no rank can make "
                    f"a communicator any more. Start the job again"
                ) from error
        if said[0] != b"ok":
            raise BackendError(
                f"commrt.run's store has no answer to "
                f"{b' '.join(words[:2]).decode(errors='replace')!r}"
            )
        return said[1]

    def _connected(self) -> socket.socket:
        """Return this process's own connection: a copy of a fork's is not used."""
        if self._socket is None or self._owner != os.getpid():
            made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            # By a descriptor, since a socket's path has 107 characters at most.
            folder = os.open(self._folder, os.O_PATH | os.O_DIRECTORY)
            try:
                made.connect(f"/proc/self/fd/{folder}/{socket_in('.').name}")
            except OSError:
                made.close()
                raise
            finally:
                os.close(folder)
            self._socket, self._owner = made, os.getpid()
        return self._socket


def _as_bytes(value: bytes | str) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


def _received(source: socket.socket, nbytes: int) -> bytes:
    found = bytearray()
    while len(found) < nbytes:
        piece = source.recv(nbytes - len(found))
        if not piece:
            raise ConnectionResetError("the connection was closed")
        found += piece
    return bytes(found)
