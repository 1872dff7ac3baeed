# SPDX-License-Identifier: Apache-2.0
"""Branches of a module that run on different ranks.

docs/reference/branches.md says how to use them.
"""

from commrt.layers.branches.branches import Branches
from commrt.layers.branches.gradients import sync_gradients
from commrt.layers.branches.placement import shares
from commrt.layers.tensor3d.whole_state import load_state_dict, state_dict

__all__ = ["Branches", "load_state_dict", "shares", "state_dict", "sync_gradients"]
