# SPDX-License-Identifier: Apache-2.0
"""Graph networks on grids have the outputs, losses and gradients of one process."""

from __future__ import annotations

import functools
import itertools
import math
import random
from typing import Any

import numpy as np
import pytest
import torch
from graph_cases import (
    NEAR,
    Case,
    axes_of,
    differences,
    digits_neighbours,
    grids_of,
    karate,
    made_layers,
    outputs,
    power_law,
    random_graph,
)

from commrt.errors import UsageError
from commrt.layers.graphs import (
    CsrMatrix,
    DoublePermutation,
    GCNConv3d,
    SAGEConv3d,
    aggregation,
    cross_entropy3d,
    cut_adjacency,
    double_permutation,
    roles_of,
    shard_graph,
    spmm,
    symmetrically_normalized,
)
from commrt.layers.process_grid import ProcessGrid
from commrt.layers.tensors import DistTensor, Placement
from commrt.local import run

CASES: dict[str, Any] = {
    "karate": functools.cache(karate),
    "digits": functools.cache(digits_neighbours),
    "power law": functools.cache(power_law),
}
WIDTHS = {"karate": (5, 7, 4, 3, 2), "digits": (64, 16, 10), "power law": (6, 9, 5)}


@pytest.mark.full(sample=8)
@pytest.mark.parametrize("is_permuted", [False, True])
@pytest.mark.parametrize("kind", ["gcn", "sage"])
@pytest.mark.parametrize("shape", grids_of(1, 2, 3, 4, 8))
@pytest.mark.parametrize("name", CASES)
def test_a_network_is_that_of_one_process(
    name: str, shape: tuple[int, int, int], kind: str, is_permuted: bool
) -> None:
    case: Case = CASES[name]()

    def main(comm: Any) -> dict[str, float]:
        orders = double_permutation(case.graph, 3) if is_permuted else None
        with ProcessGrid(comm, axes_of(shape)) as grid:
            return differences(grid, case, kind, WIDTHS[name], orders)

    for found in run(math.prod(shape), main, timeout_s=900):
        assert max(found.values()) < NEAR, found


@pytest.mark.full(sample=5)
@pytest.mark.parametrize("number", range(40))
def test_drawn_graphs_of_any_size(number: int, seed: int) -> None:
    """Also with fewer nodes, features and classes than ranks, and without edges."""
    rng = random.Random(f"{seed} {number}")
    ranks = rng.choice([2, 3, 4, 5, 6, 7, 8])
    shape = rng.choice(grids_of(ranks))
    nodes = rng.choice([1, 2, 3, 5, 13, 40])
    widths = [rng.choice([1, 2, 3, 5, 9]) for _ in range(rng.randint(2, 6))]
    draws = np.random.default_rng(rng.randrange(1 << 30))
    density = rng.choice([0.0, 0.1, 0.5])
    case = random_graph(draws, nodes, density, widths[0], widths[-1])
    kind, is_permuted = rng.choice(["gcn", "sage"]), rng.random() < 0.5
    told = f"{shape} {nodes} nodes, widths {widths}, {kind}, permuted: {is_permuted}"

    def main(comm: Any) -> dict[str, float]:
        orders = double_permutation(case.graph, number) if is_permuted else None
        with ProcessGrid(comm, axes_of(shape)) as grid:
            return differences(grid, case, kind, widths, orders)

    for found in run(ranks, main):
        assert max(found.values()) < NEAR, (told, found)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 1, 2), (1, 3, 1)])
@pytest.mark.parametrize("kind", ["gcn", "sage"])
def test_products_of_a_device_give_the_same_network(
    kind: str, shape: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    case = karate()
    # So the CPU is a device whose memory the native kernel does not read.
    monkeypatch.setattr(aggregation, "HOST", "none")

    def main(comm: Any) -> dict[str, float]:
        with ProcessGrid(comm, axes_of(shape)) as grid:
            return differences(grid, case, kind, WIDTHS["karate"], None)

    for found in run(math.prod(shape), main):
        assert max(found.values()) < NEAR, found


@pytest.mark.parametrize("kind", ["gcn", "sage"])
def test_chunks_do_not_change_the_result(kind: str) -> None:
    case = karate()

    def main(comm: Any) -> list[Any]:
        with ProcessGrid(comm, {"x": 2, "y": 1, "z": 2}) as grid:
            results = []
            for chunks in (1, 3, 100):
                layers = made_layers(kind, (5, 4, 2), grid)
                for layer in layers:
                    layer.chunks = chunks
                graph = shard_graph(case.graph, case.x, case.y, grid, layers=2)
                graph.features.local.requires_grad_()
                y = outputs(layers, graph.features, graph.adjacency)
                cross_entropy3d(y, graph.target).backward()
                results.append((y.local.detach(), graph.features.local.grad))
            return results

    for one, *others in run(4, main):
        for other in others:
            # Sums of two ranks, which have no order.
            assert torch.equal(one[0], other[0])
            assert torch.equal(one[1], other[1])


def test_one_rank_has_the_bits_of_the_plain_products() -> None:
    case = digits_neighbours()
    matrix = symmetrically_normalized(case.graph)

    def main(comm: Any) -> None:
        with ProcessGrid(comm, {"x": 1, "y": 1, "z": 1}) as grid:
            layer = made_layers("gcn", (64, 10), grid)[0]
            graph = shard_graph(matrix, case.x, case.y, grid, layers=1)
            y = layer(graph.features, graph.adjacency)
            summed = torch.empty_like(case.x)
            matrix.times(case.x.numpy(), summed.numpy())
            weight = layer.weight.detach().clone().requires_grad_()
            bias = layer.bias.detach().clone().requires_grad_()
            expected = summed @ weight + bias
            assert torch.equal(y.local, expected)
            y.local.square().sum().backward()
            expected.square().sum().backward()
            assert torch.equal(layer.weight.grad, weight.grad)
            assert torch.equal(layer.bias.grad, bias.grad)

    run(1, main)


def test_training_lowers_the_loss_as_one_process_does() -> None:
    case = digits_neighbours()
    matrix = symmetrically_normalized(case.graph)

    def main(comm: Any) -> list[float]:
        shape = {"x": 2, "y": 2, "z": 0} if comm.size > 1 else {"x": 1, "y": 1, "z": 1}
        orders = double_permutation(matrix, 1) if comm.size > 1 else None
        with ProcessGrid(comm, shape) as grid:
            layers = made_layers("gcn", (64, 16, 10), grid)
            graph = shard_graph(
                matrix, case.x, case.y, grid, layers=2, permutation=orders
            )
            parameters = [each for layer in layers for each in layer.parameters()]
            optimizer = torch.optim.Adam(parameters, lr=0.01)
            losses = []
            for _ in range(10):
                optimizer.zero_grad()
                y = outputs(layers, graph.features, graph.adjacency)
                loss = cross_entropy3d(y, graph.target)
                loss.backward()
                optimizer.step()
                losses.append(float(loss.local.detach()))
            return losses

    [alone] = run(1, main)
    assert alone[-1] < 0.8 * alone[0]
    for losses in run(8, main):
        assert np.allclose(losses, alone, rtol=1e-9, atol=0)


def test_whole_parameters_come_and_go() -> None:
    def main(comm: Any) -> None:
        with ProcessGrid(comm, {"x": 2, "y": 2, "z": 1}) as grid:
            layer = SAGEConv3d(5, 3, 1, grid)
            other = SAGEConv3d(5, 3, 2, grid)
            state = layer.whole_state()
            assert {*state} == {"weight", "root_weight", "bias"}
            other.load_whole(state)
            for name, held in other.whole_state().items():
                assert torch.equal(held, state[name])
            numbers = torch.tensor([float(layer.weight.numel())])
            comm.allreduce(numbers)
            assert numbers[0] == 15  # each element lies once in the grid
            with pytest.raises(UsageError, match="load_whole"):
                other.load_whole({"weight": state["weight"]})

    run(4, main)


def test_a_layer_without_bias_has_none() -> None:
    case = karate()

    def main(comm: Any) -> None:
        with ProcessGrid(comm, {"x": 1, "y": 2, "z": 1}) as grid:
            layer = GCNConv3d(5, 2, 0, grid, bias=False, dtype=torch.float64)
            assert layer.bias is None
            assert [*layer.state_dict()] == ["weight"]
            graph = shard_graph(case.graph, case.x, case.y, grid, layers=1)
            whole = layer.whole_state()["weight"]
            dense = torch.zeros(34, 5, dtype=torch.float64)
            case.graph.times(case.x.numpy(), dense.numpy())
            y = layer(graph.features, graph.adjacency).whole()
            assert torch.allclose(y, dense @ whole, rtol=1e-12, atol=1e-13)

    run(2, main)


# -- bad input -------------------------------------------------------------------------


def refused(call: Any, says: str, axes: dict[str, int] | None = None) -> None:
    """Check that a call on two ranks is refused before anything is sent."""

    def main(comm: Any) -> None:
        with ProcessGrid(comm, axes or {"x": 2, "y": 1, "z": 1}) as grid:
            with pytest.raises(UsageError, match=says):
                call(grid)
            comm.barrier()

    run(2, main)


@pytest.mark.parametrize(
    ("axes", "says"),
    [({"x": 2}, "three axes"), ({"a": 1, "b": 2, "c": 1, "d": 1}, "three axes")],
)
def test_other_grids_are_refused(axes: dict[str, int], says: str) -> None:
    case = karate()
    refused(lambda grid: GCNConv3d(5, 2, 0, grid), says, axes)
    refused(lambda grid: shard_graph(case.graph, case.x, case.y, grid), says, axes)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((0, 2, 0), "in_features=0"),
        ((5, 2.0, 0), "out_features=2.0"),
        ((5, 2, -1), "layer_index=-1"),
    ],
)
def test_wrong_sizes_of_layers_are_refused(arguments: Any, says: str) -> None:
    refused(lambda grid: GCNConv3d(*arguments, grid), says)


def test_tensors_that_lie_elsewhere_are_refused() -> None:
    case = karate()

    def call(grid: ProcessGrid, placement: Placement, x: Any, layers: int = 3) -> Any:
        adjacency = cut_adjacency(case.graph, grid, layers=layers)
        return spmm(adjacency, DistTensor.from_whole(x, grid, placement), 3 - layers)

    right = Placement("x", "y")
    refused(lambda grid: call(grid, Placement(None, None), case.x), "expected")
    refused(lambda grid: call(grid, right, case.x.float()), "torch.float64")
    refused(lambda grid: call(grid, right, case.x[:33]), "34 rows")
    refused(lambda grid: call(grid, Placement("z", "x"), case.x, 1), "no block")
    refused(
        lambda grid: spmm(cut_adjacency(case.graph, grid), case.x), "must be a DistT"
    )
    refused(
        lambda grid: GCNConv3d(4, 2, 0, grid)(
            DistTensor.from_whole(case.x, grid, right), cut_adjacency(case.graph, grid)
        ),
        "expected 4 columns",
    )


def test_graphs_that_do_not_fit_are_refused() -> None:
    case = karate()
    graph, x, y = case.graph, case.x, case.y
    refused(lambda grid: shard_graph(graph, x[1:], y, grid), "each of the 34 nodes")
    refused(lambda grid: shard_graph(graph, x, y.int(), grid), "of int64")
    refused(lambda grid: shard_graph(graph, x, y, grid, layers=0), "layers=0")
    wide = CsrMatrix(graph.indptr, graph.indices, graph.data, (34, 40))
    refused(lambda grid: shard_graph(wide, x, y, grid), "square")
    short = DoublePermutation(np.arange(3), np.arange(3))
    refused(lambda grid: shard_graph(graph, x, y, grid, permutation=short), "3 nodes")


def test_targets_that_are_no_class_are_refused_on_all_ranks() -> None:
    """Only one rank has the wrong one."""

    def call(grid: ProcessGrid, wrong: int) -> Any:
        logits = torch.ones(6, 3, dtype=torch.float64)
        target = torch.tensor([0, 1, 2, 0, 1, wrong])
        return cross_entropy3d(
            DistTensor.from_whole(logits, grid, Placement("x", "y")),
            DistTensor.from_whole(target, grid, Placement("x")),
        )

    refused(lambda grid: call(grid, 3), "1 targets are no classes")
    refused(lambda grid: call(grid, -1), "1 targets are no classes")


def test_losses_of_tensors_that_do_not_fit_are_refused() -> None:
    def call(grid: ProcessGrid, *where: Any, dtype: Any = torch.int64) -> Any:
        logits = DistTensor.from_whole(torch.ones(6, 3), grid, where[0])
        target = DistTensor.from_whole(torch.zeros(6, dtype=dtype), grid, where[1])
        return cross_entropy3d(logits, target, where[2] if len(where) > 2 else None)

    rows = Placement("x", "y"), Placement("x")
    refused(lambda grid: call(grid, rows[0], Placement(None)), "cut as the rows are")
    refused(lambda grid: call(grid, *rows, dtype=torch.int32), "expected floats")
    refused(lambda grid: call(grid, *rows, object()), "expected the same one")
    refused(lambda grid: cross_entropy3d(torch.ones(2, 2), None), "must be DistTensors")


@pytest.mark.parametrize("shape", [(2, 2, 1), (1, 3, 1), (3, 1, 2), (1, 5, 1)])
def test_a_loss_ignores_what_does_not_count(shape: tuple[int, int, int]) -> None:
    draws = np.random.default_rng(2)
    whole = torch.from_numpy(draws.standard_normal((7, 4)) * 300)
    target = torch.tensor([0, -7, 3, 2, -7, 1, 0])
    one = whole.clone().requires_grad_()
    expected = torch.nn.functional.cross_entropy(one, target, ignore_index=-7)
    expected.backward()

    def main(comm: Any) -> None:
        with ProcessGrid(comm, axes_of(shape)) as grid:
            logits = DistTensor.from_whole(whole, grid, Placement("x", "y"))
            logits.local.requires_grad_()
            labels = DistTensor.from_whole(target, grid, Placement("x"))
            loss = cross_entropy3d(logits, labels, ignore_index=-7)
            assert abs(float(loss.local.detach()) / float(expected.detach()) - 1) < NEAR
            (loss * 2.0).backward()
            assert logits.grad is not None
            gradient = logits.grad.whole()
            assert torch.allclose(gradient, 2 * one.grad, rtol=1e-12, atol=1e-15)
            nobody = DistTensor.from_whole(
                torch.full_like(target, -7), grid, Placement("x")
            )
            none = cross_entropy3d(logits, nobody, ignore_index=-7)
            assert math.isnan(float(none.local.detach()))

    run(math.prod(shape), main)


def test_roles_come_back_after_three_layers() -> None:
    def main(comm: Any) -> None:
        with ProcessGrid(comm, {"x": 1, "y": 1, "z": 2}) as grid:
            roles = [roles_of(grid, layer) for layer in range(6)]
            assert roles[:3] == roles[3:]
            assert (roles[0].inner, roles[0].features, roles[0].rows) == (*"xyz",)
            for one, after in itertools.pairwise(roles):
                assert one.result == after.given

    run(2, main)
