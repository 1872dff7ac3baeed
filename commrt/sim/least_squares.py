# SPDX-License-Identifier: Apache-2.0
"""Numbers of a network with which simulated times are like measured ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from commrt.sim.topologies.network import Floats

__all__ = ["least_squares"]

_MOST_STEPS = 40
_LONGEST_STEP = math.log(4.0)
_SMALL = 1e-3
"""Change of a logarithm that tells its slope."""
_FAR_OFF = 0.3
"""Error of a logarithm beyond which it counts in proportion, not by its square."""


def least_squares(
    measured_us: Sequence[float],
    simulated_us: Callable[[int, Mapping[str, float]], float],
    start: Mapping[str, float],
) -> dict[str, float]:
    """Return the numbers whose logarithms make the errors of times smallest.

    The method is that of Levenberg and Marquardt (D. Marquardt, "An algorithm for
    least-squares estimation of nonlinear parameters", SIAM J. 11, 1963). Times that are
    far off count less (P. Huber, "Robust estimation of a location parameter", Annals of
    Mathematical Statistics 35, 1964).

    Args:
        measured_us: times above 0.
        simulated_us: returns the time of one of them, by its place, with such numbers.
        start: numbers above 0 of the right order, by name.
    """
    keys = [*start]
    places = range(len(measured_us))

    def errors(logs: Floats) -> Floats:
        values = dict(zip(keys, map(float, np.exp(logs)), strict=True))
        found = (simulated_us(at, values) / measured_us[at] for at in places)
        off: Floats = np.log(np.fromiter(found, float))
        return off

    logs = np.log(np.array([start[key] for key in keys]))
    here, damping = errors(logs), 1e-2
    for _ in range(_MOST_STEPS):
        changed = [errors(logs + _SMALL * unit) for unit in np.eye(len(keys))]
        slopes = (np.stack(changed, axis=1) - here[:, None]) / _SMALL
        weights = np.minimum(1.0, _FAR_OFF / np.maximum(np.abs(here), 1e-12))
        normal = slopes.T @ (weights[:, None] * slopes)
        target = slopes.T @ (weights * here)
        before = _cost(here)
        while damping < 1e9:
            # A number that changes no time stays where it is.
            own = np.diag(normal) + 1e-4 * np.trace(normal)
            step = -np.linalg.solve(normal + damping * np.diag(own), target)
            step = np.clip(step, -_LONGEST_STEP, _LONGEST_STEP)
            there = errors(logs + step)
            if _cost(there) < before:
                logs, here, damping = logs + step, there, damping / 4
                break
            damping *= 4
        if _cost(here) > before * (1 - 1e-5):
            break
    return dict(zip(keys, map(float, np.exp(logs)), strict=True))


def _cost(errors: Floats) -> float:
    off = np.abs(errors)
    near = off <= _FAR_OFF
    return float(np.where(near, off**2, _FAR_OFF * (2 * off - _FAR_OFF)).sum())
