# SPDX-License-Identifier: Apache-2.0
"""Prefixes, grids and meshes between real ranks, on one node and across nodes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import commrt

NODES = [(2, ""), (3, "2,1"), (4, "2,2"), (4, "")]


def nodes(text: str) -> dict[str, str]:
    return {"COMMRT_NODES": text, "COMMRT_TIMEOUT_S": "300"} if text else {}


def native_keeps_rank_0() -> list[Any]:
    comm = commrt.init()
    x, out = np.full(3000, comm.rank + 1.0), np.full(3000, -7.0)
    comm.exscan(x, out=out, algorithm="mpi/native")
    comm.exscan(x, algorithm="mpi/native")
    return [sorted({*out.tolist()}), sorted({*x.tolist()})]


def test_the_librarys_exscan_leaves_rank_0_alone(mpirun: Any) -> None:
    assert mpirun(3, native_keeps_rank_0) == [
        [[-7.0], [1.0]],
        [[1.0], [1.0]],
        [[3.0], [3.0]],
    ]


def round_the_grid() -> list[Any]:
    comm = commrt.init()
    with comm.cart((0, 0), periodic=True) as cart:
        around = []
        for dim in range(2):
            source, dest = cart.shift(dim)
            got = np.array([cart.rank])
            if cart.dims[dim] > 1:
                mine = np.array([cart.rank])
                cart.sendrecv(mine, dest=dest, out=got, source=source)
            around.append(bool(got[0] == source))
        lines = [cart.sub(dim) for dim in range(2)]
        sums = [float(line.allreduce(np.ones(9))[8]) for line in lines]
        for line in lines:
            line.free()
        extents = [float(extent) for extent in cart.dims]
    with comm.mesh({"data": 0, "tensor": 2 if comm.size % 2 == 0 else 1}) as mesh:
        request = mesh["data"].allreduce(np.array([comm.rank]), nonblocking=True)
        mesh["tensor", "data"].barrier()
        total = int(request.wait()[0])
    return [around, sums == extents, total]


@pytest.mark.parametrize(("size", "where"), NODES)
def test_grids_and_meshes(mpirun: Any, size: int, where: str) -> None:
    tensor = 2 if size % 2 == 0 else 1
    got = mpirun(size, round_the_grid, env=nodes(where))
    for rank, (around, right, total) in enumerate(got):
        assert (around, right) == ([True, True], True)
        assert total == sum(range(rank % tensor, size, tensor))
