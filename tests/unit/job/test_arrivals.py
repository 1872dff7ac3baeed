# SPDX-License-Identifier: Apache-2.0
"""Ranks that wait in ``init`` look for others, while those may be ready and leave."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from dict_store import DictStore

from commrt.bootstrap.store import StoreBootstrap
from commrt.job.arrivals import Arrivals


class BetweenStore(DictStore):
    """A store in which others act between a key's being there and its being read."""

    def __init__(self) -> None:
        super().__init__()
        self.between: Callable[[], None] = lambda: None

    def check(self, keys: list[str]) -> bool:
        found = super().check(keys)
        if found:
            self.between()
        return found


@pytest.mark.parametrize("size", [2, 3, 5])
def test_a_rank_that_leaves_while_another_looks_is_not_missed(size: int) -> None:
    store = BetweenStore()
    bootstraps = [StoreBootstrap(store, rank, size) for rank in range(size)]
    looks, *others = [Arrivals(bootstrap) for bootstrap in bootstraps]

    def all_leave() -> None:
        while others:
            others.pop().close()

    store.between = all_leave
    assert [looks.gone(rank) for rank in range(size)] == [""] * size
    assert not others
    looks.close()
    assert sorted(store.values) == [f"commrt/generation/{r}" for r in range(size)]
