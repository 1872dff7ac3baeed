# SPDX-License-Identifier: Apache-2.0
"""Strategies of networks in which tensors skip parts."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import numpy as np
import pytest
import torch
from cnn_networks import ResNet50, UNet3d
from recorded import logs_of
from torch import nn

import commrt.trace
from commrt.layers.cnn import (
    ParallelStrategy,
    choose_strategies,
    labelling,
    parallelize_cnn,
)
from commrt.layers.cnn.cost import Rates, layer_cost, move_cost
from commrt.layers.cnn.labelling import cheapest_labels, price_of
from commrt.layers.cnn.layer_facts import facts_of
from commrt.layers.cnn.tensor_flow import Flow, flows_of
from commrt.layers.process_grid import ProcessGrid
from commrt.local import run

LABELS = 3


def drawn_graph(rng: random.Random) -> tuple[list[Any], dict[tuple[int, int], Any]]:
    """Return costs of a chain with a few edges that skip vertices."""
    draw = np.random.default_rng(rng.getrandbits(32))
    vertices = rng.randint(1, 7)
    edges = [*itertools.pairwise(range(vertices))]
    more = [*itertools.combinations(range(vertices), 2)]
    edges += [each for each in rng.sample(more, rng.randint(0, len(more)))]
    pairs = {
        tuple(rng.sample(each, 2)): draw.random((LABELS, LABELS))
        for each in dict.fromkeys(edges)
    }
    own = [draw.random(LABELS) for _ in range(vertices)]
    if rng.random() < 0.3:
        own[0][rng.randrange(LABELS)] = math.inf  # a strategy that a part cannot have
    return own, pairs


def test_labels_are_the_cheapest_of_all(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(60):
        own, pairs = drawn_graph(rng)
        every = itertools.product(range(LABELS), repeat=len(own))
        least = min(price_of(labels, own, pairs) for labels in every)
        found = cheapest_labels(own, pairs)
        assert price_of(found, own, pairs) == pytest.approx(least, rel=1e-12)


def test_labels_of_a_dense_graph_are_no_worse_than_one_for_all(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(labelling, "MOST_ENTRIES", LABELS)
    rng = random.Random(seed)
    for _ in range(20):
        own, pairs = drawn_graph(rng)
        found = cheapest_labels(own, pairs)
        price = price_of(found, own, pairs)
        for label in range(LABELS):
            assert price <= price_of([label] * len(own), own, pairs)
        for vertex, label in itertools.product(range(len(own)), range(LABELS)):
            other = [*found[:vertex], label, *found[vertex + 1 :]]
            assert price <= price_of(other, own, pairs)


def test_flows_of_a_network_are_inputs_and_what_skips_parts() -> None:
    parts = ["down1", "pool", "down2", "down3", "bottom"]
    parts += ["up3", "join3", "up2", "join2", "up1", "join1", "last"]
    found = flows_of(UNet3d(2, 2), (1, 2, 16, 16, 16), parts)
    # The first operand of a cat is the skipping one: the other is moved to it.
    assert Flow("up3", "down3", (1, 32, 4, 4, 4)) in found
    assert Flow("down3", "join3", (1, 48, 4, 4, 4)) in found
    assert Flow("up1", "down1", (1, 8, 16, 16, 16)) in found
    with torch.device("meta"):
        resnet = ResNet50()
    stages = [f"layer{number}" for number in (1, 2, 3, 4)]
    pairs = [(f.source, f.target) for f in flows_of(resnet, (1, 3, 64, 64), stages)]
    # The skip connections of its blocks are within its parts.
    assert pairs == [*itertools.pairwise(stages)]


class Joined(nn.Module):
    """A wide tensor skips two parts with many weights."""

    def __init__(self, by_sum: bool) -> None:
        super().__init__()
        self.by_sum = by_sum
        self.wide = nn.Conv2d(2, 8, 3, padding=1)
        self.act = nn.ReLU(inplace=True)
        self.deep = nn.Sequential(nn.Conv2d(8, 64, 3, 4, 1), nn.Conv2d(64, 64, 3, 1, 1))
        self.back = nn.ConvTranspose2d(64, 8, 4, 4)
        self.last = nn.Conv2d(8 if by_sum else 16, 2, 1)

    def forward(self, x: Any) -> Any:
        """Return the network's output."""
        x = self.act(self.wide(x))
        y = self.back(self.deep(x))
        return self.last(y + x if self.by_sum else torch.cat([y, x], 1))


@pytest.mark.parametrize("by_sum", [False, True])
@pytest.mark.parametrize(
    ("side", "rates"),
    [
        (8, Rates(1e10, 1e-7, 1e-9)),  # the skipping tensor decides
        (24, Rates(1e12, 1e-6, 1e-9)),
        (24, Rates(1e9, 1e-4, 1e-9)),
    ],
)
def test_the_chosen_strategies_are_the_cheapest_with_skips_counted(
    by_sum: bool, side: int, rates: Rates
) -> None:
    shape = (1, 2, side, side)
    model = Joined(by_sum)
    parts = ["wide", "act", "deep", "back", "last"]
    facts, flows = facts_of(model, shape), flows_of(model, shape, parts)
    assert ("wide", "back") in [(f.source, f.target) for f in flows]
    roles = ("sample", "height", "width", None)
    strategies = [ParallelStrategy(**({role: "a"} if role else {})) for role in roles]
    strategies.append(ParallelStrategy(channel="a", filter="a"))

    def main(comm: Any) -> None:
        with ProcessGrid(comm, {"a": 2}) as grid:
            chosen = choose_strategies(model, grid, shape, rates=rates)
            if comm.rank:
                return
            own = {
                (part, s): sum(
                    layer_cost(each, strategies[s], grid, rates).seconds(rates)
                    for each in facts
                    if each.path.partition(".")[0] == part
                )
                for part in parts
                for s in range(len(strategies))
            }
            moves = {
                (flow.shape, a, b): move_cost(flow.shape, one, other, grid)
                for flow in flows
                for a, one in enumerate(strategies)
                for b, other in enumerate(strategies)
            }

            def price(by_part: dict[str, int]) -> float:
                moved = (
                    moves[flow.shape, by_part[flow.source], by_part[flow.target]]
                    for flow in flows
                )
                return sum(own[each] for each in by_part.items()) + sum(
                    each.seconds(rates) for each in moved
                )

            every = itertools.product(range(len(strategies)), repeat=len(parts))
            least = min(price(dict(zip(parts, each, strict=True))) for each in every)
            assert chosen.step_s == pytest.approx(least, rel=1e-9)
            mine = {part: strategies.index(chosen.by_path[part]) for part in parts}
            assert price(mine) == pytest.approx(least, rel=1e-9)

    run(2, main)


def test_a_step_moves_the_tensors_that_the_cost_model_counts() -> None:
    model, shape = Joined(by_sum=True), (2, 2, 16, 16)
    by_path = {
        "": ParallelStrategy(sample="a"),
        "deep": ParallelStrategy(height="a"),
        "back": ParallelStrategy(height="a"),
    }
    parts = ["wide", "act", "deep", "back", "last"]
    flows = flows_of(model, shape, parts)
    strategy = {part: by_path.get(part, by_path[""]) for part in parts}
    moved = [
        math.prod(flow.shape) * 4 // 2
        for flow in flows
        if strategy[flow.source] != strategy[flow.target]
    ]
    assert len(moved) == 3  # into deep, the skipping operand, and into last

    def main(comm: Any) -> None:
        mine = Joined(by_sum=True)
        with ProcessGrid(comm, {"a": 2}) as grid, torch.no_grad():
            parallelize_cnn(mine, grid, by_path)
            x = torch.ones(shape)
            comm.barrier()
            with commrt.trace.record() as recording:
                mine(x)
                comm.barrier()
            for log in logs_of(recording):
                ops = [e.nbytes for e in log.operations if e.op == "redistribute"]
                assert ops == moved

    run(2, main)
