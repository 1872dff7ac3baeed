# SPDX-License-Identifier: Apache-2.0
"""Dependencies from data: who must wait for whom because they touch the same block.

One tracker serves the builder (steps), the verifier (to find missing edges) and the
lowering (instructions). Block i of ``in`` counts as block i of ``out`` where the two
may be the same memory, so a program is right in place and out of place.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from commrt.schedule.ir import Slice, Space

__all__ = ["DependencyTracker", "locations"]


def locations(spaces: Sequence[Space]) -> list[int]:
    """Return the number of the first block of each space; aliased spaces share it."""
    first: list[int] = []
    by_name: dict[str, int] = {}
    following = 0
    for space in spaces:
        aliased = by_name.get(space.alias or "")
        shared = aliased is not None and spaces[aliased].nblk == space.nblk
        first.append(first[aliased] if aliased is not None and shared else following)
        by_name[space.name] = len(first) - 1
        following += space.nblk
    return first


class DependencyTracker:
    """Reads and writes of blocks in program order; yields the edges they need."""

    def __init__(self, spaces: Sequence[Space]) -> None:
        self._first = locations(spaces)
        self._writer: dict[int, int] = {}
        self._readers: dict[int, list[int]] = {}

    def extend(self, spaces: Sequence[Space]) -> None:
        """Learn of spaces added at the end; those known before keep their numbers."""
        self._first = locations(spaces)

    def access(
        self, index: int, reads: Iterable[Slice], writes: Iterable[Slice]
    ) -> set[int]:
        """Record what item ``index`` touches and return what it must wait for."""
        deps: set[int] = set()
        writer, readers = self._writer, self._readers
        for where in reads:
            first = self._first[where.space]
            for block in range(first + where.lo, first + where.hi):
                if block in writer:
                    deps.add(writer[block])
                readers.setdefault(block, []).append(index)
        for where in writes:
            first = self._first[where.space]
            for block in range(first + where.lo, first + where.hi):
                # The readers have waited for the writer before them.
                before = readers.pop(block, None)
                if before is not None:
                    deps.update(before)
                if block in writer:
                    deps.add(writer[block])
                writer[block] = index
        deps.discard(index)
        return deps
