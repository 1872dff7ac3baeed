# SPDX-License-Identifier: Apache-2.0
"""Pipelines: layers on different ranks, cut by what they cost.

docs/reference/pipeline.md says how to use them.
"""

from commrt.layers.pipeline.message_driven import MessageDrivenPipeline
from commrt.layers.pipeline.partition import partition
from commrt.layers.pipeline.placement import Placement, stage_seconds
from commrt.layers.pipeline.shisha import Shisha
from commrt.layers.pipeline.stage import (
    Stage,
    load_state_dict,
    measure_layers,
    split,
    state_dict,
)

__all__ = [
    "MessageDrivenPipeline",
    "Placement",
    "Shisha",
    "Stage",
    "load_state_dict",
    "measure_layers",
    "partition",
    "split",
    "stage_seconds",
    "state_dict",
]
