# SPDX-License-Identifier: Apache-2.0
"""K-FAC sees layers that checkpoints run again, and counts them to the right pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kfac_cases import (
    NEAR,
    SerialKFAC,
    batch_of,
    distance,
    loss_of,
    model_of,
    own_part,
    serial_run,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

from commrt.errors import UsageError
from commrt.layers.kfac import KFAC
from commrt.local import run

SHORT_S = 60
SETTINGS: dict[str, Any] = {"inverse_every": 2, "lr": 0.05}
REENTRANT = pytest.mark.parametrize("is_reentrant", [False, True])


class Checkpointed(nn.Module):
    """A whole model in a checkpoint."""

    def __init__(self, inner: nn.Module, is_reentrant: bool) -> None:
        super().__init__()
        self.inner, self.is_reentrant = inner, is_reentrant

    def forward(self, x: Any) -> Any:
        x = x.clone().requires_grad_()
        return checkpoint(self.inner, x, use_reentrant=self.is_reentrant)


class Segments(nn.Module):
    """One layer in two checkpoints, and outside of them."""

    def __init__(self, is_reentrant: bool, checkpoints: bool = True) -> None:
        super().__init__()
        self.mix, self.head = nn.Linear(5, 5), nn.Linear(5, 3)
        self.is_reentrant, self.checkpoints = is_reentrant, checkpoints
        with torch.no_grad():
            for each in self.parameters():
                each.copy_(torch.linspace(-1, 1, each.numel()).reshape(each.shape))

    def _once(self, x: Any) -> Any:
        return self.mix(x).tanh()

    def forward(self, x: Any) -> Any:
        x = x.clone().requires_grad_()
        for _ in range(2):
            if self.checkpoints:
                x = checkpoint(self._once, x, use_reentrant=self.is_reentrant)
            else:
                x = self._once(x)
        return self.head(self.mix(x))


@REENTRANT
def test_a_pass_for_metrics_does_not_take_the_samples_of_another(
    is_reentrant: bool,
) -> None:
    """Its forward pass lies between the forward and the backward pass of the step."""
    right = serial_run("perceptron", 2, 4, **SETTINGS)

    def main(comm: Any) -> nn.Module:
        inner = model_of("perceptron")
        model = Checkpointed(inner, is_reentrant)
        with KFAC(model, comm, **SETTINGS) as kfac:
            for step in range(4):
                x, y, _ = own_part("perceptron", 2, comm.rank, step)
                kfac.zero_grad()
                loss = loss_of(model(x), y, "mean", 1)
                model(batch_of("perceptron", 9, 77)[0])
                loss.backward()
                kfac.step()
        return inner

    for model in run(2, main, timeout_s=SHORT_S):
        assert distance(model, right) < NEAR


@REENTRANT
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_layer_in_several_checkpoints_counts_each_time(
    ranks: int, is_reentrant: bool
) -> None:
    serial = Segments(is_reentrant, checkpoints=False).double()
    plain = SerialKFAC(serial, **SETTINGS)
    for step in range(3):
        plain.step(*batch_of("perceptron", 3 * ranks, step))

    def main(comm: Any) -> nn.Module:
        model = Segments(is_reentrant).double()
        with KFAC(model, comm, **SETTINGS) as kfac:
            for step in range(3):
                x, y = batch_of("perceptron", 3 * ranks, step)
                own = slice(3 * comm.rank, 3 * comm.rank + 3)
                kfac.zero_grad()
                loss_of(model(x[own]), y[own], "mean", 1).backward()
                kfac.step()
        return model

    for model in run(ranks, main, timeout_s=SHORT_S):
        assert distance(model, serial) < NEAR


@REENTRANT
def test_a_model_that_is_checkpointed_whole_counts_once(is_reentrant: bool) -> None:
    """Here the program checkpoints calls of the model, in two parts of a batch."""
    right = serial_run("perceptron", 1, 3, **SETTINGS)

    def main(comm: Any) -> nn.Module:
        model = model_of("perceptron")
        with KFAC(model, comm, **SETTINGS) as kfac:
            for step in range(3):
                x, y, _ = own_part("perceptron", 1, 0, step)
                kfac.zero_grad()
                x = x.clone().requires_grad_()
                parts = [
                    checkpoint(model, part, use_reentrant=is_reentrant)
                    for part in (x[:1], x[1:])
                ]
                loss_of(torch.cat(parts), y, "mean", 1).backward()
                kfac.step()
        return model

    for model in run(1, main, timeout_s=SHORT_S):
        assert distance(model, right) < NEAR


def test_layers_used_outside_a_call_of_the_model_are_refused() -> None:
    """Also after the first call; what has no backward pass, such as metrics, may be."""

    def main(comm: Any) -> None:
        model: Any = model_of("perceptron")
        with KFAC(model, comm) as kfac:
            for step in range(2):
                x, y, _ = own_part("perceptron", 2, comm.rank, step)
                kfac.zero_grad()
                loss_of(model(x), y, "mean", 1).backward()
                model.first(x)
                kfac.step()
            kfac.zero_grad()
            x, y, _ = own_part("perceptron", 2, comm.rank, 2)
            hidden = model.norm(model.first(x).tanh())
            loss_of(model.last(hidden), y, "mean", 1).backward()
            with pytest.raises(UsageError, match="used outside a call of the model"):
                kfac.step()

    run(2, main, timeout_s=SHORT_S)


def test_a_call_that_fails_leaves_no_pass_behind() -> None:
    right = serial_run("perceptron", 2, 2, **SETTINGS)

    def main(comm: Any) -> nn.Module:
        model: Any = model_of("perceptron")
        with KFAC(model, comm, **SETTINGS) as kfac:
            for step in range(2):
                x, y, _ = own_part("perceptron", 2, comm.rank, step)
                with pytest.raises(RuntimeError, match="mat1 and mat2"):
                    model(x[:, :3])
                kfac.zero_grad()
                loss_of(model(x), y, "mean", 1).backward()
                kfac.step()
            x, y, _ = own_part("perceptron", 2, comm.rank, 2)
            with pytest.raises(RuntimeError, match="mat1 and mat2"):
                model(x[:, :3])
            kfac.zero_grad()
            model.last(model.first(x)).sum().backward()
            with pytest.raises(UsageError, match="used outside a call of the model"):
                kfac.step()
        return model

    for model in run(2, main, timeout_s=SHORT_S):
        assert distance(model, right) < NEAR
