# SPDX-License-Identifier: Apache-2.0
"""Plans that Python keeps, bounded by bytes: those not used for longest go first.

The engine keeps plans of calls on host arrays by itself (native/calls/plan_cache.hpp).
"""

from __future__ import annotations

import sys
from collections.abc import Hashable, Iterator
from typing import Any, Generic, Protocol, TypeVar

__all__ = ["KeptPlans", "Limited"]

T = TypeVar("T")

_UNKNOWN_NBYTES = 4096
"""Bytes of a plan that does not say how many: one of a backend from outside."""


class Limited(Protocol):
    """A group of ranks with a limit for each cache of plans."""

    @property
    def plans_limit_nbytes(self) -> int:
        """Most bytes."""
        ...


class KeptPlans(Generic[T]):
    """The plans of one kind of calls of a group, by what the calls are.

    A rank keeps or drops plans without the others: making one is its own affair. The
    plan that was used last stays, however much it takes.
    """

    def __init__(self, group: Limited) -> None:
        self._group = group
        self._kept: dict[Hashable, tuple[T, int]] = {}
        """Plans with their bytes, the last used last."""
        self.nbytes = 0
        """Bytes of them all, keys included."""

    def __len__(self) -> int:
        return len(self._kept)

    def __iter__(self) -> Iterator[T]:
        return (plan for plan, _ in self._kept.values())

    def find(self, key: Hashable) -> T | None:
        """Return the plan of a call; None if there is none."""
        found = self._kept.pop(key, None)
        if found is None:
            return None
        self._kept[key] = found
        return found[0]

    def keep(self, key: Hashable, plan: T) -> None:
        """Keep the plan of a call that has none, and drop others for it."""
        nbytes = _bytes_of_key(key) + getattr(plan, "nbytes", _UNKNOWN_NBYTES)
        self._kept[key] = plan, nbytes
        self.nbytes += nbytes
        while self.nbytes > self._group.plans_limit_nbytes and len(self._kept) > 1:
            _, dropped = self._kept.pop(next(iter(self._kept)))
            self.nbytes -= dropped

    def forget(self) -> None:
        """Drop all of them."""
        self._kept.clear()
        self.nbytes = 0


def _bytes_of_key(key: Any) -> int:
    if isinstance(key, tuple):
        return sys.getsizeof(key) + sum(map(_bytes_of_key, key))
    return sys.getsizeof(key)
