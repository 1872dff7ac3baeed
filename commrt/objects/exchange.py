# SPDX-License-Identifier: Apache-2.0
"""Steps of the collectives of objects.

The ranks first tell each other what they call, and how much comes or that nothing can:
so all of them raise the same error where one rank's object cannot be pickled, and no
rank waits for it. Then come the heads, then the large arrays, each to its own memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from commrt.calls.channel import Channel
from commrt.errors import MismatchError, UsageError
from commrt.group.stepped import Awaited, Steps
from commrt.objects.packing import Packed, Refusal, memory_for_large, pack, unpack
from commrt.vocabulary.operations import names_of

__all__ = ["Talk", "allgather", "bcast", "gather", "scatter"]

_NAMES = names_of("object")
_MAGIC = 0x6F626A31
_CALL, _ROOT, _REFUSED, _SIZES = 1, 2, 3, 4
"""Places of a row; behind them stand the bytes of each head."""
_TAG = 1
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
        return np.array(
            [_MAGIC, _NAMES.index(self.call), self.root, refused, *sizes], np.int64
        )

    def bcast(self, array: Any) -> Awaited:
        """Start to copy the root's array."""
        return self.bcast_of(self.root, array)

    def bcast_of(self, root: int, array: Any) -> Awaited:
        """Start to copy a rank's array."""
        return self._start("bcast", array, root=root)

    def allgather(self, array: Any, out: Any) -> Awaited:
        """Start to bring all ranks' arrays together."""
        return self._start("allgather", array, out=out)

    def joined(self, part: Bytes, counts: Sequence[int]) -> tuple[Bytes, Awaited]:
        """Start to bring together arrays of different lengths; return where."""
        out = np.empty(sum(counts), np.uint8)
        return out, self._start("allgatherv", part, counts=[*counts], out=out)

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
        self, ranks: Sequence[int], texts: Sequence[Bytes], own: Refusal | None
    ) -> UsageError:
        """Return the error of all ranks for objects that cannot be sent."""
        said = [
            f"{bytes(text).decode(errors='replace')} on rank {rank}"
            for rank, text in zip(ranks, texts, strict=True)
        ]
        error = UsageError(f"{self.what}: {'; '.join(said)}; nothing was sent")
        error.on_all_ranks = True
        error.__cause__ = None if own is None else own.cause
        return error

    def _start(self, name: str, array: Any, **more: Any) -> Awaited:
        # Without a limit of its own the engine knows the call; its wait has one.
        started: Awaited = getattr(self.channel, name)(array, nonblocking=True, **more)
        return started


def _said(row: Row) -> str:
    if len(row) < _SIZES or row[0] != _MAGIC or not 0 <= row[_CALL] < len(_NAMES):
        return "another call"
    root = f" root={row[_ROOT]}" if row[_ROOT] >= 0 else ""
    return f"{_NAMES[row[_CALL]]}{root}"


def _refusal(found: Packed | Refusal | None) -> Refusal | None:
    return found if isinstance(found, Refusal) else None


def _head_of(found: Packed | Refusal | None) -> Bytes:
    return np.empty(0, np.uint8) if found is None else found.head


def bcast(talk: Talk, x: Any) -> Steps[Any]:
    """Return the root's object."""
    mine = pack(x) if talk.is_root else None
    refusal = _refusal(mine)
    row = talk.row(refusal, [_head_of(mine).size])
    yield [talk.bcast(row)]
    talk.check([row], [talk.root])
    if row[_REFUSED]:
        text = np.empty(row[_REFUSED], np.uint8) if refusal is None else refusal.head
        yield [talk.bcast(text)]
        raise talk.refused([talk.root], [text], refusal)
    head = _head_of(mine) if talk.is_root else np.empty(row[_SIZES], np.uint8)
    yield [talk.bcast(head)]
    large = mine.large if isinstance(mine, Packed) else memory_for_large(head)
    yield [talk.bcast(each) for each in large]
    return x if talk.is_root else unpack(talk.what, head, large)


def allgather(talk: Talk, x: Any) -> Steps[list[Any]]:
    """Return the objects of all ranks; that of this rank is ``x`` itself."""
    mine = pack(x)
    sizes = yield from _told(talk, mine)
    joined, coming = talk.joined(mine.head, sizes)
    yield [coming]
    heads = _split(joined, sizes)
    large = [
        mine.large
        if rank == talk.channel.rank and isinstance(mine, Packed)
        else memory_for_large(head)
        for rank, head in enumerate(heads)
    ]
    yield [talk.bcast_of(rank, each) for rank, of in enumerate(large) for each in of]
    return [
        x if rank == talk.channel.rank else unpack(talk.what, head, of)
        for rank, (head, of) in enumerate(zip(heads, large, strict=True))
    ]


def gather(talk: Talk, x: Any) -> Steps[list[Any] | None]:
    """Return the objects of all ranks on the root; its own is ``x`` itself."""
    mine = pack(x)
    sizes = yield from _told(talk, mine)
    joined = np.empty(sum(sizes), np.uint8) if talk.is_root else None
    yield [talk.rooted("gatherv", mine.head, sizes, joined)]
    if joined is None:
        large = mine.large if isinstance(mine, Packed) else ()
        yield [talk.send(each, talk.root) for each in large]
        return None
    heads = _split(joined, sizes)
    found = [
        () if rank == talk.root else memory_for_large(head)
        for rank, head in enumerate(heads)
    ]
    yield [talk.recv(each, rank) for rank, of in enumerate(found) for each in of]
    return [
        x if rank == talk.root else unpack(talk.what, head, of)
        for rank, (head, of) in enumerate(zip(heads, found, strict=True))
    ]


def scatter(talk: Talk, x: Any) -> Steps[Any]:
    """Return this rank's object of the root's list; the root's own is not copied."""
    size, root = talk.channel.size, talk.root
    packed, refusal = _pack_each(x, size) if talk.is_root else ([], None)
    sizes = [each.head.size for each in packed] or [0] * size
    row = talk.row(refusal, sizes)
    yield [talk.bcast(row)]
    talk.check([row], [root])
    if row[_REFUSED]:
        text = np.empty(row[_REFUSED], np.uint8) if refusal is None else refusal.head
        yield [talk.bcast(text)]
        raise talk.refused([root], [text], refusal)
    sizes = row[_SIZES:].tolist()
    head = np.empty(sizes[talk.channel.rank], np.uint8)
    joined = np.concatenate([each.head for each in packed]) if packed else None
    yield [talk.rooted("scatterv", joined, sizes, head)]
    if talk.is_root:
        others = [(rank, each) for rank, each in enumerate(packed) if rank != root]
        yield [talk.send(part, rank) for rank, each in others for part in each.large]
        return x[root]
    large = memory_for_large(head)
    yield [talk.recv(each, root) for each in large]
    return unpack(talk.what, head, large)


def _pack_each(x: Any, size: int) -> tuple[list[Packed], Refusal | None]:
    """Return the objects of a list as bytes, or why they cannot be sent."""
    if not isinstance(x, list | tuple):
        kind = type(x).__name__
        return [], Refusal(f"x is a {kind}, expected a list of {size} objects")
    if len(x) != size:
        return [], Refusal(f"x has {len(x)} objects, expected one for each rank")
    packed: list[Packed] = []
    for rank, each in enumerate(x):
        found = pack(each, f"x[{rank}]")
        if isinstance(found, Refusal):
            return [], found
        packed.append(found)
    return packed, None


def _told(talk: Talk, mine: Packed | Refusal) -> Steps[list[int]]:
    """Return the bytes of each rank's head; UsageError where a rank has none."""
    refusal = _refusal(mine)
    row = talk.row(refusal, [0 if refusal else mine.head.size])
    rows = np.empty((talk.channel.size, row.size), np.int64)
    yield [talk.allgather(row, rows)]
    talk.check([*rows], range(talk.channel.size))
    lengths = rows[:, _REFUSED].tolist()
    if any(lengths):
        own = np.empty(0, np.uint8) if refusal is None else refusal.head
        joined, coming = talk.joined(own, lengths)
        yield [coming]
        ranks = [rank for rank, length in enumerate(lengths) if length]
        texts = _split(joined, lengths)
        raise talk.refused(ranks, [texts[rank] for rank in ranks], refusal)
    found: list[int] = rows[:, _SIZES].tolist()
    return found


def _split(joined: Bytes, sizes: Sequence[int]) -> list[Bytes]:
    """Return the parts of different lengths that an array has, one after the other."""
    ends = np.cumsum(sizes)
    return [joined[end - size : end] for size, end in zip(sizes, ends, strict=True)]
