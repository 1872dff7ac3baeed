# SPDX-License-Identifier: Apache-2.0
"""Neighbour collectives on drawn grids and graphs, and what must come of them."""

from __future__ import annotations

import random
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
Edges = list[list[tuple[int, int] | None]]


def draw_grid(rng: random.Random, size: int) -> tuple[tuple[int, ...], Any]:
    dims = [1] * rng.randint(1, 3)
    for prime in (2, 3, 5, 7, 11):
        while size % prime == 0:
            size //= prime
            dims[rng.randrange(len(dims))] *= prime
    return tuple(dims), tuple(rng.random() < 0.6 for _ in dims)


def grid_edges(dims: tuple[int, ...], periodic: tuple[bool, ...]) -> Edges:
    """Return, per rank and slot, which rank's block arrives there, and which of it."""
    ranks = np.arange(int(np.prod(dims))).reshape(dims)
    found: Edges = []
    for rank in range(ranks.size):
        here = np.unravel_index(rank, dims)
        row: list[tuple[int, int] | None] = []
        for dim in range(len(dims)):
            for side, step in enumerate((-1, 1)):
                place = int(here[dim]) + step
                if not periodic[dim] and not 0 <= place < dims[dim]:
                    row.append(None)
                    continue
                there = list(here)
                there[dim] = np.intp(place % dims[dim])
                # What comes from before was sent to the one behind.
                row.append((int(ranks[tuple(there)]), 2 * dim + 1 - side))
        found.append(row)
    return found


def draw_graph(
    rng: random.Random, size: int
) -> tuple[list[list[int]], list[list[int]], Edges]:
    """Return sources and destinations of each rank, and what arrives in each slot."""
    sources: list[list[int]] = [[] for _ in range(size)]
    destinations: list[list[int]] = [[] for _ in range(size)]
    for _ in range(rng.randint(0, 3 * size)):
        one, other = rng.randrange(size), rng.randrange(size)
        destinations[one].append(other)
        sources[other].append(one)
    for ranks in (*sources, *destinations):
        rng.shuffle(ranks)
    edges: Edges = []
    for rank in range(size):
        seen = [0] * size
        row: list[tuple[int, int] | None] = []
        for source in sources[rank]:
            places = [i for i, to in enumerate(destinations[source]) if to == rank]
            row.append((source, places[seen[source]]))
            seen[source] += 1
        edges.append(row)
    return sources, destinations, edges


def check_all(comm: Any, edges: Edges, outgoing: list[int], seed: int) -> int:
    """Run every neighbour collective on ``comm``; return how many were compared.

    ``outgoing`` is the number of destinations of each rank.
    """
    rng = random.Random(seed)
    compared = 0
    for dtype in ("float64", "int16"):
        for count in (1, rng.randint(2, 40), rng.choice((0, 3000))):
            compared += _plain(comm, edges, outgoing, dtype, count)
        lengths = [[rng.randint(0, 30) for _ in range(out)] for out in outgoing]
        if rng.random() < 0.3 and any(lengths):
            lengths[max(range(len(lengths)), key=lambda r: len(lengths[r]))][0] = 9000
        compared += _with_counts(comm, edges, lengths, dtype)
    return compared


def _values(rank: int, block: int, count: int, dtype: str) -> Array:
    return (np.arange(count) * 7 + 100 * rank + block).astype(dtype)


def _plain(comm: Any, edges: Edges, outgoing: list[int], dtype: str, count: int) -> int:
    own = edges[comm.rank]
    x = _values(comm.rank, 0, count, dtype)
    out = np.full((len(own), count), 77, dtype)
    got = comm.neighbor_allgather(x, out=out)
    assert got is out
    for slot, edge in enumerate(own):
        right = 77 if edge is None else _values(edge[0], 0, count, dtype)
        np.testing.assert_array_equal(out[slot], right)
    blocks = [_values(comm.rank, i, count, dtype) for i in range(outgoing[comm.rank])]
    x = np.concatenate([np.zeros(0, dtype), *blocks])
    out = np.full((len(own), count), 77, dtype)
    call = comm.plan.neighbor_alltoall(x, out=out)
    for _ in range(2):
        assert call() is out
    for slot, edge in enumerate(own):
        right = 77 if edge is None else _values(*edge, count, dtype)
        np.testing.assert_array_equal(out[slot], right)
    return 2


def _with_counts(comm: Any, edges: Edges, lengths: list[list[int]], dtype: str) -> int:
    own, mine = edges[comm.rank], lengths[comm.rank]
    blocks = [_values(comm.rank, i, n, dtype) for i, n in enumerate(mine)]
    coming = [3 if edge is None else lengths[edge[0]][edge[1]] for edge in own]
    out = np.full(sum(coming), 77, dtype)
    request = comm.neighbor_alltoallv(
        np.concatenate([np.zeros(0, dtype), *blocks]),
        send_counts=mine,
        recv_counts=coming,
        out=out,
        nonblocking=True,
    )
    assert request.wait() is out
    right = [
        np.full(n, 77, dtype) if edge is None else _values(*edge, n, dtype)
        for n, edge in zip(coming, own, strict=True)
    ]
    np.testing.assert_array_equal(out, np.concatenate([np.zeros(0, dtype), *right]))

    def length(rank: int) -> int:
        return 5 * rank % 11

    coming = [2 if edge is None else length(edge[0]) for edge in own]
    out = np.full(sum(coming), 77, dtype)
    x = _values(comm.rank, 0, length(comm.rank), dtype)
    comm.neighbor_allgatherv(x, recv_counts=coming, out=out)
    right = [
        np.full(n, 77, dtype) if edge is None else _values(edge[0], 0, n, dtype)
        for n, edge in zip(coming, own, strict=True)
    ]
    np.testing.assert_array_equal(out, np.concatenate([np.zeros(0, dtype), *right]))
    return 2
