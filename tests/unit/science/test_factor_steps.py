# SPDX-License-Identifier: Apache-2.0
"""Steps of a factorisation lower the objective, for any data, graph and weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commrt.errors import UsageError
from commrt.science.nmf import GraphKernel
from commrt.science.nmf.start import random_components, random_rows
from commrt.science.nmf.updates import effective_weights, multiplied, simplex_step
from commrt.science.rows import RowCut

Array = np.ndarray[Any, Any]


def objective(x: Array, w: Array, h: Array, laplacian: Array, lam: float) -> float:
    return float(((x - w @ h) ** 2).sum() + lam * np.trace(w.T @ laplacian @ w))


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    rows=st.integers(1, 9),
    features=st.integers(1, 6),
    components=st.integers(1, 4),
    lam=st.sampled_from([0.0, 1e-3, 1.0, 50.0, 1e6]),
    zeros=st.sampled_from([0.0, 0.4, 1.0]),
)
def test_multiplicative_steps_never_raise_the_objective(
    seed: int, rows: int, features: int, components: int, lam: float, zeros: float
) -> None:
    """Also on graphs of two parts, where all rows change at once: the worst case."""
    rng = np.random.default_rng(seed)
    x, w, h = (
        rng.uniform(size=shape) * (rng.uniform(size=shape) >= zeros)
        for shape in ((rows, features), (rows, components), (components, features))
    )
    edges = rng.uniform(size=(rows, rows)) * (rng.uniform(size=(rows, rows)) < 0.4)
    if seed % 2:
        sides = np.arange(rows) % 2
        edges *= sides[:, None] != sides
    adjacency = edges + edges.T
    degrees = adjacency.sum(1)
    laplacian = np.diag(degrees) - adjacency
    before = objective(x, w, h, laplacian, lam)
    room = 1e-12 * (1.0 + before)
    for _ in range(4):
        h = multiplied(h, w.T @ x, w.T @ w @ h)
        after = objective(x, w, h, laplacian, lam)
        assert after <= before + room
        up = x @ h.T + lam * adjacency @ w
        down = w @ (h @ h.T) + lam * degrees[:, None] * w
        w = multiplied(w, up, down)
        before = after
        after = objective(x, w, h, laplacian, lam)
        assert after <= before + room
        assert np.isfinite(w).all()
        assert (w >= 0).all()
        before = after


def test_multiplicative_steps_come_to_a_factorisation_that_is_there() -> None:
    rng = np.random.default_rng(3)
    x = rng.uniform(size=(12, 2)) @ rng.uniform(size=(2, 7))
    w, h = rng.uniform(size=(12, 2)), rng.uniform(size=(2, 7))
    for _ in range(3000):
        h = multiplied(h, w.T @ x, w.T @ w @ h)
        w = multiplied(w, x @ h.T, w @ (h @ h.T))
    assert ((x - w @ h) ** 2).sum() < 1e-5 * (x**2).sum()


@settings(max_examples=100, deadline=None)
@given(
    roughness=st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=5),
    power=st.sampled_from([1.05, 1.5, 2.0, 5.0]),
    seed=st.integers(0, 10**6),
)
def test_the_simplex_step_is_the_minimum(
    roughness: list[float], power: float, seed: int
) -> None:
    c = np.array(roughness)
    best = simplex_step(c, power)
    assert best.sum() == pytest.approx(1.0, rel=1e-12)
    assert (best >= 0).all()
    lowest = c @ effective_weights(best, power)
    others = np.random.default_rng(seed).dirichlet(np.full(len(c), 0.7), 50)
    corners = np.eye(len(c))
    for other in [*others, *corners, np.full(len(c), 1.0 / len(c))]:
        assert lowest <= (c @ effective_weights(other, power)) * (1 + 1e-12)


def test_smooth_kernels_take_all_weight_where_there_are_some() -> None:
    assert simplex_step(np.array([0.0, 3.0, 0.0]), 2.0).tolist() == [0.5, 0.0, 0.5]
    assert simplex_step(np.zeros(2), 3.0).tolist() == [0.5, 0.5]
    assert simplex_step(np.empty(0), 2.0).tolist() == []


def test_equal_weights_give_the_mean_of_the_kernels() -> None:
    found = effective_weights(np.full(4, 0.25), 3.0)
    np.testing.assert_allclose(found, np.full(4, 0.25))
    assert effective_weights(np.ones(1), 2.7).tolist() == [1.0]


@pytest.mark.parametrize("power", [499.0, 1000.0])
def test_large_powers_give_every_kernel_the_same_part(power: float) -> None:
    """Though p^(g - 1) alone is beyond all numbers."""
    np.testing.assert_allclose(effective_weights(np.full(5, 0.2), power), 0.2)
    roughness = np.array([1.0, 2.0, 4.0, 30.0, 100.0])
    weights = simplex_step(roughness, power)
    np.testing.assert_allclose(weights, 0.2, rtol=0.02)
    parts = roughness * effective_weights(weights, power)
    np.testing.assert_allclose(parts, parts.mean(), rtol=0.02)


def test_weights_far_from_equal_stay_finite() -> None:
    weights = np.array([1.0, 0.0, 0.0, 0.0, 0.0])
    assert effective_weights(weights, 1000.0).tolist() == [1e100, 0, 0, 0, 0]


def test_widths_beyond_all_squares_have_weights() -> None:
    squares, places = np.array([0.0, 1.0, 4.0]), np.zeros(3, np.int64)
    wide = GraphKernel(1, 1e200).weights(squares, places, 2.0)
    assert wide.tolist() == [1.0, 1.0, 1.0]
    for width in (1e-200, 5e-324):
        narrow = GraphKernel(1, width).weights(squares, places, 2.0)
        assert narrow.tolist() == [1.0, 0.0, 0.0]


@pytest.mark.parametrize("width", [1, 3, 4, 5, 8])
def test_random_rows_depend_on_their_numbers_alone(width: int) -> None:
    whole = random_rows(RowCut((11,), 0, 1), width, 7)
    counts = (4, 0, 1, 6)
    pieces = [random_rows(RowCut(counts, rank, 1), width, 7) for rank in range(4)]
    np.testing.assert_array_equal(np.concatenate(pieces), whole)
    assert len(np.unique(whole)) == whole.size
    assert (random_rows(RowCut((11,), 0, 1), width, 8) != whole).all()


def test_random_components_are_no_random_rows() -> None:
    rows = random_rows(RowCut((3,), 0, 1), 4, 7)
    assert not np.isin(random_components(3, 4, 7), rows).any()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"num_neighbors": 0}, "num_neighbors=0"),
        ({"num_neighbors": 2.5}, "num_neighbors=2.5"),
        ({"width": 0.0}, "width"),
        ({"width": float("nan")}, "width"),
        ({"width": "wide"}, "width"),
        ({"width": "2"}, "width"),
        ({"width": 10**400}, "width"),
    ],
)
def test_wrong_kernels_are_refused(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        GraphKernel(**arguments)
