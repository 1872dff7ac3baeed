# SPDX-License-Identifier: Apache-2.0
"""Layers on grids send the bytes that their docstrings say, no more and no less."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensor3d_cases import Grid, axes_of, grids_of
from torch import nn

import commrt
from commrt.comm import Communicator
from commrt.errors import UsageError
from commrt.layers.process_grid import ProcessGrid
from commrt.layers.tensor3d import (
    Attention3d,
    ChannelConv2d,
    Embedding3d,
    LayerShape,
    Linear3d,
    cut_sequence,
    overlap_communication,
    rank_grids,
    sequence_parallel,
    state_dict,
    sync_gradients,
)
from commrt.local import run

E = 4
"""Bytes of an element."""
Sent = dict[tuple[str, str], float]


def sent_by(
    grid: Grid,
    make: Callable[[ProcessGrid], nn.Module],
    step: Callable[[nn.Module, ProcessGrid], None],
    *,
    on_wire: bool = False,
) -> list[Sent]:
    """Return each rank's bytes by axis and operation of one step."""

    def main(comm: Communicator) -> Sent:
        with ProcessGrid(comm, axes_of(grid)) as places:
            model = make(places)
            comm.barrier()
            with commrt.trace.record() as recording:
                step(model, places)
                comm.barrier()
            mine = [log for log in recording.logs() if log.rank == comm.rank]
            found: Sent = {}
            for log in mine:
                for key, volume in log.volume(("dimension", "op")).items():
                    if volume.nbytes:
                        number = volume.wire_nbytes if on_wire else volume.nbytes
                        axis = key[0].partition("[")[2].removesuffix("]")
                        add_up(found, axis, key[1], number)
            return found

    return run(math.prod(grid), main)


def add_up(found: Sent, axis: str, op: str, nbytes: float) -> None:
    """Add bytes to those of an operation along an axis."""
    found[axis, op] = found.get((axis, op), 0) + nbytes


def add(found: Sent, axis: str, op: str, grid: Grid, nbytes: float) -> None:
    """Count an operation, unless its axis has one rank."""
    if dict(zip(("data", "z", "y", "x"), grid, strict=True))[axis] > 1:
        add_up(found, axis, op, nbytes)


@pytest.mark.full(sample=3)
@pytest.mark.parametrize("on", [False, True])
@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("is_whole", [False, True])
@pytest.mark.parametrize("grid", grids_of(2, 4, 8))
def test_linear_sends_what_its_formula_says(
    grid: Grid, is_whole: bool, transpose: bool, on: bool
) -> None:
    k, n, m = 8, 16, 6
    _, d, y, x = grid
    inputs, outputs = ("x", "y") if transpose else ("y", "x")
    c, r = (x, y) if transpose else (y, x)

    def make(places: ProcessGrid) -> nn.Module:
        layer = Linear3d(
            *(k, n),
            grid=places,
            transpose=transpose,
            whole_input=is_whole,
            whole_output=is_whole,
        )
        if on:
            overlap_communication(layer)
        return layer

    def step(layer: nn.Module, places: ProcessGrid) -> None:
        given = torch.ones(m, k if is_whole else k // c, requires_grad=True)
        layer(given).sum().backward()
        sync_gradients(layer)

    right: Sent = {}
    add(right, "z", "allgatherv", grid, 2 * k * n // (r * c) * E)
    add(right, "z", "reduce_scatterv", grid, k * n // (r * c) * E)
    add(right, "z", "allreduce", grid, n // r * E)
    add(right, inputs, "allreduce", grid, m * n // r * E)
    add(right, outputs, "allreduce", grid, m * k // c * E)
    if is_whole:
        add(right, outputs, "allgatherv", grid, m * n * E)
        add(right, inputs, "allgatherv", grid, m * k * E)
    shards = k * n // (r * c * d) + n // r
    add(right, "data", "allreduce", grid, (shards + 2) * E)
    for found in sent_by(grid, make, step):
        assert found == right


@pytest.mark.parametrize("grid", [(1, 2, 2, 2), (1, 1, 1, 3), (1, 1, 4, 1)])
def test_convolution_and_embedding_send_what_their_formulas_say(grid: Grid) -> None:
    _, _, y, x = grid
    k, n, m = 12, 24, 5

    class Both(nn.Module):
        def __init__(self, places: ProcessGrid) -> None:
            super().__init__()
            self.conv = ChannelConv2d(k, n, 3, grid=places, bias=False)
            self.table = Embedding3d(n, k, grid=places)

    def conv(model: Any, places: ProcessGrid) -> None:
        model.conv(torch.ones(m, k, 5, 6, requires_grad=True)).sum().backward()

    def table(model: Any, places: ProcessGrid) -> None:
        model.table(torch.zeros(m, dtype=torch.int64)).sum().backward()

    right: Sent = {}
    block = k * n * 9 // (x * y)
    add(right, "z", "allgatherv", grid, 2 * block * E)
    add(right, "z", "reduce_scatterv", grid, block * E)
    add(right, "y", "allreduce", grid, m * n // x * 3 * 4 * E)
    add(right, "x", "allreduce", grid, m * k // y * 5 * 6 * E)
    add(right, "x", "allgatherv", grid, m * n * 3 * 4 * E)
    add(right, "y", "allgatherv", grid, m * k * 5 * 6 * E)
    for found in sent_by(grid, Both, conv):
        assert found == right
    right = {}
    add(right, "z", "allgatherv", grid, n * k // (x * y) * E)
    add(right, "z", "reduce_scatterv", grid, n * k // (x * y) * E)
    add(right, "x", "allreduce", grid, m * k // y * E)
    add(right, "y", "allgatherv", grid, m * k * E)
    for found in sent_by(grid, Both, table):
        assert found == right


class Block(nn.Module):
    """A transformer's block in Megatron's form: the axis ``x`` alone."""

    def __init__(self, grid: ProcessGrid, sequence_dim: int | None) -> None:
        super().__init__()
        more: dict[str, Any] = {"grid": grid, "sequence_dim": sequence_dim}
        self.norms = nn.ModuleList([nn.LayerNorm(8), nn.LayerNorm(8)])
        self.attention = Attention3d(8, 4, **more)
        self.up = Linear3d(8, 32, whole_output=False, **more)
        self.down = Linear3d(32, 8, transpose=True, whole_input=False, **more)
        if sequence_dim is not None:
            sequence_parallel(self.norms, "x")

    def forward(self, x: Any) -> Any:
        x = x + self.attention(self.norms[0](x))
        return x + self.down(self.up(self.norms[1](x)).relu())


@pytest.mark.parametrize("ranks", [2, 4])
def test_megatrons_block_has_four_allreduces(ranks: int) -> None:
    b, s, h = 3, 4, 8

    def step(block: nn.Module, places: ProcessGrid) -> None:
        block(torch.ones(b, s, h, requires_grad=True)).sum().backward()

    grid = (1, 1, 1, ranks)
    for found in sent_by(grid, lambda places: Block(places, None), step):
        assert found == {("x", "allreduce"): 4 * b * s * h * E}


@pytest.mark.parametrize("ranks", [2, 4])
def test_sequence_parallel_pairs_have_five_calls(ranks: int) -> None:
    """Forward an allgather and a reduce-scatter; backward two and one."""
    b, s, h = 3, 4, 8
    pairs, nbytes = 2, b * s * h * E

    def step(block: nn.Module, places: ProcessGrid) -> None:
        x = torch.ones(b, s, h, requires_grad=True)
        block(cut_sequence(x.detach(), places).requires_grad_()).sum().backward()

    grid = (1, 1, 1, ranks)
    for found in sent_by(grid, lambda places: Block(places, 1), step):
        assert found == {
            ("x", "allgather"): pairs * 3 * nbytes,
            ("x", "reduce_scatter"): pairs * 2 * nbytes,
        }


def test_a_whole_state_gathers_each_parameter_once() -> None:
    def step(layer: nn.Module, places: ProcessGrid) -> None:
        assert state_dict(layer) is not None

    grid = (2, 2, 1, 2)
    for found in sent_by(grid, lambda places: Linear3d(8, 6, grid=places), step):
        assert {op for _, op in found} == {"allgatherv"}
        assert sum(found.values()) == (8 * 6 + 6) * E


# -- the model of communication --------------------------------------------------------


@pytest.mark.full(sample=1)
@pytest.mark.parametrize("is_whole", [False, True])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_ranked_bytes_are_those_that_are_measured(ranks: int, is_whole: bool) -> None:
    """The model's order of grids is that of the measured bytes."""
    k, n, batch = 16, 32, 32

    class Net(nn.Module):
        def __init__(self, places: ProcessGrid) -> None:
            super().__init__()
            more: dict[str, Any] = {"grid": places, "bias": False}
            more |= {"whole_input": is_whole, "whole_output": is_whole}
            self.up = Linear3d(k, n, **more)
            self.down = Linear3d(n, k, transpose=True, **more)

    shapes = [LayerShape(k, n, None, is_whole), LayerShape(n, k, None, is_whole)]
    ranked = rank_grids(ranks, shapes, samples=batch, ranks_per_node=ranks)
    assert len(ranked) == len(grids_of(ranks))
    measured = []
    for cost in ranked:
        grid = tuple(cost.axes.values())
        data, d, y, _ = grid

        def step(
            net: Any, places: ProcessGrid, d: int = d, y: int = y, data: int = data
        ) -> None:
            rows = batch // (data * d)
            x = torch.ones(rows, k if is_whole else k // y, requires_grad=True)
            net.down(net.up(x)).sum().backward()
            sync_gradients(net)

        for found in sent_by(grid, Net, step, on_wire=True):
            by_axis: dict[str, float] = {}
            for (axis, _), nbytes in found.items():
                by_axis[axis] = by_axis.get(axis, 0) + nbytes
            if data > 1:  # an element for each parameter, which says it is there
                by_axis["data"] -= 2 * 2 * E * (data - 1) / data
            right = {axis: sent for axis, sent in cost.nbytes.items() if sent}
            assert by_axis == pytest.approx(right)
        measured.append(sum(by_axis.values()))
        assert cost.parameter_nbytes == 2 * k * n * E * data / ranks
    assert measured == sorted(measured)


def test_ranking_knows_nodes_latency_and_memory() -> None:
    shapes = [(64, 256), (256, 64)]

    def ranked(**more: Any) -> dict[Grid, Any]:
        costs = rank_grids(8, shapes, samples=64, **more)
        assert [each.seconds for each in costs] == sorted(
            each.seconds for each in costs
        )
        return {tuple(each.axes.values()): each for each in costs}

    # One ring of data over 4 nodes, or two rings that share each node's link.
    nodes = {"ranks_per_node": 2, "bandwidth": 1e6, "node_bandwidth": 1e9}
    costs = ranked(**nodes)
    one, two = costs[8, 1, 1, 1], costs[4, 1, 1, 2]
    assert one.seconds == pytest.approx(one.nbytes["data"] / 1e6)
    slow, fast = two.nbytes["data"] / (1e6 / 2), two.nbytes["x"] / 1e9
    assert two.seconds == pytest.approx(slow + fast)
    # Megatron's form has two allreduces over 8 ranks, of 14 messages each.
    late = ranked(latency_s=1.0)[1, 1, 1, 8]
    plain = ranked()[1, 1, 1, 8]
    assert late.seconds == pytest.approx(plain.seconds + 2 * 14)
    share = 2 * 64 * 256 * 4 / 8
    assert {each[0] for each in ranked(most_parameter_nbytes=share)} == {1}
    assert one.total_nbytes == sum(one.nbytes.values())


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"world_size": 0}, "world_size=0"),
        ({"samples": 1.5}, "samples=1.5"),
        ({"layer_shapes": []}, "0 layers"),
        ({"bandwidth": 0}, "bandwidth=0"),
    ],
)
def test_rankings_of_nothing_are_refused(arguments: dict[str, Any], says: str) -> None:
    given = {"world_size": 2, "layer_shapes": [(2, 2)], "samples": 1, **arguments}
    with pytest.raises(UsageError, match=says):
        rank_grids(**given)
