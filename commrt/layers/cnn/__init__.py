# SPDX-License-Identifier: Apache-2.0
"""Networks of convolutions whose batch, space and channels are cut over ranks."""

from commrt.layers.cnn.choice import ChosenStrategies, choose_strategies
from commrt.layers.cnn.parallelize import parallelize_cnn
from commrt.layers.cnn.strategy import ParallelStrategy

__all__ = [
    "ChosenStrategies",
    "ParallelStrategy",
    "choose_strategies",
    "parallelize_cnn",
]
