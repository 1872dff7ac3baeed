# SPDX-License-Identifier: Apache-2.0
"""Sharded embedding bags beside torch's EmbeddingBag, on ranks as threads."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from tensor3d_cases import Difference, drawn_in
from torch import nn

from commrt.comm import Communicator
from commrt.layers.embeddings import (
    Bags,
    EmbeddingTable,
    Placement,
    ShardedEmbeddingBags,
    load_state_dict,
)
from commrt.layers.embeddings.whole_rows import gathered_rows
from commrt.layers.process_grid import ProcessGrid
from commrt.local import run

Tables = tuple[EmbeddingTable, ...]


def cut_as(tables: Tables, sharding: str | None) -> Tables:
    """Return tables that are all cut in one way."""
    return tuple(dataclasses.replace(each, sharding=sharding) for each in tables)


PLAIN: Tables = (
    EmbeddingTable("a", 11, 4),
    EmbeddingTable("b", 5, 4, lookups=3.0),
    EmbeddingTable("c", 1, 4),
)
MIXED: Tables = (
    EmbeddingTable("whole", 9, 5, sharding="table"),
    EmbeddingTable("mean", 7, 5, mode="mean", padding_idx=2, sharding="row"),
    EmbeddingTable("columns", 6, 7, mode="mean", sharding="column"),
    EmbeddingTable("weighted", 8, 5, is_weighted=True, padding_idx=0, sharding="row"),
    EmbeddingTable("narrow", 10, 1, sharding="column"),
    EmbeddingTable("both", 12, 7, is_weighted=True, sharding="column"),
    EmbeddingTable("tiny", 1, 3, sharding="row"),
    EmbeddingTable("empty", 0, 2),
)
FORMS: dict[str, Tables] = {
    "chosen": PLAIN,
    "by table": cut_as(PLAIN, "table"),
    "by row": cut_as(PLAIN, "row"),
    "by column": cut_as(PLAIN, "column"),
    "padding": (EmbeddingTable("p", 4, 3, padding_idx=3), EmbeddingTable("q", 6, 3)),
    "weights": (EmbeddingTable("w", 9, 3, is_weighted=True, sharding="row"),),
    "mixed": MIXED,
}


class PlainBags(nn.ModuleDict):
    """The serial tables, as torch has them."""

    def __init__(self, tables: Tables, *, sparse: bool = False) -> None:
        made = {}
        for table in tables:
            made[table.name] = nn.EmbeddingBag(
                table.num_embeddings,
                table.embedding_dim,
                mode=table.mode,
                padding_idx=table.padding_idx,
                sparse=sparse,
                dtype=torch.float64,
            )
        super().__init__(made)

    def forward(self, bags: Sequence[Bags]) -> list[Any]:
        return [
            self._one(self[name], each) for name, each in zip(self, bags, strict=True)
        ]

    @staticmethod
    def _one(table: nn.EmbeddingBag, bags: Bags) -> Any:
        if len(bags.indices):
            return table(bags.indices, bags.offsets, bags.weights)
        zeros = table.weight.new_zeros((len(bags.offsets), table.embedding_dim))
        return zeros + 0 * table.weight.sum()


def serial_of(tables: Tables, *, sparse: bool = False) -> PlainBags:
    """Return serial tables whose rows depend on their names alone."""
    made = PlainBags(tables, sparse=sparse)
    with torch.no_grad():
        for number, table in enumerate(tables):
            shape = table.num_embeddings, table.embedding_dim
            made[table.name].weight.copy_(drawn_in(50 + number, *shape))
    return made


def drawn_bags(table: EmbeddingTable, samples: int, seed: int, most: int = 4) -> Bags:
    """Return bags of no to ``most`` indices, some of them the same."""
    draws = random.Random(f"{table.name} {seed}")
    most = most if table.num_embeddings else 0
    lengths = [draws.randint(0, most) for _ in range(samples)]
    offsets = [sum(lengths[:at]) for at in range(samples)]
    number = sum(lengths)
    rows = [draws.randrange(table.num_embeddings) for _ in range(number)]
    weights = drawn_in(seed, number) if table.is_weighted else None
    return Bags(
        torch.tensor(rows, dtype=torch.int64),
        torch.tensor(offsets, dtype=torch.int64),
        weights,
    )


def batches_of(
    tables: Tables, counts: Sequence[int], seed: int = 0, most: int = 4
) -> list[list[Bags]]:
    """Return the bags of each rank, for its number of samples."""
    return [
        [drawn_bags(table, count, 100 * seed + rank, most) for table in tables]
        for rank, count in enumerate(counts)
    ]


def together(batches: Sequence[Sequence[Bags]]) -> list[Bags]:
    """Return the bags of one process that has the samples of all ranks."""
    found = []
    for bags in zip(*batches, strict=True):
        offsets, before = [], 0
        for each in bags:
            offsets.append(each.offsets + before)
            before += len(each.indices)
        weights = None
        if bags[0].weights is not None:
            weights = torch.cat([each.weights for each in bags])
        found.append(
            Bags(
                torch.cat([each.indices for each in bags]), torch.cat(offsets), weights
            )
        )
    return found


def layer_of(
    tables: Tables, grid: ProcessGrid, serial: nn.Module | None = None, **more: Any
) -> ShardedEmbeddingBags:
    """Return the layer with the rows of serial tables."""
    made = ShardedEmbeddingBags(tables, grid=grid, dtype=torch.float64, **more)
    load_state_dict(made, (serial or serial_of(tables)).state_dict())
    return made


def loss_of(rows: Any) -> Any:
    """Return a loss whose gradient differs by column."""
    return sum(
        (each.square() * torch.arange(1, each.shape[1] + 1)).sum() + each.sum()
        for each in rows
    )


def whole_gradients(layer: ShardedEmbeddingBags) -> dict[str, Any]:
    """Return the gradients of whole tables; collective."""
    held = []
    for parameter in layer.parameters():
        assert parameter.grad is not None
        held.append(parameter.grad.to_dense())
    return gathered_rows(layer.layout, layer.along, held)


def counts_of(ranks: int, seed: int) -> list[int]:
    """Return uneven numbers of samples; some ranks have none."""
    return [(2 * seed + 3 * rank) % 5 for rank in range(ranks)]


def compare(
    tables: Tables,
    counts: Sequence[int],
    *,
    seed: int = 0,
    most: int = 4,
    placement: Callable[[int], Placement] | None = None,
    is_sparse: bool = True,
) -> dict[str, float]:
    """Return how far rows and gradients are from those of torch's EmbeddingBag.

    Args:
        tables: all tables.
        counts: samples of each rank.
        seed: draws the bags.
        most: indices of a bag at most.
        placement: returns one for a number of ranks; None: ``place`` does.
        is_sparse: of the layer.
    """
    serial = serial_of(tables)
    batches = batches_of(tables, counts, seed, most)
    every = together(batches)
    for bags in every:
        if bags.weights is not None:
            bags.weights.requires_grad_()
    right = serial(every)
    factors = [drawn_in(7 + n, *each.shape) for n, each in enumerate(right)]
    sum(
        (each.square() * factor).sum()
        for each, factor in zip(right, factors, strict=True)
    ).backward()

    def main(comm: Communicator) -> dict[str, float]:
        found = Difference()
        with ProcessGrid(comm, {"data": 0}) as grid:
            given = None if placement is None else placement(comm.size)
            layer = layer_of(tables, grid, serial, placement=given, is_sparse=is_sparse)
            low = sum(counts[: comm.rank])
            own = slice(low, low + counts[comm.rank])
            bags = batches[comm.rank]
            for each in bags:
                if each.weights is not None:
                    each.weights.requires_grad_()
            rows = layer(bags)
            loss = sum(
                (each.square() * factor[own]).sum()
                for each, factor in zip(rows, factors, strict=True)
            )
            loss.backward()
            for table, mine, whole in zip(tables, rows, right, strict=True):
                assert mine.shape == (counts[comm.rank], table.embedding_dim)
                found.note(f"rows of {table.name}", mine.detach(), whole[own].detach())
            for name, gradient in whole_gradients(layer).items():
                expected = serial[name].weight.grad
                if expected is None:
                    expected = torch.zeros_like(serial[name].weight)
                found.note(f"gradient of {name}", gradient, expected)
            for number, table in enumerate(tables):
                whole, mine = every[number].weights, bags[number].weights
                if whole is not None and whole.grad is not None:
                    before = batches[: comm.rank]
                    first = sum(len(each[number].indices) for each in before)
                    part = whole.grad[first : first + len(mine)]
                    found.note(f"weights of {table.name}", mine.grad, part)
            for parameter in layer.parameters():
                assert parameter.grad.is_sparse == is_sparse
        return found.of

    ranks = run(len(counts), main, timeout_s=240)
    return {
        name: max(rank.get(name, 0.0) for rank in ranks)
        for name in {name for rank in ranks for name in rank}
    }
