# SPDX-License-Identifier: Apache-2.0
"""The footprint of a schedule: what bounds its messages, over all ranks' programs.

The number of fragments follows from it, so it is equal on all ranks, as it must be:
messages are matched by their position in fragments.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache

from commrt import algorithms
from commrt.errors import UsageError
from commrt.schedule.ir import Op, ParamValue
from commrt.schedule.nodes import Nodes

__all__ = [
    "CHUNK_NBYTES",
    "DIRECT_CHUNK_NBYTES",
    "LANE_NBYTES",
    "Footprint",
    "Own",
    "footprint",
]

Own = tuple[tuple[str, ParamValue], ...]
"""An algorithm's own parameters, by name."""

LANE_NBYTES = 4 << 20
"""Payload memory of one operation in flight, per rank."""
CHUNK_NBYTES = 131072
DIRECT_CHUNK_NBYTES = 65536
"""Bytes of a message, about, over connections of commrt's own between nodes."""
_EXCHANGED_NBYTES = 262144
"""Ranks that exchange wait for each other anyway: from 256 KiB to 4 MiB, twice the
chunk took 0.92 to 0.98 of the time on two ranks, near and far, and on four; one way it
took up to 1.13."""
_EXCHANGED_REUSE = 2
_LINE_NBYTES = 64


@dataclass(frozen=True)
class Footprint:
    """Bounds of the messages of a schedule, over all of its ranks."""

    publishes: int
    """Most different payloads of one rank that are unread at once."""
    slices: tuple[tuple[int, int, tuple[int, int]], ...]
    """(blocks, blocks of the space, scale) of every message."""
    messages: int
    """Most messages that go from one rank to another in a fragment."""
    exchanges: bool
    """True if any two ranks send each other equally many."""

    def chunk_nbytes(self, wanted: int | str) -> int:
        """Return the wanted bytes per message, of a number or ``auto``."""
        if isinstance(wanted, int):
            return wanted
        return _EXCHANGED_NBYTES if self.exchanges else CHUNK_NBYTES

    def slot_reuse(self, wanted: int | str, combines: bool) -> int:
        """Return the engine's argument: fragments, or 0 for what its window holds.

        Between near cores of Zen 4 the window saves a bcast 30 to 55 % of its time, and
        a reduce_scatter 2 to 15 %; blocks that two ranks only exchange took 0.94 to
        1.14 (docs/performance.md).
        """
        if isinstance(wanted, int):
            return wanted
        return _EXCHANGED_REUSE if self.exchanges and not combines else 0

    def largest_nbytes(self, num_elements: int, itemsize: int, fragments: int) -> int:
        """Return an upper bound of any message of any fragment."""
        largest = 0
        for width, nblk, (num, den) in self.slices:
            block = -(-(num_elements * num // den) // nblk)
            piece = self._piece_nbytes(block, itemsize, fragments)
            largest = max(largest, width * piece)
        return self._rounded(largest)

    @staticmethod
    def _piece_nbytes(length: int, itemsize: int, fragments: int) -> int:
        """Return an upper bound of any fragment of a block of ``length`` elements."""
        if fragments == 1:
            return length * itemsize
        return (length // fragments + 1) * itemsize + _LINE_NBYTES

    @staticmethod
    def _rounded(nbytes: int) -> int:
        return -(-nbytes // _LINE_NBYTES) * _LINE_NBYTES

    def fragments(
        self, num_elements: int, itemsize: int, chunk: int, lane_nbytes: int
    ) -> int:
        """Return into how many fragments messages of this length are cut.

        Messages get about ``chunk`` bytes, and what one rank publishes in a fragment
        fits into a lane: the operation then never waits for its own consumption.
        """
        whole = self.largest_nbytes(num_elements, itemsize, 1)
        if whole <= _LINE_NBYTES:
            return 1
        fragments = max(1, -(-whole // chunk))
        limit = lane_nbytes // max(1, self.publishes)
        # A payload may start anywhere in the first line of its slot.
        limit -= _LINE_NBYTES
        while self.largest_nbytes(num_elements, itemsize, fragments) > limit:
            if fragments > num_elements:
                raise UsageError(
                    f"{self.publishes} payloads of one rank do not fit into a lane of "
                    f"{lane_nbytes} bytes: choose another algorithm for so many ranks"
                )
            fragments += max(1, fragments // 8)
        return fragments


@lru_cache(maxsize=1024)
def footprint(
    coll: str,
    algorithm: str,
    size: int,
    root: int,
    params: Own,
    nodes: Nodes | None = None,
) -> Footprint:
    """Return the footprint of a schedule, over the programs of all ranks."""
    publishes = 0
    sent: Counter[tuple[int, int]] = Counter()
    slices: set[tuple[int, int, tuple[int, int]]] = set()
    schedule = algorithms.schedule(coll, algorithm, size, root, dict(params), nodes)
    for program in schedule.programs():
        sends = [step for step in program.steps if step.op is Op.SEND]
        publishes = max(publishes, len(sends))
        sent.update((program.rank, step.peer) for step in sends)
        for step in sends:
            assert step.src is not None
            space = program.spaces[step.src.space]
            slices.add((step.src.hi - step.src.lo, space.nblk, space.scale))
    messages = max(sent.values(), default=0)
    exchanges = all(sent[peer, rank] == times for (rank, peer), times in sent.items())
    return Footprint(publishes, tuple(sorted(slices)), messages, exchanges)
