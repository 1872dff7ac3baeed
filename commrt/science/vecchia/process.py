# SPDX-License-Identifier: Apache-2.0
"""Gaussian processes by the scaled block Vecchia approximation."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import numpy as np

from commrt.comm import Communicator
from commrt.errors import UsageError, shown
from commrt.science.exact_sums import exact_sum
from commrt.science.rows import Floats, RowCut, agreed_rows, as_rows, as_values
from commrt.science.vecchia.batches import Batch, batches_of
from commrt.science.vecchia.covariances import COVARIANCES
from commrt.science.vecchia.hyperparameters import (
    NAMES,
    Hyperparameters,
    decoded,
    encoded,
    is_learned,
)
from commrt.science.vecchia.likelihood import log_likelihood
from commrt.science.vecchia.model import VecchiaModel, not_definite
from commrt.science.vecchia.neighbors import NeighborTraffic, find_neighbors
from commrt.science.vecchia.partition import Blocks, cut_into_blocks
from commrt.science.vecchia.quasi_newton import minimize
from commrt.science.vecchia.steering import steered
from commrt.vocabulary.checks import as_integer

__all__ = ["ScaledBlockVecchia"]

_SCALE_RANGE, _VARIANCE_RANGE = 1e3, 1e4
"""Length scales stay within this factor of the data's spread, variances of the
variance of y."""
_LEAST_NUGGET = 1e-10
"""Of the variance of y, at a bound of the search."""


class ScaledBlockVecchia:
    """Gaussian processes for more points than one matrix holds.

        process = ScaledBlockVecchia(comm, kernel="matern52", num_neighbors=64)
        model = process.fit(x, y)           # each rank has rows of its own
        found = model.predict(new)           # found.mean, found.variance

    The joint density is a product over blocks of points: each block given the points
    of earlier blocks that are nearest to it. Distances are over the length scales, so
    dimensions that matter little do not choose neighbours. Cost for n points, blocks of
    b and m neighbours: n / b times (b + m)^3, in place of n^3. Neighbours of all
    earlier points give the exact process.

    Ranks have any number of points, also none. Blocks, neighbours and sums do not
    depend on the number of ranks. All methods are collective. Everything is computed in
    float64 on the host.

    Args:
        comm: the ranks; it stays the caller's.
        block_size: points of a block on average.
        num_neighbors: earlier points of a block, m; 0 makes blocks independent.
        kernel: "matern12", "matern32", "matern52" or "squared_exponential".
        seed: draws the blocks.

    Raises UsageError for wrong arguments, before anything is sent.

    Source: Pan et al., "Scaled Block Vecchia approximation for high-dimensional
    Gaussian process emulation on GPUs" (arXiv 2504.12004).
    """

    def __init__(
        self,
        comm: Communicator,
        *,
        block_size: int = 32,
        num_neighbors: int = 64,
        kernel: str = "matern52",
        seed: int = 0,
    ) -> None:
        if not isinstance(comm, Communicator):
            raise UsageError(
                f"ScaledBlockVecchia: comm={shown(comm)} must be a communicator, as "
                f"commrt.init() returns it"
            )
        if kernel not in COVARIANCES:
            raise UsageError(
                f"ScaledBlockVecchia: kernel={shown(kernel)} must be one of "
                f"{', '.join(COVARIANCES)}"
            )
        self.comm, self.kernel = comm, kernel
        self.block_size = _number("block_size", block_size, 1)
        self.num_neighbors = _number("num_neighbors", num_neighbors, 0)
        self.seed = _number("seed", seed, 0)

    def condition(
        self,
        x: Any,
        y: Any,
        hyperparameters: Hyperparameters,
        *,
        mean: float | None = None,
    ) -> VecchiaModel:
        """Return the model of data with given hyperparameters.

        Args:
            x: (rows, d), this rank's points.
            y: (rows,), their values.
            hyperparameters: the same on all ranks.
            mean: of the process; None: the mean of all y.

        Raises UsageError on all ranks where an argument is wrong on any, and where a
        block's covariance is not positive definite.
        """
        what = "ScaledBlockVecchia.condition"
        data = self._data(what, x, y, hyperparameters, mean, ())
        return self._conditioned(what, data, hyperparameters)

    def log_likelihood(
        self,
        x: Any,
        y: Any,
        hyperparameters: Hyperparameters,
        *,
        mean: float | None = None,
    ) -> float:
        """Return the log-likelihood of data; arguments as for ``condition``."""
        found = self.condition(x, y, hyperparameters, mean=mean)
        return found.log_likelihood

    def fit(
        self,
        x: Any,
        y: Any,
        *,
        start: Hyperparameters | None = None,
        mean: float | None = None,
        fixed: Collection[str] = (),
        rounds: int = 3,
        max_steps: int = 40,
        tolerance: float = 1e-6,
    ) -> VecchiaModel:
        """Return the model of data with hyperparameters of the largest likelihood.

        Args:
            x, y, mean: as for ``condition``.
            start: where the search begins; None: length scales of the spread of each
                dimension times the root of their number, the variance of y, and a
                hundredth of it as the nugget.
            fixed: names of hyperparameters that stay as they are in ``start``.
            rounds: searches; each begins with blocks and neighbours by the length
                scales that the last one has found.
            max_steps: steps of a quasi-Newton search.
            tolerance: a search ends where a step gains less than this part of the
                log-likelihood.

        Length scales stay within a factor of 1000 of those at the default start,
        variances within 10000. Raises UsageError as ``condition`` does.
        """
        what = "ScaledBlockVecchia.fit"
        is_list = isinstance(fixed, Collection) and not isinstance(fixed, str)
        settings = (
            sorted(map(str, fixed)) if is_list else [shown(fixed)],
            *(rounds, max_steps, tolerance),
        )
        data = self._data(what, x, y, start, mean, settings)
        spread, variance = self._spread(data)
        usual = Hyperparameters(
            spread * math.sqrt(max(len(spread), 1)), variance, 0.01 * variance
        )
        values = usual if start is None else start
        low, high = _bounds(usual)
        evaluations = 0
        has_converged = False
        for _ in range(rounds):
            _blocks, batches, _ = self._arranged(data, values)
            first, begun = values, evaluations

            def evaluate(
                point: Floats,
                batches: list[Batch] = batches,
                first: Hyperparameters = first,
                begun: int = begun,
            ) -> tuple[float, Floats]:
                trial = decoded(point, first, fixed)
                value, gradient = log_likelihood(
                    batches, COVARIANCES[self.kernel], trial, self.comm
                )
                nonlocal evaluations
                evaluations += 1
                if evaluations == begun + 1 and not math.isfinite(value):
                    raise not_definite(what, trial)
                return -value, -gradient

            search = minimize(
                encoded(values),
                low,
                high,
                is_learned(len(spread), fixed),
                max_steps=max_steps,
                tolerance=tolerance,
            )
            found = steered(search, evaluate, len(low), self.comm)
            has_converged = found.has_converged
            values = decoded(found.point, first, fixed)
        return self._conditioned(
            what, data, values, evaluations=evaluations, has_converged=has_converged
        )

    # -- inside --------------------------------------------------------------------

    def _data(
        self,
        what: str,
        x: Any,
        y: Any,
        values: Hyperparameters | None,
        mean: float | None,
        settings: tuple[Any, ...],
    ) -> _Data:
        """Return checked data of all ranks; collective."""

        def check() -> tuple[Floats, ...]:
            rows = as_rows(what, x)
            found = as_values(what, y, len(rows))
            if settings:
                _check_search(what, *settings)
            if mean is not None and not _is_finite(mean):
                raise UsageError(f"{what}: mean={shown(mean)} must be a number")
            if values is None:
                if settings and settings[0]:
                    raise UsageError(
                        f"{what}: fixed={settings[0]} needs start, with the values "
                        f"that stay"
                    )
                return rows, found
            if not isinstance(values, Hyperparameters):
                raise UsageError(f"{what}: {shown(values)} must be Hyperparameters")
            if len(values.length_scales) != rows.shape[1]:
                raise UsageError(
                    f"{what}: {len(values.length_scales)} length scales, and x has "
                    f"{rows.shape[1]} columns; expected one for each"
                )
            if settings and "nugget" not in settings[0] and values.nugget == 0:
                raise UsageError(
                    f"{what}: a search cannot begin at nugget=0; pass a positive one, "
                    f"or fixed=('nugget',)"
                )
            return rows, found

        own = (self.kernel, self.block_size, self.num_neighbors, self.seed)
        exact = values.exact if isinstance(values, Hyperparameters) else None
        facts = what, own, exact, mean if mean is None else repr(mean), settings
        (rows, found), cut = agreed_rows(what, self.comm, check, facts)
        if cut.total == 0 or cut.num_features == 0:
            raise UsageError(
                f"{what}: {cut.total} points of {cut.num_features} dimensions; "
                f"expected at least one of each"
            )
        if mean is None:
            mean = float(exact_sum(found[:, None], self.comm)[0]) / cut.total
        return _Data(rows, found, cut, float(mean))

    def _spread(self, data: _Data) -> tuple[Floats, float]:
        """Return each dimension's standard deviation and y's variance; 1 for 0."""
        both = np.column_stack([data.x, data.y])
        center = exact_sum(both, self.comm) / data.cut.total
        squares = exact_sum((both - center) ** 2, self.comm) / data.cut.total
        squares[squares <= 0] = 1.0
        return np.sqrt(squares[:-1]), float(squares[-1])

    def _arranged(
        self, data: _Data, values: Hyperparameters
    ) -> tuple[Blocks, list[Batch], NeighborTraffic]:
        """Return blocks by some length scales, and stacks of them; collective."""
        blocks = cut_into_blocks(
            data.x,
            data.y,
            data.cut,
            values.length_scales,
            block_size=self.block_size,
            num_neighbors=self.num_neighbors,
            seed=self.seed,
            comm=self.comm,
        )
        neighbors = find_neighbors(
            blocks,
            blocks.centers[blocks.own],
            blocks.own,
            self.num_neighbors,
            self.comm,
        )
        starts = blocks.starts
        points = [np.arange(low, high) for low, high in itertools.pairwise(starts)]
        centered = neighbors.y - data.mean
        batches = [*batches_of(neighbors.rows, points, neighbors.x, centered)]
        return blocks, batches, neighbors.traffic

    def _conditioned(
        self,
        what: str,
        data: _Data,
        values: Hyperparameters,
        *,
        evaluations: int = 0,
        has_converged: bool = True,
    ) -> VecchiaModel:
        blocks, batches, traffic = self._arranged(data, values)
        value, _ = log_likelihood(batches, COVARIANCES[self.kernel], values, self.comm)
        if not math.isfinite(value):
            raise not_definite(what, values)
        return VecchiaModel(
            hyperparameters=values,
            mean=data.mean,
            log_likelihood=value,
            num_evaluations=evaluations + 1,
            has_converged=has_converged,
            num_neighbors=self.num_neighbors,
            kernel=self.kernel,
            blocks=blocks,
            traffic=traffic,
            comm=self.comm,
        )


@dataclass(frozen=True, eq=False)
class _Data:
    """Points and values of this rank, and what all ranks know."""

    x: Floats
    y: Floats
    cut: RowCut
    mean: float


def _bounds(usual: Hyperparameters) -> tuple[Floats, Floats]:
    """Return the lowest and the highest logarithms of a search."""
    factors = np.log(
        [*[_SCALE_RANGE] * len(usual.length_scales), _VARIANCE_RANGE, _VARIANCE_RANGE]
    )
    center = encoded(usual)
    low, high = center - factors, center + factors
    low[-1] = math.log(_LEAST_NUGGET * usual.variance)
    return low, high


def _number(name: str, value: Any, least: int) -> int:
    found = as_integer(value)
    if found is None or found < least:
        raise UsageError(
            f"ScaledBlockVecchia: {name}={shown(value)} must be an integer from "
            f"{least} on"
        )
    return found


def _is_finite(value: Any) -> bool:
    try:
        return math.isfinite(value)
    except TypeError:
        return False


def _check_search(
    what: str, fixed: list[str], rounds: Any, max_steps: Any, tolerance: Any
) -> None:
    """Raise UsageError for wrong arguments of ``fit``."""
    wrong = [name for name in fixed if name not in NAMES]
    if wrong:
        raise UsageError(f"{what}: fixed={wrong} must be among {', '.join(NAMES)}")
    for name, value, least in (("rounds", rounds, 1), ("max_steps", max_steps, 0)):
        number = as_integer(value)
        if number is None or number < least:
            raise UsageError(
                f"{what}: {name}={shown(value)} must be an integer from {least} on"
            )
    if not (_is_finite(tolerance) and tolerance >= 0):
        raise UsageError(f"{what}: tolerance={shown(tolerance)} must be a number >= 0")
