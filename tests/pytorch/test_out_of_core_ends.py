# SPDX-License-Identifier: Apache-2.0
"""Ends of passes: finalizers in any thread, hooks, and errors that come too late."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from out_of_core_cases import ENOUGH, close_opened
from torch import nn

from commrt.errors import BackendError, UsageError
from commrt.layers.out_of_core import Link, OutOfCore, ThrottledCopy
from commrt.layers.out_of_core.far import Lane
from commrt.layers.out_of_core.near import NearMemory
from commrt.layers.out_of_core.turn import Turn


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    close_opened()


def test_a_turn_is_free_only_while_nobody_is_in() -> None:
    turn = Turn()
    with turn, turn:
        assert not turn.enter_if_free()
        found: list[bool] = []
        other = threading.Thread(target=lambda: found.append(turn.enter_if_free()))
        other.start()
        other.join()
        assert found == [False]
    assert turn.enter_if_free()
    with turn.entered():
        assert not turn.enter_if_free()
    assert turn.enter_if_free()


def test_finalizers_wait_for_nobody() -> None:
    """A lane's thread, for whose transfer the holder of the lock may wait, goes on."""
    with ThrottledCopy(1e9) as far:
        near = NearMemory(100, far)
        done: list[str] = []

        def amid_a_call() -> None:
            near.later(lambda: done.append("amid"))
            lane = Lane("test")
            lane.do(lambda: near.later(lambda: done.append("lane")), "test").wait()
            lane.close()
            assert not done

        near.later(lambda: near.later(amid_a_call))  # each is within a call
        assert sorted(done) == ["amid", "lane"]
        lane = Lane("test")
        lane.do(lambda: near.later(lambda: done.append("later")), "test").wait()
        lane.close()
        assert len(done) == 2
        near.poll()
        assert len(done) == 3


class Constant(nn.Module):
    """A block whose output is its parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the parameter."""
        return self.value


def test_parameters_that_are_outputs_keep_no_hooks() -> None:
    constant = Constant()
    with ThrottledCopy(1e9) as far:
        model = OutOfCore(
            [constant, nn.Tanh()], torch.ones(3), budget_bytes=ENOUGH, far=far
        )
        for _ in range(3):
            model(torch.ones(3)).sum().backward()
        model.close()
    constant.value.grad = None
    constant.value.square().sum().backward()
    assert torch.equal(constant.value.grad, torch.full((3,), 2.0))


class Failing:
    """Transfers that fail, once they end."""

    has_ended = False

    def is_done(self) -> bool:
        return self.has_ended

    def wait(self) -> None:
        raise BackendError("no such disk")

    order = wait


def test_an_error_of_tensors_that_nobody_needs_is_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with ThrottledCopy(1e9) as far:
        blocks = [nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)]
        model = OutOfCore(
            blocks, torch.ones(2, 4), budget_bytes=ENOUGH, far=far, policy="swap"
        )
        store, failing = far.store, Failing()

        def fails(source: torch.Tensor) -> tuple[Any, Any]:
            return store(source)[0], failing

        with monkeypatch.context() as patched:
            patched.setattr(far, "store", fails)
            output = model(torch.ones(2, 4))
            del output
            gc.collect()
            failing.has_ended = True
        assert model.near_nbytes == 0
        model(torch.ones(2, 4)).sum().backward()
        model.close()


@pytest.mark.parametrize("speed", [0.0, -1.0, float("inf"), float("nan")])
def test_links_have_speeds(speed: float) -> None:
    with pytest.raises(UsageError, match="expected a finite number above 0"):
        Link(1.0, speed)
