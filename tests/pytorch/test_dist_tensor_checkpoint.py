# SPDX-License-Identifier: Apache-2.0
"""Distributed tensors in torch's distributed checkpoint: saved so, loaded otherwise."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dist_tensor_cases import draw_placement, drawn
from torch.distributed import checkpoint
from torch_ranks import TorchRun

import commrt
import commrt.torch
from commrt.errors import UsageError
from commrt.layers.process_grid import ProcessGrid
from commrt.layers.tensors import DistTensor, Placement
from commrt.layers.tensors.checkpoint import shards

SHAPES = [(7, 5), (12,), (4, 1, 6), (), (0, 3), (9, 9)]


def saved_and_loaded(folder: str, seed: int) -> list[Any]:
    comm = commrt.init()
    commrt.torch.init_process_group(comm)
    rng = random.Random(seed)
    wholes = {f"layer.{n}": drawn(rng, shape) for n, shape in enumerate(SHAPES)}

    def cut(grid: ProcessGrid, *, empty: bool = False) -> dict[str, DistTensor]:
        return {
            name: DistTensor.from_whole(
                torch.full_like(whole, -1) if empty else whole,
                grid,
                draw_placement(rng, grid, whole.shape),
            )
            for name, whole in wholes.items()
        }

    one = ProcessGrid(comm, {"a": 2, "b": 2})
    other = ProcessGrid(comm, {"c": 4})
    for turn in range(3):
        place = f"{folder}/{turn}"
        checkpoint.save(shards({"model": cut(one)}), checkpoint_id=place)
        mine = cut(other, empty=True)
        checkpoint.load(shards({"model": mine}), checkpoint_id=place)
        for name, x in mine.items():
            assert torch.equal(x.whole(), wholes[name]), (name, x)
    partial = DistTensor.from_whole(wholes["layer.0"], one, Placement(None, None))
    partial = partial.redistribute(partial=("a",))
    with pytest.raises(UsageError, match="along a is still open"):
        shards([partial])
    with pytest.raises(UsageError, match="for saving and loading only"):
        shards((mine["layer.0"],))[0].sum()
    dist.barrier()
    return [comm.rank]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_what_was_cut_one_way_is_loaded_in_another(
    torchrun: TorchRun, tmp_path: Path, seed: int
) -> None:
    folder = str(tmp_path / "checkpoints")
    assert torchrun(4, saved_and_loaded, folder=folder, seed=seed) == [
        [rank] for rank in range(4)
    ]
    # One process reads the whole of it, without any rank.
    whole = {"model": {"layer.0": torch.zeros(7, 5, dtype=torch.float64)}}
    checkpoint.load(whole, checkpoint_id=f"{folder}/0", no_dist=True)
    assert torch.equal(whole["model"]["layer.0"], drawn(random.Random(seed), (7, 5)))
