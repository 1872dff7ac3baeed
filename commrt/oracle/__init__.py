# SPDX-License-Identifier: Apache-2.0
"""Projected time and memory of training strategies: ParaDL's oracle on commrt's costs.

``Oracle`` projects; ``LayerTable`` says what is trained; ``AlphaBeta`` and the classes
of ``commrt.oracle.costs`` say what communication takes.
"""

from commrt.oracle.layer_table import Layer, LayerTable
from commrt.oracle.projection import Oracle, Projection, Recommendation, volume
from commrt.oracle.strategies import STRATEGIES
from commrt.oracle.transfers import AlphaBeta

__all__ = [
    "STRATEGIES",
    "AlphaBeta",
    "Layer",
    "LayerTable",
    "Oracle",
    "Projection",
    "Recommendation",
    "volume",
]
