# SPDX-License-Identifier: Apache-2.0
"""Training whose saved tensors do not fit: they are kept, swapped or recomputed.

docs/reference/out-of-core.md says how to use it.
"""

from commrt.layers.out_of_core.costs import BlockCost, Link
from commrt.layers.out_of_core.far import FarMemory
from commrt.layers.out_of_core.file_far import FileFar
from commrt.layers.out_of_core.out_of_core import OutOfCore, Step
from commrt.layers.out_of_core.pinned import PinnedMemory
from commrt.layers.out_of_core.planner import Plan, plan
from commrt.layers.out_of_core.throttled import ThrottledCopy

__all__ = [
    "BlockCost",
    "FarMemory",
    "FileFar",
    "Link",
    "OutOfCore",
    "PinnedMemory",
    "Plan",
    "Step",
    "ThrottledCopy",
    "plan",
]
