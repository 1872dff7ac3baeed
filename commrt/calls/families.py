# SPDX-License-Identifier: Apache-2.0
"""Families of a group's calls: those that differ in their lengths alone.

The engine keeps the plans of all families, and says which family was not used for
longest where all of it takes too much memory (native/calls/plan_cache.hpp).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from commrt import _native

__all__ = ["Families", "PlanKeeper"]


class PlanKeeper(Protocol):
    """A group of ranks, as far as its plans go."""

    def least_used_family(self) -> _native.PlanFamily | None:
        """Return the family to drop, where all of them take too much; else None."""
        ...

    def drop_family(self, family: _native.PlanFamily) -> None:
        """Drop a family with its plans."""
        ...


class Families:
    """The families of one group, by what their calls have in common."""

    def __init__(self, group: PlanKeeper) -> None:
        self._group = group
        self._made: dict[Any, _native.PlanFamily] = {}

    def __len__(self) -> int:
        return len(self._made)

    def get(
        self, key: Any, make: Callable[[], _native.PlanFamily]
    ) -> _native.PlanFamily:
        """Return the family of a key, which ``make`` makes where there is none."""
        found = self._made.get(key)
        if found is None:
            found = self._made[key] = make()
            self.drop_least_used()
        return found

    def drop_least_used(self) -> None:
        """Drop the families that were not used for longest, if they take too much."""
        while (least := self._group.least_used_family()) is not None:
            self._group.drop_family(least)
            kept = self._made.items()
            self._made = {key: one for key, one in kept if one is not least}

    def forget(self) -> None:
        """Plan all calls anew from here on."""
        for family in self._made.values():
            self._group.drop_family(family)
        self._made.clear()
