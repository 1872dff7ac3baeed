# SPDX-License-Identifier: Apache-2.0
"""Cut networks call what the oracle projects: the same operations, the same bytes."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

import commrt.trace
from commrt.layers.cnn import ParallelStrategy, parallelize_cnn
from commrt.layers.process_grid import ProcessGrid
from commrt.local import run
from commrt.oracle import AlphaBeta, Oracle, Projection
from commrt.oracle.torch_layers import layer_sizes

BATCH = 8
ITEM = 4


def network() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(
        *(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU()),
        *(nn.Conv2d(8, 16, 3, padding=1), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 8)),
    )


def pictures() -> Any:
    return torch.ones(BATCH, 8, 8, 8)


def step(comm: Any, axes: dict[str, int]) -> None:
    """Run a step, of which only the calls between the marks are looked at."""
    with ProcessGrid(comm, axes) as grid:
        strategy = ParallelStrategy(**{role: role for role in axes})
        model = parallelize_cnn(network(), grid, strategy, cut_weights=True)
        comm.barrier()
        model(pictures()).square().mean().redistribute().backward()
        comm.barrier()


def traced(axes: dict[str, int]) -> Counter[str]:
    """Return bytes of a rank's calls in a step, by operation."""
    ranks = math.prod(axes.values())
    with commrt.trace.record() as recording:
        run(ranks, lambda comm: step(comm, axes))
    found: Counter[str] = Counter()
    marks = 0
    for call in recording.logs()[0].operations:
        if call.op == "barrier":
            marks += 1
        elif marks == 1:
            found[call.op] += call.nbytes
    assert marks == 2
    return found


def projected(name: str, ways: tuple[int, ...]) -> Projection:
    table = layer_sizes(network(), pictures())
    oracle = Oracle(table, AlphaBeta(0, 0), BATCH, gradients_by_layer=True)
    return oracle.project(name, ways, batch=BATCH)


def by_operation(projection: Projection) -> Counter[str]:
    found: Counter[str] = Counter()
    for one in projection.transfers:
        found[one.coll] += round(one.times * one.nbytes)
    return found


LOSS = ITEM
"""The mean over the batch is summed over ranks that have parts of it."""
OUTPUT = BATCH * 8 * ITEM
"""The last output, which ParaDL does not count."""


@pytest.mark.parametrize("ranks", [2, 4])
def test_samples_cost_sums_of_all_gradients(ranks: int) -> None:
    got = traced({"sample": ranks})
    expected = by_operation(projected("data", (ranks,)))
    weights = sum(each.numel() for each in network().parameters())
    assert expected == {"allreduce": ITEM * weights}
    assert got == {"allreduce": expected["allreduce"] + LOSS}


@pytest.mark.parametrize("ranks", [2, 4])
def test_filters_cost_a_gather_and_a_sum_of_each_input(ranks: int) -> None:
    got = traced({"filter": ranks})
    expected = by_operation(projected("filter", (ranks,)))
    # A rank gives its block of each gathered input.
    assert got["redistribute"] * ranks == expected["allgather"]
    assert got["allreduce"] == expected["allreduce"] + LOSS


@pytest.mark.parametrize("ranks", [2, 4])
def test_channels_cost_a_sum_of_each_output_and_a_gather(ranks: int) -> None:
    got = traced({"channel": ranks})
    expected = by_operation(projected("channel", (ranks,)))
    assert got["redistribute"] * ranks == expected["allgather"]
    assert got["allreduce"] == expected["allreduce"] + OUTPUT


def test_samples_and_filters_cost_both() -> None:
    got = traced({"sample": 2, "filter": 2})
    expected = by_operation(projected("data+filter", (2, 2)))
    assert got["redistribute"] * 2 == expected["allgather"]
    # The mean is of parts along both axes; biases stay in tiles as weights do.
    others = got["allreduce"] - expected["allreduce"]
    assert 0 <= others <= 2 * LOSS


def test_rows_cost_halos_and_sums() -> None:
    got = traced({"height": 4})
    projection = projected("spatial", (4, 1))
    expected = by_operation(projection)
    # Behind the pooling each rank adds the bias to the whole, and has its gradient.
    assert got["allreduce"] == expected["allreduce"] - 8 * ITEM
    # The first rank has one neighbour of two, and nothing returns the input's halo.
    halos = sorted(
        one.nbytes
        for one in projection.transfers
        for _ in range(int(one.times))
        if one.purpose == "halos"
    )
    row = BATCH * 8 * 8 * ITEM
    assert halos == [row] * 6 + [2 * row] * 2
    assert got["send"] == 3 * row


def test_strategies_are_in_the_order_of_what_is_sent() -> None:
    """Of the calls on 4 ranks, each with a ring's share of its bytes."""
    grids = {"data": {"sample": 4}, "filter": {"filter": 4}, "channel": {"channel": 4}}
    real = {}
    for name, axes in grids.items():
        found = traced(axes)
        real[name] = 2 * found["allreduce"] * 3 / 4 + 3 * found["redistribute"]
    sent = {name: projected(name, (4,)).sent_nbytes for name in grids}
    assert sorted(sent, key=sent.__getitem__) == sorted(real, key=real.__getitem__)
