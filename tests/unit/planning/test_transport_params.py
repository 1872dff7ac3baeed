# SPDX-License-Identifier: Apache-2.0
"""Which stores a plan starts with, and which ones experience decides."""

from __future__ import annotations

import pytest

from commrt.planning import host_plans
from commrt.planning.host_plans import TransportParams
from commrt.select.facts import LinkClass

PLAIN, STREAM, STREAM_SLOTS, STREAM_BOTH = 0, 1, 2, 3
CACHE = 1 << 20
cache_of_this_machine = host_plans.last_level_cache_nbytes


@pytest.fixture(autouse=True)
def _cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_plans, "last_level_cache_nbytes", lambda: CACHE)


@pytest.mark.parametrize("combines", [False, True])
@pytest.mark.parametrize(
    ("link_class", "in_cache", "beyond"),
    [
        ("near", PLAIN, STREAM),
        ("far", STREAM_SLOTS, STREAM_BOTH),
        ("oversubscribed", STREAM_SLOTS, STREAM_BOTH),
    ],
)
def test_results_are_streamed_where_no_cache_would_keep_them(
    link_class: LinkClass, in_cache: int, beyond: int, combines: bool
) -> None:
    def start(message_nbytes: int, node_nbytes: int) -> tuple[int, int]:
        params = TransportParams()
        return params.stores(message_nbytes, node_nbytes, link_class, combines)

    assert start(65536, CACHE // 2) == (in_cache, STREAM_SLOTS)
    assert start(65536, 4 * CACHE) == (beyond, STREAM_BOTH)
    assert start(1024, 4 * CACHE) == (PLAIN, PLAIN)


def test_between_far_cores_moved_results_stay_longer_than_combined_ones() -> None:
    params = TransportParams()
    for nbytes in (CACHE, 2 * CACHE):
        assert params.stores(65536, nbytes, "far", True)[0] == STREAM_BOTH
        assert params.stores(65536, nbytes, "far", False)[0] == STREAM_SLOTS


@pytest.mark.parametrize("store", ["plain", "stream", "stream_slots", "stream_both"])
def test_a_named_kind_of_stores_is_kept(store: str) -> None:
    params = TransportParams(store=store)
    names = ["plain", "stream", "stream_slots", "stream_both"]
    for nbytes in (64, 65536):
        assert params.stores(nbytes, 1 << 30, "near", False) == (names.index(store), 0)


def test_the_cache_is_as_large_as_caches_are() -> None:
    assert 1 << 17 <= cache_of_this_machine() <= 1 << 36
