# SPDX-License-Identifier: Apache-2.0
"""A Gaussian process whose hyperparameters are known, and its predictions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from commrt.comm import Communicator
from commrt.errors import UsageError, shown
from commrt.science.distances import first_of_each
from commrt.science.row_route import RowRoute
from commrt.science.rows import Floats, Ints, agreed_rows, as_rows
from commrt.science.vecchia.batches import Batch, batches_of, covariances_of
from commrt.science.vecchia.covariances import COVARIANCES
from commrt.science.vecchia.hyperparameters import Hyperparameters
from commrt.science.vecchia.neighbors import NeighborTraffic, find_neighbors
from commrt.science.vecchia.partition import Blocks, nearest_block
from commrt.science.vecchia.triangular import cholesky, inverse_of_lower
from commrt.vocabulary.checks import as_integer

__all__ = ["Prediction", "VecchiaModel", "not_definite"]

_MOST_POINTS = 64
"""New points that are computed together; more near one block are several groups."""


class Prediction(NamedTuple):
    """Means and variances of the function at new points."""

    mean: Floats
    """(rows,)."""
    variance: Floats
    """(rows,): of the function; add the nugget for that of an observation."""
    traffic: NeighborTraffic
    """Counts of the search of neighbours, of this rank."""


@dataclass(frozen=True, eq=False)
class VecchiaModel:
    """A Gaussian process with its data on all ranks.

    ``ScaledBlockVecchia`` makes one, by ``fit`` or ``condition``.
    """

    hyperparameters: Hyperparameters
    """The same on all ranks."""
    mean: float
    """The process's mean."""
    log_likelihood: float
    """Of the data, by blocks."""
    num_evaluations: int
    """Likelihoods that ``fit`` has computed; 1 after ``condition``."""
    has_converged: bool
    """False where the last round of ``fit`` has ended by its number of steps."""
    num_neighbors: int
    """Of a block, as the process was told."""
    kernel: str
    """The covariance's name."""
    blocks: Blocks
    """The data, by block."""
    traffic: NeighborTraffic
    """Counts of the last search of neighbours, of this rank."""
    comm: Communicator
    """The ranks."""

    def predict(self, x: Any, *, num_neighbors: int | None = None) -> Prediction:
        """Return means and variances at this rank's new points; collective.

        Args:
            x: (rows, d); ranks may have different numbers of rows, also none.
            num_neighbors: the nearest data points that count; None: as many as of a
                block.

        New points that are nearest to one block of the data form groups of at most 64,
        and a group has the data points that are nearest to its centre. All data points
        give the exact prediction.

        Raises UsageError on all ranks where x is wrong on any, and where the covariance
        of any group's neighbours is not positive definite. Bytes, for n own points: an
        allgather of 32 and an alltoall of 8 for each rank, alltoallvs of 8 n (d + 2)
        and of 16 for each point that has come, an allreduce of 8, and those of
        ``find_neighbors``.
        """
        what = "VecchiaModel.predict"
        comm, blocks = self.comm, self.blocks
        number = self.num_neighbors if num_neighbors is None else num_neighbors

        def check() -> tuple[tuple[Floats, ...], tuple[str, int]]:
            most = as_integer(number)
            if most is None or most < 0:
                raise UsageError(
                    f"{what}: num_neighbors={shown(number)} must be an integer from 0 "
                    f"on"
                )
            rows = as_rows(what, x)
            if rows.shape[1] != len(blocks.scales):
                raise UsageError(
                    f"{what}: x has {rows.shape[1]} columns, and the data "
                    f"{len(blocks.scales)}"
                )
            return (rows,), (what, most)

        (new,), (_, most), cut = agreed_rows(what, comm, check)
        block = nearest_block(new / blocks.scales, blocks.centers)
        route = RowRoute(comm, blocks.owners[block])
        came = route.there(np.column_stack([block, cut.ids, new]).astype(np.float64))
        order = np.lexsort((came[:, 1], came[:, 0]))
        points = came[order, 2:]
        groups = _groups(came[order, 0].astype(np.int64))
        scaled = points / blocks.scales
        centers = [scaled[group].mean(axis=0) for group in groups]
        neighbors = find_neighbors(
            blocks,
            np.array(centers).reshape(len(groups), new.shape[1]),
            np.full(len(groups), blocks.num_blocks),
            most,
            comm,
        )
        table = np.concatenate([neighbors.x, points])
        values = np.concatenate([neighbors.y - self.mean, np.zeros(len(points))])
        shifted = [group + len(neighbors.x) for group in groups]
        answers = np.empty((len(points), 2))
        for batch in batches_of(neighbors.rows, shifted, table, values):
            for place, answer in zip(batch.places, self._predicted(batch), strict=True):
                answers[order[groups[place]]] = answer
        num_failed = np.array([np.isnan(answers).any()], np.int64)
        if comm.size > 1:
            comm.allreduce(num_failed)
        if num_failed[0]:
            raise not_definite(what, self.hyperparameters)
        found = route.back(answers)
        return Prediction(
            found[:, 0] + self.mean, found[:, 1].copy(), neighbors.traffic
        )

    def _predicted(self, batch: Batch) -> list[Floats]:
        """Return means and variances (points, 2) of the blocks of a stack."""
        m = batch.num_neighbors
        values = self.hyperparameters
        matrix = covariances_of(batch, COVARIANCES[self.kernel], values).matrix
        lower = cholesky(matrix[:, :m, :m])
        if lower is None:
            # All ranks raise together, when each has computed its groups.
            lower = np.full((len(matrix), m, m), np.nan)
        inverse = inverse_of_lower(lower)
        crossed = inverse @ matrix[:, :m, m:]
        z = inverse @ batch.y[:, :m, None]
        means = (np.swapaxes(crossed, 1, 2) @ z)[:, :, 0]
        variances = values.variance - (crossed * crossed).sum(axis=1)
        both = np.stack([means, np.maximum(variances, 0.0)], axis=2)
        return [
            pair[is_real]
            for pair, is_real in zip(both, batch.is_real[:, m:], strict=True)
        ]


def _groups(block: Ints) -> list[Ints]:
    """Return the rows of each group, given the sorted blocks of all rows."""
    _, counts = np.unique(block, return_counts=True)
    groups = []
    for start, count in zip(first_of_each(counts), counts, strict=True):
        for low in range(start, start + count, _MOST_POINTS):
            groups.append(np.arange(low, min(low + _MOST_POINTS, start + count)))
    return groups


def not_definite(what: str, values: Hyperparameters) -> UsageError:
    """Return the error of points that are too near each other for the nugget."""
    return UsageError(
        f"{what}: the covariance of a block is not positive definite with nugget="
        f"{values.nugget!r}: points lie too near each other, or twice at one place; "
        f"pass a larger nugget"
    )
