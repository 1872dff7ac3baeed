# SPDX-License-Identifier: Apache-2.0
"""The built-in algorithms, one file each, and the registry that others add to."""

from __future__ import annotations

from commrt.algorithms import (
    bidirectional_ring,
    binomial,
    direct,
    dissemination,
    double_tree,
    halving_doubling,
    neighbor_exchange,
    pairwise,
    pipelined_trees,
    recursive_doubling,
    ring,
    scatter_allgather,
    shifted_halving_doubling,
    swing,
    two_level,
)
from commrt.algorithms._nested import run as run_nested
from commrt.algorithms._registry import (
    Algorithm,
    algorithm,
    get,
    names,
    offered_params,
    param_choices,
    schedule,
)

__all__ = [
    "Algorithm",
    "algorithm",
    "get",
    "names",
    "offered_params",
    "param_choices",
    "run_nested",
    "schedule",
]

_BUILT_IN = (
    bidirectional_ring,
    binomial,
    direct,
    dissemination,
    double_tree,
    halving_doubling,
    neighbor_exchange,
    pairwise,
    pipelined_trees,
    recursive_doubling,
    ring,
    scatter_allgather,
    shifted_halving_doubling,
    swing,
    two_level,
)
