# SPDX-License-Identifier: Apache-2.0
"""The search finds minima within bounds, and ends where it cannot go on."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from commrt.science.vecchia.quasi_newton import Minimum, minimize

Array = np.ndarray[Any, Any]
Function = Callable[[Array], tuple[float, Array]]
WIDE = 50.0


def searched(
    function: Function,
    start: list[float],
    low: float | list[float] = -WIDE,
    high: float | list[float] = WIDE,
    free: list[bool] | None = None,
    max_steps: int = 200,
    tolerance: float = 1e-12,
) -> tuple[Minimum, list[Array]]:
    """Return the minimum, and all points that the search has asked for."""
    begin = np.array(start)
    search = minimize(
        begin,
        np.broadcast_to(low, begin.shape),
        np.broadcast_to(high, begin.shape),
        np.ones(len(begin), bool) if free is None else np.array(free),
        max_steps=max_steps,
        tolerance=tolerance,
    )
    points = [next(search)]
    while True:
        try:
            points.append(search.send(function(points[-1])))
        except StopIteration as stop:
            return stop.value, points


def rosenbrock(x: Array) -> tuple[float, Array]:
    a, b = 1 - x[0], x[1] - x[0] ** 2
    return a * a + 100 * b * b, np.array([-2 * a - 400 * x[0] * b, 200 * b])


def bowl(x: Array) -> tuple[float, Array]:
    scales = 10.0 ** np.arange(len(x))
    off = x - np.arange(len(x))
    return float(scales @ off**2), 2 * scales * off


def test_rosenbrocks_valley_is_followed_to_its_end() -> None:
    found, points = searched(rosenbrock, [-1.2, 1.0])
    np.testing.assert_allclose(found.point, [1, 1], rtol=1e-5)
    assert found.has_converged
    assert found.num_steps < 60
    assert len(points) < 100


def test_bounds_hold_at_every_point() -> None:
    found, points = searched(
        bowl, [5.0, 5.0, 5.0], low=[1.5, -9, -9], high=[9, 9, 1.25]
    )
    np.testing.assert_allclose(found.point, [1.5, 1, 1.25], rtol=1e-6)
    every = np.array(points)
    assert (every >= [1.5, -9, -9]).all()
    assert (every <= [9, 9, 1.25]).all()


def test_a_start_beyond_the_bounds_is_moved_to_them() -> None:
    _, points = searched(bowl, [99.0, 99.0], low=-1.0, high=4.0)
    np.testing.assert_array_equal(points[0], [4.0, 4.0])


def test_fixed_numbers_keep_their_bits() -> None:
    found, points = searched(bowl, [99.25, 3.0], low=-9.0, high=9.0, free=[False, True])
    assert {point[0] for point in points} == {99.25}
    assert found.point[1] == pytest.approx(1.0, abs=1e-6)


def test_values_that_are_not_finite_halve_the_step() -> None:
    def walled(x: Array) -> tuple[float, Array]:
        value, gradient = bowl(x)
        return (math.nan, gradient) if x[0] < 0.5 else (value, gradient)

    found, points = searched(walled, [3.0, 1.0])
    assert any(point[0] < 0.5 for point in points)
    assert 0.5 <= found.point[0] < 0.6


def test_no_step_leaves_the_start_where_it_is() -> None:
    found, points = searched(bowl, [3.0, 3.0], max_steps=0)
    assert len(points) == 1
    np.testing.assert_array_equal(found.point, [3.0, 3.0])
    assert not found.has_converged


def test_nothing_that_may_change_ends_at_once() -> None:
    found, points = searched(bowl, [3.0, 3.0], free=[False, False])
    assert found.has_converged
    assert len(points) == 1


def test_each_step_lowers_the_value() -> None:
    values = []

    def noted(x: Array) -> tuple[float, Array]:
        answer = rosenbrock(x)
        values.append(answer[0])
        return answer

    found, _ = searched(noted, [-1.2, 1.0])
    assert found.value == min(values)
