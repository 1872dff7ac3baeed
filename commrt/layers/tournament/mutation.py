# SPDX-License-Identifier: Apache-2.0
"""Changes of hyperparameters that a trainer makes to a model it has taken over."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch

from commrt.errors import UsageError, shown

__all__ = ["Mutation", "Perturb"]

Mutation: TypeAlias = Callable[[torch.optim.Optimizer, random.Random], None]
"""Changes an optimizer in place, by a generator that is equal on a trainer's ranks."""


@dataclass(frozen=True)
class Perturb:
    """A mutation that multiplies hyperparameters by factors drawn by lot.

    Each name has one factor for all parameter groups. It is the "perturb" of Jaderberg
    et al. 2017, "Population based training of neural networks", arXiv 1711.09846,
    section 4.1.1.
    """

    names: tuple[str, ...] = ("lr",)
    """Entries of the optimizer's parameter groups."""
    factors: tuple[float, ...] = (0.8, 1.2)
    """One of them is drawn, all equally likely."""

    def __post_init__(self) -> None:
        names, factors = self.names, self.factors
        if not isinstance(names, tuple) or not all(isinstance(n, str) for n in names):
            raise UsageError(
                f'Perturb: names={shown(names)} must be a tuple of names, as ("lr",)'
            )
        is_good = isinstance(factors, tuple) and len(factors) > 0
        if not is_good or not all(
            isinstance(each, int | float) and math.isfinite(each) and each > 0
            for each in factors
        ):
            raise UsageError(
                f"Perturb: factors={shown(factors)} must be a tuple of numbers above 0"
            )

    def __call__(
        self, optimizer: torch.optim.Optimizer, generator: random.Random
    ) -> None:
        """Multiply the named entries; UsageError where no group has one of them."""
        for name in self.names:
            # random() alone draws the same numbers in every version of Python.
            factor = self.factors[int(generator.random() * len(self.factors))]
            groups = [each for each in optimizer.param_groups if name in each]
            if not groups:
                raise UsageError(
                    f"Perturb: no parameter group of {type(optimizer).__name__} has "
                    f"{name!r}; they have {', '.join(optimizer.defaults)}"
                )
            for group in groups:
                group[name] = group[name] * factor
