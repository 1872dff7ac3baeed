# SPDX-License-Identifier: Apache-2.0
"""Networks of convolutions whose batch, space and channels are cut over ranks."""

from commrt.layers.cnn.choice import ChosenStrategies, choose_strategies
from commrt.layers.cnn.parallelize import parallelize_cnn
from commrt.layers.cnn.strategy import ParallelStrategy
from commrt.layers.tensor3d.clipping import clip_grad_norm_
from commrt.layers.tensor3d.training_state import TrainingState
from commrt.layers.tensor3d.whole_state import load_state_dict, state_dict

__all__ = [
    "ChosenStrategies",
    "ParallelStrategy",
    "TrainingState",
    "choose_strategies",
    "clip_grad_norm_",
    "load_state_dict",
    "parallelize_cnn",
    "state_dict",
]
