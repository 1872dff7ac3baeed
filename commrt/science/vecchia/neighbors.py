# SPDX-License-Identifier: Apache-2.0
"""The nearest earlier points of each block, wherever they lie.

Each rank knows centre, radius and number of points of all blocks. So it knows a
distance within which enough points lie for sure, and which blocks can have points so
near: it searches no others (the filter). It looks at its own points first, which makes
the distance smaller, and asks only ranks with blocks that are left. These answer with
numbers and distances of points. At last each point that is needed, and that another
rank has, travels once.

In arXiv 2504.12004 the distance comes from the density of points, and a search that
finds too few begins again. Here it is a bound, and one search is enough.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from commrt.comm import Communicator
from commrt.science.distances import nearest, squared_distances
from commrt.science.row_route import RowRoute, exchanged
from commrt.science.rows import Bools, Floats, Ints
from commrt.science.vecchia.partition import Blocks

__all__ = ["NeighborTraffic", "Neighbors", "find_neighbors"]

_SLACK = 1e-9
"""Part of a distance by which bounds are widened, beyond any rounding."""
_FAR = 1e150
"""Stands for no limit: its square is finite, as communicators may check."""
_MOST_ELEMENTS = 1 << 18
"""Distances of questions and blocks that are computed at a time."""


@dataclass(frozen=True)
class NeighborTraffic:
    """Counts of one search, of this rank."""

    num_queries: int
    """Questions to other ranks: a block and a rank each."""
    num_answered: int
    """Questions of other ranks."""
    num_candidates: int
    """Points that this rank named in its answers."""
    num_requested: int
    """Points of other ranks that this rank needs."""
    num_served: int
    """Points that this rank has sent."""


@dataclass(frozen=True, eq=False)
class Neighbors:
    """The neighbours of some blocks, and a table of their points."""

    x: Floats
    """(rows, d): this rank's points, then those that have come."""
    y: Floats
    """(rows,)."""
    rows: list[Ints]
    """For each block, its neighbours in the table, the nearest first."""
    traffic: NeighborTraffic


def find_neighbors(
    blocks: Blocks, centers: Floats, before: Ints, number: int, comm: Communicator
) -> Neighbors:
    """Return the nearest points of earlier blocks; collective.

    Args:
        blocks: the points.
        centers: (queries, d): where neighbours are wanted, over the scales.
        before: (queries,): blocks with a smaller number are searched.
        number: neighbours of each, fewer where there are fewer points.
        comm: the ranks.

    Of equally near points the one with the lower number comes first.

    Bytes, for q questions, a answered ones, c candidates, r requested and s served
    points, as the traffic counts them: alltoallvs of 8 q (d + 2), 8 a, 16 c, 8 r and
    8 s (d + 1), and two alltoalls of 8 for each rank.
    """
    search = _Search(blocks, number)
    found: list[tuple[Ints, Floats]] = []
    limits = np.empty(len(centers))
    asked = np.zeros((len(centers), comm.size), np.bool_)
    for part in _parts(len(centers), blocks.num_blocks):
        own, limits[part], reach = _own_nearest(search, centers[part], before[part])
        found.extend(own)
        asked[part] = _ranks_with(reach, blocks.owners, comm)
    queries, ranks = np.nonzero(asked)
    route = RowRoute(comm, ranks)
    questions = np.column_stack([centers, limits, before])[queries]
    answers = _answers(search, route.there(questions))
    counts = np.array([len(ids) for ids, _ in answers], np.int64)
    answered = route.back(counts)
    flat = [np.column_stack([ids, squares]) for ids, squares in answers]
    named = np.concatenate([np.empty((0, 2)), *flat])
    sends = np.bincount(route.sources, counts, comm.size).astype(np.int64)
    recvs = np.bincount(ranks, answered, comm.size).astype(np.int64)
    came = exchanged(comm, named, sends, recvs)
    merged = _merged(blocks, found, came, queries, ranks, answered, number, comm.rank)
    return _fetched(blocks, merged, (len(queries), len(answers), len(named)), comm)


def blocks_within(blocks: Blocks, distances: Floats, limits: Floats) -> Bools:
    """Return which blocks (queries, blocks) may have points within a limit."""
    slack = _SLACK * (distances + blocks.radii)
    found: Bools = distances - blocks.radii - slack <= limits[:, None]
    return found


def _parts(num_queries: int, num_blocks: int) -> Iterator[slice]:
    """Yield the questions whose distances to all blocks are computed together."""
    step = max(1, _MOST_ELEMENTS // max(1, num_blocks))
    for low in range(0, num_queries, step):
        yield slice(low, low + step)


def _own_nearest(
    search: _Search, centers: Floats, before: Ints
) -> tuple[list[tuple[Ints, Floats]], Floats, Bools]:
    """Return the nearest own points of some questions, and where more may lie.

    Returns numbers and squared distances for each question, the distances (queries,)
    beyond which no point counts, and the blocks (queries, blocks) that are as near.
    """
    blocks, number = search.blocks, search.number
    distances = np.sqrt(squared_distances(centers, blocks.centers))
    earlier = np.arange(blocks.num_blocks) < before[:, None]
    limits = _sure_limits(blocks, distances, earlier, number)
    reach = earlier & blocks_within(blocks, distances, limits)
    found = search.nearest_of_each(centers, limits, reach)
    for place, (_, squares) in enumerate(found):
        if 0 < number == len(squares):
            limits[place] = min(limits[place], np.sqrt(squares[-1]) * (1.0 + _SLACK))
    reach &= blocks_within(blocks, distances, limits)
    return found, limits, reach


def _sure_limits(
    blocks: Blocks, distances: Floats, earlier: Bools, number: int
) -> Floats:
    """Return distances within which so many earlier points lie for sure."""
    farthest = (distances + blocks.radii) * (1.0 + _SLACK)
    farthest[~earlier] = np.inf
    order = np.argsort(farthest, axis=1, kind="stable")
    counts = np.where(np.take_along_axis(earlier, order, 1), blocks.counts[order], 0)
    enough = np.cumsum(counts, axis=1) >= number
    first = enough.argmax(axis=1)
    rows = np.arange(len(distances))
    limits = np.take_along_axis(farthest, order, 1)[rows, first]
    return np.where(enough.any(axis=1), limits, _FAR)


class _Search:
    """Finds the nearest of a rank's own points."""

    def __init__(self, blocks: Blocks, number: int) -> None:
        self.blocks, self.number = blocks, number
        self._scaled = np.ascontiguousarray(blocks.scaled)

    def nearest_of_each(
        self, centers: Floats, limits: Floats, reach: Bools
    ) -> list[tuple[Ints, Floats]]:
        """Return numbers and squared distances of the nearest own points, in order.

        Args:
            centers: (queries, d), over the scales.
            limits: (queries,): points that are farther do not count.
            reach: (queries, blocks): the blocks to be searched.
        """
        return [
            self._nearest(center, limit * limit, within)
            for center, limit, within in zip(centers, limits, reach, strict=True)
        ]

    def _nearest(
        self, center: Floats, limit_squared: float, within: Bools
    ) -> tuple[Ints, Floats]:
        rows = self.blocks.rows_of(np.flatnonzero(within[self.blocks.own]))
        squares = squared_distances(self._scaled[rows], center[None])[:, 0]
        is_near = squares <= limit_squared
        ids, squares = self.blocks.ids[rows][is_near], squares[is_near]
        places = nearest(squares, ids, self.number)
        return ids[places], squares[places]


def _ranks_with(reach: Bools, owners: Ints, comm: Communicator) -> Bools:
    """Return which other ranks (queries, ranks) have blocks that are in reach."""
    asked = np.zeros((len(reach), comm.size), np.bool_)
    for rank in range(comm.size):
        if rank != comm.rank:
            asked[:, rank] = reach[:, owners == rank].any(axis=1)
    return asked


def _answers(search: _Search, questions: Floats) -> list[tuple[Ints, Floats]]:
    """Return the nearest own points for each question of another rank."""
    blocks = search.blocks
    centers = np.ascontiguousarray(questions[:, :-2])
    limits, before = questions[:, -2], questions[:, -1]
    found = []
    for part in _parts(len(centers), blocks.num_blocks):
        distances = np.sqrt(squared_distances(centers[part], blocks.centers))
        reach = np.arange(blocks.num_blocks) < before[part, None]
        reach &= blocks_within(blocks, distances, limits[part])
        found.extend(search.nearest_of_each(centers[part], limits[part], reach))
    return found


def _merged(
    blocks: Blocks,
    found: list[tuple[Ints, Floats]],
    came: Floats,
    queries: Ints,
    ranks: Ints,
    answered: Ints,
    number: int,
    own_rank: int,
) -> list[tuple[Ints, Ints]]:
    """Return numbers and owners of the nearest points of all ranks, in order."""
    # Answers come by rank, those of one rank in the order of its questions.
    order = np.argsort(ranks, kind="stable")
    pieces: list[list[tuple[Ints, Floats, int]]] = [
        [(ids, squares, own_rank)] for ids, squares in found
    ]
    ends = np.cumsum(answered[order])
    for place, end in zip(order, ends, strict=True):
        piece = came[end - answered[place] : end]
        ids = piece[:, 0].astype(np.int64)
        pieces[queries[place]].append((ids, piece[:, 1], int(ranks[place])))
    merged = []
    for each in pieces:
        ids = np.concatenate([piece[0] for piece in each])
        squares = np.concatenate([piece[1] for piece in each])
        owners = np.repeat([piece[2] for piece in each], [len(p[0]) for p in each])
        places = nearest(squares, ids, number)
        merged.append((ids[places], owners[places]))
    return merged


def _fetched(
    blocks: Blocks,
    merged: list[tuple[Ints, Ints]],
    counted: tuple[int, int, int],
    comm: Communicator,
) -> Neighbors:
    """Return the neighbours with a table that has all their points; collective."""
    empty = np.empty(0, np.int64)
    ids = np.concatenate([empty, *(each[0] for each in merged)])
    owners = np.concatenate([empty, *(each[1] for each in merged)])
    missing, first = np.unique(ids[owners != comm.rank], return_index=True)
    route = RowRoute(comm, owners[owners != comm.rank][first])
    by_id = np.argsort(blocks.ids)
    wanted = route.there(missing)
    served = by_id[np.searchsorted(blocks.ids[by_id], wanted)]
    rows = np.column_stack([blocks.y, blocks.x])[served]
    came = route.back(rows)
    table_ids = np.concatenate([blocks.ids, missing])
    table_order = np.argsort(table_ids)
    places = table_order[np.searchsorted(table_ids[table_order], ids)]
    ends = np.cumsum([len(each[0]) for each in merged])
    return Neighbors(
        x=np.concatenate([blocks.x, came[:, 1:]]),
        y=np.concatenate([blocks.y, came[:, 0]]),
        rows=np.split(places, ends[:-1]) if merged else [],
        traffic=NeighborTraffic(*counted, len(missing), len(wanted)),
    )
