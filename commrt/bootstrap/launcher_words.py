# SPDX-License-Identifier: Apache-2.0
"""Which ranks have ended, as their launcher says in the store in which they meet.

A rank that ends before it comes to ``init`` can say nothing there; its launcher knows.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Protocol

__all__ = ["ENDED", "ended_ranks", "text_of"]

ENDED = "commrt/launcher/ended"
"""The key of what the launcher says. It writes all of it each time."""


class _Store(Protocol):
    def get(self, key: str) -> bytes: ...

    def check(self, keys: list[str]) -> bool: ...


def text_of(ended: Mapping[int, str]) -> str:
    """Return what a launcher writes: for each rank that has ended, its process."""
    whys = {rank: f"{process} has ended" for rank, process in ended.items()}
    return json.dumps([*whys.items()])


def ended_ranks(store: _Store) -> dict[int, str]:
    """Return why ranks come no more; empty where the launcher has said nothing."""
    if not store.check([ENDED]):
        return {}
    return dict(json.loads(bytes(store.get(ENDED))))
