# SPDX-License-Identifier: Apache-2.0
"""Wishes for calls to come: of COMMRT_ALGORITHM, or of a group.

A wish for one operation holds for it, or is an error if it cannot run. A wish for all
operations holds for those that have it; for the others the table decides.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from commrt.errors import UsageError, shown, suggest
from commrt.select.facts import Candidate, ParamValue
from commrt.vocabulary.operations import COLLECTIVES

__all__ = ["VARIABLE", "Wish", "Wishes", "parse_wishes"]

VARIABLE = "COMMRT_ALGORITHM"
_FORM = (
    "write COLL:BACKEND/ALGORITHM for one operation, as in allreduce:mpi/native, and "
    "ALGORITHM or BACKEND/ALGORITHM for all that have it, with commas between"
)
_ANY = "any"


@dataclass(frozen=True)
class Wish:
    """A candidate with parts left open, as ``ring`` or ``shm/ring{chunk=1}``."""

    backend: str | None = None
    """The backend; None: any that can."""
    algorithm: str | None = None
    """The algorithm; None: any of the backend."""
    params: Mapping[str, ParamValue] = field(default_factory=dict)
    """Parameters that hold whatever is chosen, sorted by name, read-only."""

    def __post_init__(self) -> None:
        ordered = {name: self.params[name] for name in sorted(self.params)}
        object.__setattr__(self, "params", MappingProxyType(ordered))

    @property
    def names(self) -> tuple[str | None, str | None]:
        """Backend and algorithm."""
        return self.backend, self.algorithm

    def fits(self, candidate: Candidate) -> bool:
        """Return whether a candidate is what is asked for; parameters aside."""
        return self.backend in (None, candidate.backend) and self.algorithm in (
            None,
            candidate.algorithm,
        )

    def __str__(self) -> str:
        stands_in = Candidate(self.backend or _ANY, self.algorithm or "*", self.params)
        return str(stands_in).removeprefix(f"{_ANY}/" if self.backend is None else "")

    @classmethod
    def parse(
        cls,
        text: str,
        backend: str | None = None,
        params: Mapping[str, ParamValue] = {},
    ) -> Wish:
        """Return the wish in ``text``: ``NAME`` or ``BACKEND/NAME``, with parameters.

        Args:
            text: what is asked for.
            backend: who is to run it, where the text does not say.
            params: parameters, which come before those of the text.
        """
        bare = "/" not in text.partition("{")[0]
        # A stand-in backend, so that one parser serves.
        parsed = Candidate.parse(f"{_ANY}/{text.strip()}" if bare else text)
        named = None if bare else parsed.backend
        if backend is not None and named not in (None, backend):
            raise UsageError(
                f"backend={shown(backend)} contradicts algorithm={shown(text)}: give "
                "one of them"
            )
        merged = {**parsed.params, **params}
        return cls(backend or named, parsed.algorithm, merged)


@dataclass(frozen=True)
class Wishes:
    """The wishes of one place, such as a variable."""

    who: str
    """The subject and verb for messages, such as ``COMMRT_ALGORITHM asks``."""
    named: Mapping[str, Wish] = field(default_factory=dict)
    """Wishes by operation."""
    others: Wish | None = None
    """Wish for all other operations that have it."""

    def __iter__(self) -> Iterator[Wish]:
        """Yield all that is asked for."""
        yield from self.named.values()
        if self.others is not None:
            yield self.others

    def __bool__(self) -> bool:
        return bool(self.named) or self.others is not None


def parse_wishes(text: str | None, who: str = VARIABLE) -> Wishes:
    """Return the wishes of COMMRT_ALGORITHM, or of an argument of that form.

    Raises UsageError for an unknown operation and for what is said twice. Whether there
    is a candidate of that name is known only to the policy.
    """
    named: dict[str, Wish] = {}
    others: Wish | None = None
    for part in _split_outside_braces(text or ""):
        coll, colon, wanted = part.partition(":")
        if not colon:
            if others is not None:
                raise UsageError(
                    f"{who}: {shown(part)} and {str(others)!r} are both for all "
                    f"operations: keep one; {_FORM}"
                )
            others = _parsed(part, who)
            continue
        coll = coll.strip()
        if coll not in COLLECTIVES:
            raise UsageError(
                f"{who}: unknown operation {shown(coll)}{suggest(coll, COLLECTIVES)}"
            )
        if coll in named:
            raise UsageError(f"{who} names {shown(coll)} twice: keep one")
        named[coll] = _parsed(wanted, who)
    return Wishes(who, named, others)


def _parsed(text: str, who: str) -> Wish:
    try:
        return Wish.parse(text)
    except UsageError as error:
        raise UsageError(f"{who}: {error}; {_FORM}") from None


def _split_outside_braces(text: str) -> list[str]:
    """Split at commas that separate wishes, not at those between parameters."""
    parts = re.split(r",(?![^{]*\})", text)
    return [part.strip() for part in parts if part.strip()]
