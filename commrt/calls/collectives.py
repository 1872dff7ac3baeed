# SPDX-License-Identifier: Apache-2.0
"""Collectives of a channel: from the arguments of a call to its plan, or its route."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

from commrt.calls import arguments
from commrt.calls.arguments import Bound, Call
from commrt.calls.channel import Channel
from commrt.calls.counts import bind_call
from commrt.calls.plan_cache import cache_plan
from commrt.calls.routes import Route
from commrt.calls.selection import Selection
from commrt.errors import UsageError
from commrt.group.compare import Comparison
from commrt.vocabulary.checks import check_timeout
from commrt.vocabulary.dtypes import engine_factor
from commrt.vocabulary.operations import operation

__all__ = ["Collectives"]

_MAX_PLANS = 4096


class Compressor(Protocol):
    """Compresses calls on host arrays."""

    def bound(self, call: Call, bound: Bound) -> Any:
        """Return the compressed call, checked; None where it is not compressed."""
        ...


class Collectives:
    """Runs the collectives that the engine does not recognise at a glance.

    Args:
        channel: the ranks.
        selection: chooses among the backends' candidates.
        comparison: tells all ranks of an error in check mode.
        routes: other ways of a call, asked in this order.
        compression: is asked next; the host's plans come last.
    """

    def __init__(
        self,
        channel: Channel,
        selection: Selection,
        comparison: Comparison,
        routes: Sequence[Route],
        compression: Compressor,
    ) -> None:
        self._channel, self._selection = channel, selection
        self._comparison = comparison
        self._routes, self._compression = routes, compression
        self.plans: dict[Any, Any] = {}
        """Plans of calls on host arrays."""

    def run(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a collective that the dispatcher did not recognise at a glance."""
        self._channel.check_usable()
        for route in self._routes:
            known = route.again(name, args, kwargs)
            if known is not None:
                return known
        try:
            call = arguments.parse(operation(name), args, kwargs)
            bound = bind_call(self._channel, call)
            for route in self._routes:
                if route.takes(call, bound):
                    started = route.run(call, bound)
                    if started is not NotImplemented:
                        return started
            plan: Any = None
            compressed = self._compression.bound(call, bound)
            if compressed is None:
                plan = self.agreed_plan(call, bound)
        except UsageError as error:
            self.tell(name, kwargs, error)
            raise
        if compressed is not None:
            request = compressed.start()
            return request if call.nonblocking else request.wait()
        x, out = bound.x, bound.out
        return self._channel.run_plan(
            plan,
            0 if x is None else x.address,
            0 if out is None else out.address,
            None if x is None else x.owner,
            None if out is None else out.owner,
            bound.result,
            name,
            call.nonblocking,
            self._channel.timeout_s if call.timeout_s is None else call.timeout_s,
        )

    def tell(self, name: str, kwargs: dict[str, Any], error: UsageError) -> None:
        """In check mode, raise what is wrong with this rank's call on all ranks."""
        timeout_s = kwargs.get("timeout_s")
        try:
            limit = None if timeout_s is None else check_timeout(name, timeout_s)
        except UsageError:
            limit = None
        self._comparison.tell(name, error, limit)

    def agreed_plan(self, call: Call, bound: Bound) -> Any:
        """Return the plan; in check mode only where all ranks made the same call.

        A plan is made before the ranks are compared, so that a mistake of this rank
        is named as such. Only plans of the library's own collectives, which the ranks
        make together, come after.
        """
        if self._channel.checker is None:
            return self.plan(call, bound)
        if self._selection.choose(call, bound).algorithm != "native":
            self.plan(call, bound)
        self._channel.checker.check(call, bound)
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
                self._channel, *engine_factor(call.factor, bound.dtype)
            )
            self.plans[key] = plan
        # What is asked for with compress="none" may be compressed without it.
        plain = not chosen and not params and call.compress is None
        if call.user is None and plain:
            cache_plan(self._channel, call, bound, plan)
        return plan

    def plan_alone(self, call: Call, bound: Bound) -> Any:
        """Return the plan of a call by a schedule, which this rank makes alone."""
        if self._selection.choose(call, bound).algorithm == "native":
            call = replace(call, algorithm="recursive_doubling")
        return self.plan(call, bound)
