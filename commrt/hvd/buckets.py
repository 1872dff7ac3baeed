# SPDX-License-Identifier: Apache-2.0
"""Buckets: tensors that are complete on all ranks, and share a collective.

A bucket is closed once it holds at least ``fusion_nbytes``. So k tensors of one kind
and type become at most ceil(bytes / fusion_nbytes) collectives. A tensor that is so
long by itself is sent alone, without a copy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from commrt.hvd.entries import Entry, nbytes_of
from commrt.hvd.signatures import Signature

__all__ = ["Bucket", "Buckets", "Part"]

Key: TypeAlias = tuple[str, str, str, str, int, float, float]


@dataclass(frozen=True, eq=False)
class Part:
    """One tensor of an entry, with what all ranks have said of the entry."""

    entry: Entry
    number: int
    """Place among the entry's tensors."""
    signatures: Mapping[int, Signature]
    """By rank of the process set; not of ranks that have joined."""

    @property
    def dtype(self) -> str:
        """Name of the element type."""
        return self.entry.signature.tensors[self.number][0]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of this rank's tensor."""
        return self.entry.signature.tensors[self.number][1]

    def shape_on(self, rank: int) -> tuple[int, ...]:
        """Return the shape of a rank's tensor."""
        return self.signatures[rank].tensors[self.number][1]

    @property
    def agreed_nbytes(self) -> int:
        """Bytes of the first rank's tensor: a number that is the same on all ranks."""
        first = next(iter(self.signatures))
        count = 1
        for extent in self.shape_on(first):
            count *= extent
        return count * int(self.entry.inputs[self.number].element_size())

    @property
    def nbytes(self) -> int:
        """Bytes of this rank's tensor."""
        return nbytes_of(self.entry.inputs[self.number])

    @property
    def key(self) -> Key:
        """What parts of one bucket have in common."""
        of = self.entry.signature
        scales = of.prescale, of.postscale
        return (of.kind, self.dtype, of.device, of.op, of.root, *scales)


@dataclass(eq=False)
class Bucket:
    """Parts that go together."""

    parts: list[Part]
    nbytes: int = 0


class Buckets:
    """Buckets that are open, in the order in which they were begun.

    Args:
        fusion_nbytes: a bucket is closed once it has so many bytes; 0: no fusion.
    """

    def __init__(self, fusion_nbytes: int) -> None:
        self.fusion_nbytes = fusion_nbytes
        self._open: dict[Key, Bucket] = {}

    @property
    def is_empty(self) -> bool:
        """True if nothing waits in an open bucket."""
        return not self._open

    def add(self, part: Part) -> Bucket | None:
        """Put a part into a bucket; return the bucket that this has closed."""
        nbytes = part.agreed_nbytes
        if not part.entry.kind.is_fused or nbytes >= self.fusion_nbytes:
            return Bucket([part], nbytes)
        bucket = self._open.setdefault(part.key, Bucket([]))
        bucket.parts.append(part)
        bucket.nbytes += nbytes
        if bucket.nbytes < self.fusion_nbytes:
            return None
        del self._open[part.key]
        return bucket

    def close(self) -> list[Bucket]:
        """Close all buckets, and return them."""
        found = list(self._open.values())
        self._open.clear()
        return found
