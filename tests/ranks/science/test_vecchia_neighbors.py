# SPDX-License-Identifier: Apache-2.0
"""Blocks have the nearest earlier points, and only what is needed travels."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest
from science_cases import RANKS, cut_of, points_of

from commrt.local import run
from commrt.science.rows import RowCut
from commrt.science.vecchia import neighbors
from commrt.science.vecchia.neighbors import NeighborTraffic, find_neighbors
from commrt.science.vecchia.partition import cut_into_blocks

Array = np.ndarray[Any, Any]
Found = dict[int, tuple[list[int], list[int]]]
"""For each block, its points, and its neighbours in order."""


def found_on(
    size: int, x: Array, number: int, block_size: int, seed: int = 0
) -> tuple[Found, list[NeighborTraffic], list[set[int]], list[set[int]]]:
    """Return blocks and neighbours, traffic, owned and needed points of each rank."""
    pieces = cut_of(len(x), size, seed)
    counts = tuple(piece.stop - piece.start for piece in pieces)
    scales = np.array([0.5, 1.0, 3.0])[: x.shape[1]]
    values = np.arange(len(x), dtype=np.float64)  # tell which point a row is

    def main(comm: Any) -> Any:
        own = pieces[comm.rank]
        blocks = cut_into_blocks(
            x[own],
            values[own],
            RowCut(counts, comm.rank, x.shape[1]),
            scales,
            block_size=block_size,
            num_neighbors=number,
            seed=4,
            comm=comm,
        )
        found = find_neighbors(
            blocks, blocks.centers[blocks.own], blocks.own, number, comm
        )
        np.testing.assert_array_equal(found.x, x[found.y.astype(int)])
        mine: Found = {}
        for place, block in enumerate(blocks.own.tolist()):
            points = blocks.ids[blocks.starts[place] : blocks.starts[place + 1]]
            mine[block] = (
                points.tolist(),
                found.y[found.rows[place]].astype(int).tolist(),
            )
        needed = {one for _, each in mine.values() for one in each}
        return mine, found.traffic, {*blocks.ids.tolist()}, needed

    ranks = run(size, main)
    every: Found = {}
    for mine, *_ in ranks:
        assert not {*mine} & {*every}
        every.update(mine)
    return every, *([rank[part] for rank in ranks] for part in (1, 2, 3))  # type: ignore[return-value]


def expected(found: Found, x: Array, number: int) -> Found:
    """Return the neighbours by brute force."""
    scaled = x / np.array([0.5, 1.0, 3.0])[: x.shape[1]]
    right: Found = {}
    for block, (points, _) in found.items():
        earlier = [p for other in range(block) for p in found[other][0]]
        center = scaled[points].mean(0)
        squares = ((scaled[earlier] - center) ** 2).sum(1)
        order = sorted(range(len(earlier)), key=lambda i: (squares[i], earlier[i]))
        right[block] = points, [earlier[i] for i in order[:number]]
    return right


@pytest.mark.full(sample=6)
@pytest.mark.parametrize("number", [1, 6, 40, 500])
@pytest.mark.parametrize("block_size", [1, 5, 30])
@pytest.mark.parametrize("size", RANKS)
def test_neighbours_are_the_nearest_earlier_points(
    size: int, block_size: int, number: int, seed: int
) -> None:
    x, _ = points_of(80, 3, seed)
    found, *_ = found_on(size, x, number, block_size, seed)
    assert sorted(p for points, _ in found.values() for p in points) == [*range(80)]
    assert found == expected(found, x, number)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_each_point_that_is_needed_travels_once(size: int, seed: int) -> None:
    x, _ = points_of(120, 2, seed)
    _, traffic, owned, needed = found_on(size, x, 8, 6, seed)
    for counts, own, need in zip(traffic, owned, needed, strict=True):
        assert counts.num_requested == len(need - own)
    served = sum(counts.num_served for counts in traffic)
    assert served == sum(counts.num_requested for counts in traffic)


def test_the_filter_asks_few_ranks_for_few_points() -> None:
    """On a line only neighbours in it have near points, and few."""
    x = np.linspace(0, 1, 400)[:, None]
    found, traffic, *_ = found_on(4, x, 5, 10)
    num_blocks = len(found)
    assert sum(counts.num_queries for counts in traffic) < num_blocks // 2
    assert sum(counts.num_candidates for counts in traffic) < 5 * num_blocks // 2
    assert sum(counts.num_queries for counts in traffic) > 0


def test_equally_near_points_come_in_the_order_of_their_numbers() -> None:
    """On a lattice many points are equally far from a centre."""
    rows, columns = np.divmod(np.arange(64), 8)
    x = np.column_stack([rows, columns]).astype(np.float64)
    first, *_ = found_on(1, x, 9, 4)
    for size in (2, 3, 8):
        other, *_ = found_on(size, x, 9, 4)
        assert other == first
    assert first == expected(first, x, 9)


@pytest.mark.parametrize("most", [1, 100])
def test_questions_in_parts_have_the_same_answers(
    most: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, _ = points_of(80, 3, seed)
    whole, traffic, *_ = found_on(3, x, 6, 5, seed)
    monkeypatch.setattr(neighbors, "_MOST_ELEMENTS", most)
    found, again, *_ = found_on(3, x, 6, 5, seed)
    assert found == whole
    assert again == traffic


def test_no_table_of_all_blocks_and_all_questions_is_made() -> None:
    """Of 2,500 blocks it would be 50 MB, and several are needed at a time."""
    x, y = points_of(2500, 2)

    def main(comm: Any) -> int:
        blocks = cut_into_blocks(
            x,
            y,
            RowCut((len(x),), 0, 2),
            np.ones(2),
            block_size=1,
            num_neighbors=4,
            seed=0,
            comm=comm,
        )
        tracemalloc.start()
        try:
            find_neighbors(blocks, blocks.centers, blocks.own, 4, comm)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        return peak

    assert run(1, main)[0] < 40e6
