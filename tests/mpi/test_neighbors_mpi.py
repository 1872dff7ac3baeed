# SPDX-License-Identifier: Apache-2.0
"""Neighbour collectives between real ranks, compared with the MPI library's own."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from neighbor_cases import check_all, draw_graph, draw_grid, grid_edges

import commrt
from commrt.bench import turns
from commrt.bench.options import TURNS


def nodes(text: str) -> dict[str, str]:
    return {"COMMRT_NODES": text, "COMMRT_TIMEOUT_S": "300"} if text else {}


def run_drawn(seed: int) -> bool:
    comm = commrt.init()
    rng = random.Random(f"neighbors {comm.size} {seed}")
    compared = 0
    for turn in range(4):
        dims, periodic = draw_grid(rng, comm.size)
        with comm.cart(dims, periodic) as cart:
            outgoing = [2 * len(dims)] * comm.size
            compared += check_all(cart, grid_edges(dims, periodic), outgoing, turn)
        sources, destinations, edges = draw_graph(rng, comm.size)
        with comm.graph(sources[comm.rank], destinations[comm.rank]) as graph:
            compared += check_all(graph, edges, list(map(len, destinations)), turn)
    return compared > 0


@pytest.mark.parametrize(("size", "where"), [(2, ""), (3, "2,1"), (4, "2,2")])
def test_every_block_arrives(mpirun: Any, size: int, where: str, seed: int) -> None:
    assert mpirun(size, run_drawn, seed=seed, env=nodes(where)) == [True] * size


def like_the_librarys_own() -> bool:
    comm = commrt.init()
    mpi = comm.mpi
    right = []
    # Where both neighbours are the same rank, libraries have differed.
    for dims, periodic in (((3,), (True,)), ((3,), (False,)), ((3, 1), (True, False))):
        other = mpi.Create_cart(dims, list(periodic))
        with comm.cart(dims, periodic) as cart:
            x = np.arange(4.0 * len(dims)) + 100 * comm.rank
            ours, theirs = np.zeros((2, len(x)))
            cart.neighbor_alltoall(x, out=ours)
            other.Neighbor_alltoall(x, theirs)
            right.append(np.array_equal(ours, theirs))
            ours, theirs = np.zeros((2, 2 * len(dims), len(x)))
            cart.neighbor_allgather(x, out=ours)
            other.Neighbor_allgather(x, theirs)
            right.append(np.array_equal(ours, theirs))
        other.Free()
    return all(map(bool, right))


def test_grids_do_as_the_librarys_own(mpirun: Any) -> None:
    assert mpirun(3, like_the_librarys_own) == [True] * 3


def timed() -> list[Any]:
    rows = []
    for operation in TURNS:
        job = {
            "operation": operation,
            "sizes": [4, 4096],
            "dtype": "float32",
            "grid": None,
            "periodic": True,
            "density": 0.01,
            "iterations": 10,
            "device": "cpu",
            "timing": "host",
        }
        found = turns.measure(job)
        if found is not None:
            rows += [(row["valid"], sorted(row["samples_us"])) for row in found["rows"]]
    return rows


def test_benchmarks_measure_the_library_beside_and_are_right(mpirun: Any) -> None:
    rows = mpirun(3, timed)
    assert rows[1:] == [[], []]
    beside = [*["mpi4py"] * 10, *["dense allreduce"] * 2]
    assert rows[0] == [[True, sorted(["commrt", each])] for each in beside]
