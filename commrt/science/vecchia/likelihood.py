# SPDX-License-Identifier: Apache-2.0
"""The log-likelihood of blocks, given their neighbours, and its gradient.

For one block let J be its neighbours N, then its points B, and L L^T the covariance of
J. With Q = L^-1 and z = Q y, its term is log p(y_B | y_N) = -1/2 |z_B|^2 - sum log
L_BB - |B|/2 log 2 pi, since the leading part of L belongs to N alone.

The gradient by a number t is 1/2 <W, dK/dt>, where W is a a^T - K^-1 of J less that of
N. With u = Q_N^T z_N and v = Q_B^T z_B this is v v^T + u v^T + v u^T - Q_B^T Q_B, so J
and N are never subtracted (Rasmussen and Williams, section 5.4.1, for J and for N). For
the length scale of dimension k, dK/dt has -2 variance f'(s) ((a_k - b_k) / length_k)^2.
The squared difference stays one factor: f' of matern12 grows as 1 / r, and a product
with a_k^2 or with a_k b_k would cancel.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from commrt.comm import Communicator
from commrt.science.exact_sums import exact_sum
from commrt.science.rows import Floats
from commrt.science.vecchia.batches import Batch, covariances_of, squares_along
from commrt.science.vecchia.covariances import Covariance
from commrt.science.vecchia.hyperparameters import Hyperparameters
from commrt.science.vecchia.triangular import cholesky, inverse_of_lower

__all__ = ["block_terms", "log_likelihood"]


def log_likelihood(
    batches: Sequence[Batch],
    covariance: Covariance,
    values: Hyperparameters,
    comm: Communicator,
) -> tuple[float, Floats]:
    """Return the log-likelihood of all ranks' blocks, and its gradient; collective.

    The gradient (d + 2,) is by the logarithms of length scales, variance and nugget.
    Both are the same on all ranks, and NaN where any block's covariance is not positive
    definite. Bytes: an allreduce of 8 (d + 3) and one of 24 (d + 3).
    """
    columns = len(values.length_scales) + 3
    terms = [block_terms(batch, covariance, values) for batch in batches]
    sums = exact_sum(np.concatenate([np.empty((0, columns)), *terms]), comm)
    return float(sums[0]), sums[1:]


def block_terms(
    batch: Batch, covariance: Covariance, values: Hyperparameters
) -> Floats:
    """Return each block's term and its gradient, (blocks, 1 + d + 2); local."""
    found = np.full((len(batch.y), len(values.length_scales) + 3), math.nan)
    m = batch.num_neighbors
    parts = covariances_of(batch, covariance, values)
    lower = cholesky(parts.matrix)
    if lower is None:
        return found
    inverse = inverse_of_lower(lower)
    head, tail = inverse[:, :m, :m], inverse[:, m:]
    z_head = head @ batch.y[:, :m, None]
    z_tail = tail @ batch.y[:, :, None]
    num_points = batch.is_real[:, m:].sum(axis=1)
    pivots = np.diagonal(lower, axis1=1, axis2=2)[:, m:]
    found[:, 0] = (
        -0.5 * (z_tail[:, :, 0] ** 2).sum(axis=1)
        - np.log(pivots).sum(axis=1)
        - 0.5 * math.log(2.0 * math.pi) * num_points
    )
    u = np.zeros((*batch.y.shape, 1))
    u[:, :m] = _transposed(head) @ z_head
    v = _transposed(tail) @ z_tail
    weights = (v + u) @ _transposed(v) + v @ _transposed(u) - _transposed(tail) @ tail
    bent = weights * parts.slope
    for dimension in range(batch.x.shape[2]):
        moved = bent * squares_along(batch, dimension, values)
        found[:, 1 + dimension] = -values.variance * moved.sum(axis=(1, 2))
    found[:, -2] = 0.5 * values.variance * (weights * parts.value).sum(axis=(1, 2))
    own = np.diagonal(weights, axis1=1, axis2=2) * batch.is_real
    found[:, -1] = 0.5 * values.nugget * own.sum(axis=1)
    return found


def _transposed(matrices: Floats) -> Floats:
    return np.swapaxes(matrices, 1, 2)
