# SPDX-License-Identifier: Apache-2.0
"""Predictions are exact in the limit, and the same on any number of ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from science_cases import RANKS, cut_of, dense_prediction, points_of

from commrt.errors import UsageError
from commrt.local import run
from commrt.science.vecchia import Hyperparameters, ScaledBlockVecchia
from commrt.science.vecchia.covariances import COVARIANCES

Array = np.ndarray[Any, Any]
VALUES = Hyperparameters([0.3, 0.5, 2.0], 1.3, 0.02)


def predicted(
    size: int,
    x: Array,
    y: Array,
    new: Array,
    *,
    number: int | None = None,
    seed: int = 0,
    values: Hyperparameters = VALUES,
    **options: Any,
) -> tuple[Array, Array]:
    """Return means and variances of all ranks' new points, in their order."""
    pieces, others = cut_of(len(x), size, seed), cut_of(len(new), size, seed + 1)

    def main(comm: Any) -> tuple[Array, Array]:
        own, mine = pieces[comm.rank], others[comm.rank]
        process = ScaledBlockVecchia(comm, **options)
        model = process.condition(x[own], y[own], values)
        found = model.predict(new[mine], num_neighbors=number)
        return found.mean, found.variance

    ranks = run(size, main)
    return tuple(np.concatenate(each) for each in zip(*ranks, strict=True))  # type: ignore[return-value]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("kernel", COVARIANCES)
def test_all_points_give_the_exact_prediction(kernel: str, size: int) -> None:
    """Also at points of the data, and far away from all."""
    x, y = points_of(70, 3)
    new = np.concatenate([points_of(50, 3, seed=5)[0], x[:3], x[:2] + 40.0])
    found = predicted(size, x, y, new, number=70, kernel=kernel, block_size=9)
    exact = dense_prediction(kernel, x, y, new, VALUES, y.mean())
    for ours, right in zip(found, exact, strict=True):
        np.testing.assert_allclose(ours, right, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("number", [0, 3, 20])
def test_the_number_of_ranks_changes_no_prediction(number: int, seed: int) -> None:
    x, y = points_of(90, 3)
    new, _ = points_of(60, 3, seed=7)
    first = predicted(1, x, y, new, number=number, block_size=8)
    for size in RANKS[1:]:
        other = predicted(size, x, y, new, number=number, seed=seed, block_size=8)
        for one, two in zip(first, other, strict=True):
            np.testing.assert_allclose(two, one, rtol=1e-12, atol=1e-14)


def test_the_order_of_new_points_is_kept() -> None:
    x, y = points_of(60, 3)
    new, _ = points_of(40, 3, seed=2)
    order = np.random.default_rng(0).permutation(40)
    mean, variance = predicted(2, x, y, new, number=60)
    other, spread = predicted(2, x, y, new[order], number=60)
    np.testing.assert_allclose(other, mean[order], rtol=1e-9)
    np.testing.assert_allclose(spread, variance[order], rtol=1e-9)


def test_more_new_points_near_a_block_than_one_group_takes() -> None:
    x, y = points_of(20, 3)
    new, _ = points_of(300, 3, seed=2)
    found = predicted(2, x, y, new, number=20, block_size=20)
    exact = dense_prediction("matern52", x, y, new, VALUES, y.mean())
    np.testing.assert_allclose(found[0], exact[0], rtol=1e-9, atol=1e-11)


def test_variances_grow_away_from_the_data() -> None:
    x, y = points_of(80, 3)
    _, near = predicted(1, x, y, x[:5])
    _, far = predicted(1, x, y, x[:5] + 100.0)
    assert (near < 0.1).all()
    np.testing.assert_allclose(far, VALUES.variance, rtol=1e-12)


@pytest.mark.parametrize("size", [1, 3])
def test_no_new_points(size: int) -> None:
    x, y = points_of(30, 3)
    mean, variance = predicted(size, x, y, np.empty((0, 3)))
    assert mean.shape == variance.shape == (0,)


@pytest.mark.parametrize(
    ("new", "number", "says"),
    [
        (np.zeros((2, 4)), 5, "4 columns, and the data 3"),
        (np.full((1, 3), np.nan), 5, "NaN"),
        (np.zeros((1, 3)), -1, "num_neighbors"),
        (np.zeros((1, 3)), 1.5, "num_neighbors"),
    ],
)
def test_wrong_new_points_on_one_rank_are_refused_by_all(
    new: Array, number: Any, says: str
) -> None:
    x, y = points_of(30, 3)

    def main(comm: Any) -> str:
        model = ScaledBlockVecchia(comm).condition(x, y, VALUES)
        wrong = comm.rank == 1
        own, neighbors = (new, number) if wrong else (np.zeros((1, 3)), 5)
        with pytest.raises(UsageError) as raised:
            model.predict(own, num_neighbors=neighbors)
        comm.barrier()
        return str(raised.value)

    first, second, third = run(3, main)
    assert says in second
    assert first == third
    assert "rank 1 refused" in first


@pytest.mark.parametrize("size", [1, 2, 3])
def test_neighbours_that_are_too_near_are_told_by_all_ranks(size: int) -> None:
    """Each block alone is fine, and only a prediction needs two of them at once."""
    x = np.array([[0.0], [1e-9], [5.0]])
    y = np.array([1.0, 1.0, 0.0])
    values = Hyperparameters([1.0], 1.0, 0.0)
    pieces = cut_of(len(x), size)

    def main(comm: Any) -> str:
        own = pieces[comm.rank]
        process = ScaledBlockVecchia(comm, block_size=1, num_neighbors=0)
        model = process.condition(x[own], y[own], values)
        rows = 1 if comm.rank == 0 else 0
        new = np.zeros((rows, 1))
        assert model.predict(new, num_neighbors=1).mean.shape == (rows,)
        with pytest.raises(UsageError, match="larger nugget") as raised:
            model.predict(new, num_neighbors=2)
        comm.barrier()
        return str(raised.value)

    assert len({*run(size, main)}) == 1
