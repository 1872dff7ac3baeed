# SPDX-License-Identifier: Apache-2.0
"""Random factors that depend on rows' numbers alone, not on ranks."""

from __future__ import annotations

import numpy as np

from commrt.science.rows import Floats, RowCut

__all__ = ["random_components", "random_rows"]

_DRAWS = 4
"""Numbers of a step of the counter of Philox."""


def random_rows(cut: RowCut, width: int, seed: int) -> Floats:
    """Return this rank's rows (rows, width) of one random matrix in [0, 1).

    The generator counts (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2,
    3"), so a rank begins at its first row.
    """
    steps = -(-width // _DRAWS)
    counter = np.random.Philox(key=seed)
    counter.advance(sum(cut.counts[: cut.rank]) * steps)
    rows = np.random.Generator(counter).random((cut.counts[cut.rank], steps * _DRAWS))
    return np.ascontiguousarray(rows[:, :width])


def random_components(num_components: int, num_features: int, seed: int) -> Floats:
    """Return a random matrix (components, features), the same on all ranks."""
    draws = np.random.Generator(np.random.Philox(key=seed + 1))
    return draws.random((num_components, num_features))
