# SPDX-License-Identifier: Apache-2.0
"""Distributed tensors and torch's DTensors are each other's, without a copy."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch_ranks import TorchRun

import commrt
import commrt.torch
from commrt.errors import UsageError
from commrt.layers.process_grid import ProcessGrid
from commrt.layers.tensors import DistTensor, Placement
from commrt.layers.tensors.dtensor import chunks, from_dtensor, to_dtensor

KINDS = (Replicate(), Shard(0), Shard(1), Shard(2), Partial())


@pytest.mark.parametrize("places", [1, 2, 3, 8])
@pytest.mark.parametrize("extent", [0, 1, 5, 8, 9])
def test_pieces_are_those_of_torchs_chunk(extent: int, places: int) -> None:
    pieces = (
        [len(each) for each in torch.arange(extent).chunk(places)] if extent else []
    )
    assert chunks(extent, places) == (*pieces, *[0] * (places - len(pieces)))


def both_ways() -> list[Any]:
    comm = commrt.init()
    commrt.torch.init_process_group(comm)
    grid = ProcessGrid(comm, {"data": 2, "row": 2})
    mesh = grid.device_mesh()
    again = ProcessGrid.from_device_mesh(mesh)
    assert (again.shape, again.coords) == (grid.shape, grid.coords)
    whole = torch.arange(5.0 * 3 * 7, dtype=torch.float64).reshape(5, 3, 7)
    checked = 0
    for kinds in itertools.product(KINDS, KINDS):
        start = [Replicate() if isinstance(k, Partial) else k for k in kinds]
        x = dist.tensor.distribute_tensor(whole, mesh, start, src_data_rank=None)
        share = 0.5 ** sum(isinstance(kind, Partial) for kind in kinds)
        part = (x.to_local() * share).requires_grad_()
        more = {"shape": whole.shape, "stride": whole.stride()}
        x = DTensor.from_local(part, mesh, kinds, run_check=False, **more)
        mine = from_dtensor(x, grid)
        assert mine.local.data_ptr() == x.to_local().data_ptr()
        assert torch.equal(mine.whole(), whole), kinds
        (mine * 3).whole().sum().backward()
        assert part.grad is not None
        assert torch.equal(part.grad, torch.full_like(part, 3)), kinds
        back = to_dtensor(mine, mesh)
        assert back.placements == x.placements
        assert back.shape == x.shape
        assert torch.equal(back.full_tensor(), whole), kinds
        checked += 1
    even = DistTensor.from_whole(whole, grid, Placement("data", None, None))
    with pytest.raises(UsageError, match=r"into \(3, 2\): redistribute it"):
        to_dtensor(even, mesh)
    other = dist.DeviceMesh(
        "cpu", torch.arange(4).reshape(2, 2), mesh_dim_names=("a", "b")
    )
    lying = DTensor.from_local(
        whole, other, [Replicate(), Replicate()], run_check=False
    )
    with pytest.raises(UsageError, match="make the grid by"):
        from_dtensor(lying, grid)
    largest = DTensor.from_local(
        whole, mesh, [Partial("max"), Replicate()], run_check=False
    )
    with pytest.raises(UsageError, match="has no counterpart"):
        from_dtensor(largest, grid)
    return [checked, grid.coords["row"]]


def test_dtensors_are_taken_and_given_without_a_copy(torchrun: TorchRun) -> None:
    expected = [[len(KINDS) ** 2, rank % 2] for rank in range(4)]
    assert torchrun(4, both_ways) == expected
