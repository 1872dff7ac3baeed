# SPDX-License-Identifier: Apache-2.0
"""The built-in algorithms, one file each, and the registry that others add to."""

from __future__ import annotations

from commrt.algorithms import (
    binomial,
    direct,
    dissemination,
    halving_doubling,
    pairwise,
    recursive_doubling,
    ring,
    shifted_halving_doubling,
)
from commrt.algorithms._registry import (
    Algorithm,
    algorithm,
    get,
    names,
    param_choices,
    schedule,
)

__all__ = [
    "Algorithm",
    "algorithm",
    "get",
    "names",
    "param_choices",
    "schedule",
]

_BUILT_IN = (
    binomial,
    direct,
    dissemination,
    halving_doubling,
    pairwise,
    recursive_doubling,
    ring,
    shifted_halving_doubling,
)
