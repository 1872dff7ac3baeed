# SPDX-License-Identifier: Apache-2.0
"""Plans of calls whose arguments the ranks compare, kept by what all ranks passed.

A rank cannot tell by its own arguments whether the others have made theirs before: its
block of an array may be the same in two distributions. So every call adds up a number
for each rank's arguments, one reduction of 8 bytes. If the sum has been before, all
ranks have a plan for it, and none has to speak; if not, none has, and all of them
compare their arguments and plan.
"""

from __future__ import annotations

from collections.abc import Callable
from hashlib import blake2b
from typing import Any

import numpy as np

__all__ = ["agreed_plan"]

_MOST_PLANS = 1024


def agreed_plan(
    comm: Any,
    what: str,
    mine: tuple[Any, ...],
    limit: float,
    make: Callable[[], Any],
) -> Any:
    """Return the native plan of a call; collective.

    Args:
        comm: the communicator.
        what: the operation.
        mine: all that this rank's plan depends on.
        limit: seconds that the others may take to come.
        make: compares the ranks' arguments and plans; collective.
    """
    plans: dict[int, Any] = comm._agreed_plans
    said = repr((comm.rank, what, mine)).encode()
    digest = blake2b(said, digest_size=8).digest()
    total = np.frombuffer(digest, np.uint64).copy()
    comm.allreduce(total, op="sum", name=what, timeout_s=limit)
    plan = plans.get(int(total[0]))
    if plan is None:
        plan = make()
        if len(plans) >= _MOST_PLANS:  # on all ranks at the same call
            plans.clear()
        plans[int(total[0])] = plan
    return plan
