# SPDX-License-Identifier: Apache-2.0
"""Lightning on commrt: the Trainer and Fabric, with DDP and with FSDP2."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from client_programs import DEADLINE_S, Program
from client_training import STEPS, alone, loss_of, net, optimizer_of, part

PROGRAM = Program("Lightning", "lightning")
pytestmark = PROGRAM.marks


def parts() -> list[Any]:
    """Return this rank's rows of all steps."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    return [part(step, rank, size) for step in range(STEPS)]


def strategy(sharded: bool) -> Any:
    from lightning.pytorch import strategies

    if sharded:
        return strategies.ModelParallelStrategy(
            data_parallel_size=int(os.environ["WORLD_SIZE"]),
            tensor_parallel_size=1,
            process_group_backend="commrt",
        )
    return strategies.DDPStrategy(process_group_backend="commrt")


def trainer(sharded: bool, folder: str) -> list[float]:
    import lightning
    from torch.distributed.fsdp import fully_shard

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()
            self.losses: list[float] = []

        def configure_model(self) -> None:
            if sharded:
                mesh = self.device_mesh["data_parallel"]
                for layer in (self.net.first, self.net.second, self.net):
                    fully_shard(layer, mesh=mesh)

        def training_step(self, rows: Any) -> torch.Tensor:
            loss = loss_of(self.net(rows[0]), rows[1])
            self.losses.append(loss.item())
            self.log("mean", loss, sync_dist=True)
            return loss

        def on_train_batch_end(self, *_: Any) -> None:
            every = self.all_gather(torch.tensor(self.losses[-1]))
            mean = self.trainer.callback_metrics["mean"]
            torch.testing.assert_close(every.mean(), mean)

        def configure_optimizers(self) -> Any:
            return optimizer_of(self.parameters())

    module = Module()
    runner = lightning.Trainer(
        accelerator="cpu",
        devices=int(os.environ["WORLD_SIZE"]),
        strategy=strategy(sharded),
        max_epochs=1,
        default_root_dir=folder,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loader = torch.utils.data.DataLoader(parts(), batch_size=None)
    runner.fit(module, loader)
    assert dist.get_backend() == "commrt"
    runner.save_checkpoint(f"{folder}/end")
    return module.losses


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("sharded", [False, True], ids=["DDP", "FSDP2"])
def test_trainer(
    torchrun: Any, compare: Any, tmp_path: Any, sharded: bool, size: int
) -> None:
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    got = torchrun(
        size, trainer, deadline_s=DEADLINE_S, sharded=sharded, folder=str(folder)
    )
    assert (folder / "end").exists()
    how = "FSDP2" if sharded else "DDP"
    compare(f"{PROGRAM}, Trainer with {how}", alone(), got)


def fabric(sharded: bool) -> list[float]:
    from lightning.fabric import Fabric, strategies
    from torch.distributed.fsdp import fully_shard

    def shard(model: Any, mesh: Any) -> Any:
        for layer in (model.first, model.second, model):
            fully_shard(layer, mesh=mesh["data_parallel"])
        return model

    size = int(os.environ["WORLD_SIZE"])
    kind: Any = strategies.DDPStrategy(process_group_backend="commrt")
    if sharded:
        kind = strategies.ModelParallelStrategy(
            shard,
            data_parallel_size=size,
            tensor_parallel_size=1,
            process_group_backend="commrt",
        )
    runner = Fabric(accelerator="cpu", devices=size, strategy=kind)
    runner.launch()
    assert dist.get_backend() == "commrt"
    model: Any = runner.setup_module(net())
    optimizer = runner.setup_optimizers(optimizer_of(model.parameters()))
    losses = []
    for x, y in parts():
        optimizer.zero_grad()
        loss = loss_of(model(x), y)
        runner.backward(loss)
        runner.clip_gradients(model, optimizer, max_norm=1e6)
        optimizer.step()
        losses.append(loss.item())
        mean = runner.all_reduce(loss.detach().clone())
        gathered = runner.all_gather(loss.detach())
        torch.testing.assert_close(gathered.mean(), mean)
    assert runner.broadcast({"from": runner.global_rank}) == {"from": 0}
    runner.barrier()
    return losses


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("sharded", [False, True], ids=["DDP", "FSDP2"])
def test_fabric(torchrun: Any, compare: Any, sharded: bool, size: int) -> None:
    got = torchrun(size, fabric, deadline_s=DEADLINE_S, sharded=sharded)
    how = "FSDP2" if sharded else "DDP"
    compare(f"{PROGRAM}, Fabric with {how}", alone(), got)
