# SPDX-License-Identifier: Apache-2.0
"""What is kept of a call: for the native dispatcher, so that the next like it is a hit,
and for calls whose counts are new and whose query is not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from commrt.select.facts import Candidate, Query
from commrt.select.policy import Policy
from commrt.vocabulary.wire_formats import COMPRESS

if TYPE_CHECKING:
    from commrt.calls.arguments import Bound, Call
    from commrt.group.group import Group

__all__ = ["Choices", "cache_plan"]

_NO_DTYPE = 11
"""What the dispatcher's key holds where there is no array."""
_MOST_KEPT = 1024
_NO_X = -1
"""Its count where only other ranks have one."""


class Choices:
    """What the policy chose for vector operations, and for what a rule compresses.

    Programs may have new counts in every call. An alltoallv's query is the same for all
    of them, and asking the model takes longer than all the rest of making a plan. The
    dispatcher knows no plan of what is compressed, so that is asked every time.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._kept: dict[Any, Candidate] = {}

    def forget(self) -> None:
        """Ask again from here on: what can run has changed."""
        self._kept.clear()

    def of(self, query: Query, call: Call) -> Candidate:
        """Return what runs ``query``, for a call's wishes."""
        params = tuple(sorted((call.params or {}).items()))
        key = query, call.backend, call.algorithm, params
        found = self._kept.get(key)
        if found is None:
            wishes = {"backend": call.backend, "algorithm": call.algorithm}
            choice = self._policy.choose(query, **wishes, params=call.params)
            found = choice.candidate
            if call.spec.count_arguments or COMPRESS in found.params:
                if len(self._kept) >= _MOST_KEPT:
                    self._kept.clear()
                self._kept[key] = found
        return found


def cache_plan(comm: Group, call: Call, bound: Bound, plan: Any) -> None:
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
        comm.keep_vector_plan(count, *key, flat, plan)
    else:
        times_size = spec.out_count == "times_size"
        count = bound.num_elements // (comm.size if times_size else 1)
        comm.keep_plan(count, *key, plan)
