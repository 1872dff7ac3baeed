# SPDX-License-Identifier: Apache-2.0
"""A schedule as ranks execute it: long messages are cut, and pieces overtake no others.

    schedule = algorithms.schedule("bcast", "chain", 4)
    cut = fragmented(schedule, num_elements=1 << 18, itemsize=4, fragments=16)
    simulate(cut, network, 0, costs=Costs(in_order=True))

Fragment f is the whole schedule, on the f-th part of every block
(docs/internals/schedules.md). A rank begins a fragment once an earlier one is done, so
that a few are on their way at a time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from commrt.errors import UsageError
from commrt.planning.footprint import DIRECT_CHUNK_NBYTES, LANE_NBYTES, footprint
from commrt.schedule.ir import RankProgram, Schedule, Slice, Space, Step

__all__ = ["CONNECTIONS", "DEPTH", "as_sent_by_tcp", "fragmented", "num_fragments"]

DEPTH = 2
"""Fragments that a rank has in hand at once, where nobody says otherwise."""
CONNECTIONS: Mapping[str, Any] = {"in_order": True, "queued_nbytes": 40_000}
"""Fields of ``Costs`` for messages over connections of commrt's own."""
_LINE_NBYTES = 64
"""Fragments begin at multiples of this, in each block."""


def num_fragments(
    schedule: Schedule, num_elements: int, itemsize: int, chunk_nbytes: int
) -> int:
    """Return into how many fragments ranks cut a call of a built-in algorithm.

    ``chunk_nbytes``: bytes of a fragment's largest message, about
    (``TransportParams.chunk``).
    """
    own = tuple(sorted(schedule.params.items()))
    bound = footprint(
        *(schedule.coll, schedule.algorithm, schedule.size, schedule.root),
        *(own, schedule.nodes),
    )
    return bound.fragments(num_elements, itemsize, chunk_nbytes, LANE_NBYTES)


def as_sent_by_tcp(schedule: Schedule, num_elements: int, itemsize: int) -> Schedule:
    """Return the schedule as ranks send it over connections of commrt's own."""
    number = num_fragments(schedule, num_elements, itemsize, DIRECT_CHUNK_NBYTES)
    return fragmented(schedule, num_elements, itemsize, number)


def fragmented(
    schedule: Schedule,
    num_elements: int,
    itemsize: int,
    fragments: int,
    depth: int = DEPTH,
) -> Schedule:
    """Return the schedule of all fragments of one call: for this length alone.

    Args:
        schedule: whose blocks are even, or have counts.
        num_elements: length of the full vector.
        itemsize: bytes of an element.
        fragments: their number; 1: the same steps.
        depth: fragments that a rank has in hand at once.

    Returns:
        A schedule that can be simulated and drawn, with ``nbytes=0``. It can neither be
        proved nor run.

    Raises:
        UsageError: fewer than one fragment, or in hand.
    """
    if fragments < 1 or depth < 1:
        raise UsageError(
            f"fragmented: fragments={fragments}, depth={depth}; expected 1 or more"
        )

    def program(rank: int) -> RankProgram:
        one = schedule.program(rank)
        spaces = tuple(
            _cut(space, num_elements, itemsize, fragments) for space in one.spaces
        )
        made = RankProgram(rank, spaces)
        ends: list[tuple[int, ...]] = []
        for fragment in range(fragments):
            before = ends[fragment - depth] if fragment >= depth else ()
            ends.append(_append(made, one, fragment, before))
        return made

    return Schedule(
        schedule.coll,
        schedule.algorithm,
        schedule.size,
        schedule.root,
        program,
        schedule.params,
        schedule.redop_class,
        schedule.nodes,
    )


def _cut(space: Space, num_elements: int, itemsize: int, fragments: int) -> Space:
    """Return a space with the blocks of all fragments, one fragment after the other."""
    edges = space.bounds(num_elements)
    lengths = [high - low for low, high in pairwise(edges)]
    unit = max(1, _LINE_NBYTES // itemsize)
    counts = [
        _place(length, at + 1, fragments, unit) - _place(length, at, fragments, unit)
        for at in range(fragments)
        for length in lengths
    ]
    return Space(
        space.name, space.kind, len(counts), split="counts", counts=tuple(counts)
    )


def _place(length: int, fragment: int, fragments: int, unit: int) -> int:
    """Return where a fragment of a block begins, in elements."""
    if fragment == fragments:
        return length
    return length * fragment // fragments // unit * unit


def _append(
    made: RankProgram, one: RankProgram, fragment: int, before: Sequence[int]
) -> tuple[int, ...]:
    """Add a fragment's steps; return those that no other one of it waits for."""
    base = len(made.steps)
    shifts = [fragment * space.nblk for space in one.spaces]

    def moved(where: Slice | None) -> Slice | None:
        if where is None:
            return None
        shift = shifts[where.space]
        return Slice(where.space, where.lo + shift, where.hi + shift)

    followed: set[int] = set()
    for step in one.steps:
        followed.update(step.deps)
        deps = tuple(base + dep for dep in step.deps) or tuple(before)
        made.steps.append(
            Step(step.op, moved(step.src), moved(step.dst), step.peer, deps)
        )
    own = range(len(one.steps))
    return tuple(base + index for index in own if index not in followed)
