# SPDX-License-Identifier: Apache-2.0
"""Collectives of a group: from the arguments of a call to the route that runs it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from commrt.calls import arguments
from commrt.calls.counts import Exchanging, bind_call
from commrt.calls.routes import Route
from commrt.errors import UsageError
from commrt.group.compare import Comparison
from commrt.vocabulary.checks import check_timeout
from commrt.vocabulary.operations import operation

__all__ = ["Collectives"]


class Collectives:
    """Runs the collectives that the engine does not recognise at a glance.

    Args:
        group: the ranks.
        comparison: tells all ranks of an error in check mode.
        routes: ways of a call, asked in this order; the last one takes every call.
    """

    def __init__(
        self, group: Exchanging, comparison: Comparison, routes: Sequence[Route]
    ) -> None:
        self._group, self._comparison = group, comparison
        self.routes = routes

    def run(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a collective that the dispatcher did not recognise at a glance."""
        self._group.check_usable()
        for route in self.routes:
            request = route.again(name, args, kwargs)
            if request is not None:
                return request
        try:
            call = arguments.parse(operation(name), args, kwargs)
            bound = bind_call(self._group, call)
            for route in self.routes:
                start = route.prepare(call, bound)
                if start is not None:
                    break
        except UsageError as error:
            self.tell(name, kwargs, error)
            raise
        assert start is not None, "the last route takes every call"
        return start()

    def bound(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return a collective bound to its arrays, to run it any number of times."""
        self._group.check_usable()
        if "nonblocking" in kwargs or "timeout_s" in kwargs:
            raise UsageError(
                f"plan.{name}: nonblocking is said when the plan is run: plan() or "
                f"plan.start(); its deadline is comm.timeout_s"
            )
        try:
            call = arguments.parse(operation(name), args, kwargs)
            bound = bind_call(self._group, call)
            for route in self.routes:
                made = route.bind(call, bound)
                if made is not None:
                    return made
        except UsageError as error:
            self.tell(name, kwargs, error)
            raise
        raise AssertionError("the last route takes every call")

    def tell(self, name: str, kwargs: dict[str, Any], error: UsageError) -> None:
        """In check mode, raise what is wrong with this rank's call on all ranks."""
        timeout_s = kwargs.get("timeout_s")
        try:
            limit = None if timeout_s is None else check_timeout(name, timeout_s)
        except UsageError:
            limit = None
        self._comparison.tell(name, error, limit)
