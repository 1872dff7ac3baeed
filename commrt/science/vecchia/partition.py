# SPDX-License-Identifier: Apache-2.0
"""Blocks of near points, and the ranks that have them.

Random points are the anchors of blocks, in a random order, and each point joins the
nearest anchor (random anchor clustering). Anchors are drawn by the points' numbers, and
blocks are the same for every number of ranks. Ranks own blocks that lie side by side in
the direction in which anchors spread most, as even in work as can be.

Source: Pan et al., "Scaled Block Vecchia approximation for high-dimensional Gaussian
process emulation on GPUs" (arXiv 2504.12004). There a rank clusters its own points
alone, so blocks depend on the number of ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from commrt.comm import Communicator
from commrt.science.distances import first_of_each, squared_distances
from commrt.science.row_route import RowRoute
from commrt.science.rows import Floats, Ints, RowCut

__all__ = ["Blocks", "cut_into_blocks", "nearest_block"]

_MOST_ELEMENTS = 1 << 20
"""Distances that are computed at a time."""


@dataclass(frozen=True, eq=False)
class Blocks:
    """All blocks in short, and the points of those that this rank owns."""

    scales: Floats
    """(d,): length scales by which distances are measured."""
    centers: Floats
    """(blocks, d): the mean of each block's points over the scales."""
    radii: Floats
    """(blocks,): no point of the block is farther from its centre."""
    counts: Ints
    """(blocks,): points of each block, none empty."""
    owners: Ints
    """(blocks,): ranks."""
    own: Ints
    """The blocks of this rank, in order."""
    ids: Ints
    """(points,): numbers of this rank's points, by block, then by number."""
    x: Floats
    """(points, d)."""
    y: Floats
    """(points,)."""

    @property
    def num_blocks(self) -> int:
        """Blocks of all ranks."""
        return len(self.counts)

    @property
    def scaled(self) -> Floats:
        """This rank's points over the scales."""
        return self.x / self.scales

    @cached_property
    def starts(self) -> Ints:
        """The first point of each own block, and the end of the last one."""
        return np.concatenate([[0], np.cumsum(self.counts[self.own])])

    def rows_of(self, blocks: Ints) -> Ints:
        """Return the places of points of some own blocks, given by their place."""
        starts, lengths = self.starts[blocks], self.counts[self.own[blocks]]
        skipped = np.repeat(starts - first_of_each(lengths), lengths)
        return skipped + np.arange(int(lengths.sum()))


def cut_into_blocks(
    x: Floats,
    y: Floats,
    cut: RowCut,
    scales: Floats,
    *,
    block_size: int,
    num_neighbors: int,
    seed: int,
    comm: Communicator,
) -> Blocks:
    """Return the blocks of all ranks' points; collective.

    Args:
        x, y: this rank's points (n, d) and values (n,).
        cut: the numbers of all ranks' points, at least one.
        scales: (d,): length scales.
        block_size: points of a block on average.
        num_neighbors: of a block, to estimate its work.
        seed: draws the anchors.
        comm: the ranks.

    Bytes, for K blocks and n own points: an allgatherv of 8 K d, an allreduce of 8 K,
    an alltoall of 8 for each rank, an alltoallv of 8 n (d + 3), and an allgatherv of
    8 K (d + 1).
    """
    scaled = x / scales
    anchors = _anchors(scaled, cut, block_size, seed, comm)
    block = nearest_block(scaled, anchors)
    counts = np.bincount(block, minlength=len(anchors)).astype(np.int64)
    if comm.size > 1:
        comm.allreduce(counts)
    # Of anchors at one place the first has all points.
    is_kept = counts > 0
    block = (np.cumsum(is_kept) - 1)[block]
    anchors, counts = anchors[is_kept], counts[is_kept]
    owners = _owners(anchors, counts, num_neighbors, comm.size)
    route = RowRoute(comm, owners[block])
    came = route.there(np.column_stack([block, cut.ids, y, x]).astype(np.float64))
    came = came[np.lexsort((came[:, 1], came[:, 0]))]
    own = np.flatnonzero(owners == comm.rank)
    own_x = np.ascontiguousarray(came[:, 3:])
    lengths = counts[own]
    centers, radii = _balls(own_x / scales, lengths)
    ordered = np.argsort(owners, kind="stable")
    summary = np.empty((len(counts), len(scales) + 1))
    summary[ordered] = _gathered(
        np.column_stack([centers, radii]),
        np.bincount(owners, minlength=comm.size),
        comm,
    )
    return Blocks(
        scales=scales,
        centers=np.ascontiguousarray(summary[:, :-1]),
        radii=np.ascontiguousarray(summary[:, -1]),
        counts=counts,
        owners=owners,
        own=own,
        ids=came[:, 1].astype(np.int64),
        x=own_x,
        y=np.ascontiguousarray(came[:, 2]),
    )


def nearest_block(scaled: Floats, centers: Floats) -> Ints:
    """Return the nearest centre of each point; of equally near ones the first."""
    found = np.empty(len(scaled), np.int64)
    step = max(1, _MOST_ELEMENTS // max(1, len(centers)))
    for low in range(0, len(scaled), step):
        distances = squared_distances(scaled[low : low + step], centers)
        found[low : low + step] = distances.argmin(axis=1)
    return found


def _anchors(
    scaled: Floats, cut: RowCut, block_size: int, seed: int, comm: Communicator
) -> Floats:
    """Return the anchors in their order; collective."""
    number = -(-cut.total // block_size)
    draws = np.random.default_rng(seed)
    ids = draws.choice(cut.total, number, replace=False).astype(np.int64)
    ends = np.cumsum(cut.counts)
    ranks = np.searchsorted(ends, ids, side="right")
    own = ids[ranks == cut.rank] - (ends[cut.rank] - cut.counts[cut.rank])
    anchors = np.empty((number, scaled.shape[1]))
    anchors[np.argsort(ranks, kind="stable")] = _gathered(
        scaled[own], np.bincount(ranks, minlength=comm.size), comm
    )
    return anchors


def _gathered(rows: Floats, counts: Ints, comm: Communicator) -> Floats:
    """Return the rows of all ranks in rank order, given how many each has."""
    if comm.size == 1:
        return rows
    width = rows.shape[1]
    out = np.empty((int(counts.sum()), width))
    comm.allgatherv(
        np.ascontiguousarray(rows).reshape(-1),
        counts=tuple((counts * width).tolist()),
        out=out.reshape(-1),
    )
    return out


def _owners(anchors: Floats, counts: Ints, num_neighbors: int, size: int) -> Ints:
    """Return the rank of each block: runs of equal work along the widest direction."""
    widest = int(np.argmax(anchors.max(axis=0) - anchors.min(axis=0)))
    order = np.lexsort((np.arange(len(anchors)), anchors[:, widest]))
    rows = counts + np.minimum(np.cumsum(counts) - counts, num_neighbors)
    work = rows[order].astype(np.float64) ** 3
    middle = np.cumsum(work) - 0.5 * work
    owners = np.empty(len(anchors), np.int64)
    owners[order] = np.minimum(middle * (size / work.sum()), size - 1).astype(np.int64)
    return owners


def _balls(scaled: Floats, lengths: Ints) -> tuple[Floats, Floats]:
    """Return the centre and the radius of each block, given its number of points."""
    centers = np.empty((len(lengths), scaled.shape[1]))
    radii = np.empty(len(lengths))
    ends = np.cumsum(lengths)
    for place, (end, length) in enumerate(zip(ends, lengths, strict=True)):
        points = scaled[end - length : end]
        centers[place] = points.mean(axis=0)
        distances = squared_distances(points, centers[place : place + 1])
        radii[place] = np.sqrt(distances.max())
    return centers, radii
