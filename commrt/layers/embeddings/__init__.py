# SPDX-License-Identifier: Apache-2.0
"""Embedding bags, whose tables lie on different ranks.

docs/reference/embeddings.md says how to use them.
"""

from commrt.layers.embeddings.bags import Bags
from commrt.layers.embeddings.placement import Placement, Shard
from commrt.layers.embeddings.planner import place
from commrt.layers.embeddings.rowwise_adagrad import RowwiseAdagrad
from commrt.layers.embeddings.sharded import PendingRows, ShardedEmbeddingBags
from commrt.layers.embeddings.tables import EmbeddingTable
from commrt.layers.tensor3d.gradients import broadcast_parameters, sync_gradients
from commrt.layers.tensor3d.whole_state import load_state_dict, state_dict

__all__ = [
    "Bags",
    "EmbeddingTable",
    "PendingRows",
    "Placement",
    "RowwiseAdagrad",
    "Shard",
    "ShardedEmbeddingBags",
    "broadcast_parameters",
    "load_state_dict",
    "place",
    "state_dict",
    "sync_gradients",
]
