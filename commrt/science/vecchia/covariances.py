# SPDX-License-Identifier: Apache-2.0
"""Covariances of two points as functions of their scaled squared distance.

With s, the sum over dimensions of ((a_k - b_k) / length_k)^2, and r, its root, each is
f(s) with f(0) = 1. The derivative by log length_k is -2 f'(s) ((a_k - b_k) /
length_k)^2. Source: Rasmussen and Williams, "Gaussian processes for machine learning",
section 4.2.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np

from commrt.science.rows import Floats

__all__ = ["COVARIANCES", "Covariance"]

Covariance = Callable[[Floats], tuple[Floats, Floats]]
"""Returns f(s) and f'(s) for an array of s."""


def _matern12(s: Floats) -> tuple[Floats, Floats]:
    r = np.sqrt(s)
    value = np.exp(-r)
    # At s = 0 the slope is infinite, and is only used times a distance of 0.
    slope = np.divide(-0.5 * value, r, out=np.zeros_like(r), where=r > 0)
    return value, slope


def _matern32(s: Floats) -> tuple[Floats, Floats]:
    r = math.sqrt(3.0) * np.sqrt(s)
    decay = np.exp(-r)
    return (1.0 + r) * decay, -1.5 * decay


def _matern52(s: Floats) -> tuple[Floats, Floats]:
    r = math.sqrt(5.0) * np.sqrt(s)
    decay = np.exp(-r)
    return (1.0 + r + r * r / 3.0) * decay, (-5.0 / 6.0) * (1.0 + r) * decay


def _squared_exponential(s: Floats) -> tuple[Floats, Floats]:
    value = np.exp(-0.5 * s)
    return value, -0.5 * value


COVARIANCES: Mapping[str, Covariance] = {
    "matern12": _matern12,
    "matern32": _matern32,
    "matern52": _matern52,
    "squared_exponential": _squared_exponential,
}
"""By name; the numbers are twice the smoothness of the process."""
