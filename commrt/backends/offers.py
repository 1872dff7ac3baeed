# SPDX-License-Identifier: Apache-2.0
"""The candidates of a communicator's backends, as its policy asks for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from commrt import backends
from commrt.backends.base import Attached
from commrt.select.facts import Candidate, Query
from commrt.select.policy import Offers, Rejected
from commrt.select.wishes import Wish
from commrt.vocabulary.reduction_names import is_known

__all__ = ["AttachedOffers"]


class AttachedOffers(Offers):
    """Passes a policy's questions on to the backends of one communicator.

    Args:
        attached: the backends, by name.
    """

    def __init__(self, attached: Mapping[str, Attached]) -> None:
        self._attached = attached
        self._before = {
            name: _more_preferred(attached, one) for name, one in attached.items()
        }
        """By name, the backends that may claim a query before this one runs it."""

    def of(self, candidate: Candidate) -> Attached:
        """Return the backend that runs a candidate."""
        return self._attached[candidate.backend]

    def runnable(self, query: Query) -> list[Candidate]:
        """Return the candidates that can run ``query`` here, simplest first."""
        found = self._found(query)
        return [each for each in found if self.why_refused(query, each) is None]

    def why_refused(self, query: Query, candidate: Candidate) -> str | None:
        """Return why a candidate must not run ``query``; None where it may."""
        return self.of(candidate).why_refused(query, candidate)

    def predicted_us(self, query: Query, candidate: Candidate) -> float:
        """Return the predicted microseconds of a candidate; ``inf`` means never."""
        return self.of(candidate).predicted_us(query, candidate)

    def floor_us(self, query: Query, candidate: Candidate) -> float:
        """Return what ``predicted_us`` is at least, which is quicker to find."""
        return self.of(candidate).floor_us(query, candidate)

    def allows(self, query: Query, candidate: Candidate) -> bool:
        """Return whether a candidate may have parameters beyond those offered."""
        return self.of(candidate).allows(query, candidate)

    def only_on_request(self, query: Query, candidate: Candidate) -> str | None:
        """Return why a candidate runs only on request; None where it needs none."""
        for name in self._before[candidate.backend]:
            first = self._attached[name].claims(query)
            if first is not None:
                return f"{first} unless a table, COMMRT_ALGORITHM or the call says so"
        return self.of(candidate).only_on_request(query, candidate)

    def as_run_here(self, query: Query, use: Candidate) -> Candidate:
        """Return a rule's candidate, by the backend that runs its schedule here."""
        for name, attached in self._attached.items():
            if use.algorithm == "native" or use.backend not in attached.stands_in_for:
                continue
            found = self._found(query)
            offered = {one.backend for one in found if one.algorithm != "native"}
            if name in offered and use.backend not in offered:
                return replace(use, backend=name)
        return use

    def speaks_of(self, query: Query, wish: Wish) -> bool:
        """Return whether a wish, made beforehand, means the query's kind of memory."""
        if wish.backend is None:
            return True
        backends.get(wish.backend)  # raises where there is none
        return self._attached[wish.backend].is_meant(query, wish.algorithm)

    def refused(self, query: Query) -> list[Rejected]:
        """Return what could run the operation, but not as this query needs it."""
        by_user = query.op is not None and not is_known(query.op)
        refused: list[Rejected] = []
        for attached in sorted(self._attached.values(), key=lambda a: -a.precedence):
            refused.extend(attached.refused(query))
        told = {str(each.candidate) for each in refused}
        if query.order == "any" and not by_user:
            reasons = {
                each: self.why_refused(query, each) for each in self._found(query)
            }
            return refused + [
                Rejected(each, why)
                for each, why in reasons.items()
                if why is not None and str(each) not in told
            ]
        allowed = {str(each) for each in self.runnable(query)}
        plain = replace(query, order="any", op="sum" if by_user else query.op)
        for each in self._found(plain):
            if str(each) not in allowed and str(each) not in told:
                reason = self.why_refused(query, each) or "knows no reduction of yours"
                refused.append(Rejected(each, reason))
        return refused

    def _found(self, query: Query) -> list[Candidate]:
        """Return the backends' candidates, whatever order they combine in."""
        found: list[Candidate] = []
        for attached in self._attached.values():
            found.extend(attached.candidates(query))
        return found


def _more_preferred(attached: Mapping[str, Attached], one: Attached) -> list[str]:
    """Return the names of the backends that have a larger precedence, those first."""
    ahead = [each for each in attached if attached[each].precedence > one.precedence]
    return sorted(ahead, key=lambda each: -attached[each].precedence)
