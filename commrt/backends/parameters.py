# SPDX-License-Identifier: Apache-2.0
"""The parameters of schedule algorithms, and of the transport that runs them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache, partial
from typing import Any

from commrt import algorithms
from commrt.errors import UsageError, shown
from commrt.planning.host_plans import TransportParams
from commrt.select.facts import ParamValue
from commrt.select.schema import Parameters
from commrt.vocabulary.operations import operation
from commrt.vocabulary.wire_formats import COMPRESS, check_compress

__all__ = ["checked_by", "schedule_parameters"]

_MANY = range(1, 129)
"""Rank counts that are asked where a rule holds for any."""
_MOST_RANKS = 4096
"""An algorithm lists its values in time that grows with the ranks, and a file may say
any number of them."""


def schedule_parameters(coll: str, algorithm: str, ranks: int | None) -> Parameters:
    """Return the parameters of a schedule; the library's own collective has none."""
    if algorithm == "native":
        return {}
    values, ends = _choices(coll, algorithm, ranks)
    own = {name: partial(_check_choice, name, these, ends) for name, these in values}
    transport = TransportParams.__dataclass_fields__
    of_transport = {name: partial(_check_transport, name) for name in transport}
    found: dict[str, Callable[[ParamValue], str | None]] = {**own, **of_transport}
    if operation(coll).compresses:
        found[COMPRESS] = checked_by(check_compress)
    return found


def checked_by(check: Callable[[Any], Any]) -> Callable[[ParamValue], str | None]:
    """Return a function that says the fault of a value, by a check that raises it."""

    def wrong(value: ParamValue) -> str | None:
        try:
            check(value)
        except UsageError as error:
            return str(error)
        return None

    return wrong


def _choices(
    coll: str, algorithm: str, ranks: int | None
) -> tuple[Iterable[tuple[str, tuple[ParamValue, ...]]], bool]:
    """Return an algorithm's own parameters with values, and whether those are all."""
    one = algorithms.get(coll, algorithm)
    asked = 1 if ranks is None else ranks
    if one.spans_nodes:
        # A table's rule does not say on which nodes: any number of leaders.
        return algorithms.param_choices(coll, algorithm, asked).items(), True
    if not callable(one.choices) or (
        ranks is not None and ranks <= _MOST_RANKS and one.supports(ranks)
    ):
        return algorithms.param_choices(coll, algorithm, asked).items(), True
    return _choices_on_many(one).items(), False


@lru_cache(maxsize=64)
def _choices_on_many(one: algorithms.Algorithm) -> dict[str, tuple[ParamValue, ...]]:
    found: dict[str, dict[ParamValue, None]] = {}
    for size in filter(one.supports, _MANY):
        for name, values in algorithms.param_choices(one.coll, one.name, size).items():
            found.setdefault(name, {}).update(dict.fromkeys(values))
    return {name: tuple(values) for name, values in found.items()}


def _check_choice(
    name: str, values: tuple[ParamValue, ...], ends: bool, value: ParamValue
) -> str | None:
    """Return the fault of a value of an algorithm's own parameter."""
    if value in values:
        return None
    largest = max((one for one in values if isinstance(one, int)), default=0)
    if not ends and isinstance(value, int) and value > largest:
        return None  # more ranks than were asked about may allow it
    return (
        f"{name}={shown(value)} is not one of {_few(values)}{'' if ends else ', ...'}"
    )


def _few(values: Iterable[ParamValue], most: int = 8) -> str:
    # Numbers by size, words behind them.
    ordered = [str(value) for value in sorted(values, key=lambda v: (str(v) == v, v))]
    if len(ordered) <= most:
        return ", ".join(ordered)
    return f"{', '.join(ordered[:most])}, ..., {ordered[-1]}"


def _check_transport(name: str, value: ParamValue) -> str | None:
    """Return the fault of a value of a parameter of the transport."""
    default = getattr(TransportParams(), name)
    if name in ("depth", "store") and type(value) is not type(default):
        return f"{name}={shown(value)} must be like its default, {default!r}"
    try:
        TransportParams(**{name: value})  # type: ignore[arg-type]
    except UsageError as error:
        return str(error)
    return None
