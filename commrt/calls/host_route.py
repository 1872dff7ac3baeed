# SPDX-License-Identifier: Apache-2.0
"""The route of calls on host arrays: a plan, which the engine runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

from commrt import _native
from commrt.calls.arguments import Bound, Call
from commrt.calls.selection import Selection
from commrt.group.group import Group
from commrt.vocabulary.dtypes import engine_factor

__all__ = ["HostRoute"]

_MAX_PLANS = 4096
_NO_DTYPE = 11
"""The element type in the dispatcher's key of a call without an array."""
_NO_X = -1
"""Its count where only other ranks have one."""


class HostRoute:
    """Plans calls on host arrays and lets the engine run the plans; the last route.

    Args:
        group: the ranks.
        selection: chooses among the backends' candidates.
    """

    asked_by: ClassVar[tuple[str, ...]] = ()
    is_open = True
    again = None
    """The engine itself starts calls like one before."""

    def __init__(self, group: Group, selection: Selection) -> None:
        self._group, self._selection = group, selection
        self.plans: dict[Any, Any] = {}
        """Plans of calls on host arrays."""

    def prepare(self, call: Call, bound: Bound) -> Callable[[], Any]:
        """Return what starts the call's plan."""
        plan = self.agreed_plan(call, bound)
        x, out, group = bound.x, bound.out, self._group
        return partial(
            group.run_plan,
            plan,
            0 if x is None else x.address,
            0 if out is None else out.address,
            None if x is None else x.owner,
            None if out is None else out.owner,
            bound.result,
            call.spec.name,
            call.nonblocking,
            group.timeout_s if call.timeout_s is None else call.timeout_s,
        )

    def bind(self, call: Call, bound: Bound) -> _native.PersistentCall:
        """Return the call's plan, bound to its arrays."""
        plan = self.agreed_plan(call, bound)
        x, out = bound.x, bound.out
        return _native.PersistentCall(
            self._group,
            plan,
            0 if x is None else x.address,
            0 if out is None else out.address,
            None if x is None else (x.owner, x.array),
            None if out is None else out.owner,
            bound.result,
            call.spec.name,
            0 if x is None else x.copied_from,
            0 if x is None else x.nbytes,
        )

    def agreed_plan(self, call: Call, bound: Bound) -> Any:
        """Return the plan; in check mode only where all ranks made the same call.

        A plan is made before the ranks are compared, so that a mistake of this rank
        is named as such. Only plans of the library's own collectives, which the ranks
        make together, come after.
        """
        checker = self._group.checker
        if checker is None:
            return self.plan(call, bound)
        if self._selection.choose(call, bound).algorithm != "native":
            self.plan(call, bound)
        checker.check(call, bound)
        return self.plan(call, bound)

    def plan(self, call: Call, bound: Bound) -> Any:
        """Return the plan of a call on host arrays, kept for the next like it."""
        chosen = call.algorithm is not None or call.backend is not None
        params = tuple(sorted((call.params or {}).items()))
        key = (
            call.spec.code,
            bound.num_elements,
            bound.dtype.name,
            bound.device,
            call.reduction if call.user is None else call.user,
            call.root,
            call.backend,
            call.algorithm,
            params,
            bound.counts,
        )
        plan = self.plans.get(key)
        if plan is None:
            if len(self.plans) >= _MAX_PLANS:
                self.plans.clear()
            plan = self._selection.planned(call, bound)
            self.plans[key] = plan
        if call.factor is not None:
            # One plan per key, of the latest factor: they may be new in every call.
            plan = plan.with_factor(
                self._group, *engine_factor(call.factor, bound.dtype)
            )
            self.plans[key] = plan
        # The cache does not see compress. Without compress="none" another route may
        # take the same call, so no plan of it is kept here.
        plain = not chosen and not params and call.compress is None
        if call.user is None and plain:
            _cache_plan(self._group, call, bound, plan)
        return plan

    def plan_alone(self, call: Call, bound: Bound) -> Any:
        """Return the plan of a call by a schedule, which this rank makes alone."""
        if self._selection.choose(call, bound).algorithm == "native":
            call = replace(call, algorithm="recursive_doubling")
        return self.plan(call, bound)


def _cache_plan(group: Group, call: Call, bound: Bound, plan: Any) -> None:
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
        group.keep_vector_plan(count, *key, flat, plan)
    else:
        times_size = spec.out_count == "times_size"
        count = bound.num_elements // (group.size if times_size else 1)
        group.keep_plan(count, *key, plan)
