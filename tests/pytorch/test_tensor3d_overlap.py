# SPDX-License-Identifier: Apache-2.0
"""Collectives of layers start early and are waited for late, where a model says so."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from tensor3d_cases import drawn_in
from torch import nn

from commrt.layers.process_grid import ProcessGrid
from commrt.layers.tensor3d import Embedding3d, Linear3d, overlap_communication
from commrt.layers.tensor3d.depth import DepthShards, Gathered, Reduced
from commrt.layers.tensor3d.kernels import Matmul
from commrt.local import run

GRID = {"z": 2, "x": 2}
Events = list[str]


class Recorded(threading.local):
    """What a rank has done, in its order."""

    def __init__(self) -> None:
        self.events: Events = []

    def note(self, what: str, function: Any) -> Any:
        """Return a function that notes each call."""

        def noted(*args: Any, **more: Any) -> Any:
            self.events.append(what)
            return function(*args, **more)

        return noted


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    """Return the events of each rank: starts, waits and products."""
    record = Recorded()
    for owner, name, what in (
        (DepthShards, "start", "gather"),
        (Gathered, "wait", "block"),
        (DepthShards, "reduce", "reduce"),
        (Reduced, "wait", "shard"),
        (Matmul, "forward", "forward"),
        (Matmul, "of_input", "of input"),
        (Matmul, "of_weight", "of weight"),
    ):
        monkeypatch.setattr(owner, name, record.note(what, getattr(owner, name)))
    return record


def events_of(recorded: Recorded, passes: int = 2, **switches: bool) -> list[Events]:
    """Return what each rank does in the last of some steps of three layers."""

    def main(comm: Any) -> Events:
        with ProcessGrid(comm, GRID) as grid:
            layers = [Linear3d(4, 4, bias=False, grid=grid) for _ in range(3)]
            model = nn.Sequential(*layers)
            overlap_communication(model, **{**OFF, **switches})
            for step in range(passes):
                recorded.events = []
                model(drawn_in(step, 3, 4).float().requires_grad_()).sum().backward()
            return recorded.events

    return run(4, main)


OFF = {"all_reduce": False, "reduce_scatter": False, "all_gather": False}
FORWARD = ["gather", "block", "forward"]
BACKWARD = ["gather", "block", "of input", "of weight", "reduce", "shard"]


def test_all_is_in_turn_without_overlap(recorded: Recorded) -> None:
    for events in events_of(recorded):
        assert events == [*FORWARD * 3, *BACKWARD * 3]


def test_the_next_block_is_gathered_before_a_layer_computes(
    recorded: Recorded,
) -> None:
    """Forward the next layer's, backward that of the layer before."""
    one, last = FORWARD[1:], BACKWARD[1:]
    right = ["gather", *["gather", *one] * 2, *one]
    right += ["gather", *["gather", *last] * 2, *last]
    for events in events_of(recorded, all_gather=True):
        assert events == right


def test_the_first_step_gathers_early_where_the_order_is_known(
    recorded: Recorded,
) -> None:
    for events in events_of(recorded, passes=1, all_gather=True):
        assert events[:9] == FORWARD * 3
        assert events[9:11] == ["gather", "gather"]


def test_gradients_are_waited_for_at_the_end_of_the_pass(recorded: Recorded) -> None:
    for events in events_of(recorded, reduce_scatter=True):
        assert events[-3:] == ["shard"] * 3
        assert events.count("shard") == 3


def test_the_inputs_gradient_travels_while_the_weights_is_computed(
    recorded: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    from commrt.layers.tensor3d import products

    wait = products._InputGradient.wait
    monkeypatch.setattr(
        products._InputGradient, "wait", recorded.note("summed input", wait)
    )
    wanted = ("of input", "of weight", "summed input")
    for on in (False, True):
        for events in events_of(recorded, all_reduce=on):
            order = [each for each in events if each in wanted]
            if on:
                assert order == [*wanted] * 3
            else:  # at once, and again where it is returned, which sends nothing
                first = ["of input", "summed input", "of weight", "summed input"]
                assert order == first * 3


def test_no_block_is_left_over(recorded: Recorded) -> None:
    """What is gathered is waited for, also where layers run in another order."""

    def main(comm: Any) -> Events:
        with ProcessGrid(comm, GRID) as grid:

            class Net(nn.Module):
                def __init__(self) -> None:
                    super().__init__()
                    self.table = Embedding3d(5, 4, grid=grid)
                    self.one = Linear3d(4, 4, grid=grid)
                    self.two = Linear3d(4, 4, grid=grid)

                def forward(self, indices: Any, order: str) -> Any:
                    x = self.table(indices)
                    for name in order.split():
                        x = getattr(self, name)(x)
                    return x

            net = Net()
            overlap_communication(net)
            recorded.events = []
            for order in ("one two", "two one", "one", "two two one", "one two"):
                net(torch.tensor([1, 4]), order).sum().backward()
                for parameter in net.parameters():
                    parameter.grad = None
            with torch.no_grad():
                net(torch.tensor([0]), "one")
                net(torch.tensor([0]), "two")
                net(torch.tensor([0]), "one two")
            return recorded.events

    for events in run(4, main):
        assert events.count("gather") == events.count("block")


@pytest.mark.parametrize("on", [False, True])
def test_gradients_that_are_returned_or_left_out_are_not_added(
    on: bool, seed: int
) -> None:
    def main(comm: Any) -> None:
        with ProcessGrid(comm, {"z": 2}) as grid:
            first, last = Linear3d(6, 8, grid=grid), Linear3d(8, 3, grid=grid)
            model = nn.Sequential(first, nn.Tanh(), last).double()
            overlap_communication(model, reduce_scatter=on)
            torch.manual_seed(seed)
            x = torch.randn(5, 6, dtype=torch.float64, requires_grad=True)
            parameters = [*model.parameters()]
            model(x).square().sum().backward()
            expected = [each.grad for each in parameters]
            of_x, x.grad = x.grad, None
            model.zero_grad()

            found = torch.autograd.grad(model(x).square().sum(), parameters)
            assert all(map(torch.equal, found, expected))
            (found_x,) = torch.autograd.grad(model(x).square().sum(), [x])
            assert torch.equal(found_x, of_x)
            assert [each.grad for each in parameters] == [None] * 4
            model(x).square().sum().backward(inputs=[last.weight])
            given = [each.grad is None for each in parameters]
            assert given == [each is not last.weight for each in parameters]
            assert torch.equal(last.weight.grad, expected[2])

    run(2, main)
