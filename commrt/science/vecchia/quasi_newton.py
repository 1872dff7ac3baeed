# SPDX-License-Identifier: Apache-2.0
"""A minimum within bounds by a projected BFGS method, as a generator.

The generator yields points and is sent the function's value and gradient there, so it
knows nothing of ranks. Numbers at a bound whose gradient points outwards keep still;
the others move along the quasi-Newton direction, and are cut at their bounds. Source:
Bertsekas, "Projected Newton methods for optimization problems with simple constraints"
(1982); the update is that of Nocedal and Wright, "Numerical optimization", section 6.1.
"""

from __future__ import annotations

import math
from collections.abc import Generator
from dataclasses import dataclass

import numpy as np

from commrt.science.rows import Bools, Floats

__all__ = ["Minimum", "Search", "minimize"]

Search = Generator[Floats, "tuple[float, Floats]", "Minimum"]

_SUFFICIENT = 1e-4
"""Part of the decrease that the slope promises which a step must bring."""
_MOST_HALVINGS = 30
_LONGEST = 2.0
"""Of a step in any number. These are logarithms: a factor of 7."""


@dataclass(frozen=True)
class Minimum:
    """The point that a search has found."""

    point: Floats
    value: float
    num_steps: int
    has_converged: bool
    """False where the search has ended by its number of steps."""


def minimize(
    start: Floats,
    low: Floats,
    high: Floats,
    is_free: Bools,
    *,
    max_steps: int,
    tolerance: float,
) -> Search:
    """Search a minimum from a point on.

    Args:
        start: where the search begins; it is moved within the bounds where it is free.
        low, high: bounds of each number.
        is_free: which numbers may change.
        max_steps: steps at most.
        tolerance: the search ends where a step lowers the value by less than this part
            of it, and where no gradient is larger.

    Values that are not finite are taken for infinite: the step is halved.
    """
    point = np.where(is_free, np.clip(start, low, high), start)
    value, gradient = yield point
    inverse, is_scaled = np.eye(len(point)), False
    for step in range(max_steps):
        outward = ((point <= low) & (gradient > 0)) | ((point >= high) & (gradient < 0))
        moving = np.flatnonzero(is_free & ~outward)
        pull = gradient[moving]
        if np.max(np.abs(pull), initial=0.0) <= tolerance:
            return Minimum(point, value, step, True)
        direction = np.zeros_like(point)
        direction[moving] = -inverse[np.ix_(moving, moving)] @ pull
        if not direction @ gradient < 0:
            inverse, is_scaled = np.eye(len(point)), False
            direction[moving] = -pull
        length = min(1.0, _LONGEST / float(np.max(np.abs(direction))))
        if not is_scaled:
            length = min(length, 1.0 / float(np.max(np.abs(direction))))
        for _ in range(_MOST_HALVINGS):
            trial = np.where(
                is_free, np.clip(point + length * direction, low, high), point
            )
            trial_value, trial_gradient = yield trial
            promised = float(gradient @ (trial - point))
            is_good = math.isfinite(trial_value) and bool(
                np.isfinite(trial_gradient).all()
            )
            if is_good and trial_value <= value + _SUFFICIENT * promised:
                break
            length *= 0.5
        else:
            return Minimum(point, value, step, True)
        moved, bent = trial - point, trial_gradient - gradient
        curvature = float(moved @ bent)
        if curvature > 1e-12 * float(np.linalg.norm(moved) * np.linalg.norm(bent)):
            if not is_scaled:
                inverse *= curvature / float(bent @ bent)
                is_scaled = True
            inverse = _updated(inverse, moved, bent, curvature)
        decrease = value - trial_value
        point, value, gradient = trial, trial_value, trial_gradient
        if decrease <= tolerance * max(1.0, abs(value)):
            return Minimum(point, value, step + 1, True)
    return Minimum(point, value, max_steps, False)


def _updated(inverse: Floats, moved: Floats, bent: Floats, curvature: float) -> Floats:
    """Return the inverse of the Hessian that fits the last step, too."""
    left = np.eye(len(moved)) - np.outer(moved, bent) / curvature
    updated: Floats = left @ inverse @ left.T + np.outer(moved, moved) / curvature
    return updated
