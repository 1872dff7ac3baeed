# SPDX-License-Identifier: Apache-2.0
"""Turns of a pipeline's ranks: memory of messages, what ranks wait for, overlap."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from pipeline_cases import batch, gradients_of, linear, mean_loss
from torch import nn

from commrt.layers.pipeline import MessageDrivenPipeline
from commrt.layers.pipeline.boundary import Signature, TensorSpec
from commrt.layers.pipeline.flow import Flow, Signatures
from commrt.layers.pipeline.gradients import GradientSums
from commrt.layers.process_grid import ProcessGrid
from commrt.local import run

WAIT_S = 300.0
LONG = 8192
"""Numbers of a message that does not leave before its receiver looks at it."""


class Scaled(nn.Module):
    """Multiplies; waits before its third micro-batch, if told so."""

    def __init__(self, may_go_on: threading.Event | None) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(1, 2, LONG, dtype=torch.float64))
        self.may_go_on, self.calls = may_go_on, 0

    def forward(self, x: Any) -> Any:
        self.calls += 1
        if self.may_go_on is not None and self.calls == 3:
            assert self.may_go_on.wait(WAIT_S)
        return x * self.scale


class Shifted(nn.Module):
    """Adds a row, whose gradient is a view of the input's in batches of one sample."""

    def __init__(self, is_leaf_alone: bool = False) -> None:
        super().__init__()
        row = torch.zeros(LONG, dtype=torch.float64)
        # A tensor that is no parameter gathers its gradient in place as well.
        self.row: Any = row.requires_grad_() if is_leaf_alone else nn.Parameter(row)

    def forward(self, x: Any) -> Any:
        return x + self.row.unsqueeze(0)


@pytest.mark.parametrize("is_leaf_alone", [False, True])
def test_gradients_on_their_way_are_not_added_to(is_leaf_alone: bool) -> None:
    """The second micro-batch goes back while the first one's gradient waits."""
    draws = torch.Generator().manual_seed(4)
    x, target = (
        torch.randn(4, LONG, generator=draws, dtype=torch.float64) for _ in range(2)
    )
    alone = Scaled(None)
    loss = mean_loss(alone(x), target)
    loss.backward()
    may_go_on = threading.Event()

    def main(comm: Any) -> Any:
        backs: list[int] = []
        stage: Any = Scaled(may_go_on)
        if comm.rank:
            stage = Shifted(is_leaf_alone)

            def count(_: Any) -> None:
                backs.append(1)
                if len(backs) == 2:
                    may_go_on.set()

            stage.row.register_post_accumulate_grad_hook(count)
        with MessageDrivenPipeline(stage, comm, mean_loss) as pipeline:
            return pipeline.step(x.split(1), target.split(1)), gradients_of(stage)

    (ours, own), _ = run(2, main)
    assert abs(ours - float(loss.detach())) < 1e-12
    assert torch.allclose(own["scale"], alone.scale.grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("shape", [(3, 2), (1,), ()])
@pytest.mark.parametrize("is_transposed", [False, True])
def test_a_lone_gradients_message_has_memory_of_its_own(
    shape: tuple[int, ...], is_transposed: bool
) -> None:
    spec = TensorSpec(torch.float64, shape, True)
    gradient = torch.rand(shape[::-1], dtype=torch.float64).permute(
        *reversed(range(len(shape)))
    )
    if not is_transposed:
        gradient = gradient.contiguous()
    right = gradient.clone()
    wire = Signature((spec,)).back_packed([gradient])
    gradient.zero_()
    (found,) = Signature((spec,)).back_unpacked(wire, wire.nbytes)
    assert torch.equal(found, right)


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


class Lane:
    """Messages to or from nobody."""

    def __init__(self, looks: int) -> None:
        self.looks = looks

    def send(self, _: Any) -> Any:
        return Looked(self.looks)

    def post(self, out: Any) -> Any:
        out.fill_(0)
        return Looked(self.looks)


class Ends:
    """Neighbours of a stage that is not the last one."""

    device = torch.device("cpu")
    is_last = False

    def __init__(self, is_first: bool, sends: int, receives: int) -> None:
        self.is_first = is_first
        self.values_out, self.values_in = Lane(sends), Lane(receives)

    def unsent(self) -> list[Any]:
        return []


class NoAlarm:
    requests: tuple[Any, ...] = ()
    has_come = False


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
    links: Any = Ends(is_first, sends, receives)
    alarm: Any = NoAlarm()
    flow = Flow(
        *(nn.Identity(), links, alarm),
        inputs=[(torch.zeros(2, 5, dtype=torch.float64),)] * count,
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
