# SPDX-License-Identifier: Apache-2.0
"""What the native dispatcher is told of a call, so that the next like it is a hit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from commrt.calls import Bound, Call
    from commrt.comm import Communicator

__all__ = ["remember"]

_NO_DTYPE = 11
"""What the dispatcher's key holds where there is no array."""
_NO_X = -1
"""Its count where only other ranks have one."""


def remember(comm: Communicator, call: Call, bound: Bound, plan: Any) -> None:
    """Tell the dispatcher the plan of a call without special wishes."""
    spec = call.spec
    takes_x = spec.x_count != "none"
    key = (
        spec.code,
        bound.dtype.code if takes_x else _NO_DTYPE,
        int(call.reduction),
        call.root,
    )
    if bound.counts:
        count = _NO_X if call.x is None else bound.given_elements
        flat = [one for counts in bound.counts for one in counts]
        comm._remember_vector_plan(count, *key, flat, plan)
    elif call.x is not None or not takes_x:
        times_size = spec.out_count == "times_size"
        count = bound.num_elements // (comm.size if times_size else 1)
        comm._remember_plan(count, *key, plan)
