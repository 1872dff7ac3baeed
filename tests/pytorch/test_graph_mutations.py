# SPDX-License-Identifier: Apache-2.0
"""Comparisons with one process turn red where graph layers have a typical mistake."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from graph_cases import NEAR, differences, random_graph

from commrt.layers.graphs import (
    CsrMatrix,
    DoublePermutation,
    RowExchange,
    adjacency,
    aggregation,
    double_permutation,
    loss,
    products,
)
from commrt.layers.process_grid import ProcessGrid
from commrt.local import run

Patch = Callable[[pytest.MonkeyPatch], None]
WIDTHS = (4, 6, 4, 4)


def largest(kind: str = "gcn") -> dict[str, float]:
    """Return how far a network on eight ranks is from one process."""
    case = random_graph(np.random.default_rng(1), 24, 0.3, WIDTHS[0], WIDTHS[-1])

    def main(comm: Any) -> dict[str, float]:
        orders = double_permutation(case.graph, 2)
        with ProcessGrid(comm, {"x": 2, "y": 2, "z": 2}) as grid:
            return differences(grid, case, kind, WIDTHS, orders)

    ranks = run(8, main)
    return {name: max(rank[name] for rank in ranks) for name in ranks[0]}


def red(kind: str = "gcn") -> set[str]:
    return {name for name, off in largest(kind).items() if not off < 1e-3}


def gradients_use_the_matrix_itself(patch: pytest.MonkeyPatch) -> None:
    def same(self: CsrMatrix) -> CsrMatrix:
        return self

    patch.setattr(CsrMatrix, "transposed", same)


def products_are_not_summed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(products, "_start_sum", lambda x, comm: None)


def the_last_chunk_is_not_summed(patch: pytest.MonkeyPatch) -> None:
    def short(a: Any, x: Any, comm: Any, chunks: Any) -> Any:
        out = summed(a, x, comm, 2)
        rows = a.shape[0] // 2
        aggregation.multiply(a, x, out, (rows, a.shape[0]))
        return out

    summed = aggregation._summed_products
    patch.setattr(aggregation, "_summed_products", short)


def weight_gradients_are_summed_twice(patch: pytest.MonkeyPatch) -> None:
    def twice(x: Any, comm: Any, sizes: Any) -> Any:
        return scattered(2 * x, comm, sizes)

    scattered = products.start_scattered_rows
    patch.setattr(products, "start_scattered_rows", twice)


def odd_layers_have_the_matrix_of_even_ones(patch: pytest.MonkeyPatch) -> None:
    def same(self: DoublePermutation, graph: Any, layer_index: int) -> CsrMatrix:
        return matrix(self, graph, 0)

    matrix = DoublePermutation.matrix
    patch.setattr(DoublePermutation, "matrix", same)


def blocks_are_one_node_off(patch: pytest.MonkeyPatch) -> None:
    def off(grid: Any, axes: Any, extent: int) -> Any:
        low, high = own(grid, axes, extent)
        return (low - 1, high - 1) if low else (low, high)

    own = adjacency.own_range
    patch.setattr(adjacency, "own_range", off)


def classes_of_others_do_not_count(patch: pytest.MonkeyPatch) -> None:
    def alone(x: Any, comm: Any, op: str) -> None:
        if x.dim() < 2:
            reduce(x, comm, op)

    reduce = loss._reduce
    patch.setattr(loss, "_reduce", alone)


def nodes_of_others_do_not_count(patch: pytest.MonkeyPatch) -> None:
    def alone(x: Any, comm: Any, op: str) -> None:
        if tuple(x.shape) != (3,):
            reduce(x, comm, op)

    reduce = loss._reduce
    patch.setattr(loss, "_reduce", alone)


OUTPUTS = {"outputs", "loss", "gradient of weight 0", "gradient of weight 2"}
EARLY = {"gradient of features", "gradient of weight 0", "gradient of weight 1"}
ALL_WEIGHTS = {f"gradient of weight {layer}" for layer in range(3)}


def test_all_is_near_without_a_mistake() -> None:
    assert max(largest().values()) < NEAR


@pytest.mark.parametrize(
    ("mistake", "wrong"),
    [
        (gradients_use_the_matrix_itself, EARLY),
        (products_are_not_summed, OUTPUTS),
        (the_last_chunk_is_not_summed, OUTPUTS),
        (weight_gradients_are_summed_twice, ALL_WEIGHTS),
        (odd_layers_have_the_matrix_of_even_ones, OUTPUTS),
        (blocks_are_one_node_off, OUTPUTS),
        (classes_of_others_do_not_count, {"loss", *ALL_WEIGHTS}),
        (nodes_of_others_do_not_count, {"loss", *ALL_WEIGHTS}),
    ],
)
def test_a_mistake_turns_the_comparison_red(
    mistake: Patch, wrong: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    mistake(monkeypatch)
    found = red()
    assert wrong <= found
    if mistake is gradients_use_the_matrix_itself:
        assert not {"outputs", "loss", "gradient of weight 2"} & found
    if mistake is weight_gradients_are_summed_twice:
        assert found == ALL_WEIGHTS


def test_a_lost_reordering_turns_means_of_neighbours_red(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert red("sage") == set()
    monkeypatch.setattr(adjacency.Adjacency, "reordering", lambda self, layer: None)
    assert red("sage") >= {"outputs", "loss"}


def test_sums_of_rows_that_overwrite_turn_red(monkeypatch: pytest.MonkeyPatch) -> None:
    def summed() -> list[Any]:
        def main(comm: Any) -> Any:
            index = torch.tensor([0, 1, 1])
            return RowExchange(index, 2, comm).scatter(torch.ones(3, 1))

        return run(2, main)

    assert torch.equal(torch.cat(summed()), torch.tensor([[2.0], [4.0]]))
    monkeypatch.setattr(torch.Tensor, "index_add_", torch.Tensor.index_copy_)
    assert not torch.equal(torch.cat(summed()), torch.tensor([[2.0], [4.0]]))
