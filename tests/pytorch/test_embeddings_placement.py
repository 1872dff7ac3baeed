# SPDX-License-Identifier: Apache-2.0
"""Tables are placed within the memory of ranks, and with even loads."""

from __future__ import annotations

import itertools
import random

import pytest
from embedding_cases import MIXED, PLAIN, compare
from tensor3d_cases import NEAR

from commrt.errors import UsageError
from commrt.layers.embeddings import EmbeddingTable, Placement, Shard, place
from commrt.layers.embeddings.placement import load_of


def drawn_tables(seed: int, number: int) -> tuple[EmbeddingTable, ...]:
    draws = random.Random(seed)
    return tuple(
        EmbeddingTable(
            f"t{each}",
            draws.randint(1, 200),
            draws.choice((1, 4, 16)),
            lookups=draws.choice((0.5, 1, 5, 20)),
            sharding=draws.choice((None, None, None, "table", "row", "column")),
        )
        for each in range(number)
    )


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("seed", range(12))
def test_placements_keep_limits_and_wishes(seed: int, ranks: int) -> None:
    tables = drawn_tables(seed, 1 + seed)
    total = sum(table.nbytes(4) for table in tables)
    largest = max(table.nbytes(4) for table in tables)
    limit = total // ranks + largest
    found = place(tables, ranks, limit_nbytes=limit)
    assert max(found.nbytes) <= limit
    assert sum(found.nbytes) == total
    assert found == place(tables, ranks, limit_nbytes=limit)
    for number, table in enumerate(tables):
        shards = found.of_table(number)
        if table.sharding == "table":
            assert len(shards) == 1
        elif table.sharding == "row":
            assert len(shards) == ranks
        elif table.sharding == "column":
            assert len(shards) == min(ranks, table.embedding_dim)


def test_whole_tables_come_near_to_the_best_placement() -> None:
    """Longest processing time first is within 4/3 - 1/(3 p); swaps come nearer."""
    for seed in range(20):
        draws = random.Random(seed)
        tables = tuple(
            EmbeddingTable(
                f"t{n}", 10, 4, sharding="table", lookups=draws.randint(1, 9)
            )
            for n in range(7)
        )
        loads = [load_of(table, Shard(0, 0, (0, 10), (0, 4)), 4) for table in tables]
        best = min(
            max(
                sum(x for x, r in zip(loads, ranks, strict=True) if r == rank)
                for rank in range(3)
            )
            for ranks in itertools.product(range(3), repeat=7)
        )
        assert max(place(tables, 3).loads) <= 1.12 * best


def test_swaps_mend_what_longest_first_leaves() -> None:
    """Loads 5, 5, 4, 4, 3, 3, 3 on three ranks: 11 at first, 9 after a swap or two."""
    lookups = (4, 4, 3, 3, 2, 2, 2)
    tables = [
        EmbeddingTable(f"t{n}", 8, 1, sharding="table", lookups=each)
        for n, each in enumerate(lookups)
    ]
    loads = place(tables, 3, itemsize=1).loads
    assert sorted(loads) in ([9.0, 9.0, 9.0], [8.0, 9.0, 10.0])


def test_a_table_that_is_too_heavy_is_cut_by_rows() -> None:
    tables = [
        EmbeddingTable("hot", 1000, 16, lookups=40),
        *(EmbeddingTable(f"cold{n}", 1000, 16) for n in range(6)),
    ]
    found = place(tables, 4)
    assert found.sharding_of(0) == "row"
    assert {found.sharding_of(n) for n in range(1, 7)} == {"table"}
    assert found.imbalance < 1.15
    assert "hot" in found.explain()
    assert "(cut: whole it would load one rank too much)" in found.explain()


def test_even_tables_stay_whole() -> None:
    tables = [EmbeddingTable(f"t{n}", 100, 8, lookups=3) for n in range(8)]
    found = place(tables, 4)
    assert {found.sharding_of(n) for n in range(8)} == {"table"}
    assert found.imbalance == 1.0


def test_a_table_that_is_too_large_is_cut_by_rows() -> None:
    tables = [EmbeddingTable("large", 900, 4), EmbeddingTable("small", 10, 4)]
    found = place(tables, 3, limit_nbytes=5000)
    assert found.sharding_of(0) == "row"
    assert max(found.nbytes) <= 5000
    assert ["large", "14400"] in [
        line.split()[:2] for line in found.explain().split("\n")
    ]
    assert "cut: no rank has room for it" in found.explain()


def test_tables_are_cut_where_whole_ones_leave_gaps() -> None:
    """Three tables of 60 bytes on two ranks with room for 100 each."""
    tables = [EmbeddingTable(f"t{n}", 15, 1) for n in range(3)]
    found = place(tables, 2, limit_nbytes=100)
    assert sorted(found.sharding_of(n) for n in range(3)) == ["row", "table", "table"]
    assert max(found.nbytes) <= 100


@pytest.mark.parametrize(
    ("tables", "limit", "message"),
    [
        ([EmbeddingTable("t", 100, 4)], 799, "they have 1600 bytes, and 2 ranks"),
        ([EmbeddingTable("t", 100, 4, sharding="table")], 1599, "sharding='table'"),
        ([EmbeddingTable("t", 100, 4, sharding="column")], 799, "sharding='column'"),
        ([EmbeddingTable("t", 3, 4, sharding="row")], 31, "table 't' of 48 bytes"),
    ],
)
def test_tables_without_a_place_are_told(
    tables: list[EmbeddingTable], limit: int, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        place(tables, 2, limit_nbytes=limit)
    place(tables, 2, limit_nbytes=limit + 1)


@pytest.mark.parametrize(
    ("ranks", "more", "message"),
    [
        (0, {}, "num_ranks=0 must be an integer from 1"),
        (2, {"itemsize": 0}, "itemsize=0 must be"),
        (2, {"limit_nbytes": -1}, "limit_nbytes=-1 must be None"),
        (2, {"limit_nbytes": 3.0}, r"limit_nbytes=3\.0 must be None"),
    ],
)
def test_bad_numbers_for_places_are_refused(
    ranks: int, more: dict[str, int], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        place(PLAIN, ranks, **more)


def test_many_tables_are_placed_at_once() -> None:
    """A thousand tables, whose loads differ by a factor of a hundred."""
    draws = random.Random(1)
    tables = [
        EmbeddingTable(f"t{n}", 1000, 8, lookups=draws.choice((1, 3, 10, 100)))
        for n in range(1000)
    ]
    assert place(tables, 8).imbalance < 1.01


@pytest.mark.parametrize("seed", range(3))
def test_rows_are_right_wherever_tables_lie(seed: int) -> None:
    """Uneven pieces of rows and columns on any ranks, also none on some."""

    def anywhere(ranks: int) -> Placement:
        draws = random.Random(seed)
        shards = []
        for number, table in enumerate(MIXED):
            order = draws.sample(range(ranks), draws.randint(1, ranks))
            by_rows = draws.random() < 0.5
            extent = table.num_embeddings if by_rows else table.embedding_dim
            if not by_rows:
                order = order[:extent]
            inner = sorted(
                draws.choices(range(extent + 1), k=len(order) - 1)
                if by_rows
                else draws.sample(range(1, extent), len(order) - 1)
            )
            ends = [0, *inner, extent]
            whole = (0, table.num_embeddings), (0, table.embedding_dim)
            for rank, low, high in zip(order, ends, ends[1:], strict=False):
                piece = low, high
                shards.append(
                    Shard(
                        *(number, rank),
                        piece if by_rows else whole[0],
                        whole[1] if by_rows else piece,
                    )
                )
        return Placement(MIXED, ranks, tuple(shards), 8)

    for counts in ([3, 2], [2, 0, 4], [1, 5, 0, 2]):
        off = compare(MIXED, counts, seed=seed, placement=anywhere)
        assert max(off.values()) < NEAR, off
