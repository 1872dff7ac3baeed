# SPDX-License-Identifier: Apache-2.0
"""The route of calls on host arrays: a plan, which the engine runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

from commrt import _native, env
from commrt.calls.arguments import Bound, Call
from commrt.calls.families import Families
from commrt.calls.selection import Selection
from commrt.group.group import Group
from commrt.vocabulary.dtypes import engine_factor
from commrt.vocabulary.operations import OpSpec, elements_of

__all__ = ["NO_DTYPE", "HostRoute", "count_unit"]

NO_DTYPE = 11
"""The element type in the dispatcher's key of a call without an array."""
_NO_X = -1
"""Its count where only other ranks have one."""


class HostRoute:
    """Plans calls on host arrays and lets the engine run the plans; the last route.

    Args:
        group: the ranks.
        selection: chooses among the backends' candidates.
        families: what the group's calls have in common.
    """

    asked_by: ClassVar[tuple[str, ...]] = ()
    is_open = True
    again = None
    """The engine itself starts calls like one before."""

    def __init__(self, group: Group, selection: Selection, families: Families) -> None:
        self._group, self._selection = group, selection
        self._families = families
        group.plans_limit_nbytes = int(env.read_float("COMMRT_PLAN_CACHE_NBYTES"))

    def prepare(self, call: Call, bound: Bound) -> Callable[[], Any]:
        """Return what starts the call's plan."""
        plan = self.agreed_plan(call, bound)
        bound = self._readable(call, bound, plan)
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
        bound = self._readable(call, bound, plan)
        x, out = bound.x, bound.out
        return _native.PersistentCall(
            self._group,
            plan,
            0 if x is None else x.address,
            0 if out is None else out.address,
            None if x is None else x.owner,
            None if out is None else out.owner,
            bound.result,
            call.spec.name,
            bound.places,
            0 if x is None else x.copied_from,
            0 if x is None else x.nbytes,
        )

    def _readable(self, call: Call, bound: Bound, plan: Any) -> Bound:
        """Return the arrays, with a copy of ``x`` where the plan might overwrite it.

        Local: within one algorithm, one rank may need a copy and another one none.
        """
        if not bound.x_is_own_block:
            return bound
        candidate = self._selection.choose(call, bound)
        if str(candidate) == plan.label:
            attached = self._selection.offers.of(candidate)
            if attached.keeps_own_block(self._selection.spec(call, bound, candidate)):
                return bound
        return bound.apart()

    def agreed_plan(self, call: Call, bound: Bound) -> Any:
        """Return the plan; in check mode only where all ranks made the same call.

        A plan is made before the ranks are compared, so that a mistake of this rank
        is named as such. Only plans of the library's own collectives, which the ranks
        make together, come after.
        """
        checker = self._group.checker
        if checker is None:
            return self.plan(call, bound)
        made = None
        if self._selection.choose(call, bound).algorithm != "native":
            made = self.plan(call, bound)
        checker.check(call, bound)
        return made or self.plan(call, bound)

    def plan(self, call: Call, bound: Bound) -> Any:
        """Return the plan of a call on host arrays, kept for the next like it."""
        group = self._group
        family = self._family(call, bound)
        count, counts = _lengths(call, bound, family.unit)
        plan = group.find_plan(family, count, counts)
        if plan is None:
            plan = self._new_plan(family, call, bound)
            group.keep_plan(family, count, counts, plan)
        if call.factor is not None:
            # One plan per length, of the latest factor: they may be new in every call.
            changed = plan.with_factor(group, *engine_factor(call.factor, bound.dtype))
            if changed is not plan:
                plan = changed
                group.keep_plan(family, count, counts, plan)
        return plan

    def _new_plan(
        self, family: _native.PlanFamily, call: Call, bound: Bound
    ) -> _native.Plan:
        """Return the plan of a call, and let the engine make those of like lengths."""
        span = self._selection.span(call, bound)
        spec = self._selection.spec(call, bound, span.candidate)
        attached = self._selection.offers.of(span.candidate)
        template = family.named(str(span.candidate)) or attached.template(spec)
        if template is None:
            alone: _native.Plan = attached.plan(spec)
            return alone
        plan: _native.Plan = attached.sized(template, spec)
        size, item = self._group.size, bound.dtype.itemsize
        lo, hi = elements_of(call.spec.name, span.lo, span.hi, item, size)
        self._group.add_template(family, lo, hi, template)
        self._families.drop_least_used()
        return plan

    def _family(self, call: Call, bound: Bound) -> _native.PlanFamily:
        """Return what this call has in common with those of other lengths."""
        spec, user = call.spec, call.user
        params = tuple(sorted((call.params or {}).items()))
        # The dispatcher does not see compress. Without compress="none" another route
        # may take the same call, so it must not know plans of it.
        by_choice = call.algorithm is not None or call.backend is not None or params
        is_plain = not by_choice and call.compress is None and user is None
        key = (
            spec.code,
            bound.dtype.name,
            bound.dtype.itemsize,
            call.reduction if user is None else user,
            call.root,
            call.backend,
            call.algorithm,
            params,
            is_plain,
        )

        dtype = bound.dtype.code if spec.x_count != "none" else NO_DTYPE
        facts = spec.code, dtype, int(call.reduction), call.root

        def make() -> _native.PlanFamily:
            unit = count_unit(spec, self._group.size)
            return self._group.plan_family(*facts, unit=unit, is_plain=is_plain)

        family = self._families.get(key, make)
        others = call.backend, params or None, call.compress, user
        if call.algorithm is not None and others == (None,) * len(others):
            self._group.name_family(family, *facts, call.algorithm)
        return family

    def forget(self) -> None:
        """Plan all calls anew from here on."""
        self._families.forget()

    def plan_alone(self, call: Call, bound: Bound) -> Any:
        """Return the plan of a call by a schedule, which this rank makes alone."""
        if self._selection.choose(call, bound).algorithm == "native":
            call = replace(call, algorithm="recursive_doubling")
        return self.plan(call, bound)


def count_unit(spec: OpSpec, size: int) -> int:
    """Return how many elements of the full vector each element of ``x`` stands for."""
    return size if spec.out_count == "times_size" else 1


def _lengths(call: Call, bound: Bound, unit: int) -> tuple[int, list[int]]:
    """Return the lengths of a call as the dispatcher has them: a count, and counts."""
    if not bound.counts:
        return bound.num_elements // unit, []
    count = _NO_X if call.x is None else bound.given_elements
    return count, [one for counts in bound.counts for one in counts]
