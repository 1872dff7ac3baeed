# SPDX-License-Identifier: Apache-2.0
"""A small GPT learns commrt's own documents under FSDP2: every rank has a shard of it.

torchrun --nproc-per-node 2 -m commrt.examples.gpt_fsdp --check
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from commrt.examples import gpt, runs
from commrt.examples.documents import load_documents

__all__ = ["main", "sharded"]


def sharded(model: gpt.Gpt, mesh: DeviceMesh) -> gpt.Gpt:
    """Shard a model over a mesh: gathered block by block as it is used."""
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def main(argv: Sequence[str] | None = None) -> int:
    """Train on the ranks that torchrun started; return the exit status."""
    arguments = runs.arguments_of("gpt_fsdp", __doc__, gpt.STEPS, argv)
    with runs.job(arguments.backend):
        rank, size = dist.get_rank(), dist.get_world_size()
        if gpt.BATCH % size:
            runs.say(f"{size} ranks: expected a divisor of {gpt.BATCH}, the batch")
            return 2
        text = load_documents()
        mesh = init_device_mesh("cpu", (size,))

        def together() -> list[float]:
            model = sharded(gpt.made(), mesh)
            losses = gpt.trained(model, text, arguments.steps, rank, size)
            return runs.mean_over_ranks(losses)

        def alone() -> list[float]:
            return gpt.alone(text, arguments.steps)

        return runs.report(together, alone if arguments.check else None)


if __name__ == "__main__":
    sys.exit(main())
