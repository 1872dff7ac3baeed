# SPDX-License-Identifier: Apache-2.0
"""What may be named: backends, their algorithms, and the parameters of those.

Tables and command lines are checked against it before anything runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache, partial
from typing import Any

from commrt import algorithms, backends
from commrt.backends.staged.collectives import COPIES, PIECE, check_copies, check_piece
from commrt.errors import UsageError, suggest
from commrt.planning.host_plans import TransportParams
from commrt.select.facts import Candidate, ParamValue
from commrt.select.schema import Known, Parameters
from commrt.select.wishes import Wish, Wishes
from commrt.vocabulary.operations import COLLECTIVES, operation
from commrt.vocabulary.wire_formats import COMPRESS, check_compress

__all__ = ["check_candidate", "check_wishes", "known_names", "offered"]

_MANY = range(1, 129)
"""Rank counts that are asked where a rule holds for any."""
_MOST_RANKS = 4096
"""An algorithm lists its values in time that grows with the ranks, and a file may say
any number of them."""


def known_names() -> Known:
    """Return what a table may name here."""
    found = {
        name: frozenset().union(*(offered(name, coll) for coll in COLLECTIVES))
        for name in backends.all_backends()
    }
    return Known(found, offered, _parameters)


def check_candidate(coll: str, candidate: Candidate, ranks: int | None = None) -> None:
    """Raise UsageError unless such a candidate exists; it may still not run here."""
    backend, algorithm = candidate.backend, candidate.algorithm
    backends.get(backend)
    names = offered(backend, coll)
    if algorithm not in names:
        raise UsageError(
            f"{backend} has no {coll} algorithm {algorithm!r}"
            f"{suggest(algorithm, names)}"
        )
    known = _parameters(coll, backend, algorithm, ranks)
    if known is None:
        return
    for name, value in candidate.params.items():
        if name not in known:
            none = f"; {candidate.name} takes none."
            hint = suggest(name, known) or none
            raise UsageError(f"{candidate}: unknown parameter {name!r}{hint}")
        wrong = known[name](value)
        if wrong is not None:
            raise UsageError(f"{candidate}: {wrong}")


def check_wishes(wishes: Wishes, *, named: bool = False) -> Wishes:
    """Return the wishes; UsageError where no operation has what all are to run.

    With ``named``, also where an operation has not what it alone is to run. Otherwise
    its first call says so, by which time the program may have registered it.
    """
    asked = [(COLLECTIVES, wishes.others)] if wishes.others is not None else []
    if named:
        asked += [((coll,), wish) for coll, wish in wishes.named.items()]
    for colls, wish in asked:
        found = {
            Candidate(backend, algorithm)
            for backend in backends.all_backends()
            for coll in colls
            for algorithm in offered(backend, coll)
        }
        if any(wish.fits(each) for each in found):
            continue
        names = {each.backend for each in found}
        if wish.backend in (None, *names) and wish.algorithm is not None:
            names = {each.algorithm for each in found if wish.backend is None}
            names |= {each.name for each in found if each.backend == wish.backend}
        which = "no operation has" if colls is COLLECTIVES else f"{colls[0]} has not"
        asked_for = str(Wish(*wish.names)).removesuffix("/*")
        raise UsageError(
            f"{wishes.who} asks for {asked_for!r}, which {which}"
            f"{suggest(asked_for, names)}"
        )
    return wishes


def offered(backend: str, coll: str) -> frozenset[str]:
    """Return the algorithms of ``coll`` that ``backend`` has, whether usable or not."""
    can = backends.get(backend).capabilities
    own = (*can.algorithms, *["native"] * can.native)
    return frozenset((*own, *(algorithms.names(coll) if can.schedules else ())))


def _parameters(
    coll: str, backend: str, algorithm: str, ranks: int | None
) -> Parameters | None:
    """Return the parameters of a candidate; None where only its author knows them."""
    one = backends.get(backend)
    if not type(one).__module__.startswith("commrt.backends."):
        return None
    of_staging = {PIECE: check_piece, COPIES: check_copies}
    staged = {name: partial(_check_own, check) for name, check in of_staging.items()}
    if backend != "staged":
        staged = {}
    if algorithm == "native":
        return staged
    values, ends = _choices(coll, algorithm, ranks)
    own = {name: partial(_check_choice, name, these, ends) for name, these in values}
    transport = TransportParams.__dataclass_fields__
    of_transport = {name: partial(_check_transport, name) for name in transport}
    compress = {COMPRESS: _check_compress} if operation(coll).compresses else {}
    return {**own, **of_transport, **compress, **staged}


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
    """Return what is wrong with the value of an algorithm's own parameter."""
    if value in values:
        return None
    largest = max((one for one in values if isinstance(one, int)), default=0)
    if not ends and isinstance(value, int) and value > largest:
        return None  # more ranks than were asked about may allow it
    return f"{name}={value!r} is not one of {_few(values)}{'' if ends else ', ...'}"


def _check_own(check: Callable[[Any], Any], value: ParamValue) -> str | None:
    """Return what is wrong with the value of a parameter of staging."""
    try:
        check(value)
    except UsageError as error:
        return str(error)
    return None


def _check_compress(value: ParamValue) -> str | None:
    """Return what is wrong with a wire format."""
    try:
        check_compress(value)
    except UsageError as error:
        return str(error)
    return None


def _few(values: Iterable[ParamValue], most: int = 8) -> str:
    # Numbers by size, words behind them.
    ordered = [str(value) for value in sorted(values, key=lambda v: (str(v) == v, v))]
    if len(ordered) <= most:
        return ", ".join(ordered)
    return f"{', '.join(ordered[:most])}, ..., {ordered[-1]}"


def _check_transport(name: str, value: ParamValue) -> str | None:
    """Return what is wrong with the value of a parameter of the transport."""
    default = getattr(TransportParams(), name)
    if name in ("depth", "store") and type(value) is not type(default):
        return f"{name}={value!r} must be like its default, {default!r}"
    try:
        TransportParams(**{name: value})  # type: ignore[arg-type]
    except UsageError as error:
        return str(error)
    return None
