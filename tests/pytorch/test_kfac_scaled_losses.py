# SPDX-License-Identifier: Apache-2.0
"""K-FAC with torch's GradScaler, where steps fail, overflow or have no gradients."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from kfac_cases import NEAR, distance, loss_of, model_of, own_part, serial_run
from torch import nn

from commrt.errors import RefusedError, UsageError
from commrt.layers.kfac import KFAC
from commrt.local import run

SHORT_S = 60
SCALE = 2.0**16
SETTINGS: dict[str, Any] = {"inverse_every": 2, "lr": 0.05}


def scaled_step(
    model: nn.Module, kfac: Any, scaler: Any, comm: Any, step: int, factor: float = 1
) -> None:
    x, y, _ = own_part("perceptron", comm.size, comm.rank, step)
    kfac.zero_grad()
    scaler.scale(loss_of(model(x), y, "mean", 1) * factor).backward()
    scaler.step(kfac)
    scaler.update()


@pytest.mark.parametrize("unscales", [False, True])
def test_the_scale_of_a_failed_step_does_not_stay(unscales: bool) -> None:
    """Torch removes it after steps without an error alone, and multiplies the next."""
    right = serial_run("perceptron", 2, 3, **SETTINGS)

    def main(comm: Any) -> nn.Module:
        model = model_of("perceptron")
        scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
        with KFAC(model, comm, grad_scaler=scaler, **SETTINGS) as kfac:
            x, y, _ = own_part("perceptron", 2, comm.rank, 0)
            scaler.scale(loss_of(model(x), y, "mean", 1)).backward()
            if unscales:
                scaler.unscale_(kfac)
            if comm.rank == 1:
                kfac.param_groups[0]["lr"] = -1.0
            with pytest.raises(UsageError if comm.rank == 1 else RefusedError):
                scaler.step(kfac)
            assert not hasattr(kfac, "grad_scale")
            assert not hasattr(kfac, "found_inf")
            scaler.update()
            kfac.param_groups[0]["lr"] = SETTINGS["lr"]
            for step in range(3):
                scaled_step(model, kfac, scaler, comm, step)
        return model

    for model in run(2, main, timeout_s=SHORT_S):
        assert distance(model, right) < NEAR


@pytest.mark.parametrize("gradients", ["local", "synchronised"])
def test_an_overflow_on_all_ranks_skips_a_step_that_inverts(gradients: str) -> None:
    """All gradients are the same NaN then, as those that were summed already."""

    def main(comm: Any) -> None:
        model = model_of("perceptron")
        before = copy.deepcopy(model)
        scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
        with KFAC(
            model, comm, grad_scaler=scaler, gradients=gradients, **SETTINGS
        ) as kfac:
            scaled_step(model, kfac, scaler, comm, 0, float("nan"))
            assert kfac.param_groups[0]["steps"] == 0
            assert distance(model, before) == 0.0
            assert scaler.get_scale() == SCALE / 2

    run(2, main, timeout_s=SHORT_S)


def test_gradients_that_are_nan_on_all_ranks_are_no_sums() -> None:
    def main(comm: Any) -> None:
        model = model_of("perceptron")
        with KFAC(model, comm) as kfac:
            x, y, _ = own_part("perceptron", 2, comm.rank, 0)
            (loss_of(model(x), y, "mean", 1) * float("nan")).backward()
            with pytest.raises(UsageError, match="have NaN or infinity in step 0"):
                kfac.step()

    run(2, main, timeout_s=SHORT_S)


def test_a_rank_without_gradients_takes_part_in_scaled_steps() -> None:
    """Torch says then that its overflows are the number 0."""
    right = serial_run("perceptron", 3, 3, **SETTINGS)

    def main(comm: Any) -> nn.Module:
        model = model_of("perceptron")
        scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
        with KFAC(model, comm, grad_scaler=scaler, **SETTINGS) as kfac:
            for step in range(3):
                x, y, _ = own_part("perceptron", 3, comm.rank, step)
                kfac.zero_grad()
                loss = scaler.scale(torch.zeros(()))
                if len(x):
                    loss = loss + scaler.scale(loss_of(model(x), y, "mean", 1))
                    loss.backward()
                scaler.step(kfac)
                scaler.update(None if len(x) else scaler.get_scale())
        return model

    for model in run(3, main, timeout_s=SHORT_S):
        assert distance(model, right) < NEAR
