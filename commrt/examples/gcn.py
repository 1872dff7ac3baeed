# SPDX-License-Identifier: Apache-2.0
"""A graph network learns handwritten digits from a graph that is cut over all ranks.

    torchrun --nproc-per-node 2 -m commrt.examples.gcn --check

Nodes are images, and edges join those that look alike. A third of the nodes have their
digit in training; the network tells the others'. Adjacency, features and weights are
cut over a grid of three axes, which the model of costs chooses: every step is that of
one process.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from commrt.comm import Communicator
from commrt.examples import runs
from commrt.examples.digits import load_digits
from commrt.layers.graphs import (
    CsrMatrix,
    GCNConv3d,
    ShardedGraph,
    cross_entropy3d,
    double_permutation,
    rank_grids,
    shard_graph,
    symmetrically_normalized,
)
from commrt.layers.process_grid import ProcessGrid
from commrt.layers.tensors import DistTensor

__all__ = ["Gcn", "main", "neighbours"]

STEPS = 100
SEED = 1
WIDTHS = (64, 32, 10)
NEIGHBOURS = 8


class Gcn(nn.Module):  # type: ignore[misc]  # torch is not looked into
    """Two graph convolutions, some 2,400 parameters."""

    def __init__(self, grid: ProcessGrid) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(SEED)
        self.first = GCNConv3d(*WIDTHS[:2], 0, grid, generator=generator)
        self.second = GCNConv3d(*WIDTHS[1:], 1, grid, generator=generator)

    def forward(self, graph: ShardedGraph) -> DistTensor:
        """Return ten numbers for each node."""
        hidden: Any = self.first(graph.features, graph.adjacency).tanh()
        logits: DistTensor = self.second(hidden, graph.adjacency)
        return logits


def main(argv: Sequence[str] | None = None) -> int:
    """Train on the ranks that torchrun started; return the exit status."""
    arguments = runs.arguments_of("gcn", __doc__, STEPS, argv)
    with runs.job(arguments.backend):
        comm = getattr(dist.group.WORLD, "communicator", None)
        if comm is None:
            runs.say(f"backend {arguments.backend}: the graph layers need commrt's")
            return 2
        matrix, pixels, digits = data()

        def together() -> list[float]:
            return trained(comm, matrix, pixels, digits, arguments.steps)

        def alone() -> list[float]:
            return trained_alone(matrix, pixels, digits, arguments.steps)

        return runs.report(together, alone if arguments.check else None)


def data() -> tuple[CsrMatrix, torch.Tensor, torch.Tensor]:
    """Return the graph's matrix, the pixels, and the digits."""
    images, digits = load_digits()
    pixels = (images.reshape(len(images), -1) / 16.0).astype(np.float32)
    matrix = symmetrically_normalized(neighbours(pixels, NEIGHBOURS))
    return matrix, torch.from_numpy(pixels), torch.from_numpy(digits.astype(np.int64))


def neighbours(points: Any, number: int) -> CsrMatrix:
    """Return the graph that joins each point with those that are nearest."""
    squares = (points**2).sum(1)
    distance = squares[:, None] + squares[None] - 2 * points @ points.T
    np.fill_diagonal(distance, np.inf)
    nearest = np.argpartition(distance, number, axis=1)[:, :number]
    one = np.repeat(np.arange(len(points)), number)
    pairs = np.unique(np.sort(np.stack([one, nearest.ravel()], 1), 1), axis=0)
    rows, columns = np.concatenate([pairs, pairs[:, ::-1]]).T
    shape = len(points), len(points)
    return CsrMatrix.from_entries(
        rows, columns, np.ones(len(rows), points.dtype), shape
    )


def known(digits: torch.Tensor) -> torch.Tensor:
    """Return the digits of every third node; the others do not count."""
    is_known = torch.arange(len(digits)) % 3 == 0
    return digits.where(is_known, torch.full_like(digits, -100))


def trained(
    comm: Communicator,
    matrix: CsrMatrix,
    pixels: torch.Tensor,
    digits: torch.Tensor,
    steps: int,
) -> list[float]:
    """Train on all ranks; return the losses."""
    chosen = rank_grids(
        comm.size,
        num_nodes=matrix.shape[0],
        num_entries=matrix.num_entries,
        widths=WIDTHS,
    )[0]
    with ProcessGrid(comm, dict(zip("xyz", chosen.shape, strict=True))) as grid:
        runs.say(f"grid {chosen.shape}, {chosen.nbytes:,} bytes of collectives a step")
        graph = shard_graph(
            matrix,
            pixels,
            known(digits),
            grid,
            layers=2,
            permutation=double_permutation(matrix, SEED),
        )
        model = Gcn(grid)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
        losses = []
        for _ in range(steps):
            optimizer.zero_grad()
            loss = cross_entropy3d(model(graph), graph.target)
            loss.backward()
            optimizer.step()
            losses.append(float(loss.local.detach()))
        with torch.no_grad():
            said = graph.in_order(model(graph)).argmax(1)
        unknown = torch.arange(len(digits)) % 3 != 0
        right = float((said == digits)[unknown].float().mean())
        runs.say(f"{right:.1%} of the unknown digits are told right")
        return losses


def trained_alone(
    matrix: CsrMatrix, pixels: torch.Tensor, digits: torch.Tensor, steps: int
) -> list[float]:
    """Train in one process, with torch's own sparse product; return the losses."""
    places = torch.from_numpy(np.stack([matrix.rows(), matrix.indices]))
    values = torch.from_numpy(matrix.data.copy())
    sparse = torch.sparse_coo_tensor(
        places, values, matrix.shape, check_invariants=True
    ).coalesce()
    generator = torch.Generator().manual_seed(SEED)
    parameters = []
    for width, out in pairwise(WIDTHS):
        weight = nn.Parameter(torch.empty(width, out))
        nn.init.xavier_uniform_(weight, generator=generator)
        parameters += [weight, nn.Parameter(torch.zeros(out))]
    first, bias, second, other = parameters
    optimizer = torch.optim.Adam(parameters, lr=0.02)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        hidden = (torch.sparse.mm(sparse, pixels) @ first + bias).tanh()
        logits = torch.sparse.mm(sparse, hidden) @ second + other
        loss = functional.cross_entropy(logits, known(digits))
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


if __name__ == "__main__":
    sys.exit(main())
