# SPDX-License-Identifier: Apache-2.0
"""Symmetric buffers: arrays in memory that every rank of the node has mapped.

``comm.empty`` is collective over the node's ranks and gives each of them an array of
the same length. Long collectives then read and write the peers' arrays in place, where
they otherwise copy through shared slots (native/engine/symmetric.cpp).

The heap consists of segments, each with a part for every rank. All ranks make the same
requests in the same order, so each keeps the books of the whole heap by itself.
Dropping an array is local: its owner mentions it at the next ``empty``, and once every
rank has done so its slot may be given out again.
"""

from __future__ import annotations

import json
import math
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from commrt.bootstrap.base import Bootstrap
from commrt.errors import (
    BackendError,
    MismatchError,
    RefusedError,
    UsageError,
    shown,
)
from commrt.job.arena import Arena
from commrt.job.memory_limit import memory_limit_nbytes
from commrt.vocabulary.checks import as_integer, as_items

__all__ = ["Slot", "Slots", "SymmetricHeap", "as_array", "parse_request"]

_ALIGN_NBYTES = 4096
_MOST_DIMS = 64
_MOST_ELEMENTS = 2**62
_SEGMENT_NBYTES = 2 << 20
"""Segments are multiples of it: the size of a huge page."""


@dataclass(frozen=True)
class Slot:
    """A piece of every rank's part of a segment."""

    number: int
    """Counts slots since the heap was made; never used again."""
    segment: int
    offset: int
    """Bytes from the start of each part."""
    nbytes: int


class Slots:
    """The books of a heap: which pieces of which segments are taken.

    Every rank keeps the same books. Pieces are given out best fit first, the lowest of
    equals.
    """

    def __init__(self) -> None:
        self._free: list[tuple[int, int, int]] = []  # segment, offset, nbytes; ordered
        self._taken: dict[int, Slot] = {}
        self._segments = 0
        self._next = 0
        self.changes = 0
        """Number of changes to the books: a difference between ranks shows that books
        differ."""

    def add_segment(self, nbytes: int) -> None:
        """Add a segment with ``nbytes`` for every rank."""
        self._free.append((self._segments, 0, nbytes))
        self._segments += 1
        self.changes += 1

    def take(self, nbytes: int) -> Slot | None:
        """Return a new slot of at least ``nbytes``, None if no piece is long enough."""
        wanted = _round_up(max(nbytes, 1), _ALIGN_NBYTES)
        fitting = [piece for piece in self._free if piece[2] >= wanted]
        if not fitting:
            return None
        best = min(fitting, key=lambda piece: piece[2])
        segment, offset, length = best
        at = self._free.index(best)
        self._free[at : at + 1] = (
            [(segment, offset + wanted, length - wanted)] if length > wanted else []
        )
        slot = Slot(self._next, segment, offset, wanted)
        self._next += 1
        self._taken[slot.number] = slot
        self.changes += 1
        return slot

    def give_back(self, number: int) -> None:
        """Free a slot; its neighbours that are free join it."""
        slot = self._taken.pop(number)
        self.changes += 1
        self._free.append((slot.segment, slot.offset, slot.nbytes))
        self._free.sort()
        joined: list[tuple[int, int, int]] = []
        for segment, offset, length in self._free:
            if joined and joined[-1][0] == segment and sum(joined[-1][1:]) == offset:
                segment, offset, before = joined.pop()
                length += before
            joined.append((segment, offset, length))
        self._free = joined


class _Segment:
    """A mapping, which lives as long as the heap or an array needs it."""

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self._users = 1
        # The garbage collector may drop another array while this thread has it.
        self._lock = threading.RLock()

    def use(self) -> None:
        with self._lock:
            self._users += 1

    def drop(self) -> None:
        with self._lock:
            self._users -= 1
            last = self._users == 0
        if last:
            self.arena.close()


class _Owner:
    """The memory of one array: numpy keeps it alive as long as a view refers to it."""

    def __init__(
        self, segment: _Segment, slot: Slot, address: int, nbytes: int, left: deque[int]
    ) -> None:
        segment.use()
        self._segment = segment
        self._number = slot.number
        self._left = left
        self.__array_interface__ = {
            "version": 3,
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
        }

    def __del__(self) -> None:
        if sys.is_finalizing():
            return
        self._left.append(self._number)  # atomic: the collector may run anywhere
        self._segment.drop()


class SymmetricHeap:
    """One communicator's symmetric memory on this node, as one rank sees it."""

    def __init__(
        self,
        bootstrap: Bootstrap,
        ranks: Sequence[int],
        called: Sequence[int],
        name: str,
        key: str,
        share: Callable[[Sequence[int], str, int, float], Arena],
        attach: Callable[[Arena], None],
    ) -> None:
        """``ranks`` are the world's ranks that share it, ``key`` names it to them.

        ``called``: what errors call these ranks.
        ``share(ranks, key, part_nbytes, timeout_s)`` maps memory of all ranks, and
        ``attach`` makes it known to the engine.
        """
        self._bootstrap = bootstrap
        self._ranks, self._called = list(ranks), list(called)
        self._name = name
        self._key = key
        self._share = share
        self._attach = attach
        self._me = self._ranks.index(bootstrap.rank)
        self._slots = Slots()
        self._segments: list[_Segment] = []
        self._left: deque[int] = deque()
        self._dropped: set[int] = set()  # by this rank, not by all of them yet

    @property
    def nbytes(self) -> int:
        """Bytes of all parts of all segments."""
        return sum(segment.arena.nbytes for segment in self._segments)

    def take(
        self, nbytes: int, timeout_s: float
    ) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Return ``nbytes`` zero bytes that all ranks have mapped; collective.

        Raises MismatchError on every rank where they ask for different lengths,
        RefusedError where another rank's call was refused, and BackendError on every
        rank where there is no memory, or where an earlier call ended on some ranks
        only, so that their books differ.
        """
        said = self._meet({"nbytes": nbytes}, timeout_s)
        self._check_refused([one.get("refused") for one in said])
        self._check_equal([one["nbytes"] for one in said])
        if nbytes == 0:
            return np.zeros(0, np.uint8)
        slot = self._slots.take(nbytes)
        fresh = slot is None
        if slot is None:
            limit_nbytes = min(one["limit_nbytes"] for one in said)
            self._grow(nbytes, limit_nbytes, timeout_s)
            slot = self._slots.take(nbytes)
            assert slot is not None
        segment = self._segments[slot.segment]
        arena = segment.arena
        address = arena.address + self._me * arena.region_nbytes + slot.offset
        owner = _Owner(segment, slot, address, nbytes, self._left)
        memory: np.ndarray[Any, np.dtype[np.uint8]] = np.asarray(owner)
        if not fresh:
            memory.fill(0)
        return memory

    def refuse(self, why: str, timeout_s: float) -> None:
        """Take part in a call that was refused here; the others' raise RefusedError."""
        self._meet({"nbytes": 0, "refused": why}, timeout_s)

    def close(self) -> None:
        """Let go of the memory; arrays keep what they refer to."""
        for segment in self._segments:
            segment.drop()
        self._segments.clear()

    def _meet(self, mine: dict[str, Any], timeout_s: float) -> list[dict[str, Any]]:
        """Return what all ranks say; free what all of them have dropped."""
        while self._left:
            self._dropped.add(self._left.popleft())
        mine = {
            **mine,
            "dropped": sorted(self._dropped),
            "books": self._slots.changes,
            "limit_nbytes": memory_limit_nbytes(),
        }
        said: list[dict[str, Any]] = [
            json.loads(blob)
            for blob in self._bootstrap.exchange(
                self._ranks, self._key, json.dumps(mine).encode(), timeout_s
            )
        ]
        self._check_books([one["books"] for one in said])
        self._reuse([one["dropped"] for one in said])
        return said

    def _check_refused(self, reasons: list[str | None]) -> None:
        for rank, why in zip(self._called, reasons, strict=True):
            if why is not None:
                raise RefusedError(
                    f"empty on {self._name}: rank {rank} has refused its call, and no "
                    f"rank has got an array: {why}"
                )

    def _reuse(self, dropped: list[list[int]]) -> None:
        by_all = set(dropped[0]).intersection(*dropped[1:])
        for number in sorted(by_all):
            self._slots.give_back(number)
        self._dropped -= by_all

    def _check_books(self, books: list[int]) -> None:
        if len(set(books)) > 1:
            raise BackendError(
                f"{self._name}: an earlier empty() ended on some ranks only, by a "
                f"deadline or Ctrl-C, and their symmetric memory differs since: use "
                f"the arrays there are, or take new ones from another communicator, "
                f"of dup()"
            )

    def _check_equal(self, sizes: list[int]) -> None:
        if len(set(sizes)) > 1:
            asked = ", ".join(
                f"rank {rank} {nbytes}"
                for rank, nbytes in zip(self._called, sizes, strict=True)
            )
            raise MismatchError(
                f"{self._name}: empty() needs the same number of bytes on all ranks of "
                f"a node; asked for: {asked}"
            )

    def _grow(self, nbytes: int, limit_nbytes: int, timeout_s: float) -> None:
        # Doubling keeps segments few: every operation looks through them.
        total = self.nbytes
        part = _round_up(max(nbytes, total // len(self._ranks)), _SEGMENT_NBYTES)
        if total + part * len(self._ranks) > limit_nbytes:
            part = _round_up(nbytes, _ALIGN_NBYTES)
        if total + part * len(self._ranks) > limit_nbytes:
            raise BackendError(
                f"{self._name}: empty() asks for {nbytes} bytes on each of "
                f"{len(self._ranks)} ranks; with the {total} bytes of symmetric memory "
                f"that there are this is more than the {limit_nbytes} that this "
                f"machine or container may use: drop arrays, or raise the limit"
            )
        arena = self._share(self._ranks, f"{self._key}/segment", part, timeout_s)
        self._segments.append(_Segment(arena))
        self._slots.add_segment(arena.region_nbytes)
        self._attach(arena)


def parse_request(shape: Any, dtype: Any) -> tuple[tuple[int, ...], np.dtype[Any], Any]:
    """Return shape, numpy's dtype of the same size, and torch's dtype or None.

    Raises UsageError for what no array can have.
    """
    one = as_integer(shape)
    items = as_items(shape) if one is None else [one]
    sizes = tuple(size for size in map(as_integer, items or ()) if size is not None)
    if items is None or len(sizes) != len(items):
        raise UsageError(
            f"empty: shape={shown(shape)}: expected a number of elements, or several"
        )
    if len(sizes) > _MOST_DIMS:
        raise UsageError(
            f"empty: shape has {len(sizes)} dimensions; numpy and torch have at most "
            f"{_MOST_DIMS}"
        )
    if any(size < 0 for size in sizes):
        raise UsageError(
            f"empty: shape={shown(shape)}: sizes must not be negative; expected "
            "numbers from 0"
        )
    if math.prod(sizes) > _MOST_ELEMENTS:
        raise UsageError(
            f"empty: shape={shown(shape)}: too many elements, expected at most "
            f"{_MOST_ELEMENTS}"
        )
    if type(dtype).__module__ == "torch":
        return sizes, np.dtype(f"V{dtype.itemsize}"), dtype
    try:
        parsed = np.dtype(dtype)
    except Exception as error:  # noqa: BLE001 - numpy raises what the value raises
        raise UsageError(f"empty: dtype={shown(dtype)}: {error}") from None
    if parsed.hasobject or parsed.itemsize == 0 or parsed.subdtype is not None:
        raise UsageError(
            f"empty: dtype={shown(dtype)}: elements must have a size and be plain bytes"
        )
    return sizes, parsed, None


def as_array(
    memory: np.ndarray[Any, np.dtype[np.uint8]],
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    torch_dtype: Any,
) -> Any:
    """Return an array, or a tensor of ``torch_dtype``, over ``memory``."""
    if torch_dtype is None:
        return memory.view(dtype).reshape(shape)
    import torch

    if memory.size == 0:  # torch's stride of it is 0, which no other type may have
        return torch.empty(shape, dtype=torch_dtype)
    return torch.from_numpy(memory).view(torch_dtype).reshape(shape)


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
