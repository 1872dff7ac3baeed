# SPDX-License-Identifier: Apache-2.0
"""Collectives of a group: from the arguments of a call to the route that runs it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from commrt.arrays.host import view
from commrt.arrays.plain import array_of, is_number, is_plain
from commrt.calls import arguments
from commrt.calls.arguments import Bound, Call
from commrt.calls.bound_call import Binders
from commrt.calls.counts import Exchanging, bind_call
from commrt.calls.number_calls import NumberCalls, takes_numbers
from commrt.calls.routes import Route
from commrt.errors import UsageError
from commrt.group.compare import Comparison, Refusing
from commrt.group.finite_values import check_finite, check_finite_on_stream
from commrt.vocabulary.limits import check_timeout
from commrt.vocabulary.operations import COLLECTIVES, OpSpec, operation

__all__ = ["Collectives"]


class Collectives:
    """Runs the collectives that the engine does not recognise at a glance.

    Args:
        group: the ranks.
        comparison: tells all ranks of an error in check mode.
        on_host: routes of calls on host arrays, asked in this order.
        on_device: routes of calls on device arrays, or ordered by a stream.
        carrier: returns what carries calls of such a name and such arguments; None
            for ``group``.
    """

    def __init__(
        self,
        group: Exchanging,
        comparison: Comparison,
        on_host: Sequence[Route],
        on_device: Sequence[Route] = (),
        carrier: Callable[[str, tuple[Any, ...], dict[str, Any]], Refusing | None]
        | None = None,
    ) -> None:
        self._group, self._comparison = group, comparison
        self._on_host, self._on_device = on_host, on_device
        self._carrier = carrier
        self._numbers = NumberCalls(group)
        self._with_again = [each for each in on_host if each.again is not None]

    def run(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a collective that the dispatcher did not recognise at a glance."""
        self._group.check_usable()
        x = args[0] if args else kwargs.get("x")
        if is_plain(x):
            spec = operation(name)
            if is_number(x) and takes_numbers(spec):
                self._check_number(name, x, kwargs)
                refuse = self._refuse_number
                if args:
                    return self._numbers.run(spec, x, args[1:], kwargs, refuse)
                others = {key: value for key, value in kwargs.items() if key != "x"}
                return self._numbers.run(spec, x, (), others, refuse)
            args, kwargs = self._with_array(spec, x, args, kwargs)
        for route in self._with_again:
            if route.is_open and route.again is not None:
                request = route.again(name, args, kwargs)
                if request is not None:
                    return request
        try:
            call, bound = self._bind(name, args, kwargs)
            check_finite_on_stream(self._group, name, bound.x, call.stream)
            for route in self._routes(call, bound):
                start = route.prepare(call, bound)
                if start is not None:
                    break
            else:
                raise self._nowhere(name)
        except Exception as error:
            self._refuse(name, args, kwargs, error)
            raise
        number = self._group.next_seq
        try:
            return start()
        except Exception as error:
            if self._group.next_seq == number:  # nothing has begun
                self._refuse(name, args, kwargs, error)
            raise

    def _check_number(self, name: str, x: Any, kwargs: dict[str, Any]) -> None:
        """Raise NotFiniteError for a number that is NaN or infinite, where asked to."""
        if self._group.nan_check and isinstance(x, float | complex):
            try:
                check_finite(self._group, name, view(array_of(x, "x"), "x"))
            except UsageError as error:
                self._refuse(name, (), kwargs, error)
                raise

    def _with_array(
        self, spec: OpSpec, x: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with an array in the place of a number or a list."""
        try:
            array = array_of(x, f"{spec.name}: x")
        except UsageError as error:
            self._refuse(spec.name, args, kwargs, error)
            raise
        return ((array, *args[1:]), kwargs) if args else (args, {**kwargs, "x": array})

    @property
    def binders(self) -> Binders:
        """Binders of the collectives, by name."""
        return {name: partial(self._bound, name) for name in COLLECTIVES}

    def _bound(self, name: str, /, *args: Any, **kwargs: Any) -> Any:
        """Return a collective bound to its arrays, to run it any number of times."""
        self._group.check_usable()
        if "nonblocking" in kwargs or "timeout_s" in kwargs:
            raise UsageError(
                f"plan.{name}: nonblocking is said when the plan is run: plan() or "
                f"plan.start(); its deadline is comm.timeout_s"
            )
        try:
            call, bound = self._bind(name, args, kwargs)
            for route in self._routes(call, bound):
                made = route.bind(call, bound)
                if made is not None:
                    return made
            raise self._nowhere(name)
        except UsageError as error:
            self._comparison.tell(name, error, _limit(name, kwargs))
            raise

    def parsed(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Call, Bound]:
        """Return what a call of a collective asks for, checked; nothing runs.

        It is local where the arguments say all counts.
        """
        return self._bind(name, args, kwargs)

    def _bind(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Call, Bound]:
        """Return a call and its arrays, checked."""
        spec = operation(name)
        call = arguments.parse(spec, args, kwargs)
        if spec.count_arguments:  # the ranks may have to exchange counts
            bound = bind_call(self._group, call)
        else:
            bound = arguments.bind(call, self._group.rank, self._group.size)
        return call, bound.apart() if _is_on_device(call, bound) else bound

    def _routes(self, call: Call, bound: Bound) -> Iterator[Route]:
        """Yield the routes that may run a call, in order."""
        routes = self._on_device if _is_on_device(call, bound) else self._on_host
        for route in routes:
            if route.is_open or (route.asked_by and _asks_for(call, route)):
                yield route

    def _nowhere(self, name: str) -> UsageError:
        return UsageError(
            f"{name} on {self._group.name}: it runs calls on host arrays only; make "
            f"calls on devices on a communicator of the program"
        )

    def _refuse_number(
        self, name: str, kwargs: dict[str, Any], error: Exception
    ) -> None:
        self._refuse(name, (), kwargs, error)

    def _refuse(
        self,
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        error: Exception,
    ) -> None:
        """Let the other ranks know that this rank's call was refused."""
        carrier = None if self._carrier is None else self._carrier(name, args, kwargs)
        self._comparison.refuse(name, error, _limit(name, kwargs), carrier)


def _limit(name: str, kwargs: dict[str, Any]) -> float | None:
    """Return the limit that a call was given, if it is one."""
    timeout_s = kwargs.get("timeout_s")
    try:
        return None if timeout_s is None else check_timeout(name, timeout_s)
    except UsageError:
        return None


def _is_on_device(call: Call, bound: Bound) -> bool:
    return bound.device is not None or call.stream is not None


def _asks_for(call: Call, route: Route) -> bool:
    return any(getattr(call, name) is not None for name in route.asked_by)
