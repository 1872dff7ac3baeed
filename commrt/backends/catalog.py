# SPDX-License-Identifier: Apache-2.0
"""All names that tables and commands may use: backends, algorithms, parameters.

Tables and command lines are checked against it before anything runs.
"""

from __future__ import annotations

from collections.abc import Sequence

from commrt import algorithms, backends
from commrt.errors import UsageError, shown, suggest
from commrt.select.facts import Candidate, CommFacts
from commrt.select.schema import Catalog, Parameters
from commrt.select.wishes import Wish, Wishes
from commrt.vocabulary.operations import COLLECTIVES

__all__ = [
    "catalog",
    "check_candidate",
    "check_wishes",
    "may_run",
    "offered",
    "own_variants",
]


def catalog() -> Catalog:
    """Return the names that a table may use here."""
    return Catalog(dict.fromkeys(backends.all_backends(), ()), offered, _parameters)


def check_candidate(coll: str, candidate: Candidate, ranks: int | None = None) -> None:
    """Raise UsageError unless such a candidate exists; it may still not run here."""
    backend, algorithm = candidate.backend, candidate.algorithm
    backends.get(backend)
    names = offered(backend, coll)
    if algorithm not in names:
        raise UsageError(
            f"{backend} has no {coll} algorithm {shown(algorithm)}"
            f"{suggest(algorithm, names)}"
        )
    known = _parameters(coll, backend, algorithm, ranks)
    if known is None:
        return
    for name, value in candidate.params.items():
        if name not in known:
            none = f"; {candidate.name} takes none."
            hint = suggest(name, known) or none
            raise UsageError(f"{candidate}: unknown parameter {shown(name)}{hint}")
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
            f"{wishes.who} asks for {shown(asked_for)}, which {which}"
            f"{suggest(asked_for, names)}"
        )
    return wishes


def offered(backend: str, coll: str, device: str | None = None) -> frozenset[str]:
    """Return the algorithms of ``coll`` that ``backend`` has, whether usable or not.

    With a kind of memory as ``device``, only those for arrays in it.
    """
    can = backends.get(backend).capabilities
    if device is not None and device not in can.devices:
        return frozenset()
    own = (*can.algorithms, *["native"] * can.native)
    has_schedules = can.schedules and device not in can.only_native_on
    return frozenset((*own, *(algorithms.names(coll) if has_schedules else ())))


def may_run(backend: str, algorithm: str, facts: CommFacts, *, by_mpi: bool) -> bool:
    """Return whether a backend may offer an algorithm to ranks not started yet."""
    asked = getattr(backends.get(backend), "may_run", None)
    return asked is None or bool(asked(algorithm, facts, by_mpi=by_mpi))


def own_variants(candidate: Candidate, full_nbytes: int) -> Sequence[Candidate] | None:
    """Return a candidate with other values of its backend's own parameters.

    None where the backend has none, and those of the transport matter.
    """
    asked = getattr(backends.get(candidate.backend), "variants", None)
    found: Sequence[Candidate] | None = None
    if asked is not None:
        found = asked(candidate, full_nbytes)
    return found


def _parameters(
    coll: str, backend: str, algorithm: str, ranks: int | None
) -> Parameters | None:
    """Return the parameters of a candidate; None where any word may be one."""
    parameters = getattr(backends.get(backend), "parameters", None)
    if parameters is None:
        return None
    found: Parameters | None = parameters(coll, algorithm, ranks)
    return found
