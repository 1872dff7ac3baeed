# SPDX-License-Identifier: Apache-2.0
"""Layers whose weights, inputs and outputs are cut over a grid of four axes."""

from commrt.layers.tensor3d.activations import cut_sequence, whole_sequence
from commrt.layers.tensor3d.attention import Attention3d, attention_form, local_heads
from commrt.layers.tensor3d.auto import auto_parallelize, parallelize
from commrt.layers.tensor3d.clipping import clip_grad_norm_
from commrt.layers.tensor3d.convolution import (
    ChannelConv,
    ChannelConv1d,
    ChannelConv2d,
    ChannelConv3d,
)
from commrt.layers.tensor3d.embedding import Embedding3d
from commrt.layers.tensor3d.features import Features
from commrt.layers.tensor3d.gradients import (
    broadcast_parameters,
    sequence_parallel,
    sync_gradients,
)
from commrt.layers.tensor3d.grid_costs import GridCost, LayerShape, rank_grids
from commrt.layers.tensor3d.linear import Form, Linear3d
from commrt.layers.tensor3d.norms import FeatureNorm
from commrt.layers.tensor3d.overlap_communication import overlap_communication
from commrt.layers.tensor3d.training_state import TrainingState
from commrt.layers.tensor3d.whole_state import load_state_dict, state_dict

__all__ = [
    "Attention3d",
    "ChannelConv",
    "ChannelConv1d",
    "ChannelConv2d",
    "ChannelConv3d",
    "Embedding3d",
    "FeatureNorm",
    "Features",
    "Form",
    "GridCost",
    "LayerShape",
    "Linear3d",
    "TrainingState",
    "attention_form",
    "auto_parallelize",
    "broadcast_parameters",
    "clip_grad_norm_",
    "cut_sequence",
    "load_state_dict",
    "local_heads",
    "overlap_communication",
    "parallelize",
    "rank_grids",
    "sequence_parallel",
    "state_dict",
    "sync_gradients",
    "whole_sequence",
]
