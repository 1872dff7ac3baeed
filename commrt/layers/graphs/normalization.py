# SPDX-License-Identifier: Apache-2.0
"""Adjacency matrices as graph layers multiply by them: scaled by the nodes' degrees."""

from __future__ import annotations

from typing import Any

import numpy as np

from commrt.errors import UsageError
from commrt.layers.graphs.csr import CsrMatrix, as_csr

__all__ = ["row_normalized", "symmetrically_normalized"]


def symmetrically_normalized(graph: Any, *, self_loops: bool = True) -> CsrMatrix:
    """Return D^(-1/2) (A + I) D^(-1/2), with the row sums of A + I as D.

    This is the matrix of graph convolution (Kipf and Welling, "Semi-Supervised
    Classification with Graph Convolutional Networks", ICLR 2017, section 2).

    Args:
        graph: a square matrix, as ``as_csr`` takes it.
        self_loops: False leaves I out. Nodes without edges then have empty rows.

    Local. Raises UsageError for a matrix that is not square, or whose row sums are
    negative.
    """
    whole = _square("symmetrically_normalized", graph)
    if self_loops:
        whole = _with_diagonal(whole)
    degree = _row_sums(whole)
    if degree.size and degree.min() < 0:
        raise UsageError(
            f"symmetrically_normalized: the row sum of node {int(degree.argmin())} is "
            f"{degree.min()}; expected none below 0, as they are divided by the root"
        )
    scale = _inverse(np.sqrt(degree))
    data = whole.data * scale[whole.rows()] * scale[whole.indices]
    return CsrMatrix(
        whole.indptr, whole.indices, data.astype(whole.data.dtype), whole.shape
    )


def row_normalized(graph: Any) -> CsrMatrix:
    """Return D^(-1) A, whose product with features is the mean over neighbours.

    This is the mean aggregator of GraphSAGE (Hamilton, Ying and Leskovec, "Inductive
    Representation Learning on Large Graphs", NeurIPS 2017, section 3). Nodes without
    neighbours have the mean 0. Local.
    """
    whole = _square("row_normalized", graph)
    data = whole.data * _inverse(_row_sums(whole))[whole.rows()]
    return CsrMatrix(
        whole.indptr, whole.indices, data.astype(whole.data.dtype), whole.shape
    )


def _square(what: str, graph: Any) -> CsrMatrix:
    whole = as_csr(graph, what)
    if whole.shape[0] != whole.shape[1]:
        raise UsageError(
            f"{what}: a matrix of shape {whole.shape}; expected a square one, with a "
            f"row and a column for each node"
        )
    return whole


def _with_diagonal(graph: CsrMatrix) -> CsrMatrix:
    """Return A + I; a loop that is there already counts once more."""
    nodes = np.arange(graph.shape[0])
    return CsrMatrix.from_entries(
        np.concatenate([graph.rows(), nodes]),
        np.concatenate([graph.indices, nodes]),
        np.concatenate([graph.data, np.ones(len(nodes), graph.data.dtype)]),
        graph.shape,
    )


def _row_sums(graph: CsrMatrix) -> Any:
    sums = np.bincount(graph.rows(), weights=graph.data, minlength=graph.shape[0])
    return sums.astype(np.float64)  # without entries they would be integers


def _inverse(x: Any) -> Any:
    """Return 1 / x, and 0 for 0."""
    return np.divide(1.0, x, out=np.zeros_like(x), where=x != 0)
