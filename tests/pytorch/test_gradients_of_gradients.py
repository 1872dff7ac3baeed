# SPDX-License-Identifier: Apache-2.0
"""Layers have second derivatives that are right, or refuse them on all ranks.

Losses are linear in the output: torch's own ``once_differentiable`` would leave the
second derivatives out without a word.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import commrt.layers
from commrt.errors import UsageError
from commrt.layers.branches import Branches
from commrt.layers.embeddings import EmbeddingTable, ShardedEmbeddingBags
from commrt.layers.graphs import SAGEConv3d, row_normalized, shard_graph
from commrt.layers.process_grid import ProcessGrid
from commrt.layers.spatial.cut import Cut
from commrt.layers.spatial.dropout import dropout
from commrt.layers.spatial.normalization import batch_norm
from commrt.layers.spatial.pooling import avg_pool
from commrt.layers.tensor3d import ChannelConv, Linear3d
from commrt.layers.tensor3d.activations import cut_features, whole_features
from commrt.layers.tensor3d.features import Features
from commrt.layers.tensor3d.roles import Along
from commrt.layers.tensors import DistTensor, Placement
from commrt.local import run

RANKS = 2

TWICE = {
    "out_of_core/measuring._Copy",  # within a measurement, which asks for one gradient
    "pipeline/flow._Enter",  # the root of a stage's graph: nothing comes before it
    "spatial/empty_results._Empty",  # gradients are 0
    *(f"experts/{name}" for name in ("moe._Whole", "balance._SumOverRanks")),
    *(f"experts/rows.{name}" for name in ("_Spread", "_Collect")),
    *(f"graphs/row_exchange.{name}" for name in ("_Gather", "_Scatter")),
    *(f"spatial/exchange.{name}" for name in ("_Gather", "_ScatterAdd")),
    "spatial/dropout._Dropout",
    *(f"tensor3d/activations.{name}" for name in ("_Cut", "_Whole")),
    "tensors/moves._Move",
    "tensors/reductions._Extreme",
}
"""Functions whose backward pass autograd can look into."""


def functions() -> dict[str, bool]:
    """Return all functions of the layers, and whether they refuse."""
    root = Path(commrt.layers.__file__).parent
    found = {}
    for path in sorted(root.rglob("*.py")):
        for each in ast.walk(ast.parse(path.read_text())):
            bases = getattr(each, "bases", ())
            if not any("autograd.Function" in ast.unparse(base) for base in bases):
                continue
            assert isinstance(each, ast.ClassDef)
            (backward,) = [
                one for one in each.body if getattr(one, "name", "") == "backward"
            ]
            marks = [ast.unparse(one) for one in backward.decorator_list]
            name = f"{path.relative_to(root).with_suffix('')}.{each.name}"
            found[name] = any(mark.startswith("differentiable_once") for mark in marks)
    return found


def test_each_function_refuses_or_is_differentiated_twice() -> None:
    found = functions()
    assert len(found) > 30
    assert {name for name, refuses in found.items() if not refuses} == TWICE


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    made = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=made, dtype=torch.float64).requires_grad_()


Case = Callable[[Any, ProcessGrid], tuple[Any, Any]]


def normalized(comm: Any, _: ProcessGrid) -> tuple[Any, Any]:
    x = drawn(3, 4, 5, seed=comm.rank)
    return batch_norm(x, comms=[comm], training=True), x


def pooled(comm: Any, _: ProcessGrid) -> tuple[Any, Any]:
    x = drawn(1, 1, 8)
    cut = Cut.even(comm, 8 * RANKS)
    return avg_pool(x, 3, stride=1, padding=1, cuts={2: cut}, overlap=True)[0], x


def classified(_: Any, grid: ProcessGrid) -> tuple[Any, Any]:
    x = DistTensor.from_whole(drawn(4, 6).detach(), grid, Placement(None, "x"))
    x.local.requires_grad_()
    target = DistTensor.from_whole(torch.tensor([0, 5, 2, 3]), grid, Placement(None))
    return functional.cross_entropy(x, target).redistribute().local, x.local


def multiplied(_: Any, grid: ProcessGrid) -> tuple[Any, Any]:
    x = drawn(5, 6)
    layer = Linear3d(6, 4, grid=grid, dtype=torch.float64)
    return layer(x), x


def convolved(_: Any, grid: ProcessGrid) -> tuple[Any, Any]:
    x = drawn(2, 4, 5, 5)
    torch.manual_seed(3)
    return ChannelConv(nn.Conv2d(4, 4, 3).double(), grid)(x), x


def branched(comm: Any, _: ProcessGrid) -> tuple[Any, Any]:
    x = drawn(3, 4, seed=comm.rank)
    made = {name: nn.Linear(4, 2).double() for name in "ab"}
    return Branches(made, comm)(x), x


def embedded(comm: Any, _: ProcessGrid) -> tuple[Any, Any]:
    tables = [EmbeddingTable(name, 9, 4) for name in "ab"]
    bags = ShardedEmbeddingBags(tables, grid=ProcessGrid(comm, {"data": RANKS}))
    a, b = bags([torch.tensor([[3], [4]])] * 2)
    return a + b, next(bags.parameters())


def aggregated(_: Any, grid: ProcessGrid) -> tuple[Any, Any]:
    graph = ([0, 1, 3, 4], [1, 0, 2, 1], [1.0, 1.0, 1.0, 1.0])
    x, y = torch.eye(3, dtype=torch.float64), torch.tensor([0, 1, 0])
    sharded = shard_graph(row_normalized(graph), x, y, grid, layers=1)
    layer = SAGEConv3d(3, 2, 0, grid, dtype=torch.float64)
    result = layer(sharded.features, sharded.adjacency)
    return result.local, next(layer.parameters())


CASES: dict[str, tuple[Case, str]] = {
    "batch_norm": (normalized, "a spatial layer"),
    "avg_pool": (pooled, "a spatial layer"),
    "cross_entropy": (classified, "a DistTensor"),
    "linear": (multiplied, "a 3-d tensor-parallel layer"),
    "channel_conv": (convolved, "a 3-d tensor-parallel layer"),
    "branches": (branched, "Branches"),
    "embeddings": (embedded, "a distributed embedding"),
    "graph": (aggregated, "a graph layer"),
}


@pytest.mark.parametrize("name", CASES)
def test_layers_refuse_gradients_of_gradients_on_all_ranks(name: str) -> None:
    case, what = CASES[name]

    def main(comm: Any) -> str:
        with ProcessGrid(comm, {"x": RANKS, "y": 1, "z": 1}) as grid:
            output, leaf = case(comm, grid)
            with pytest.raises(UsageError, match="create_graph=True") as caught:
                torch.autograd.grad(output.sum(), leaf, create_graph=True)
            output, leaf = case(comm, grid)
            output.sum().backward()  # and once they can be had
            assert leaf.grad is not None
            return str(caught.value)

    for said in run(RANKS, main, timeout_s=300):
        assert said.startswith(f"{what}: gradients of gradients")


def test_a_dropout_has_the_second_derivatives_of_its_formula() -> None:
    def main(comm: Any) -> None:
        cut = Cut.even(comm, 8)
        low, high = cut.own
        x = drawn(2, 3, 8)
        own = x.detach()[..., low:high].clone().requires_grad_()
        y = dropout(own, 0.4, seed=5, cuts={2: cut})
        kept = (y != 0).to(own.dtype) / 0.6
        (first,) = torch.autograd.grad(y.pow(3).sum(), own, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), own)
        torch.testing.assert_close(second, 6 * own * kept**3, rtol=1e-12, atol=1e-12)

    run(RANKS, main)


def own_columns(grid: ProcessGrid) -> tuple[torch.Tensor, DistTensor]:
    """Return a tensor of all ranks, and this rank's columns of it as a leaf."""
    whole = drawn(4, 6, seed=7).detach()
    cut = DistTensor.from_whole(whole, grid, Placement(None, "x"))
    cut.local.requires_grad_()
    return whole, cut


def test_moves_have_the_second_derivatives_of_one_process() -> None:
    def main(comm: Any) -> None:
        with ProcessGrid(comm, {"x": RANKS}) as grid:
            _, x = own_columns(grid)
            loss = x.redistribute("x", None).local.pow(3).sum()  # of this rank's rows
            (first,) = torch.autograd.grad(loss, x.local, create_graph=True)
            torch.testing.assert_close(first, 3 * x.local**2, rtol=1e-12, atol=0)
            (second,) = torch.autograd.grad(first.pow(2).sum(), x.local)
            torch.testing.assert_close(second, 36 * x.local**3, rtol=1e-12, atol=0)

    run(RANKS, main)


def test_largest_elements_have_the_second_derivatives_of_one_process() -> None:
    def main(comm: Any) -> None:
        with ProcessGrid(comm, {"x": RANKS}) as grid:
            whole, x = own_columns(grid)
            largest = torch.amax(x, 1).local  # the same on all ranks
            (first,) = torch.autograd.grad(
                largest.pow(3).sum(), x.local, create_graph=True
            )
            (second,) = torch.autograd.grad(first.sum(), x.local)
            is_it = x.local == whole.amax(1, keepdim=True)
            expected = torch.where(is_it, 6 * x.local, torch.zeros(()))
            torch.testing.assert_close(second, expected, rtol=1e-12, atol=0)

    run(RANKS, main)


def test_features_that_are_gathered_have_second_derivatives() -> None:
    def main(comm: Any) -> None:
        with ProcessGrid(comm, {"x": RANKS}) as grid:
            along, features = Along(grid, "x"), Features((6,), 1)
            x = drawn(3, 6, seed=9)
            own = cut_features(x, 1, features, along)
            loss = whole_features(own, 1, features, along).pow(3).sum()
            (first,) = torch.autograd.grad(loss, x, create_graph=True)
            torch.testing.assert_close(first, 3 * x**2, rtol=1e-12, atol=0)
            (second,) = torch.autograd.grad(first.pow(2).sum(), x)
            torch.testing.assert_close(second, 36 * x**3, rtol=1e-12, atol=0)

    run(RANKS, main)
