# SPDX-License-Identifier: Apache-2.0
"""Goals of each operation, block by block, for the verifier.

A block's content is a pair: which part of the operation's data it is, and whose
contributions it holds (bit r for rank r). At the start only ``in`` has content; at the
end each block of ``out`` must hold exactly what the operation says.
"""

from __future__ import annotations

from dataclasses import dataclass

from commrt.vocabulary.operations import operation

__all__ = ["Content", "Goal"]

Content = tuple[int, int]
"""part, contributors."""


@dataclass(frozen=True)
class Goal:
    """The pre- and postcondition of one operation on ``size`` ranks."""

    coll: str
    size: int
    root: int

    @property
    def idempotent(self) -> bool:
        """True if a contribution may arrive twice: a barrier's arrivals only."""
        return operation(self.coll).x_count == "none"

    def initial(self, rank: int, nblk: int) -> list[Content]:
        """Return the contents of the ``nblk`` blocks of ``in`` on ``rank``."""
        spec = operation(self.coll)
        per_rank = spec.out_count == "times_size" or spec.by_pair
        first = rank * nblk if per_rank else 0
        return [(first + block, 1 << rank) for block in range(nblk)]

    def final(self, rank: int, nblk: int) -> list[Content]:
        """Return the content that the ``nblk`` blocks of ``out`` on ``rank`` need."""
        spec = operation(self.coll)
        if spec.by_pair:
            share = nblk // self.size
            return [
                (src * nblk + rank * share + i, 1 << src)
                for src in range(self.size)
                for i in range(share)
            ]
        if spec.out_count == "times_size":
            share = nblk // self.size
            return [(block, 1 << (block // share)) for block in range(nblk)]
        first = rank * nblk if spec.out_count == "div_size" else 0
        holders = sum(1 << one for one in self.holders(rank))
        return [(first + block, holders) for block in range(nblk)]

    def holders(self, rank: int) -> range:
        """Return the ranks whose contributions ``out`` of ``rank`` ends with.

        Where each block of ``out`` belongs to a rank of its own, it holds that one's.
        """
        spec = operation(self.coll)
        if spec.reduces or self.idempotent:
            return spec.contributors(rank, self.size)
        return range(self.root, self.root + 1)
