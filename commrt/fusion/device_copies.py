# SPDX-License-Identifier: Apache-2.0
"""Copies of arrays on a device into one buffer, and of its parts back to the arrays.

If the device has kernels, one launch moves up to sixteen arrays, as in a halo exchange
(``kernels/boxes.py``); else each array is copied. Two streams do that: one gathers, in
front of collectives, and the other one puts back, behind them. So the next bucket is
gathered while the one before is on its way.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from commrt.arrays.host import HostView
from commrt.devices.arrays import DeviceStream
from commrt.errors import CommError
from commrt.kernels.boxes import MOST_ARRAYS, BoxKind, BoxTable, move_table
from commrt.schedule.boxes import Box
from commrt.vocabulary.dtypes import ReduceOp

__all__ = ["Block", "BucketCopies", "Part", "PooledEvent", "ring_nbytes"]

_RELAXED = 2
"""Calls of a thread in this mode end no capture."""
_ALIGNED = 256
_ROUND = 4
"""Buckets in a ring: what is gathered, combined and put back, and one to spare."""
_MOST_AHEAD_NBYTES = 64 << 20
"""Most bytes of a ring, unless one bucket is longer."""
_TABLES = 64
_TABLE_NBYTES = 4096
"""Bytes of a table of sixteen boxes, rounded up."""

_Placed = tuple[BoxTable, int]
"""A table, and the address of its copy on the device."""


def ring_nbytes(nbytes: int) -> int:
    """Return the length of the ring for buckets of so many bytes."""
    most = max(nbytes, min(_ROUND * nbytes, _MOST_AHEAD_NBYTES))
    return -(-most // _ALIGNED) * _ALIGNED


class PooledEvent:
    """An event, which is given back when nobody needs it any more."""

    def __init__(self, pool: EventPool) -> None:
        self._pool = pool
        self.handle = pool.take()

    def __del__(self) -> None:
        if hasattr(self, "handle"):
            self._pool.give(self.handle)


class EventPool:
    """Events of a device that wait to be used again."""

    def __init__(self, device: Any) -> None:
        self._device = device
        self._events: list[int] = []
        self._is_closed = False

    def take(self) -> int:
        """Return an event."""
        try:
            return self._events.pop()
        except IndexError:
            return int(self._device.event_create())

    def give(self, event: int) -> None:
        """Take it back; after ``close`` nobody would use it again."""
        if not self._is_closed:
            self._events.append(event)
            return
        with suppress(CommError):  # the device may be gone
            self._device.event_destroy(event)

    def close(self) -> None:
        """Destroy what is here, and what comes back later."""
        self._is_closed = True
        while self._events:
            self._device.event_destroy(self._events.pop())

    def __len__(self) -> int:
        return len(self._events)


@dataclass(frozen=True)
class Part:
    """The arrays of one call."""

    x: HostView
    """The input of the buffer."""
    out: HostView
    """The output of that part of the result."""
    reduction: ReduceOp
    """Reduction, the same for all parts of a bucket."""
    stream: int
    """Stream of the caller."""
    ready: PooledEvent
    """Event behind the work that this stream held when the call was made."""


@dataclass(eq=False)
class Block:
    """Memory for a bucket."""

    address: int
    """Address of the first byte."""
    nbytes: int
    """Its length."""
    after: list[PooledEvent]
    """Events after which earlier buckets no longer use this memory."""
    end: PooledEvent | None = None
    """Event after which this bucket no longer uses it; None until the device has been
    given all of the bucket's work."""


class BlockRing:
    """Memory of the device for buckets, in the order in which they are sent.

    A bucket that comes round to the memory of another one waits for its end, on the
    device. An allocation may wait for all work of the device, so memory is allocated
    ahead.
    """

    def __init__(self, device: Any) -> None:
        self._device = device
        self._memory: list[int] = []
        self._address, self._head = 0, 0
        self._uses: deque[Block] = deque()
        self.nbytes = 0
        """Bytes of the ring. Memory of a shorter ring before stays while buckets use
        it."""

    def reserve(self, nbytes: int) -> None:
        """Have so much."""
        if nbytes <= self.nbytes:
            return
        self._address = int(self._device.alloc(nbytes))
        self._memory.append(self._address)
        self.nbytes, self._head = nbytes, 0
        self._uses.clear()

    def take(self, nbytes: int) -> Block:
        """Return memory for a bucket."""
        length = -(-max(1, nbytes) // _ALIGNED) * _ALIGNED
        if length > self.nbytes:
            self.reserve(ring_nbytes(length))
        before = self._uses_of(length)
        if any(each.end is None for each in before):  # nothing to wait for, as yet
            self.reserve(2 * self.nbytes)
            before = []
        for each in before:
            self._uses.remove(each)
        at = self._place(length)
        ends = [each.end for each in before if each.end is not None]
        block = Block(self._address + at, length, ends)
        self._uses.append(block)
        self._head = at + length
        return block

    def _place(self, length: int) -> int:
        return self._head if self._head + length <= self.nbytes else 0

    def _uses_of(self, length: int) -> list[Block]:
        """Return the buckets that have parts of what comes next."""
        low = self._address + self._place(length)
        return [
            each
            for each in self._uses
            if each.address < low + length and low < each.address + each.nbytes
        ]

    def close(self) -> None:
        """Free all; idempotent."""
        self._uses.clear()
        self.nbytes = 0
        while self._memory:
            self._device.free(self._memory.pop())


class _Tables:
    """Tables of launches in the device's memory, one for each row of lengths.

    A program that makes the same calls again finds them here. Where there is no room
    for another one, it is not made.
    """

    def __init__(self, device: Any) -> None:
        self._device = device
        self._placed: dict[tuple[int, ...], _Placed] = {}
        self._address = int(device.alloc(_TABLES * _TABLE_NBYTES))
        self._pinned = int(device.pinned_alloc(_TABLES * _TABLE_NBYTES))

    def make_room(self, stream: int) -> None:
        """Forget all if there is no room; no launch that uses them is under way."""
        if len(self._placed) < _TABLES:
            return
        # Another thread may have seen the end of the launches.
        self._device.stream_synchronize(stream)
        self._placed.clear()

    def find(self, lengths: tuple[int, ...], stream: int) -> _Placed | None:
        """Return the table for arrays of so many bytes; ``stream`` copies a new one."""
        found = self._placed.get(lengths)
        if found is not None or len(self._placed) >= _TABLES:
            return found
        boxes = [Box(i, (0,), (nbytes,)) for i, nbytes in enumerate(lengths)]
        table = move_table(boxes, [(1,)] * len(boxes), [1] * len(boxes))
        assert len(table.content) <= _TABLE_NBYTES
        at = len(self._placed) * _TABLE_NBYTES
        self._device.write(self._pinned + at, table.content)
        self._device.memcpy_async(
            self._address + at, self._pinned + at, len(table.content), stream
        )
        self._placed[lengths] = table, self._address + at
        return self._placed[lengths]

    def existing(self, lengths: tuple[int, ...]) -> _Placed | None:
        """Return the table if it is here."""
        return self._placed.get(lengths)

    def close(self) -> None:
        """Free the memory; idempotent."""
        address, self._address = self._address, 0
        if address:
            self._device.free(address)
            self._device.pinned_free(self._pinned)


class BucketCopies:
    """Gathers and puts back on one device."""

    def __init__(self, device: Any) -> None:
        """Make streams and memory for tables, which may wait for the device."""
        self.device = device
        self.events = EventPool(device)
        self.blocks = BlockRing(device)
        self._tables: _Tables | None = None
        with self.outside_captures():
            self.gathers, self.puts_back = DeviceStream(device), DeviceStream(device)
            if getattr(device, "why_no_kernels", None) is None:
                self._tables = _Tables(device)

    def reserve(self, nbytes: int) -> None:
        """Have memory for buckets of so many bytes; mostly there is."""
        most = ring_nbytes(min(nbytes, _MOST_AHEAD_NBYTES))
        if most > self.blocks.nbytes:
            with self.outside_captures():
                self.blocks.reserve(most)

    def note(self, stream: int) -> PooledEvent:
        """Return an event behind the work that a stream holds by now."""
        noted = PooledEvent(self.events)
        self.device.event_record(noted.handle, stream)
        return noted

    def has_come(self, noted: PooledEvent) -> bool:
        """Return whether the device has come there."""
        with self.outside_captures():
            return bool(self.device.event_query(noted.handle))

    @contextlib.contextmanager
    def outside_captures(self) -> Iterator[None]:
        """Let this thread's calls to the device end no capture of its streams."""
        before = self.device.exchange_capture_mode(_RELAXED)
        try:
            yield
        finally:
            self.device.exchange_capture_mode(before)

    def gather(self, parts: Sequence[Part], block: Block, *, is_idle: bool) -> None:
        """Copy the arrays into the block, as they are where their calls were made.

        ``is_idle``: nothing that was gathered before is under way.
        """
        stream = self.gathers.handle
        if is_idle and self._tables is not None:
            self._tables.make_room(stream)
        self._await_block(block)
        self._await_calls(parts)
        self._move(BoxKind.PACK, [each.x for each in parts], block, stream)

    def _await_block(self, block: Block) -> None:
        for each in block.after:
            self._follow(each)
        block.after.clear()

    def _await_calls(self, parts: Sequence[Part]) -> None:
        """Wait for the last call of each stream: those before come before it."""
        for ready in {each.stream: each.ready for each in parts}.values():
            self._follow(ready)

    def _follow(self, event: PooledEvent) -> None:
        self.device.stream_wait_event(self.gathers.handle, event.handle)

    def put_back(self, outs: Sequence[HostView], block: Block) -> PooledEvent:
        """Copy the parts of the block to the outputs; return when that is done."""
        stream = self.puts_back.handle
        self._move(BoxKind.UNPACK, outs, block, stream)
        return self.note(stream)

    def _move(
        self, kind: BoxKind, arrays: Sequence[HostView], block: Block, stream: int
    ) -> None:
        arrays = [each for each in arrays if each.nbytes]
        at = block.address
        for first in range(0, len(arrays), MOST_ARRAYS):
            some = arrays[first : first + MOST_ARRAYS]
            placed = self._table(kind, tuple(each.nbytes for each in some), stream)
            if placed is None:
                self._copy(kind, some, at, stream)
            else:
                table, where = placed
                addresses = [each.address for each in some]
                table.launch(self.device, kind, at, addresses, where, stream)
            at += sum(each.nbytes for each in some)

    def _table(
        self, kind: BoxKind, lengths: tuple[int, ...], stream: int
    ) -> _Placed | None:
        if self._tables is None or len(lengths) == 1:
            return None
        if kind is BoxKind.PACK:
            return self._tables.find(lengths, stream)
        return self._tables.existing(lengths)  # its gather has looked for it

    def _copy(
        self, kind: BoxKind, arrays: Sequence[HostView], at: int, stream: int
    ) -> None:
        for each in arrays:
            pair = (at, each.address) if kind is BoxKind.PACK else (each.address, at)
            self.device.memcpy_async(*pair, each.nbytes, stream)
            at += each.nbytes

    def close(self) -> None:
        """Give everything back; nothing may be under way."""
        self.blocks.close()
        if self._tables is not None:
            self._tables.close()
        for stream in (self.gathers, self.puts_back):
            stream.destroy()
        self.events.close()
