# SPDX-License-Identifier: Apache-2.0
"""How one dimension of a tensor is cut along a communicator."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

from commrt.comm import Communicator
from commrt.errors import UsageError, shown
from commrt.layers.spatial.windows import Range, even_sizes

__all__ = ["Cut"]


@dataclass(frozen=True)
class Cut:
    """One dimension of a tensor in pieces, one for each rank of a communicator.

    Args:
        comm: the ranks along the cut, in the order of their pieces.
        sizes: elements of each rank's piece. They may differ, and may be 0.

    Raises UsageError where the sizes do not fit the communicator.
    """

    comm: Communicator
    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.comm, Communicator):
            raise UsageError(
                f"Cut: comm={shown(self.comm)} must be a communicator of commrt"
            )
        if not isinstance(self.sizes, tuple) or not all(
            type(size) is int and size >= 0 for size in self.sizes
        ):
            raise UsageError(
                f"Cut: sizes={shown(self.sizes)} must be a tuple of integers, "
                f"none below 0"
            )
        if len(self.sizes) != self.comm.size:
            raise UsageError(
                f"Cut: sizes={shown(self.sizes)} has {len(self.sizes)} pieces; the "
                f"communicator has {self.comm.size} ranks"
            )

    @classmethod
    def even(cls, comm: Communicator, extent: int) -> Cut:
        """Return the cut whose piece i is ``[i * n // p, (i + 1) * n // p)``."""
        return cls(comm, even_sizes(extent, comm.size))

    @cached_property
    def extent(self) -> int:
        """Elements of the whole dimension."""
        return sum(self.sizes)

    @cached_property
    def pieces(self) -> tuple[Range, ...]:
        """``(low, high)`` of each rank's piece."""
        ends = (0, *accumulate(self.sizes))
        return tuple(pairwise(ends))

    @property
    def own(self) -> Range:
        """``(low, high)`` of this rank's piece."""
        return self.pieces[self.comm.rank]

    def bounds(self, rank: int) -> Range:
        """Return ``(low, high)`` of a rank's piece."""
        return self.pieces[rank]
