# SPDX-License-Identifier: Apache-2.0
"""Turns of a pipeline's ranks: memory of messages, what ranks wait for, overlap."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from pipeline_cases import batch, linear, mean_loss
from torch import nn

from commrt.layers.pipeline import MessageDrivenPipeline
from commrt.layers.pipeline.boundary import Signature, TensorSpec
from commrt.layers.pipeline.flow import Flow, Judge, Signatures
from commrt.layers.pipeline.gradients import GradientSums
from commrt.layers.process_grid import ProcessGrid
from commrt.local import run
from commrt.request import Request

WAIT_S = 300.0


class Looked:
    """A request that is over once somebody has looked at it so many times."""

    timeout_s = WAIT_S

    def __init__(self, looks: int) -> None:
        self.looks = looks

    @property
    def done(self) -> bool:
        self.looks -= 1
        return self.looks < 0

    def test(self) -> bool:
        return self.done

    def wait(self) -> None:
        return None


Request.register(Looked)


class Lane:
    """Messages to nobody, which keep the memory that they have been given.

    Messages from nobody have the values of a list, in turn.
    """

    def __init__(self, looks: int = 0, values: Sequence[Any] = ()) -> None:
        self.looks, self.values = looks, [*values]
        self.sent: list[Any] = []

    def send(self, wire: Any) -> Any:
        self.sent.append(wire)
        return Looked(self.looks)

    def post(self, out: Any) -> Any:
        out.copy_(self.values.pop(0).reshape(-1).view(torch.uint8))
        return Looked(self.looks)


class Ends:
    """Neighbours of a stage."""

    device = torch.device("cpu")

    def __init__(self, is_first: bool, values_in: Lane, values_out: Lane) -> None:
        self.is_first = is_first
        self.values_in, self.values_out = values_in, values_out
        self.gradients_out = Lane()

    def unsent(self) -> list[Any]:
        return []


class NoAlarm:
    requests: tuple[Any, ...] = ()
    has_come = False


class Shifted(nn.Module):
    """Adds a row, whose gradient is a view of the input's in batches of one sample."""

    def __init__(self, is_parameter: bool) -> None:
        super().__init__()
        row = torch.zeros(5, dtype=torch.float64)
        # A tensor that is no parameter gathers its gradient in place as well.
        self.row: Any = nn.Parameter(row) if is_parameter else row.requires_grad_()

    def forward(self, x: Any) -> Any:
        return x + self.row.unsqueeze(0)


@pytest.mark.parametrize("is_parameter", [False, True])
def test_gradients_on_their_way_are_not_added_to(is_parameter: bool) -> None:
    """Also where later micro-batches go back before the first one's has left."""
    given = batch((1,) * 4)
    signature = Signature((TensorSpec(torch.float64, (1, 5), True),))
    lanes = Ends(False, Lane(values=given.inputs), Lane())
    links: Any = lanes
    alarm: Any = NoAlarm()
    stage = Shifted(is_parameter)
    flow = Flow(
        *(stage, links, alarm),
        inputs=(),
        count=4,
        judge=Judge(mean_loss, given.targets, [1.0] * 4),
        in_flight=4,
        is_training=True,
        known=Signatures([signature] * 4, []),
    )
    flow.run()
    right = [2 * (x - y) / 5 for x, y in zip(*given, strict=True)]
    sent = [signature.back_unpacked(x, x.nbytes)[0] for x in lanes.gradients_out.sent]
    assert all(map(torch.allclose, sent, right))
    assert torch.allclose(stage.row.grad, sum(right)[0])


@pytest.mark.parametrize("is_transposed", [False, True])
def test_a_lone_gradients_message_has_memory_of_its_own(is_transposed: bool) -> None:
    gradient = torch.rand(3, 3, dtype=torch.float64)
    if is_transposed:
        gradient = gradient.t()
    right = gradient.clone()
    signature = Signature((TensorSpec(torch.float64, (3, 3), True),))
    wire = signature.back_packed([gradient])
    gradient.zero_()
    (found,) = signature.back_unpacked(wire, wire.nbytes)
    assert torch.equal(found, right)


@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize("is_training", [False, True])
@pytest.mark.parametrize("is_first", [False, True])
@pytest.mark.parametrize("receives", [0, 1])
@pytest.mark.parametrize("sends", range(7))
def test_a_send_that_ends_between_two_looks_is_not_missed(
    sends: int, receives: int, is_first: bool, is_training: bool, in_flight: int
) -> None:
    """Nothing needs a gradient, so nothing but the send would wake the rank."""
    count = 5
    signature = Signature((TensorSpec(torch.float64, (2, 5), False),))
    zeros = torch.zeros(2, 5, dtype=torch.float64)
    links: Any = Ends(is_first, Lane(receives, [zeros] * count), Lane(sends))
    alarm: Any = NoAlarm()
    flow = Flow(
        *(nn.Identity(), links, alarm),
        inputs=[(zeros,)] * count,
        count=count,
        judge=None,
        in_flight=in_flight,
        is_training=is_training,
        known=Signatures([signature] * count, [signature] * count),
    )
    flow.run()
    assert flow.signatures.leaving == [signature] * count
    assert flow.most_in_flight <= in_flight


def test_sums_of_late_stages_start_while_early_ones_go_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first stages' last way back waits for the last stages' sums to start."""
    started = threading.Semaphore(0)
    start = GradientSums.start

    def told(self: GradientSums) -> None:
        start(self)
        started.release()

    monkeypatch.setattr(GradientSums, "start", told)

    class Late(nn.Module):
        backs = 0

        def forward(self, x: Any) -> Any:
            y = x.requires_grad_() * 1.0
            y.register_hook(self.back)
            return y

        def back(self, _: Any) -> None:
            self.backs += 1
            if self.backs == 3:
                assert started.acquire(timeout=WAIT_S)

    def main(comm: Any) -> float:
        with ProcessGrid(comm, {"data": 2, "pipe": 2}) as grid:
            place = grid.coords["pipe"]
            stage = linear(1) if place else nn.Sequential(Late(), linear(0))
            given = batch((2, 2, 2))
            with MessageDrivenPipeline(stage, grid, mean_loss) as pipeline:
                return pipeline.step(*given)

    found = run(4, main)
    assert found == [found[0]] * 4
