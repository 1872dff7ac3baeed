# SPDX-License-Identifier: Apache-2.0
"""The likelihood by blocks: exact in the limit, the same bits on any ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from science_cases import (
    RANKS,
    cut_of,
    dense_covariance,
    dense_log_likelihood,
    points_of,
)

from commrt.errors import UsageError
from commrt.local import run
from commrt.science.vecchia import Hyperparameters, ScaledBlockVecchia, VecchiaModel
from commrt.science.vecchia.batches import batches_of
from commrt.science.vecchia.covariances import COVARIANCES
from commrt.science.vecchia.likelihood import block_terms

Array = np.ndarray[Any, Any]
VALUES = Hyperparameters([0.3, 0.5, 2.0], 1.3, 0.02)


def conditioned(
    size: int,
    x: Array,
    y: Array,
    values: Hyperparameters = VALUES,
    mean: float | None = None,
    seed: int = 0,
    **options: Any,
) -> list[VecchiaModel]:
    """Return the model of each rank, of an uneven cut."""
    pieces = cut_of(len(x), size, seed)

    def main(comm: Any) -> VecchiaModel:
        own = pieces[comm.rank]
        process = ScaledBlockVecchia(comm, **options)
        return process.condition(x[own], y[own], values, mean=mean)

    return run(size, main)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("kernel", COVARIANCES)
def test_all_earlier_points_give_the_exact_likelihood(kernel: str, size: int) -> None:
    x, y = points_of(90, 3)
    models = conditioned(size, x, y, kernel=kernel, block_size=11, num_neighbors=len(x))
    exact = dense_log_likelihood(kernel, x, y, VALUES, y.mean())
    for model in models:
        assert model.mean == pytest.approx(y.mean(), rel=1e-14)
        assert model.log_likelihood == pytest.approx(exact, rel=1e-11, abs=1e-9)


@pytest.mark.parametrize("num_neighbors", [0, 1, 7, 25])
def test_the_number_of_ranks_changes_no_bit(num_neighbors: int, seed: int) -> None:
    """Points lie elsewhere, blocks have other owners, and sums other parts."""
    x, y = points_of(150, 3)
    found = {
        model.log_likelihood
        for size in RANKS
        for model in conditioned(
            size, x, y, seed=seed, block_size=9, num_neighbors=num_neighbors
        )
    }
    assert max(found) - min(found) <= 1e-12 * abs(max(found))


def test_the_divergence_from_the_exact_process_falls_with_neighbours() -> None:
    """Of y = 0 likelihoods differ by the divergence: E y^T S^-1 y is n for both."""
    x, _ = points_of(200, 3)
    zeros = np.zeros(len(x))
    exact = dense_log_likelihood("matern52", x, zeros, VALUES, 0.0)
    found = []
    for num_neighbors in (0, 4, 12, 36, 100, 200):
        (model,) = conditioned(
            1, x, zeros, mean=0.0, block_size=10, num_neighbors=num_neighbors
        )
        found.append(exact - model.log_likelihood)
    assert found == sorted(found, reverse=True)
    assert found[0] > 30.0 > 3.0 > found[3] > found[4] > 0.0
    assert found[-1] == pytest.approx(0.0, abs=1e-9)


def test_no_neighbours_make_blocks_independent() -> None:
    x, y = points_of(60, 3)
    (model,) = conditioned(1, x, y, mean=0.25, block_size=7, num_neighbors=0)
    total = 0.0
    for low, high in zip(model.blocks.starts, model.blocks.starts[1:], strict=False):
        own = model.blocks.ids[low:high]
        total += dense_log_likelihood("matern52", x[own], y[own], VALUES, 0.25)
    assert model.log_likelihood == pytest.approx(total, rel=1e-12)


@pytest.mark.parametrize("num", [1, 2, 5])
@pytest.mark.parametrize("size", [1, 3, 8])
def test_fewer_points_than_ranks_and_neighbours(num: int, size: int) -> None:
    x, y = points_of(num, 3)
    exact = dense_log_likelihood("matern52", x, y, VALUES, y.mean())
    for model in conditioned(size, x, y, block_size=2, num_neighbors=50):
        assert model.log_likelihood == pytest.approx(exact, rel=1e-12)


@pytest.mark.parametrize("size", [1, 3])
def test_one_block_of_all_points_is_exact(size: int) -> None:
    x, y = points_of(40, 3)
    exact = dense_log_likelihood("matern52", x, y, VALUES, y.mean())
    models = conditioned(size, x, y, block_size=1000, num_neighbors=5)
    for model in models:
        assert model.log_likelihood == pytest.approx(exact, rel=1e-12)
        assert model.blocks.num_blocks == 1


@pytest.mark.parametrize("size", [1, 2, 4])
def test_points_at_one_place_need_a_nugget(size: int) -> None:
    """Anchors at one place leave blocks empty, which are left out."""
    x, y = points_of(30, 3)
    x, y = np.repeat(x[:6], 5, axis=0), y
    exact = dense_log_likelihood("matern12", x, y, VALUES, y.mean())
    for model in conditioned(
        size, x, y, kernel="matern12", block_size=2, num_neighbors=30
    ):
        assert model.log_likelihood == pytest.approx(exact, rel=1e-10)
        assert model.blocks.num_blocks <= 6
        assert (model.blocks.counts >= 5).all()


@pytest.mark.parametrize("size", [1, 2, 3])
def test_without_a_nugget_all_ranks_say_so(size: int) -> None:
    """The block is one rank's alone, and all others raise as well."""
    x, y = points_of(30, 3)
    x[7] = x[8]
    values = Hyperparameters([0.3, 0.5, 2.0], 1.3, 0.0)
    pieces = cut_of(len(x), size)

    def main(comm: Any) -> str:
        own = pieces[comm.rank]
        process = ScaledBlockVecchia(comm, block_size=8)
        with pytest.raises(UsageError, match="larger nugget") as raised:
            process.log_likelihood(x[own], y[own], values)
        comm.barrier()
        return str(raised.value)

    assert len({*run(size, main)}) == 1


@pytest.mark.parametrize("kernel", COVARIANCES)
@pytest.mark.parametrize("num_neighbors", [0, 5, 13])
def test_gradients_are_those_of_differences(kernel: str, num_neighbors: int) -> None:
    rng = np.random.default_rng(num_neighbors)
    x, y = rng.uniform(size=(40, 3)), rng.standard_normal(40)
    x[3] = x[20]
    order = rng.permutation(40)
    neighbors = [order[:num_neighbors], order[: num_neighbors // 2]]
    points = [order[20:29], order[29:40]]
    (first, *more) = batches_of(neighbors, points, x, y)

    def total(logarithms: Array) -> Array:
        numbers = np.exp(logarithms)
        values = Hyperparameters(numbers[:-2], numbers[-2], numbers[-1])
        covariance = COVARIANCES[kernel]
        every = [block_terms(each, covariance, values) for each in (first, *more)]
        return np.concatenate(every).sum(0)

    at = np.log([0.4, 0.7, 1.5, 1.2, 0.05])
    _, *gradient = total(at)
    for number in range(len(at)):
        step = np.zeros(len(at))
        step[number] = 1e-5
        difference = (total(at + step)[0] - total(at - step)[0]) / 2e-5
        assert gradient[number] == pytest.approx(difference, rel=2e-6, abs=1e-7)


@pytest.mark.parametrize(
    ("distance", "nugget"),
    [(0.0, 0.01), (1e-15, 0.01), (1e-12, 1e-4), (1e-8, 1e-10), (1e-3, 1e-10)],
)
@pytest.mark.parametrize("kernel", COVARIANCES)
def test_gradients_of_near_points_do_not_cancel(
    kernel: str, distance: float, nugget: float
) -> None:
    """The slope of matern12 is as large as the distance is small."""
    x = np.array([[0.9, 0.1], [0.3, 0.7], [0.3 + distance, 0.7 + 2.0 * distance]])
    y = np.array([0.2, 0.4, -0.3])
    values = Hyperparameters([0.5, 2.0], 1.3, nugget)
    squares = ((x[:, None] - x[None]) / values.length_scales) ** 2
    _, slope = COVARIANCES[kernel](squares.sum(-1))
    matrix = dense_covariance(kernel, x, x, values) + nugget * np.eye(3)
    inverse = np.linalg.inv(matrix)
    weights = np.outer(inverse @ y, inverse @ y) - inverse
    right = [
        -values.variance * (weights * slope * squares[:, :, dimension]).sum()
        for dimension in range(2)
    ]
    (batch,) = batches_of([np.arange(0)], [np.arange(3)], x, y)
    found = block_terms(batch, COVARIANCES[kernel], values)[0, 1:3]
    np.testing.assert_allclose(found, right, rtol=1e-4)
