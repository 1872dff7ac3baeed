# SPDX-License-Identifier: Apache-2.0
"""A recommendation model learns which tumours are benign, with tables on all ranks.

    torchrun --nproc-per-node 2 -m commrt.examples.dlrm --check

Ranks have samples of their own. One table is cut by its rows, one by its columns, and
five lie whole on one rank each. Numbers go through a perceptron, categories through the
tables, and the products of all pairs through a second perceptron (Naumov et al., "Deep
learning recommendation model for personalization and recommendation systems"). Every
step is that of one process, whose network is written in torch alone.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from commrt.examples import runs
from commrt.examples.tumours import NUM_DENSE, TABLES, load_samples
from commrt.layers.embeddings import (
    EmbeddingTable,
    RowwiseAdagrad,
    ShardedEmbeddingBags,
    broadcast_parameters,
    state_dict,
    sync_gradients,
)
from commrt.layers.process_grid import ProcessGrid
from commrt.layers.spatial.windows import even_ranges

__all__ = ["Network", "main", "perceptron"]

STEPS = 60
SEED = 1
BATCH = 100
BOTTOM, TOP = (16,), (16,)
"""Hidden features of the two perceptrons."""


class Network(nn.Module):  # type: ignore[misc]  # torch is not looked into
    """A model with a bottom perceptron, tables, products of pairs and a top perceptron.

    Args:
        bags: the layer that looks rows up.
        tables: its tables, which all have the same ``embedding_dim``.
        num_dense: numbers of a sample.
        bottom, top: hidden features of the perceptrons.
        dtype: of the perceptrons' parameters.
    """

    def __init__(
        self,
        bags: nn.Module,
        tables: Sequence[EmbeddingTable],
        num_dense: int,
        bottom: Sequence[int],
        top: Sequence[int],
        dtype: Any,
    ) -> None:
        super().__init__()
        dim, vectors = tables[0].embedding_dim, len(tables) + 1
        self.bags = bags
        self.bottom = perceptron([num_dense, *bottom, dim], dtype)
        num_pairs = vectors * (vectors - 1) // 2
        self.top = perceptron([dim + num_pairs, *top, 1], dtype)
        ones = torch.ones(vectors, vectors)
        self._pairs = ones.tril(-1).nonzero(as_tuple=True)

    def forward(self, dense: torch.Tensor, bags: Any) -> torch.Tensor:
        """Return a number for each sample, above 0 where it is likely."""
        pending = self.bags.start(bags)
        hidden = self.bottom(dense)  # while rows travel
        return self.interacted(hidden, pending.wait())

    def interacted(
        self, hidden: torch.Tensor, rows: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        """Return what the top perceptron makes of the products of all pairs."""
        vectors = torch.stack([hidden, *rows], 1)
        one, other = self._pairs
        products = (vectors @ vectors.transpose(1, 2))[:, one, other]
        found: torch.Tensor = self.top(torch.cat([hidden, products], 1))
        return found.squeeze(1)


def perceptron(features: Sequence[int], dtype: Any) -> nn.Module:
    """Return linear layers with ReLU between them."""
    layers: list[nn.Module] = []
    for fan_in, fan_out in itertools.pairwise(features):
        layers += [nn.Linear(fan_in, fan_out, dtype=dtype), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class PlainNetwork(Network):
    """A network in torch alone, whose losses those on ranks must equal."""

    def forward(self, dense: torch.Tensor, bags: Any) -> torch.Tensor:
        """Return a number for each sample."""
        rows = [
            self.bags[table.name](own) for table, own in zip(TABLES, bags, strict=True)
        ]
        return self.interacted(self.bottom(dense), rows)


class PlainRowwiseAdagrad:
    """The optimizer of the tables in a few lines, on dense gradients."""

    def __init__(self, parameters: Sequence[torch.Tensor], lr: float) -> None:
        self.parameters, self.lr = [*parameters], lr
        self.sums = [each.new_zeros(len(each)) for each in self.parameters]

    def step(self) -> None:
        """Change the tables."""
        with torch.no_grad():
            for table, sums in zip(self.parameters, self.sums, strict=True):
                sums += table.grad.square().mean(1)
                table -= self.lr * table.grad / (sums.sqrt() + 1e-8)[:, None]


def main(argv: Sequence[str] | None = None) -> int:
    """Train on the ranks that torchrun started; return the exit status."""
    arguments = runs.arguments_of("dlrm", __doc__, STEPS, argv)
    with runs.job(arguments.backend):
        comm = getattr(dist.group.WORLD, "communicator", None)
        if comm is None:
            runs.say(f"backend {arguments.backend}: the layer needs commrt's")
            return 2
        with ProcessGrid(comm, {"data": 0}) as grid:
            torch.manual_seed(SEED)
            shape = TABLES, NUM_DENSE, BOTTOM, TOP, torch.float64
            bags = ShardedEmbeddingBags(TABLES, grid=grid, dtype=torch.float64)
            network = Network(bags, *shape)
            broadcast_parameters(network, grid)
            initial = state_dict(network)
            runs.say(bags.placement.explain())

            def together() -> list[float]:
                rows = RowwiseAdagrad(bags.parameters(), lr=0.05)
                return trained(network, rows, grid, arguments.steps)

            def alone() -> list[float]:
                tables = {
                    each.name: nn.EmbeddingBag(
                        *(each.num_embeddings, each.embedding_dim),
                        mode=each.mode,
                        dtype=torch.float64,
                    )
                    for each in TABLES
                }
                other = PlainNetwork(nn.ModuleDict(tables), *shape)
                other.load_state_dict(initial)
                rows = PlainRowwiseAdagrad([*other.bags.parameters()], lr=0.05)
                return trained(other, rows, None, arguments.steps)

            return runs.report(together, alone if arguments.check else None)


def trained(
    network: Network, rows: Any, grid: ProcessGrid | None, steps: int
) -> list[float]:
    """Train on the ranks of a grid, or on one process alone; return the losses.

    Args:
        network: is trained.
        rows: the optimizer of its tables.
        grid: the ranks; None: one process.
        steps: of the optimizers.
    """
    samples = load_samples()
    dense = torch.optim.Adam(
        [*network.bottom.parameters(), *network.top.parameters()], lr=0.01
    )
    draws = torch.Generator().manual_seed(SEED)
    ranks, place = (1, 0) if grid is None else (grid.num_ranks, grid.rank)
    low, high = even_ranges(BATCH, ranks)[place]
    losses: list[Any] = []
    for _ in range(steps):
        batch = torch.randint(len(samples.dense), (BATCH,), generator=draws)
        own = samples.of(batch[low:high])  # ranks may have different numbers of samples
        network.zero_grad()
        logits = network(own.dense, own.bags)
        wrong = functional.binary_cross_entropy_with_logits(
            logits, own.is_benign, reduction="sum"
        )
        loss = wrong / BATCH
        loss.backward()
        if grid is not None:
            sync_gradients(network, grid, average=False)
        dense.step()
        rows.step()
        losses.append(loss.detach())
    total = torch.stack(losses)
    if grid is not None:
        grid.comm.allreduce(total)
    return [float(loss) for loss in total]


if __name__ == "__main__":
    sys.exit(main())
