# SPDX-License-Identifier: Apache-2.0
"""Graphs, and networks in one process to compare networks on grids with."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from commrt.examples.digits import load_digits
from commrt.layers.graphs import (
    Adjacency,
    CsrMatrix,
    DoublePermutation,
    GCNConv3d,
    SAGEConv3d,
    cross_entropy3d,
    row_normalized,
    shard_graph,
    symmetrically_normalized,
)
from commrt.layers.process_grid import ProcessGrid
from commrt.layers.tensors import DistTensor

NEAR = 1e-12
"""Of float64: the relative difference that reordered sums make at most."""

# W. W. Zachary, "An Information Flow Model for Conflict and Fission in Small Groups"
# (1977): who met whom outside the karate club. 34 members, 78 pairs.
KARATE = {
    0: [1, 2, 3, 4, 5, 6, 7, 8, 10, 11, 12, 13, 17, 19, 21, 31],
    1: [2, 3, 7, 13, 17, 19, 21, 30],
    2: [3, 7, 8, 9, 13, 27, 28, 32],
    3: [7, 12, 13],
    4: [6, 10],
    5: [6, 10, 16],
    6: [16],
    8: [30, 32, 33],
    9: [33],
    13: [33],
    14: [32, 33],
    15: [32, 33],
    18: [32, 33],
    19: [33],
    20: [32, 33],
    22: [32, 33],
    23: [25, 27, 29, 32, 33],
    24: [25, 27, 31],
    25: [31],
    26: [29, 33],
    27: [33],
    28: [31, 33],
    29: [32, 33],
    30: [32, 33],
    31: [32, 33],
    32: [33],
}
OFFICERS = {9, *(14, 15, 18, 20), *range(22, 34)}
"""Members who went with the officer when the club split."""


@dataclass(frozen=True)
class Case:
    """A graph with features and classes, whole."""

    graph: CsrMatrix
    x: Any
    y: Any

    @property
    def num_nodes(self) -> int:
        return self.graph.shape[0]


def undirected(pairs: Any, num_nodes: int) -> CsrMatrix:
    """Return the matrix of edges in both directions; pairs that are there twice count
    twice."""
    pairs = np.asarray(pairs, np.int64).reshape(-1, 2)
    rows = np.concatenate([pairs[:, 0], pairs[:, 1]])
    columns = np.concatenate([pairs[:, 1], pairs[:, 0]])
    return CsrMatrix.from_entries(
        rows, columns, np.ones(len(rows)), (num_nodes, num_nodes)
    )


def karate() -> Case:
    pairs = [(one, other) for one, others in KARATE.items() for other in others]
    draws = np.random.default_rng(34)
    y = np.array([node in OFFICERS for node in range(34)], np.int64)
    return Case(undirected(pairs, 34), _floats(draws, 34, 5), torch.from_numpy(y))


def digits_neighbours(neighbours: int = 8) -> Case:
    """Return the 1,797 digits, joined with those that look alike, sorted by class."""
    images, digits = load_digits()
    order = np.argsort(digits, kind="stable")
    pixels = images.reshape(len(images), -1).astype(np.float64)[order] / 16
    squares = (pixels**2).sum(1)
    distance = squares[:, None] + squares[None] - 2 * pixels @ pixels.T
    np.fill_diagonal(distance, np.inf)
    near = np.argpartition(distance, neighbours, axis=1)[:, :neighbours]
    rows = np.repeat(np.arange(len(pixels)), neighbours)
    pairs = np.unique(np.sort(np.stack([rows, near.ravel()], 1), 1), axis=0)
    y = torch.from_numpy(digits[order].astype(np.int64))
    return Case(undirected(pairs, len(pixels)), torch.from_numpy(pixels), y)


def power_law(
    num_nodes: int = 9_001, num_edges: int = 100_000, exponent: float = 0.6
) -> Case:
    """Return a graph whose node i has edges in proportion to i to a negative power.

    Edges are directed, and none is there twice. Some nodes have none.
    """
    draws = np.random.default_rng(7)
    weights = np.arange(1, num_nodes + 1) ** -exponent
    weights[draws.integers(0, num_nodes, num_nodes // 10)] = 0
    part = weights / weights.sum()
    ends = np.zeros((0, 2), np.int64)
    while len(ends) < num_edges:
        more = draws.choice(num_nodes, (num_edges, 2), p=part)
        ends = np.unique(np.concatenate([ends, more]), axis=0)
    ends = ends[np.sort(draws.permutation(len(ends))[:num_edges])]
    graph = CsrMatrix.from_entries(
        ends[:, 0], ends[:, 1], np.ones(num_edges), (num_nodes, num_nodes)
    )
    y = torch.from_numpy(draws.integers(0, 5, num_nodes))
    return Case(graph, _floats(draws, num_nodes, 6), y)


def random_graph(
    draws: np.random.Generator, num_nodes: int, density: float, width: int, classes: int
) -> Case:
    """Return a directed graph with drawn values, some nodes without edges, and some
    that do not count."""
    there = draws.random((num_nodes, num_nodes)) < density
    alone = draws.integers(0, max(num_nodes, 1), num_nodes // 5)
    there[alone], there[:, alone] = False, False
    rows, columns = np.nonzero(there)
    values = draws.uniform(0.1, 1.0, len(rows))
    graph = CsrMatrix.from_entries(rows, columns, values, (num_nodes, num_nodes))
    y = draws.integers(0, classes, num_nodes)
    y[: num_nodes // 7] = -100
    return Case(graph, _floats(draws, num_nodes, width), torch.from_numpy(y))


def _floats(draws: np.random.Generator, *shape: int) -> Any:
    return torch.from_numpy(draws.standard_normal(shape))


def sparse_tensor(matrix: CsrMatrix) -> Any:
    """Return torch's tensor of a matrix; places that are there twice are summed."""
    places = np.stack([matrix.rows(), matrix.indices.astype(np.int64)])
    values = torch.from_numpy(matrix.data.copy())
    return torch.sparse_coo_tensor(
        torch.from_numpy(places), values, matrix.shape, check_invariants=True
    ).coalesce()


def grids_of(*numbers: int) -> list[tuple[int, int, int]]:
    """Return every grid of three axes with so many ranks."""
    return [
        (x, y, ranks // (x * y))
        for ranks in numbers
        for x in range(1, ranks + 1)
        for y in range(1, ranks + 1)
        if ranks % (x * y) == 0
    ]


def axes_of(shape: Sequence[int]) -> dict[str, int]:
    return dict(zip("xyz", shape, strict=True))


KINDS: dict[str, Any] = {"gcn": GCNConv3d, "sage": SAGEConv3d}


def normalized(case: Case, kind: str) -> CsrMatrix:
    """Return the matrix that layers of a kind multiply by."""
    if kind == "gcn":
        return symmetrically_normalized(case.graph)
    return row_normalized(case.graph)


def made_layers(kind: str, widths: Sequence[int], grid: ProcessGrid) -> list[Any]:
    """Return layers in float64, with drawn biases, equal on every grid."""
    generator = torch.Generator().manual_seed(5)
    layers = []
    for number, (width, out) in enumerate(itertools.pairwise(widths)):
        layer = KINDS[kind](
            width, out, number, grid, dtype=torch.float64, generator=generator
        )
        state = layer.whole_state()
        draws = np.random.default_rng(number)
        layer.load_whole({**state, "bias": _floats(draws, out)})
        layers.append(layer)
    return layers


def outputs(layers: Sequence[Any], x: Any, adjacency: Adjacency) -> Any:
    for layer in layers:
        x = layer(x, adjacency)
        if layer is not layers[-1]:
            x = x.tanh()
    return x


def serial_outputs(states: Sequence[dict[str, Any]], x: Any, matrix: Any) -> Any:
    """Return what one process computes with whole parameters."""
    for number, state in enumerate(states):
        result = torch.sparse.mm(matrix, x) @ state["weight"] + state["bias"]
        if "root_weight" in state:
            result = result + x @ state["root_weight"]
        x = result if number == len(states) - 1 else result.tanh()
    return x


def differences(
    grid: ProcessGrid,
    case: Case,
    kind: str,
    widths: Sequence[int],
    permutation: DoublePermutation | None = None,
) -> dict[str, float]:
    """Return how far a network on a grid is from one process: outputs, loss, gradients.

    Collective. Differences are relative to the largest element.
    """
    matrix = normalized(case, kind)
    layers = made_layers(kind, widths, grid)
    graph = shard_graph(
        matrix, case.x, case.y, grid, layers=len(layers), permutation=permutation
    )
    graph.features.local.requires_grad_()
    found = outputs(layers, graph.features, graph.adjacency)
    loss = cross_entropy3d(found, graph.target, grid)
    loss.backward()

    states = [
        {name: each.requires_grad_() for name, each in layer.whole_state().items()}
        for layer in layers
    ]
    x = case.x.clone().requires_grad_()
    expected = serial_outputs(states, x, sparse_tensor(matrix))
    right = functional.cross_entropy(expected, case.y)
    right.backward()

    assert x.grad is not None
    of_x = x.grad
    if permutation is not None:
        of_x = of_x[torch.from_numpy(permutation.columns)]
    pairs = {
        "outputs": (graph.in_order(found), expected),
        "loss": (loss.local, right),
        "gradient of features": (gradient_of(graph.features), of_x),
    }
    for number, (layer, state) in enumerate(zip(layers, states, strict=True)):
        for name, held in layer.dist_tensors().items():
            what = f"gradient of {name} {number}"
            pairs[what] = gradient_of(held), state[name].grad
    return {name: off_by(*pair) for name, pair in pairs.items()}


def gradient_of(x: DistTensor) -> Any:
    """Return the whole gradient of a leaf. Collective."""
    assert x.grad is not None
    return x.grad.whole()


def off_by(found: Any, expected: Any) -> float:
    """Return the largest difference, relative to the largest element."""
    found, expected = found.detach(), expected.detach()
    assert found.shape == expected.shape
    if expected.numel() == 0:
        return 0.0
    scale = max(float(expected.abs().max()), 1e-300)
    return float((found - expected).abs().max()) / scale
