# SPDX-License-Identifier: Apache-2.0
"""Gaussian processes by the scaled block Vecchia approximation."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from commrt.comm import Communicator
from commrt.errors import UsageError, shown
from commrt.science.exact_sums import exact_sum
from commrt.science.numbers import as_finite
from commrt.science.rows import Floats, RowCut, agreed_rows, as_rows, as_values
from commrt.science.vecchia.batches import Batch, batches_of
from commrt.science.vecchia.covariances import COVARIANCES
from commrt.science.vecchia.hyperparameters import (
    NAMES,
    Hyperparameters,
    decoded,
    encoded,
    is_learned,
    with_numbers,
)
from commrt.science.vecchia.likelihood import log_likelihood
from commrt.science.vecchia.model import VecchiaModel, not_definite
from commrt.science.vecchia.neighbors import NeighborTraffic, find_neighbors
from commrt.science.vecchia.partition import Blocks, cut_into_blocks
from commrt.science.vecchia.quasi_newton import minimize
from commrt.science.vecchia.steering import steered
from commrt.vocabulary.checks import as_integer

__all__ = ["ScaledBlockVecchia"]

Checked = TypeVar("Checked")

_SCALE_RANGE, _VARIANCE_RANGE = 1e3, 1e4
"""Factors by which a search may leave the default start, up and down."""
_LEAST_NUGGET = 1e-10
"""The lowest nugget of a search, as a part of the variance of y."""
_ROUNDING = 4.0 * float(np.finfo(np.float64).eps)
"""A mean is off by less than this part of it."""


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
        what = "ScaledBlockVecchia"
        if not isinstance(comm, Communicator):
            raise UsageError(
                f"{what}: comm={shown(comm)} must be a communicator, as "
                f"commrt.init() returns it"
            )
        if not isinstance(kernel, str) or kernel not in COVARIANCES:
            raise UsageError(
                f"{what}: kernel={shown(kernel)} must be one of "
                f"{', '.join(COVARIANCES)}"
            )
        self.comm, self.kernel = comm, str(kernel)
        self.block_size = _number(what, "block_size", block_size, 1)
        self.num_neighbors = _number(what, "num_neighbors", num_neighbors, 0)
        self.seed = _number(what, "seed", seed, 0)

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

        def check() -> None:
            if hyperparameters is None:
                raise UsageError(f"{what}: expected Hyperparameters, and got None")

        data, _ = self._data(what, x, y, hyperparameters, mean, check)
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

        A search keeps length scales within a factor of 1000 of those at the default
        start, and the variance within 10000 of that of y. It keeps the nugget between
        1e-10 and 100 times the variance of y. Raises UsageError as ``condition`` does.
        """
        what = "ScaledBlockVecchia.fit"

        def check() -> _Search:
            search = _checked_search(what, fixed, rounds, max_steps, tolerance)
            if start is None and search.fixed:
                raise UsageError(
                    f"{what}: fixed={list(search.fixed)} needs start, with the values "
                    f"that stay"
                )
            if not isinstance(start, Hyperparameters):
                return search
            if "nugget" not in search.fixed and start.nugget == 0:
                raise UsageError(
                    f"{what}: a search cannot begin at nugget=0; pass a positive one, "
                    f"or fixed=('nugget',)"
                )
            return search

        data, search = self._data(what, x, y, start, mean, check)
        spread, variance = self._spread(data)
        usual = Hyperparameters(
            spread * math.sqrt(max(len(spread), 1)), variance, 0.01 * variance
        )
        values = usual if start is None else start
        low, high = _bounds(usual)
        evaluations = 0
        has_converged = False
        for _ in range(search.rounds):
            _blocks, batches, _ = self._arranged(data, values)
            first, begun = values, evaluations

            def evaluate(
                point: Floats,
                batches: list[Batch] = batches,
                first: Hyperparameters = first,
                begun: int = begun,
            ) -> tuple[float, Floats]:
                trial = with_numbers(first, point, search.fixed)
                value, gradient = log_likelihood(
                    batches, COVARIANCES[self.kernel], trial, self.comm
                )
                nonlocal evaluations
                evaluations += 1
                if evaluations == begun + 1 and not math.isfinite(value):
                    raise not_definite(what, trial)
                return -value, -gradient

            steps = minimize(
                encoded(values),
                low,
                high,
                is_learned(len(spread), search.fixed),
                max_steps=search.max_steps,
                tolerance=search.tolerance,
            )
            found = steered(steps, decoded, evaluate, len(low), self.comm)
            has_converged = found.has_converged
            values = with_numbers(first, found.point, search.fixed)
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
        check_more: Callable[[], Checked],
    ) -> tuple[_Data, Checked]:
        """Return checked data of all ranks, and other settings; collective.

        Args:
            what, x, y, mean: of the call.
            values: hyperparameters, where the call has some.
            check_more: returns settings that must be equal on all ranks.
        """
        own = (self.kernel, self.block_size, self.num_neighbors, self.seed)

        def check() -> tuple[tuple[Floats, ...], tuple[Any, float | None, Checked]]:
            rows = as_rows(what, x)
            found = as_values(what, y, len(rows))
            center = None if mean is None else as_finite(mean)
            if mean is not None and center is None:
                raise UsageError(f"{what}: mean={shown(mean)} must be a finite number")
            more = check_more()
            if values is None:
                return (rows, found), ((what, own, None), center, more)
            if not isinstance(values, Hyperparameters):
                raise UsageError(f"{what}: {shown(values)} must be Hyperparameters")
            if len(values.length_scales) != rows.shape[1]:
                raise UsageError(
                    f"{what}: {len(values.length_scales)} length scales, and x has "
                    f"{rows.shape[1]} columns; expected one for each"
                )
            return (rows, found), ((what, own, values.exact), center, more)

        (rows, found), (_, center, more), cut = agreed_rows(what, self.comm, check)
        if cut.total == 0 or cut.num_features == 0:
            raise UsageError(
                f"{what}: {cut.total} points of {cut.num_features} dimensions; "
                f"expected at least one of each"
            )
        if center is None:
            center = float(exact_sum(found[:, None], self.comm)[0]) / cut.total
        return _Data(rows, found, cut, center), more

    def _spread(self, data: _Data) -> tuple[Floats, float]:
        """Return each dimension's standard deviation and y's variance; collective.

        A column of equal numbers has 1. Its mean is rounded, so its variance is 0 only
        but for the square of that rounding.
        """
        both = np.column_stack([data.x, data.y])
        center = exact_sum(both, self.comm) / data.cut.total
        squares = exact_sum((both - center) ** 2, self.comm) / data.cut.total
        squares[squares <= (_ROUNDING * center) ** 2] = 1.0
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


def _number(what: str, name: str, value: Any, least: int) -> int:
    found = as_integer(value)
    if found is None or found < least:
        raise UsageError(
            f"{what}: {name}={shown(value)} must be an integer from {least} on"
        )
    return found


@dataclass(frozen=True)
class _Search:
    """Arguments of ``fit``: equal ones have one ``repr`` on all ranks."""

    fixed: tuple[str, ...]
    rounds: int
    max_steps: int
    tolerance: float


def _checked_search(
    what: str, fixed: Any, rounds: Any, max_steps: Any, tolerance: Any
) -> _Search:
    """Return the arguments of ``fit``, or raise UsageError."""
    is_list = isinstance(fixed, Collection) and not isinstance(fixed, str)
    names = list(fixed) if is_list else [fixed]
    if not is_list or not all(isinstance(n, str) and n in NAMES for n in names):
        raise UsageError(
            f"{what}: fixed={shown(fixed)} must be among {', '.join(NAMES)}"
        )
    number = _number(what, "rounds", rounds, 1)
    most = _number(what, "max_steps", max_steps, 0)
    part = as_finite(tolerance)
    if part is None or part < 0:
        raise UsageError(f"{what}: tolerance={shown(tolerance)} must be a number >= 0")
    return _Search(tuple(n for n in NAMES if n in names), number, most, part)
