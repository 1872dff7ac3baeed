# SPDX-License-Identifier: Apache-2.0
"""K-FAC on a model in DDP, which averages gradients, is K-FAC of one process."""

from __future__ import annotations

import copy
from typing import Any

import torch.distributed as dist
from kfac_cases import SerialKFAC, batch_of, distance, loss_of, model_of
from process_groups import job
from torch.nn.parallel import DistributedDataParallel

from commrt.errors import RefusedError, UsageError
from commrt.layers.kfac import KFAC
from commrt.layers.kfac.factor_sums import Part

SETTINGS: dict[str, Any] = {"inverse_every": 2, "factor_every": 2, "lr": 0.05}
DEADLINE_S = 300.0
COUNT = 3
"""Samples of each rank; DDP takes the mean of ranks, not that of samples."""


def own_batch(rank: int, size: int, step: int) -> Any:
    x, y = batch_of("perceptron", COUNT * size, step)
    own = slice(COUNT * rank, COUNT * rank + COUNT)
    return x[own], y[own]


def distances(**_: Any) -> tuple[float, bool]:
    """Return how far DDP is from one process, and whether a fault moved anything."""
    broken = [False]

    def flat(self: Part, factor: float) -> Any:
        if broken[0] and self.layer.name == "module.last":
            broken[0] = False
            raise MemoryError("none is left")
        return real(self, factor)

    real = Part.flat
    Part.flat = flat  # type: ignore[method-assign]
    with job() as rank:
        comm = dist.group.WORLD.communicator
        serial = model_of("perceptron")
        plain = SerialKFAC(serial, **SETTINGS)
        model = DistributedDataParallel(model_of("perceptron"))
        with KFAC(model, comm, gradients="synchronised", **SETTINGS) as optimizer:
            # A rank without memory for a sum in the backward pass.
            before = copy.deepcopy(model.module)
            broken[0] = rank == 1
            x, y = own_batch(rank, comm.size, 0)
            loss_of(model(x), y, "mean", 1).backward()
            is_told = False
            try:
                optimizer.step()
            except (MemoryError, RefusedError) as error:
                is_told = isinstance(error, MemoryError if rank == 1 else RefusedError)
            is_told = is_told and distance(before, model.module) == 0.0
            for step in range(4):
                plain.step(*batch_of("perceptron", COUNT * comm.size, step))
                x, y = own_batch(rank, comm.size, step)
                optimizer.zero_grad()
                with optimizer.no_sync(), model.no_sync():
                    (loss_of(model(x[:1]), y[:1], "mean", 1) / 3).backward()
                (loss_of(model(x[1:]), y[1:], "mean", 1) * 2 / 3).backward()
                optimizer.step()
        try:
            KFAC(model, comm)
        except UsageError as error:
            is_told = is_told and 'give gradients="synchronised"' in str(error)
        return distance(model.module, serial), is_told


def test_kfac_with_ddp_is_kfac_of_one_process(torchrun: Any) -> None:
    for off, is_told in torchrun(2, distances, deadline_s=DEADLINE_S):
        assert off < 1e-10
        assert is_told
