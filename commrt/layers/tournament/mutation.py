# SPDX-License-Identifier: Apache-2.0
"""Changes of hyperparameters that a trainer makes to a model it has taken over."""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, is_dataclass
from typing import Any, TypeAlias

import torch

from commrt.errors import UsageError, shown

__all__ = ["Mutation", "Perturb", "settings_of"]

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
        """Multiply the named entries.

        Raises UsageError, and changes none, where no group has one of the names, and
        where an entry is no number, such as the pair ``betas``.
        """
        changes: list[tuple[dict[str, Any], str, Any]] = []
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
                if not _is_number(group[name]):
                    raise UsageError(
                        f"Perturb: {name} of {type(optimizer).__name__} is "
                        f"{shown(group[name])}; expected a number that a factor can "
                        f"change. Write a mutation for it: a function of the optimizer "
                        f"and a generator"
                    )
                changes.append((group, name, group[name] * factor))
        for group, name, value in changes:
            group[name] = value


def _is_number(value: Any) -> bool:
    """Return whether a value is a real number; a tensor may have one."""
    if isinstance(value, torch.Tensor):
        return bool(value.numel() == 1 and value.is_floating_point())
    return isinstance(value, int | float) and not isinstance(value, bool)


def settings_of(mutate: Mutation | None) -> object:
    """Return the settings of a mutation that ranks can compare, by their ``repr``.

    A dataclass, such as ``Perturb``, has its fields, a ``functools.partial`` its
    arguments. Of all else the name is known alone: objects that a function refers to
    may differ between ranks without any effect, such as a communicator.
    """
    if isinstance(mutate, functools.partial):
        simple = (bool, int, float, str, tuple)
        named = sorted(mutate.keywords.items())
        return (
            settings_of(mutate.func),
            [each if isinstance(each, simple) else type(each) for each in mutate.args],
            [(k, v if isinstance(v, simple) else type(v)) for k, v in named],
        )
    named_by: Any = mutate if hasattr(mutate, "__qualname__") else type(mutate)
    name = f"{named_by.__module__}.{named_by.__qualname__}"
    return name, repr(mutate) if is_dataclass(mutate) else ""
