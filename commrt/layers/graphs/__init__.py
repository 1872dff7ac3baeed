# SPDX-License-Identifier: Apache-2.0
"""Graph networks on grids of ranks, for graphs that fit into no single memory.

Graph, features and weights are cut over three axes, as in Plexus (SC'25).
docs/reference/graphs.md says how to use them.
"""

from commrt.layers.graphs.adjacency import Adjacency, cut_adjacency
from commrt.layers.graphs.aggregation import spmm
from commrt.layers.graphs.csr import CsrMatrix, as_csr
from commrt.layers.graphs.grid_model import Machine, rank_grids
from commrt.layers.graphs.layers import GCNConv3d, SAGEConv3d
from commrt.layers.graphs.loss import cross_entropy3d
from commrt.layers.graphs.normalization import row_normalized, symmetrically_normalized
from commrt.layers.graphs.permutation import (
    DoublePermutation,
    double_permutation,
    imbalance,
)
from commrt.layers.graphs.roles import Roles, roles_of
from commrt.layers.graphs.row_exchange import RowExchange, gather, scatter
from commrt.layers.graphs.sharded import ShardedGraph, shard_graph
from commrt.layers.graphs.storage import load_graph, save_graph

__all__ = [
    "Adjacency",
    "CsrMatrix",
    "DoublePermutation",
    "GCNConv3d",
    "Machine",
    "Roles",
    "RowExchange",
    "SAGEConv3d",
    "ShardedGraph",
    "as_csr",
    "cross_entropy3d",
    "cut_adjacency",
    "double_permutation",
    "gather",
    "imbalance",
    "load_graph",
    "rank_grids",
    "roles_of",
    "row_normalized",
    "save_graph",
    "scatter",
    "shard_graph",
    "spmm",
    "symmetrically_normalized",
]
