# SPDX-License-Identifier: Apache-2.0
"""Ranks that MPI started: keyed messages on a private communicator.

Every member sends its blob to every other member. That is size² small messages in
all, and in return each member knows exactly who is missing when time runs out.
Nothing blocks inside MPI: nonblocking calls, polled from Python.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Sequence
from typing import Any

from commrt.bootstrap.base import Keys, poll_until, timed_out
from commrt.errors import TimeoutError_

__all__ = ["TAG", "MpiBootstrap"]

TAG = 7
"""The one tag used on the private communicator."""

_HEADER = struct.Struct("<I")


class MpiBootstrap:
    """Exchanges blobs over a private duplicate of an mpi4py communicator.

    ``comm`` is that duplicate: code below the public interface may send on it with
    other tags than ``TAG``.
    """

    def __init__(self, mpi_comm: Any, timeout_s: float) -> None:
        """Collective over ``mpi_comm``."""
        from mpi4py import MPI

        self._mpi = MPI
        self.given = mpi_comm
        self.rank: int = mpi_comm.Get_rank()
        self.size: int = mpi_comm.Get_size()
        self.comm = self._duplicate(mpi_comm, timeout_s)
        self.idle: Callable[[], object] | None = None
        self._keys = Keys(self.rank, self.size)
        self._lock = threading.Lock()
        self._arrived: dict[tuple[str, int], bytes] = {}
        self._receiving: list[tuple[Any, int, bytearray]] = []

    def exchange(
        self, members: Sequence[int], key: str, blob: bytes, timeout_s: float
    ) -> list[bytes]:
        """Give ``blob`` to all members; return everybody's, in members' order."""
        wire_key = self._keys.unique(members, key)
        blob = bytes(blob)
        others = [member for member in members if member != self.rank]
        message = _pack(wire_key, blob)
        with self._lock:
            sends = {peer: self._send(message, peer) for peer in others}

        def met() -> bool:
            with self._lock:
                self._progress()
                for peer in [peer for peer, send in sends.items() if send.Test()]:
                    del sends[peer]
                return not sends and all((wire_key, r) in self._arrived for r in others)

        if not poll_until(met, timeout_s, self.idle):
            # A request nobody will test again would let go of its buffer too early.
            self._abandoned.extend((send, message) for send in sends.values())
            absent = [r for r in others if (wire_key, r) not in self._arrived]
            raise timed_out(self.rank, members, key, absent or list(sends), timeout_s)
        blobs = {peer: self._arrived.pop((wire_key, peer)) for peer in others}
        return [blobs.get(member, blob) for member in members]

    def close(self) -> None:
        """Free the private communicator, if MPI still runs."""
        if self.comm and not self._mpi.Is_finalized():
            self.comm.Free()

    def _duplicate(self, mpi_comm: Any, timeout_s: float) -> Any:
        self._abandoned: list[tuple[Any, Any]] = []
        comm, request = mpi_comm.Idup()
        if not poll_until(request.Test, timeout_s):
            self._abandoned.append((request, comm))
            raise TimeoutError_(
                f"rank {self.rank} of {self.size}: not every rank of "
                f"{mpi_comm.Get_name() or 'the communicator'} called commrt.init() "
                f"within {timeout_s:g} s; it is collective. Look for an error or an "
                f"early exit on the other ranks."
            )
        comm.Set_errhandler(self._mpi.ERRORS_RETURN)
        comm.Set_name("commrt bootstrap")
        return comm

    def _send(self, message: bytes, peer: int) -> Any:
        return self.comm.Isend([message, self._mpi.BYTE], dest=peer, tag=TAG)

    def _progress(self) -> None:
        """Start every receive that is there, and park every message that is done."""
        status = self._mpi.Status()
        while True:
            message = self.comm.Improbe(tag=TAG, status=status)
            if message is None:
                break
            buffer = bytearray(status.Get_count(self._mpi.BYTE))
            request = message.Irecv([buffer, self._mpi.BYTE])
            self._receiving.append((request, status.Get_source(), buffer))
        waiting = []
        for request, source, buffer in self._receiving:
            if request.Test():
                wire_key, blob = _unpack(buffer)
                self._arrived[wire_key, source] = blob
            else:
                waiting.append((request, source, buffer))
        self._receiving = waiting


def _pack(wire_key: str, blob: bytes) -> bytes:
    name = wire_key.encode()
    return _HEADER.pack(len(name)) + name + blob


def _unpack(message: bytearray) -> tuple[str, bytes]:
    (length,) = _HEADER.unpack_from(message)
    start = _HEADER.size
    name = bytes(message[start : start + length]).decode()
    return name, bytes(message[start + length :])
