# SPDX-License-Identifier: Apache-2.0
"""A small GPT learns commrt's own documents under tensor and data parallelism.

    torchrun --nproc-per-node 2 -m commrt.examples.gpt_tensor_parallel --check
    torchrun --nproc-per-node 4 -m commrt.examples.gpt_tensor_parallel --check

A mesh of two axes: pairs of ranks cut each block's heads and hidden layer in two, and
what lies across the pairs, none on 2 ranks, shares the batch, by FSDP2.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from commrt.examples import gpt, runs
from commrt.examples.documents import load_documents
from commrt.examples.gpt_fsdp import sharded

__all__ = ["cut", "main"]

TENSOR = 2
"""Ranks that share each layer."""


def cut(model: gpt.Gpt, mesh: DeviceMesh) -> gpt.Gpt:
    """Cut the blocks' layers: the first of each pair by columns, the second by rows."""
    for block in model.blocks:
        plan = {
            "attention.query": ColwiseParallel(),
            "attention.key": ColwiseParallel(),
            "attention.value": ColwiseParallel(),
            "attention.out": RowwiseParallel(),
            "up": ColwiseParallel(),
            "down": RowwiseParallel(),
        }
        parallelize_module(block, mesh, plan)
    return model


def main(argv: Sequence[str] | None = None) -> int:
    """Train on the ranks that torchrun started; return the exit status."""
    arguments = runs.arguments_of("gpt_tensor_parallel", __doc__, gpt.STEPS, argv)
    with runs.job(arguments.backend):
        size = dist.get_world_size()
        parts = size // TENSOR
        if size % TENSOR or gpt.BATCH % parts:
            runs.say(f"{size} ranks: expected 2, 4, 8, 16 or 32")
            return 2
        text = load_documents()
        mesh = init_device_mesh(
            "cpu", (parts, TENSOR), mesh_dim_names=("data", "tensor")
        )
        part = mesh["data"].get_local_rank()

        def together() -> list[float]:
            model = cut(gpt.made(), mesh["tensor"])
            if parts > 1:
                model = sharded(model, mesh["data"])
            losses = gpt.trained(model, text, arguments.steps, part, parts)
            return runs.mean_over_ranks(losses, mesh["data"].get_group())

        def alone() -> list[float]:
            return gpt.alone(text, arguments.steps)

        return runs.report(together, alone if arguments.check else None)


if __name__ == "__main__":
    sys.exit(main())
