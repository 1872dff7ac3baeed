# SPDX-License-Identifier: Apache-2.0
"""Exchange memory of ranks that share a node or a device, opened by CUDA IPC.

Each rank allocates one block on its device: flags, and two halves for what it
publishes. All others open it, once, so that a call exchanges nothing.

Ranks connect together, and what they share ends without waiting for anybody
(``peer_sharing``): a rank leaves, once its streams have run all that they were given,
and says so in host memory that all of them have. A block is freed only when nobody has
it open any more.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from commrt import _native
from commrt.errors import BackendError, ClosedError, UsageError
from commrt.job.arena import Arena

__all__ = ["HALF_NBYTES", "PeerMemory"]

HALF_NBYTES = 32 << 20
"""Most bytes that a rank publishes at once; longer operations go in parts."""
_LINE_NBYTES = 64
_LEFT = 1


class PeerMemory:
    """One rank's block, and where it has those of the others."""

    def __init__(
        self,
        device: Any,
        rank: int,
        size: int,
        half_nbytes: int = HALF_NBYTES,
        name: str = "ipc",
        first_value: int = 0,
    ) -> None:
        """Allocate this rank's block and set its flags to ``first_value``."""
        if half_nbytes < 1 or half_nbytes % _LINE_NBYTES:
            raise UsageError(
                f"{name}: half_nbytes={half_nbytes} must be a multiple of 64 above 0"
            )
        if not device.memory_flags:
            raise BackendError(
                f"{name}: streams of {device!r} do not write flags or wait for them, "
                f"which peers' kernels are ordered by; use the staged backend"
            )
        self.device, self.rank, self.size, self.name = device, rank, size, name
        self.half_nbytes, self._first_value = half_nbytes, first_value
        self._opened: dict[int, int] = {}
        self._exchange: _native.PeerExchange | None = None
        self._book: Arena | None = None
        self._has_left = False
        flags = _native.peer_exchange_flags_nbytes(size)
        self.memory = device.alloc(flags + 2 * half_nbytes)
        stream = device.stream_create()
        for at in range(0, flags, _LINE_NBYTES):
            device.write_value32(stream, self.memory + at, first_value)
        device.stream_synchronize(stream)
        device.stream_destroy(stream)
        handle, offset = device.ipc_export(self.memory)
        self.handle = json.dumps([handle.hex(), offset])
        """The handle by which peers open it."""

    def open(self, handles: Sequence[str], book: Arena) -> None:
        """Open what all ranks have exported, in rank order.

        ``book`` is memory of the host that all ranks have mapped, a region for each.
        """
        self._book = book
        places: list[int] = []
        for peer, text in enumerate(handles):
            if peer == self.rank:
                places.append(self.memory)
                continue
            handle, offset = json.loads(text)
            self._opened[peer] = self.device.ipc_open(bytes.fromhex(handle))
            places.append(self._opened[peer] + offset)
        self._exchange = _native.make_peer_exchange(
            self.device, self.rank, places, self.half_nbytes
        )
        self._exchange.count_from(self._first_value)

    @property
    def exchange(self) -> _native.PeerExchange:
        """The engine's exchange; ClosedError where there is none (any more)."""
        if self._exchange is None:
            raise ClosedError(
                f"{self.name}: its exchange memory on the device was closed: make a "
                f"new communicator"
            )
        return self._exchange

    def end_unused(self) -> None:
        """Give back what the device has of an exchange that nothing was given to."""
        if self._exchange is not None:
            self._exchange.end()
            self._exchange = None

    def leave(self) -> None:
        """Close what this rank has open, and say so; idempotent.

        Whatever used it has run, and has given back what the device had of it.
        """
        if self._has_left:
            return
        self._exchange = None
        while self._opened:
            _, base = self._opened.popitem()
            self.device.ipc_close(base)
        self._say_left()

    def forget(self) -> None:
        """Let a device that has failed keep everything: nothing runs there any more.

        The others need not wait for this rank.
        """
        self._exchange = None
        self._opened.clear()
        self.memory = 0
        self._say_left()

    def free(self) -> bool:
        """Free the block, if all have left; return whether it is free. Idempotent."""
        if not self._all_have_left():
            return False
        if self.memory:
            self.device.free(self.memory)
            self.memory = 0
        if self._book is not None:
            self._book.close()
            self._book = None
        return True

    def _say_left(self) -> None:
        self._has_left = True
        if self._book is not None:
            _native.book_store(self._line(self.rank), _LEFT)

    def _all_have_left(self) -> bool:
        if self._book is None:  # nobody was told of it, or it is free already
            return True
        lines = range(self.size)
        return all(_native.book_load(self._line(rank)) == _LEFT for rank in lines)

    def _line(self, rank: int) -> int:
        assert self._book is not None
        return self._book.address + rank * self._book.region_nbytes
