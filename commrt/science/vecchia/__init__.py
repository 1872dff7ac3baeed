# SPDX-License-Identifier: Apache-2.0
"""Gaussian processes whose points lie on different ranks.

docs/reference/science.md says how to use them.
"""

from commrt.science.vecchia.hyperparameters import Hyperparameters
from commrt.science.vecchia.model import Prediction, VecchiaModel
from commrt.science.vecchia.neighbors import NeighborTraffic
from commrt.science.vecchia.process import ScaledBlockVecchia

__all__ = [
    "Hyperparameters",
    "NeighborTraffic",
    "Prediction",
    "ScaledBlockVecchia",
    "VecchiaModel",
]
