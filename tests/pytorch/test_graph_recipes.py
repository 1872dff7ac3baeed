# SPDX-License-Identifier: Apache-2.0
"""Networks on graphs that are cut: beside FSDP2, under autocast, with checkpoints."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from graph_cases import (
    KINDS,
    karate,
    made_layers,
    normalized,
    outputs,
    serial_outputs,
    sparse_tensor,
)
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch_ranks import TorchRun

import commrt
import commrt.torch
from commrt.errors import UsageError
from commrt.layers.graphs import aggregation, cross_entropy3d, shard_graph
from commrt.layers.process_grid import ProcessGrid
from commrt.local import run

WIDTHS = (5, 8, 2)
LAYERS = len(WIDTHS) - 1
AXES = {"x": 2, "y": 1, "z": 2}


@pytest.mark.parametrize("axes", [AXES, {"x": 1, "y": 2, "z": 2}])
@pytest.mark.parametrize("kind", KINDS)
def test_checkpointed_layers_have_the_same_gradients(
    kind: str, axes: dict[str, int]
) -> None:
    case = karate()

    def main(comm: Any) -> list[list[Any]]:
        with ProcessGrid(comm, axes) as grid:
            layers = made_layers(kind, WIDTHS, grid)
            graph = shard_graph(
                *(normalized(case, kind), case.x, case.y, grid), layers=LAYERS
            )
            found = []
            for again in (False, True):
                x = graph.features
                for layer in layers:
                    if again:
                        x = checkpoint(layer, x, graph.adjacency, use_reentrant=False)
                    else:
                        x = layer(x, graph.adjacency)
                    x = x.tanh() if layer is not layers[-1] else x
                cross_entropy3d(x, graph.target).backward()
                parameters = [p for layer in layers for p in layer.parameters()]
                found.append([each.grad for each in parameters])
                for each in parameters:
                    each.grad = None
            return found

    for plain, computed_again in run(4, main):
        for one, other in zip(plain, computed_again, strict=True):
            assert torch.equal(one, other)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_autocast_multiplies_by_weights_in_bfloat16(
    kind: str, on_device: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = karate()
    if on_device:  # the CPU, as a device whose memory the native kernel does not read
        monkeypatch.setattr(aggregation, "HOST", "none")
    matrix = normalized(case, kind)
    matrix = replace(matrix, data=matrix.data.astype("f4"))

    def main(comm: Any) -> set[str]:
        with ProcessGrid(comm, AXES) as grid:
            layers = [layer.float() for layer in made_layers(kind, WIDTHS, grid)]
            given = case.x.float(), case.y
            graph = shard_graph(matrix, *given, grid, layers=LAYERS)
            comm.barrier()
            with commrt.trace.record() as recording:
                with torch.autocast("cpu", torch.bfloat16):
                    y = outputs(layers, graph.features, graph.adjacency)
                    loss = cross_entropy3d(y, graph.target)
                loss.backward()
                comm.barrier()
            assert (y.dtype, loss.dtype) == (torch.bfloat16, torch.float32)
            states = [
                {
                    name: each.requires_grad_()
                    for name, each in one.whole_state().items()
                }
                for one in layers
            ]
            expected = serial_outputs(states, given[0], sparse_tensor(matrix))
            right = functional.cross_entropy(expected, case.y)
            right.backward()
            assert loss.item() == pytest.approx(right.item(), rel=0.02)
            for layer, state in zip(layers, states, strict=True):
                for name, held in layer.dist_tensors().items():
                    gradient = layer.get_parameter(name).grad
                    assert gradient.dtype == torch.float32
                    whole = type(held)(gradient, held.shape, grid, held.placement)
                    off = whole.whole() - state[name].grad
                    assert off.norm() < 0.05 * state[name].grad.norm()
            (log,) = (each for each in recording.logs() if each.rank == comm.rank)
            return {
                f"{op} {dtype}"
                for (op, dtype), v in log.volume(("op", "dtype")).items()
                if v.nbytes
            }

    # Products with the matrix, and bits of the loss, are in the types of their inputs.
    for found in run(4, main):
        assert "allgatherv bfloat16" in found
        assert "reduce_scatterv bfloat16" in found
        assert "allgatherv float32" in found  # features that rest
        assert "allreduce float32" in found
        assert "reduce_scatterv float32" not in found


def test_float64_is_left_alone(seed: int) -> None:
    case = karate()

    def main(comm: Any) -> Any:
        with ProcessGrid(comm, {"x": 2, "y": 1, "z": 1}) as grid:
            layers = made_layers("gcn", WIDTHS, grid)
            graph = shard_graph(
                *(normalized(case, "gcn"), case.x, case.y, grid), layers=LAYERS
            )
            plain = outputs(layers, graph.features, graph.adjacency)
            with torch.autocast("cpu", torch.bfloat16):
                cast = outputs(layers, graph.features, graph.adjacency)
            return torch.equal(plain.local, cast.local)

    assert run(2, main) == [True] * 2


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64])
def test_autocast_lets_no_other_types_meet(dtype: torch.dtype) -> None:
    case = karate()

    def main(comm: Any) -> None:
        with ProcessGrid(comm, {"x": 2, "y": 1, "z": 1}) as grid:
            graph = shard_graph(
                *(normalized(case, "gcn"), case.x, case.y, grid), layers=LAYERS
            )
            (layer, _) = (each.float() for each in made_layers("gcn", WIDTHS, grid))
            held = graph.features
            x = type(held)(held.local.to(dtype), held.shape, grid, held.placement)
            with (
                torch.autocast("cpu", torch.bfloat16),
                pytest.raises(UsageError, match=r"columns of torch\.float32"),
            ):
                layer(x, graph.adjacency)

    run(2, main)


class Network(nn.Module):
    """Layers on a grid; it returns the loss."""

    def __init__(self, layers: list[Any]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, graph: Any) -> Any:
        """Return the mean cross-entropy of a graph's nodes."""
        y = outputs([*self.layers], graph.features, graph.adjacency)
        return cross_entropy3d(y, graph.target).local


def beside_fsdp(kind: str) -> list[Any]:
    """Train on a graph for each of two replicas, which two ranks have together."""
    comm = commrt.init()
    commrt.torch.init_process_group(comm)
    mesh = torch.distributed.init_device_mesh(
        "cpu", (2, 2), mesh_dim_names=("data", "graph")
    )
    replica = comm.split(comm.rank // 2)
    assert replica is not None
    grid = ProcessGrid(replica, {"x": 2, "y": 1, "z": 1})
    case, matrix = karate(), normalized(karate(), kind)
    features = [case.x, case.x.flip(0)]
    own = features[comm.rank // 2]
    graph = shard_graph(matrix, own, case.y, grid, layers=LAYERS)
    model = Network(made_layers(kind, WIDTHS, grid))
    whole = [layer.whole_state() for layer in model.layers]
    sizes = [each.numel() for each in model.parameters()]
    for layer in model.layers:
        fully_shard(layer, mesh=mesh["data"], reshard_after_forward=False)
    fully_shard(model, mesh=mesh["data"])
    held = [each.to_local().numel() for each in model.parameters()]
    assert sum(held) < 0.75 * sum(sizes)

    states = [
        {name: nn.Parameter(each.clone()) for name, each in state.items()}
        for state in whole
    ]
    serial = torch.optim.SGD([p for s in states for p in s.values()], lr=0.2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    for _ in range(4):
        optimizer.zero_grad()
        loss = model(graph)
        loss.backward()
        optimizer.step()
        serial.zero_grad()
        losses = [
            functional.cross_entropy(
                serial_outputs(states, x, sparse_tensor(matrix)), case.y
            )
            for x in features
        ]
        (sum(losses) / 2).backward()
        serial.step()
        right = losses[comm.rank // 2].item()
        assert loss.item() == pytest.approx(right, rel=1e-10)
    return [comm.rank]


@pytest.mark.parametrize("kind", KINDS)
def test_fsdp2_shards_over_graphs_beside_the_grid(
    kind: str, torchrun: TorchRun
) -> None:
    found = torchrun(4, beside_fsdp, kind=kind)
    assert found == [[rank] for rank in range(4)]
