# SPDX-License-Identifier: Apache-2.0
"""Steps of the collectives of objects.

The ranks first tell each other what they call, and how much comes or that nothing can:
so all of them raise the same error where one rank's object cannot be pickled, and no
rank waits for it. Then come the heads, then the large arrays, each to its own memory.
Before heads that are long and before large arrays, the ranks tell each other whether
they have the memory: where one has not, all raise an error, and none is a step ahead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from commrt.calls.channel import Channel
from commrt.errors import (
    CommError,
    MemoryError_,
    MismatchError,
    RefusedError,
    UsageError,
)
from commrt.group.stepped import Awaited, Steps
from commrt.objects.packing import (
    LARGE_NBYTES,
    Packed,
    Refusal,
    memory_for_large,
    no_memory_to_pickle,
    pack,
    unpack,
)
from commrt.vocabulary.operations import names_of

__all__ = ["Talk", "allgather", "bcast", "gather", "scatter"]

_NAMES = names_of("object")
_MAGIC = 0x6F626A31
_CALL, _ROOT, _REFUSED, _NO_MEMORY, _SIZES = 1, 2, 3, 4, 5
"""Places of a row; behind them stand the bytes of each head, then of its large arrays.
"""
_TAG = 1
T = TypeVar("T")
Bytes = npt.NDArray[np.uint8]
Row = npt.NDArray[np.int64]


@dataclass
class Talk:
    """One collective of objects."""

    channel: Channel
    """The ranks, with nobody else's messages."""
    call: str
    """The method's name."""
    what: str
    """The call in messages."""
    root: int
    """Its root; -1 without one."""
    limit_s: float

    @property
    def is_root(self) -> bool:
        """True on the root."""
        return self.channel.rank == self.root

    def row(self, refusal: Refusal | None, sizes: Sequence[int]) -> Row:
        """Return what this rank tells the others."""
        refused = 0 if refusal is None else refusal.head.size
        no_memory = refusal is not None and refusal.for_memory
        call = _NAMES.index(self.call)
        return np.array([_MAGIC, call, self.root, refused, no_memory, *sizes], np.int64)

    def bcast(self, array: Any) -> Awaited:
        """Start to copy the root's array."""
        return self.bcast_of(self.root, array)

    def bcast_of(self, root: int, array: Any) -> Awaited:
        """Start to copy a rank's array."""
        return self._start("bcast", array, root=root)

    def allgather(self, array: Any, out: Any) -> Awaited:
        """Start to bring all ranks' arrays together."""
        return self._start("allgather", array, out=out)

    def join(self, part: Bytes, counts: Sequence[int], out: Bytes) -> Awaited:
        """Start to bring together arrays of different lengths."""
        return self._start("allgatherv", part, counts=[*counts], out=out)

    def send(self, array: Bytes, dest: int) -> Awaited:
        """Start to send an array."""
        where = array.ctypes.data, array.nbytes, dest, _TAG, array, self.call
        started: Awaited = self.channel.send_bytes(*where, True, self.limit_s)
        return started

    def recv(self, array: Bytes, source: int) -> Awaited:
        """Start to receive into an array."""
        where = array.ctypes.data, array.nbytes, source, _TAG, array, array, self.call
        started: Awaited = self.channel.recv_bytes(*where, True, self.limit_s)
        return started

    def rooted(self, name: str, array: Any, counts: Sequence[int], out: Any) -> Awaited:
        """Start a gatherv or a scatterv of the root."""
        more = {"counts": [*counts], "root": self.root, "out": out}
        return self._start(name, array, **more)

    def check(self, rows: Sequence[Row], ranks: Sequence[int]) -> None:
        """Raise MismatchError where a rank calls something else."""
        said = [_said(row) for row in rows]
        if len({*said, _said(self.row(None, ()))}) > 1:
            lines = [f"  rank {r}: {each}" for r, each in zip(ranks, said, strict=True)]
            raise MismatchError(
                f"objects on {self.channel.name}: the ranks disagree; let all of them "
                f"make the same call with the same root:\n" + "\n".join(lines)
            )

    def refused(
        self,
        ranks: Sequence[int],
        rows: Sequence[Row],
        texts: Sequence[Bytes],
        own: Refusal | None,
    ) -> CommError:
        """Return this rank's error where ranks have objects that cannot be sent.

        A rank without memory raises MemoryError_. The others raise RefusedError where
        nothing but memory is lacking.
        """
        said = [
            f"{bytes(text).decode(errors='replace')} on rank {rank}"
            for rank, text in zip(ranks, texts, strict=True)
        ]
        kind: type[CommError] = UsageError
        if own is not None and own.for_memory:
            kind = MemoryError_
        elif own is None and all(row[_NO_MEMORY] for row in rows):
            kind = RefusedError
        error = kind(f"{self.what}: {'; '.join(said)}; nothing was sent")
        error.on_all_ranks = True
        error.__cause__ = None if own is None else own.cause
        return error

    def memory(
        self, make: Callable[[], T], wanted: int, *, most: int | None = None
    ) -> Steps[T]:
        """Return memory for what comes; all ranks raise where one has none for it.

        Args:
            make: returns the memory on this rank.
            wanted: its bytes, for messages.
            most: bytes that every rank knows: if they are few, the ranks do not tell
                each other; None: they do.
        """
        if most is not None and most < LARGE_NBYTES:
            return make()
        made, error = _made(make)
        lacking = np.array([0 if error is None else max(1, wanted)], np.int64)
        every = np.empty(self.channel.size, np.int64)
        yield [self.allgather(lacking, every)]
        if made is None:
            mine = MemoryError_(
                f"{self.what}: there is no memory on rank {self.channel.rank} for the "
                f"{wanted} bytes that come ({error}); nothing was delivered, and all "
                f"ranks may call again: free memory, or send less at a time"
            )
            mine.on_all_ranks = True
            raise mine from error
        if every.any():
            said = ", ".join(
                f"rank {rank} has no memory for the {every[rank]} bytes that come"
                for rank in np.flatnonzero(every)
            )
            raise RefusedError(
                f"{self.what}: {said}; nothing was delivered, and all ranks may call "
                f"again"
            )
        return made[0]

    def _start(self, name: str, array: Any, **more: Any) -> Awaited:
        # Without a limit of its own the engine knows the call; its wait has one.
        started: Awaited = getattr(self.channel, name)(array, nonblocking=True, **more)
        return started


def _said(row: Row) -> str:
    if len(row) < _SIZES or row[0] != _MAGIC or not 0 <= row[_CALL] < len(_NAMES):
        return "another call"
    root = f" root={row[_ROOT]}" if row[_ROOT] >= 0 else ""
    return f"{_NAMES[row[_CALL]]}{root}"


def _made(make: Callable[[], T]) -> tuple[tuple[T] | None, MemoryError | None]:
    """Return the memory, or the error where there is none."""
    try:
        return (make(),), None
    except MemoryError as error:
        return None, error


def _refusal(found: Packed | Refusal | None) -> Refusal | None:
    return found if isinstance(found, Refusal) else None


def _sizes_of(found: Packed | Refusal | None) -> tuple[int, int]:
    """Return the bytes of an object's head and of its large arrays."""
    if isinstance(found, Packed):
        return found.head.size, found.large_nbytes
    return 0, 0


def bcast(talk: Talk, x: Any) -> Steps[Any]:
    """Return the root's object."""
    mine = pack(x) if talk.is_root else None
    own = mine if isinstance(mine, Packed) else None
    row = yield from _told_by_root(talk, _refusal(mine), _sizes_of(mine))
    nbytes, large_nbytes = row[_SIZES:].tolist()
    head = yield from talk.memory(
        lambda: np.empty(nbytes, np.uint8) if own is None else own.head,
        nbytes,
        most=nbytes,
    )
    yield [talk.bcast(head)]
    if large_nbytes:
        large = yield from talk.memory(
            lambda: memory_for_large(head) if own is None else own.large, large_nbytes
        )
        yield [talk.bcast(each) for each in large]
    else:
        large = ()
    return x if talk.is_root else unpack(talk.what, head, large)


def allgather(talk: Talk, x: Any) -> Steps[list[Any]]:
    """Return the objects of all ranks; that of this rank is ``x`` itself."""
    mine, me = pack(x), talk.channel.rank
    own, sizes, large_sizes = yield from _told(talk, mine)
    total = sum(sizes)
    joined = yield from talk.memory(
        lambda: np.empty(total, np.uint8), total, most=total
    )
    yield [talk.join(own.head, sizes, joined)]
    heads = _split(joined, sizes)
    large = [own.large if rank == me else () for rank in range(len(heads))]
    if any(large_sizes):
        large = yield from talk.memory(
            lambda: [
                own.large if rank == me else memory_for_large(head)
                for rank, head in enumerate(heads)
            ],
            sum(large_sizes) - large_sizes[me],
        )
        yield [
            talk.bcast_of(rank, each) for rank, of in enumerate(large) for each in of
        ]
    return [
        x if rank == me else unpack(talk.what, head, of)
        for rank, (head, of) in enumerate(zip(heads, large, strict=True))
    ]


def gather(talk: Talk, x: Any) -> Steps[list[Any] | None]:
    """Return the objects of all ranks on the root; its own is ``x`` itself."""
    mine, root = pack(x), talk.root
    own, sizes, large_sizes = yield from _told(talk, mine)
    total = sum(sizes)
    joined = yield from talk.memory(
        lambda: np.empty(total, np.uint8) if talk.is_root else None, total, most=total
    )
    yield [talk.rooted("gatherv", own.head, sizes, joined)]
    heads = [] if joined is None else _split(joined, sizes)
    found: list[tuple[Bytes, ...]] = [() for _ in heads]
    if any(large_sizes):
        found = yield from talk.memory(
            lambda: [
                () if rank == root else memory_for_large(head)
                for rank, head in enumerate(heads)
            ],
            sum(large_sizes) - large_sizes[root],
        )
    if joined is None:
        yield [talk.send(each, root) for each in own.large]
        return None
    yield [talk.recv(each, rank) for rank, of in enumerate(found) for each in of]
    return [
        x if rank == root else unpack(talk.what, head, of)
        for rank, (head, of) in enumerate(zip(heads, found, strict=True))
    ]


def scatter(talk: Talk, x: Any) -> Steps[Any]:
    """Return this rank's object of the root's list; the root's own is not copied."""
    size, root, me = talk.channel.size, talk.root, talk.channel.rank
    packed, joined, refusal = _pack_each(x, size) if talk.is_root else ([], None, None)
    yield from _told_by_root(talk, refusal, (0, 0))
    each_sizes = np.array([_sizes_of(each) for each in packed] or [(0, 0)] * size)
    yield [talk.bcast(each_sizes)]
    sizes, large_sizes = each_sizes.T.tolist()
    head = yield from talk.memory(
        lambda: np.empty(sizes[me], np.uint8), sizes[me], most=max(sizes)
    )
    yield [talk.rooted("scatterv", joined, sizes, head)]
    large: tuple[Bytes, ...] = ()
    if any(large_sizes):
        large = yield from talk.memory(
            lambda: () if talk.is_root else memory_for_large(head), large_sizes[me]
        )
    if talk.is_root:
        others = [(rank, each) for rank, each in enumerate(packed) if rank != root]
        yield [talk.send(part, rank) for rank, each in others for part in each.large]
        return x[root]
    yield [talk.recv(each, root) for each in large]
    return unpack(talk.what, head, large)


def _pack_each(x: Any, size: int) -> tuple[list[Packed], Bytes | None, Refusal | None]:
    """Return a list's objects as bytes, and their heads in a row; or why not."""
    if not isinstance(x, list | tuple):
        kind = type(x).__name__
        return [], None, Refusal(f"x is a {kind}, expected a list of {size} objects")
    if len(x) != size:
        why = Refusal(f"x has {len(x)} objects, expected one for each rank")
        return [], None, why
    packed: list[Packed] = []
    for rank, each in enumerate(x):
        found = pack(each, f"x[{rank}]")
        if isinstance(found, Refusal):
            return [], None, found
        packed.append(found)
    try:
        return packed, np.concatenate([each.head for each in packed]), None
    except MemoryError as error:
        return [], None, no_memory_to_pickle("x", error)


def _told_by_root(
    talk: Talk, refusal: Refusal | None, sizes: Sequence[int]
) -> Steps[Row]:
    """Return the root's row; where the root has nothing to send, all ranks raise.

    Every rank's row goes to every rank. A root that sent its row alone would go on, and
    be steps ahead of a rank that has refused the call, which takes one place.
    """
    mine = talk.row(refusal, sizes)
    rows = np.empty((talk.channel.size, mine.size), np.int64)
    yield [talk.allgather(mine, rows)]
    talk.check([*rows], range(talk.channel.size))
    row: Row = rows[talk.root]
    if row[_REFUSED]:
        text = np.empty(row[_REFUSED], np.uint8) if refusal is None else refusal.head
        yield [talk.bcast(text)]
        raise talk.refused([talk.root], [row], [text], refusal)
    return row


def _told(
    talk: Talk, mine: Packed | Refusal
) -> Steps[tuple[Packed, list[int], list[int]]]:
    """Return this rank's object, and the bytes of each rank's head and large arrays.

    Where a rank has nothing to send, all ranks raise.
    """
    row = talk.row(_refusal(mine), _sizes_of(mine))
    rows = np.empty((talk.channel.size, row.size), np.int64)
    yield [talk.allgather(row, rows)]
    talk.check([*rows], range(talk.channel.size))
    lengths = rows[:, _REFUSED].tolist()
    if isinstance(mine, Refusal) or any(lengths):
        refusal = _refusal(mine)
        part = np.empty(0, np.uint8) if refusal is None else refusal.head
        joined = np.empty(sum(lengths), np.uint8)
        yield [talk.join(part, lengths, joined)]
        ranks = [rank for rank, length in enumerate(lengths) if length]
        texts = _split(joined, lengths)
        raise talk.refused(
            ranks,
            [rows[rank] for rank in ranks],
            [texts[rank] for rank in ranks],
            refusal,
        )
    return mine, rows[:, _SIZES].tolist(), rows[:, _SIZES + 1].tolist()


def _split(joined: Bytes, sizes: Sequence[int]) -> list[Bytes]:
    """Return the parts of different lengths that an array has, one after the other."""
    ends = np.cumsum(sizes)
    return [joined[end - size : end] for size, end in zip(sizes, ends, strict=True)]
