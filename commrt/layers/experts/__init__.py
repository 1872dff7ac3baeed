# SPDX-License-Identifier: Apache-2.0
"""Mixtures of experts, whose experts lie on different ranks.

docs/reference/experts.md says how to use them.
"""

from commrt.layers.experts.balance import RouterLosses
from commrt.layers.experts.mlp import MlpExperts
from commrt.layers.experts.moe import Mixture, MoE
from commrt.layers.experts.owned import ModuleExperts
from commrt.layers.experts.roles import ExpertRoles
from commrt.layers.experts.router import Choice, Router
from commrt.layers.tensor3d.clipping import clip_grad_norm_
from commrt.layers.tensor3d.gradients import broadcast_parameters, sync_gradients
from commrt.layers.tensor3d.whole_state import load_state_dict, state_dict

__all__ = [
    "Choice",
    "ExpertRoles",
    "Mixture",
    "MlpExperts",
    "MoE",
    "ModuleExperts",
    "Router",
    "RouterLosses",
    "broadcast_parameters",
    "clip_grad_norm_",
    "load_state_dict",
    "state_dict",
    "sync_gradients",
]
