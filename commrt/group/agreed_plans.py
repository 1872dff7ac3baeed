# SPDX-License-Identifier: Apache-2.0
"""Plans of calls whose arguments the ranks compare, kept by what all ranks passed.

A rank cannot tell by its own arguments whether the others have made theirs before: its
block of an array may be the same in two distributions. So every call adds up a number
for each rank's arguments, one reduction of 8 bytes. A sum that came before means that
all ranks have a plan for it, and none has to speak. A new sum means that none has one,
and all of them compare their arguments and plan.
"""

from __future__ import annotations

from collections.abc import Callable
from hashlib import blake2b
from typing import Any, Protocol

import numpy as np

__all__ = ["AgreedPlans", "Sums"]

_MOST_PLANS = 1024


class Sums(Protocol):
    """A set of ranks that sums arrays on the host."""

    @property
    def rank(self) -> int:
        """This process's rank."""
        ...

    def allreduce(self, x: Any, *, op: str, name: str, timeout_s: float) -> Any:
        """Replace ``x`` by the sum over all ranks."""
        ...


class AgreedPlans:
    """The plans of one communicator."""

    def __init__(self, ranks: Sums) -> None:
        self._ranks = ranks
        self._plans: dict[int, Any] = {}

    def __len__(self) -> int:
        return len(self._plans)

    def plan(
        self,
        what: str,
        mine: tuple[Any, ...],
        limit_s: float,
        make: Callable[[], Any],
    ) -> Any:
        """Return the engine's plan of a call; collective.

        Args:
            what: the operation.
            mine: all that this rank's plan depends on.
            limit_s: seconds that the others may take to come.
            make: compares the ranks' arguments and plans; collective.
        """
        plans = self._plans
        said = repr((self._ranks.rank, what, mine)).encode()
        digest = blake2b(said, digest_size=8).digest()
        total = np.frombuffer(digest, np.uint64).copy()
        self._ranks.allreduce(total, op="sum", name=what, timeout_s=limit_s)
        plan = plans.get(int(total[0]))
        if plan is None:
            plan = make()
            if len(plans) >= _MOST_PLANS:  # on all ranks at the same call
                plans.clear()
            plans[int(total[0])] = plan
        return plan
