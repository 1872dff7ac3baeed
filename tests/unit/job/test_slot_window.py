# SPDX-License-Identifier: Apache-2.0
"""Who measures with whom whether slots had better move."""

from __future__ import annotations

import random
from itertools import combinations

import pytest

from commrt.job.slot_window import own_cache_nbytes, partner_of
from commrt.select.facts import LinkClass

Links = dict[tuple[int, int], LinkClass]


def _links(size: int, caches: int) -> Links:
    """Return those of ranks of which so many share a cache."""
    return {
        (a, b): "near" if a // caches == b // caches else "far"
        for a, b in combinations(range(size), 2)
    }


@pytest.mark.parametrize("size", [2, 3, 4, 7, 8, 13, 16])
@pytest.mark.parametrize("caches", [1, 2, 3, 8])
def test_every_rank_but_an_odd_one_has_a_partner_who_has_it(
    size: int, caches: int
) -> None:
    links = _links(size, caches)
    partners = {rank: partner_of(rank, links) for rank in range(size)}
    alone = [rank for rank, partner in partners.items() if partner is None]
    assert len(alone) == size % 2
    for rank, partner in partners.items():
        if partner is not None:
            assert partner != rank
            assert partners[partner] == rank


@pytest.mark.parametrize("size", [4, 8, 16])
def test_near_partners_come_first(size: int) -> None:
    links = _links(size, 4)
    for rank in range(size):
        partner = partner_of(rank, links)
        assert partner is not None
        assert partner // 4 == rank // 4


def test_the_pairs_do_not_depend_on_the_order_in_which_links_were_told(
    seed: int,
) -> None:
    links = _links(9, 3)
    shuffled = list(links.items())
    random.Random(seed).shuffle(shuffled)
    for rank in range(9):
        assert partner_of(rank, dict(shuffled)) == partner_of(rank, links)


def test_a_rank_without_links_has_no_partner() -> None:
    assert partner_of(0, {}) is None
    assert partner_of(3, {(0, 1): "near"}) is None


def test_a_cores_own_cache_is_neither_tiny_nor_everybodys() -> None:
    assert 64 << 10 <= own_cache_nbytes() <= 64 << 20
