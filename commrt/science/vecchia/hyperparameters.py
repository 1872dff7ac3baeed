# SPDX-License-Identifier: Apache-2.0
"""The numbers that a Gaussian process learns: length scales, variance and nugget."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import numpy as np

from commrt.errors import UsageError, shown
from commrt.science.rows import Bools, Floats

__all__ = [
    "NAMES",
    "Hyperparameters",
    "decoded",
    "encoded",
    "is_learned",
    "with_numbers",
]

NAMES = ("length_scales", "variance", "nugget")
"""The fields, for ``fixed``."""
_SMALLEST = 1e-300
"""Stands for 0, which has no logarithm."""


@dataclass(frozen=True, eq=False)
class Hyperparameters:
    """Length scales, variance and nugget of a Gaussian process.

    Two points a and b have the covariance variance * f(s), with s the sum over
    dimensions of ((a_k - b_k) / length_k)^2; a point has variance + nugget with itself.
    """

    length_scales: Floats
    """(dimensions,): in the units of each one; a large one means that it matters
    little."""
    variance: float
    """Of the function, in the square of the units of y."""
    nugget: float
    """The variance of the noise of one y; 0 for none."""

    def __post_init__(self) -> None:
        try:
            scales = np.array(self.length_scales, np.float64)
            # No -0.0, which ranks would take for another number than 0.
            variance, nugget = float(self.variance) + 0.0, float(self.nugget) + 0.0
        except Exception as error:  # an object of the program raises what it likes
            raise UsageError(
                f"Hyperparameters: {shown(self.length_scales)}, {shown(self.variance)} "
                f"and {shown(self.nugget)} are no numbers"
            ) from error
        if scales.ndim != 1 or not (np.isfinite(scales).all() and (scales > 0).all()):
            raise UsageError(
                f"Hyperparameters: length_scales={shown(self.length_scales)} must be "
                f"positive numbers, one for each dimension"
            )
        if not (math.isfinite(variance) and variance > 0):
            raise UsageError(
                f"Hyperparameters: variance={variance!r} must be a positive number"
            )
        if not (math.isfinite(nugget) and nugget >= 0):
            raise UsageError(
                f"Hyperparameters: nugget={nugget!r} must be a number from 0 on"
            )
        scales.flags.writeable = False
        object.__setattr__(self, "length_scales", scales)
        object.__setattr__(self, "variance", variance)
        object.__setattr__(self, "nugget", nugget)

    def __repr__(self) -> str:
        scales = np.array2string(self.length_scales, precision=4, separator=", ")
        return (
            f"Hyperparameters(length_scales={scales}, variance={self.variance:.6g}, "
            f"nugget={self.nugget:.6g})"
        )

    @property
    def exact(self) -> tuple[Any, ...]:
        """The numbers, for a comparison of ranks."""
        return (*self.length_scales.tolist(), self.variance, self.nugget)


def encoded(values: Hyperparameters) -> Floats:
    """Return the logarithms of length scales, variance and nugget."""
    raw = np.array([*values.length_scales, values.variance, values.nugget])
    logarithms: Floats = np.log(np.maximum(raw, _SMALLEST))
    return logarithms


def is_learned(dimensions: int, fixed: Collection[str]) -> Bools:
    """Return which of the encoded numbers may change."""
    return np.array(
        [NAMES[0] not in fixed] * dimensions + [name not in fixed for name in NAMES[1:]]
    )


def decoded(logarithms: Floats) -> Floats:
    """Return length scales, variance and nugget of their logarithms."""
    numbers: Floats = np.exp(logarithms)
    return numbers


def with_numbers(
    start: Hyperparameters, numbers: Floats, fixed: Collection[str]
) -> Hyperparameters:
    """Return hyperparameters of ``decoded`` numbers; fixed ones stay as in a start."""
    return Hyperparameters(
        start.length_scales if "length_scales" in fixed else numbers[:-2],
        start.variance if "variance" in fixed else float(numbers[-2]),
        start.nugget if "nugget" in fixed else float(numbers[-1]),
    )
