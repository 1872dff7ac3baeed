# SPDX-License-Identifier: Apache-2.0
"""The graph of nearest rows is that of one process, and halos bring its rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from science_cases import RANKS, cut_of, dense_kernels

from commrt.local import run
from commrt.science.nmf import GraphKernel
from commrt.science.nmf.graph import Graph, join_nearest
from commrt.science.rows import RowCut

Array = np.ndarray[Any, Any]
KERNELS = (GraphKernel(2), GraphKernel(4, 0.5), GraphKernel(3, 2.0))


def graphs_of(
    size: int, x: Array, kernels: tuple[GraphKernel, ...], seed: int = 0
) -> tuple[list[Graph], list[slice], list[Array]]:
    """Return each rank's graph and rows, and its table of rows' numbers."""
    pieces = cut_of(len(x), size, seed)
    counts = tuple(piece.stop - piece.start for piece in pieces)

    def main(comm: Any) -> tuple[Graph, Array]:
        own = pieces[comm.rank]
        cut = RowCut(counts, comm.rank, x.shape[1])
        graph = join_nearest(x[own], cut, kernels, comm)
        numbers = cut.ids[:, None].astype(np.float64)
        halo = graph.start_halo(numbers).wait()
        return graph, np.concatenate([numbers, halo])[:, 0].astype(int)

    ranks = run(size, main)
    return [graph for graph, _ in ranks], pieces, [table for _, table in ranks]


def dense_of(
    size: int, x: Array, seed: int, kernels: tuple[GraphKernel, ...] = KERNELS
) -> Array:
    """Return the kernels (kernels, n, n) that the ranks' graphs stand for."""
    graphs, pieces, tables = graphs_of(size, x, kernels, seed)
    found = np.zeros((len(kernels), len(x), len(x)))
    for graph, piece, table in zip(graphs, pieces, tables, strict=True):
        assert graph.num_halo == len(table) - (piece.stop - piece.start)
        for edge, (row, column) in enumerate(
            zip(graph.rows, graph.columns, strict=True)
        ):
            assert not found[:, piece.start + row, table[column]].any()
            found[:, piece.start + row, table[column]] = graph.weights[:, edge]
    assert sum(g.num_halo for g in graphs) == sum(g.num_served for g in graphs)
    return found


@pytest.mark.parametrize("size", RANKS)
def test_kernels_are_those_of_one_process(size: int, seed: int) -> None:
    x = np.random.default_rng(seed).uniform(size=(40, 3))
    found = dense_of(size, x, seed)
    right = dense_kernels(x, KERNELS)
    np.testing.assert_allclose(found, right, rtol=1e-12, atol=1e-14)
    np.testing.assert_array_equal(found, found.transpose(0, 2, 1))
    np.testing.assert_allclose(found.sum((1, 2)), len(x), rtol=1e-12)


@pytest.mark.parametrize("size", [1, 3])
def test_no_kernel_changes_another(size: int, seed: int) -> None:
    """Also not one with more neighbours, whose edges are longer."""
    x = np.random.default_rng(seed).uniform(size=(40, 3))
    kernel = GraphKernel(3, 0.5)
    (alone,) = dense_of(size, x, seed, (kernel,))
    first, _ = dense_of(size, x, seed, (kernel, GraphKernel(10)))
    np.testing.assert_array_equal(first, alone)


@pytest.mark.parametrize("size", RANKS)
def test_equally_near_rows_are_joined_in_the_order_of_their_numbers(size: int) -> None:
    rows, columns = np.divmod(np.arange(36), 6)
    x = np.column_stack([rows, columns]).astype(np.float64)
    np.testing.assert_allclose(
        dense_of(size, x, 0), dense_kernels(x, KERNELS), rtol=1e-12, atol=1e-14
    )


@pytest.mark.parametrize("num", [1, 2, 3])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_fewer_rows_than_neighbours(num: int, size: int) -> None:
    x = np.arange(2.0 * num).reshape(num, 2)
    right = dense_kernels(x, KERNELS)
    np.testing.assert_allclose(dense_of(size, x, 0), right, rtol=1e-12)


@pytest.mark.parametrize("size", [1, 3])
def test_rows_that_are_all_alike(size: int) -> None:
    """Lengths are 0, and kernels have no scale."""
    x = np.ones((9, 2))
    right = dense_kernels(x, KERNELS)
    np.testing.assert_allclose(dense_of(size, x, 0), right, rtol=1e-12)


@pytest.mark.parametrize("size", RANKS)
def test_products_with_the_graph_are_those_of_matrices(size: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    x, w = rng.uniform(size=(40, 3)), rng.uniform(size=(40, 4))
    theta = np.array([0.2, 1.5, 0.7])
    kernels = dense_kernels(x, KERNELS)
    graphs, pieces, tables = graphs_of(size, x, KERNELS, seed)
    roughness = np.zeros(3)
    mixed = np.tensordot(theta, kernels, 1)
    for graph, piece, table in zip(graphs, pieces, tables, strict=True):
        sums, degrees = graph.smoothed(w[table], theta)
        np.testing.assert_allclose(sums, (mixed @ w)[piece], rtol=1e-12)
        np.testing.assert_allclose(degrees, mixed.sum(1)[piece], rtol=1e-12)
        roughness += graph.differences(w[table])
    laplacians = [np.diag(kernel.sum(1)) - kernel for kernel in kernels]
    right = [np.trace(w.T @ laplacian @ w) for laplacian in laplacians]
    np.testing.assert_allclose(roughness, right, rtol=1e-11)
