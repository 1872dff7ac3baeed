# SPDX-License-Identifier: Apache-2.0
"""Picks how an operation runs, and says why.

In this order: what the call asks for, what its group asks for, what COMMRT_ALGORITHM
asks for, the table's rule, the model. The policy is a pure function of facts that are
equal on all ranks: the same query gives the same choice, or the same error, everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NoReturn, Protocol

from commrt.errors import BackendError, UsageError, shown, suggest
from commrt.select.expected import expected_us
from commrt.select.facts import Candidate, Choice, CommFacts, Query, Source
from commrt.select.match import Hit
from commrt.select.model import cheapest
from commrt.select.rules import Evidence
from commrt.select.schema import DEVICES, YARDSTICKS
from commrt.select.table import Table
from commrt.select.wishes import VARIABLE, Wish, Wishes
from commrt.vocabulary.operations import operation

__all__ = ["Explanation", "Offers", "Policy", "Rejected", "Span"]


@dataclass(frozen=True)
class Rejected:
    """A candidate that was not picked."""

    candidate: Candidate
    """The rejected candidate."""
    reason: str
    """The reason, in words."""
    is_missing: bool = False
    """True if a library or a device cannot run it, though the algorithm exists."""


@dataclass(frozen=True)
class Explanation:
    """A query's choice, its reason, and what was rejected; ``str()`` is for people."""

    query: Query
    """The query."""
    facts: CommFacts
    """The communicator's facts."""
    choice: Choice
    """The choice."""
    table: str | None
    """Table in force, None without one."""
    evidence: tuple[str, ...]
    """The rule's measurements, one line each."""
    rejected: tuple[Rejected, ...]
    """The other candidates and a rule that could not be followed."""

    def __str__(self) -> str:
        facts = self.facts
        where = (
            f"{facts.size} ranks, {facts.nodes} node{'s' * (facts.nodes > 1)}, at most "
            f"{facts.ppn} per node, {facts.cores} cores, {facts.link_class} links"
            + (f", {facts.network}" if facts.network else "")
        )
        lines = [
            f"{self.query}: {self.choice.candidate}",
            f"  why    {self.choice.reason}",
            f"  where  {where}",
            f"  table  {self.table or 'none: the model decides'}",
        ]
        lines += [f"  seen   {line}" for line in self.evidence]
        lines += [f"  not    {no.candidate}: {no.reason}" for no in self.rejected]
        return "\n".join(lines)


@dataclass(frozen=True)
class Span:
    """A choice, and the lengths for which it holds."""

    candidate: Candidate
    """The candidate that runs."""
    lo: int
    """First rule byte count (``operations.rule_nbytes``)."""
    hi: int | None
    """First one beyond; None: no end."""

    def covers(self, nbytes: int) -> bool:
        """Return whether the choice holds for so many bytes."""
        return self.lo <= nbytes and (self.hi is None or nbytes < self.hi)


class Offers(Protocol):
    """Candidates for a policy; the answers are equal on all ranks."""

    def runnable(self, query: Query) -> Sequence[Candidate]:
        """Return the candidates that can run ``query`` here, simplest first."""
        ...

    def predicted_us(self, query: Query, candidate: Candidate) -> float:
        """Return the predicted microseconds of a candidate; ``inf`` means never."""
        ...

    def floor_us(self, query: Query, candidate: Candidate) -> float:
        """Return what ``predicted_us`` is at least, which is quicker to find."""
        return 0.0

    def only_on_request(self, query: Query, candidate: Candidate) -> str | None:
        """Return why a candidate runs only on request; None where it needs none."""
        return None

    def allows(self, query: Query, candidate: Candidate) -> bool:
        """Return whether a candidate may have parameters beyond those offered."""
        return False

    def refused(self, query: Query) -> Sequence[Rejected]:
        """Return candidates for the operation that must not run the query, and why."""
        return ()

    def as_run_here(self, query: Query, use: Candidate) -> Candidate:
        """Return a rule's candidate, by the name that its backend has today."""
        return use

    def speaks_of(self, query: Query, wish: Wish) -> bool:
        """Return whether a wish, made beforehand, means the query's kind of memory."""
        return True


class Policy:
    """Chooses among candidates for one communicator.

    Args:
        facts: the communicator; equal on all ranks.
        table: the agreed table, or None.
        offers: says what can run a query here, and what that costs.
        wishes: what is asked for beforehand; the first that speaks of a query holds.
    """

    def __init__(
        self,
        facts: CommFacts,
        table: Table | None,
        offers: Offers,
        wishes: Sequence[Wishes] = (),
    ) -> None:
        self.facts = facts
        self.table = table
        self.offers = offers
        self.wishes = tuple(wishes)

    def candidates(self, query: Query) -> list[Candidate]:
        """Return what can run ``query`` here, simplest first; at least one."""
        found = list(self.offers.runnable(query))
        if not found:
            raise UsageError(
                f"no backend here can run {query}; python -m commrt info lists the "
                f"backends and what they lack"
            )
        return found

    def span(
        self,
        query: Query,
        *,
        backend: str | None = None,
        algorithm: str | None = None,
        params: Mapping[str, int | str] | None = None,
    ) -> Span:
        """Return what runs ``query``, and the lengths for which that holds.

        Lengths whose first and last have the same choice have it all. They begin as
        the power of two that the query lies in, as far as no rule of the table begins
        or ends there, and are halved until that is so. So the answer for a length
        depends on nothing else, such as on which lengths were asked for before.
        """
        if operation(query.coll).rule_bytes in ("none", "any"):
            found = self._choose(query, backend, algorithm, params)
            return Span(found.candidate, 0, None)

        def at(nbytes: int) -> Candidate | None:
            try:
                asked = replace(query, nbytes=nbytes)
                return self._choose(asked, backend, algorithm, params).candidate
            except UsageError:
                return None

        lo, hi = self._widest(query)
        first, last = at(lo), at(hi - 1)
        while first != last:
            middle = (lo + hi) // 2
            if query.nbytes < middle:
                hi, last = middle, at(middle - 1)
            else:
                lo, first = middle, at(middle)
        if first is None:
            # It says why; if it does not, the choice is that of this length alone.
            found = self._choose(query, backend, algorithm, params)
            return Span(found.candidate, query.nbytes, query.nbytes + 1)
        return Span(first, lo, hi)

    def _widest(self, query: Query) -> tuple[int, int]:
        """Return the lengths among which the choice of one may hold for all."""
        bits = query.nbytes.bit_length()
        lo, hi = (1 << bits) >> 1, 1 << bits
        spec = operation(query.coll)
        for edge in () if self.table is None else self.table.edges:
            if edge.op not in (query.coll, spec.vector_of):
                continue
            if lo < edge.nbytes <= query.nbytes:
                lo = edge.nbytes
            elif query.nbytes < edge.nbytes < hi:
                hi = edge.nbytes
        return lo, hi

    def choose(
        self,
        query: Query,
        *,
        backend: str | None = None,
        algorithm: str | None = None,
        params: Mapping[str, int | str] | None = None,
    ) -> Choice:
        """Return what runs ``query``, and why.

        Args:
            query: the operation.
            backend: only this backend.
            algorithm: only this algorithm; ``NAME``, ``BACKEND/NAME`` or
                ``BACKEND/NAME{PARAM=VALUE,...}``.
            params: parameters to use instead of the rule's.

        Raises:
            UsageError: what was asked for does not exist, or cannot run this query.
        """
        found = self._choose(query, backend, algorithm, params)
        span = self.span(query, backend=backend, algorithm=algorithm, params=params)
        if found.candidate == span.candidate:
            return found
        near = replace(query, nbytes=span.lo)
        return self._choose(near, backend, algorithm, params)

    def _choose(
        self,
        query: Query,
        backend: str | None,
        algorithm: str | None,
        params: Mapping[str, int | str] | None,
    ) -> Choice:
        """Return the choice for the very length of ``query``."""
        found = self.candidates(query)
        if backend is not None or algorithm is not None:
            wanted, given = _asked(backend, algorithm)
            subset = self._subset(found, wanted, query, "the call")
            wishes = {**given, **(params or {})}
            choice = self._forced(
                *(query, wanted, subset, given, "call", "the call asked for it"), wishes
            )
        elif (asked := self._asked_before(query, found)) is not None:
            who, wish = asked
            subset = self._subset(found, wish.names, query, who)
            source: Source = "override" if who == VARIABLE else "group"
            why = f"{who} asks for {wish}"
            choice = self._forced(query, wish.names, subset, wish.params, source, why)
        else:
            choice = self._free(query, self._unasked(query, found), found)
        if params:
            merged = {**choice.candidate.params, **params}
            choice = replace(choice, candidate=_with(choice.candidate, merged))
        return choice

    def _asked_before(
        self, query: Query, found: Sequence[Candidate]
    ) -> tuple[str, Wish] | None:
        """Return what is asked for beforehand, and who asks; None where nobody does.

        A wish for a backend of the host is not meant for arrays on devices, and one for
        a backend of devices is not meant for arrays in host memory.
        """
        for each in self.wishes:
            wish = each.named.get(query.coll)
            if wish is not None and self.offers.speaks_of(query, wish):
                return each.who, wish
            wish = each.others
            if wish is None or not self.offers.speaks_of(query, wish):
                continue
            if any(wish.fits(candidate) for candidate in found):
                return each.who, wish
        return None

    def explain(
        self,
        query: Query,
        *,
        backend: str | None = None,
        algorithm: str | None = None,
        params: Mapping[str, int | str] | None = None,
    ) -> Explanation:
        """Return what ``choose`` would pick, the evidence, and what was rejected."""
        found = self.candidates(query)
        choice = self.choose(query, backend=backend, algorithm=algorithm, params=params)
        hit = self._lookup(query)
        rejected = self._rejections(query, found, choice, hit)
        followed = hit is not None and choice.rule == hit.index
        return Explanation(
            query=query,
            facts=self.facts,
            choice=choice,
            table=self._table_line(),
            evidence=_evidence_lines(hit) if hit is not None and followed else (),
            rejected=tuple(rejected),
        )

    def _free(
        self,
        query: Query,
        found: Sequence[Candidate],
        known: Sequence[Candidate] = (),
        wishes: Mapping[str, int | str] | None = None,
    ) -> Choice:
        """Pick by the table, which may ask for anything known, else by the model.

        ``wishes`` are parameters that will hold whatever is picked.
        """
        hit = self._lookup(query)
        use = None if hit is None else hit.rule.use
        able = use is not None and (
            self._can_run(query, use, found) or self._can_ask(query, use, known)
        )
        # A rule also knows the best parameters of the only candidate.
        if len({candidate.name for candidate in found}) == 1 and not able:
            alike = [one for one in found if _agrees(one, wishes or {})] or found
            # Where nothing is left to choose, nothing need be costed.
            best = alike[0] if len(alike) == 1 else self._cheapest(query, alike)[0]
            why = "nothing else can run this here"
            if len({candidate.name for candidate in known or found}) > 1:
                why = "nothing else runs this here unless it is asked for"
            return Choice(best, "only", why)
        if hit is None:
            table = self.table
            why = "no table" if table is None else table.why_none(self.facts, query)
            return self._modelled(query, found, why)
        use = hit.rule.use
        if not able:
            why = f"rule {hit.index} asks for {use}, which cannot run this here"
            return self._modelled(query, found, why)
        tail = f" ({hit.extrapolated})" if hit.extrapolated else ""
        return Choice(use, "table", f"{_rule_text(hit)}{tail}", hit.index)

    def expected_us(self, query: Query, candidate: Candidate) -> float:
        """Return the microseconds that what runs a query is expected to take."""
        hit = self._lookup(query)
        return expected_us(query, candidate, hit, self.offers.predicted_us)

    def _lookup(self, query: Query) -> Hit | None:
        """Return the rule for ``query``.

        Where a vector operation has none, that of the operation whose schedules it runs
        holds. The library's own two collectives are different ones, but where a root
        gives or takes long blocks.
        """
        if self.table is None:
            return None
        hit = self._as_run_here(self.table.lookup(self.facts, query), query)
        spec = operation(query.coll)
        if hit is not None or spec.vector_of is None or spec.rule_bytes == "any":
            return hit
        plain = self.table.lookup(self.facts, replace(query, coll=spec.vector_of))
        plain = self._as_run_here(plain, query)
        long = spec.has_root and query.nbytes >= _ROOT_ALONE_FROM_NBYTES
        if plain is None or (plain.rule.use.algorithm == "native" and not long):
            return None
        beside = f"; {plain.extrapolated}" if plain.extrapolated else ""
        return replace(plain, extrapolated=f"of {spec.vector_of}{beside}")

    def _as_run_here(self, hit: Hit | None, query: Query) -> Hit | None:
        """Return a rule with the backend that runs its candidate here."""
        if hit is None:
            return None
        use = self.offers.as_run_here(query, hit.rule.use)
        if use is hit.rule.use:
            return hit
        return replace(hit, rule=replace(hit.rule, use=use))

    def _can_run(
        self, query: Query, use: Candidate, found: Sequence[Candidate]
    ) -> bool:
        """Return whether ``use`` is one of what can run here, whatever else it says.

        A rule for fewer ranks may have a parameter that does not exist on so many.
        """
        known = [one for one in found if one.name == use.name]
        return any(
            all(use.params.get(name, v) == v for name, v in one.params.items())
            for one in known
        ) or self._can_ask(query, use, known)

    def _can_ask(
        self, query: Query, use: Candidate, known: Sequence[Candidate]
    ) -> bool:
        """Return whether ``use`` is one of these, with values only by request."""
        return any(one.name == use.name for one in known) and self.offers.allows(
            query, use
        )

    def _modelled(self, query: Query, found: Sequence[Candidate], why: str) -> Choice:
        best, cost = self._cheapest(query, found)
        return Choice(best, "model", f"{why}; the model expects {_us(cost)}")

    def _cheapest(
        self, query: Query, found: Sequence[Candidate]
    ) -> tuple[Candidate, float]:
        offers = self.offers
        return cheapest(
            found, partial(offers.predicted_us, query), partial(offers.floor_us, query)
        )

    def _unasked(self, query: Query, found: Sequence[Candidate]) -> Sequence[Candidate]:
        """Return those that run without being named; all, where none does."""
        able = [
            each for each in found if self.offers.only_on_request(query, each) is None
        ]
        return able or found

    def _forced(
        self,
        query: Query,
        wanted: tuple[str | None, str | None],
        subset: Sequence[Candidate],
        params: Mapping[str, int | str],
        source: Source,
        reason: str,
        wishes: Mapping[str, int | str] | None = None,
    ) -> Choice:
        """Pick within what was asked for; table and model decide what it left open.

        Who names a backend alone asks for nothing in it that runs only by name.
        """
        _, algorithm = wanted
        able = subset if algorithm is not None else self._unasked(query, subset)
        asked = params if wishes is None else wishes
        inner = self._free(query, able, subset, wishes=asked)
        candidate = _with(inner.candidate, {**inner.candidate.params, **params})
        if len({other.name for other in subset}) == 1:
            return Choice(candidate, source, reason, inner.rule)
        return Choice(
            candidate, source, f"{reason}; of these, {inner.reason}", inner.rule
        )

    def _subset(
        self,
        found: Sequence[Candidate],
        wanted: tuple[str | None, str | None],
        query: Query,
        who: str,
    ) -> list[Candidate]:
        """Return the candidates that fit; UsageError that says why if none does."""
        subset = _fitting(found, wanted)
        if subset:
            return subset
        refused = self.offers.refused(query)
        fits = _fitting([each.candidate for each in refused], wanted)
        for each in refused:
            if each.candidate in fits:
                error = BackendError if each.is_missing else UsageError
                raise error(
                    f"{who} asks for {each.candidate}, which must not run {query}: "
                    f"{each.reason}"
                )
        backend, algorithm = wanted
        for each in () if _fitting(found, (backend, None)) else refused:
            # Whatever the algorithm is, all of its backend lacks the same.
            if each.is_missing and each.candidate.backend == backend:
                raise BackendError(
                    f"{who} asks for {backend}/{algorithm}, which must not run "
                    f"{query}: {each.reason}"
                )
        _raise_unknown(found, wanted, query, who)

    def _table_line(self) -> str | None:
        if self.table is None:
            return None
        return f"{self.table.name or 'unnamed'} (digest {self.table.digest[:12]})"

    def _rejections(
        self,
        query: Query,
        found: Sequence[Candidate],
        choice: Choice,
        hit: Hit | None,
    ) -> list[Rejected]:
        rejected = []
        if hit is not None and choice.rule != hit.index:
            able = self._can_run(query, hit.rule.use, found)
            reason = self.offers.only_on_request(query, hit.rule.use)
            why = reason or "overruled" if able else "cannot run this here"
            text = f"rule {hit.index} of the table, {why}"
            rejected.append(Rejected(hit.rule.use, text))
        for candidate in found:
            if candidate.name != choice.candidate.name:
                cost = self.offers.predicted_us(query, candidate)
                text = "no estimate" if math.isinf(cost) else f"model {_us(cost)}"
                reason = self.offers.only_on_request(query, candidate)
                if reason is not None:
                    text = f"{reason}; {text}"
                rejected.append(Rejected(candidate, text))
        return [*rejected, *self.offers.refused(query)]


_ROOT_ALONE_FROM_NBYTES = 1 << 20
"""From such blocks on, a root's link is what a gather or a scatter takes: no tree saves
anything, so libraries move each block straight from rank to rank, as their vector forms
do at any length. With Open MPI 5 both took the same time on 4 ranks."""


def _asked(
    backend: str | None, algorithm: str | None
) -> tuple[tuple[str | None, str | None], Mapping[str, int | str]]:
    """Return (backend, algorithm) and parameters that a call's arguments name."""
    if algorithm is None or ("/" not in algorithm and "{" not in algorithm):
        return (backend, algorithm), {}
    parsed = Wish.parse(algorithm, backend)
    return parsed.names, parsed.params


def _fitting(
    found: Sequence[Candidate], wanted: tuple[str | None, str | None]
) -> list[Candidate]:
    wish = Wish(*wanted)
    return [candidate for candidate in found if wish.fits(candidate)]


def _agrees(candidate: Candidate, wishes: Mapping[str, int | str]) -> bool:
    return all(wishes.get(name, v) == v for name, v in candidate.params.items())


def _raise_unknown(
    found: Sequence[Candidate],
    wanted: tuple[str | None, str | None],
    query: Query,
    who: str,
) -> NoReturn:
    backend, algorithm = wanted
    backends = {candidate.backend for candidate in found}
    if algorithm is None:
        asked, known = str(backend), backends
    elif backend is None:
        asked, known = algorithm, {candidate.algorithm for candidate in found}
    else:
        asked, known = f"{backend}/{algorithm}", {each.name for each in found}
    raise UsageError(
        f"{who} asks for {shown(asked)}, which does not exist or cannot run {query}"
        f"{suggest(asked, known)}"
    )


def _with(candidate: Candidate, params: Mapping[str, int | str]) -> Candidate:
    return Candidate(candidate.backend, candidate.algorithm, params)


def _us(microseconds: float) -> str:
    return f"{microseconds:.3g} us"


def _rule_text(hit: Hit) -> str:
    match = hit.rule.match
    beyond = "infinity" if match.hi is None else str(match.hi)
    evidence = hit.rule.evidence
    verdict: str = "no evidence" if evidence is None else evidence.verdict
    if evidence is not None and evidence.quality is not None:
        verdict += f" by {evidence.quality} evidence"
    return f"rule {hit.index}: [{match.lo}, {beyond}) bytes, {verdict}"


def _evidence_lines(hit: Hit) -> tuple[str, ...]:
    evidence: Evidence | None = hit.rule.evidence
    if evidence is None:
        return ("the rule states no evidence",)
    if evidence.verdict == "simulated":
        return tuple(f"{p.nbytes} B: {_us(p.us)}, simulated" for p in evidence.points)
    own = YARDSTICKS[hit.rule.match.device or DEVICES[0]]
    lines = [
        f"{point.nbytes} B: {_us(point.us)} [{point.ci[0]:.3g}, {point.ci[1]:.3g}], "
        f"n={point.n} in {point.launches} launches"
        + (f", {point.disturbed} more disturbed" if point.disturbed else "")
        + (f", {own} {_us(point.native_us)}" if point.native_us else "")
        for point in evidence.points
    ]
    second = evidence.runner_up
    if second is not None:
        lines.append(
            f"runner-up {second.candidate} at {second.nbytes} B: {_us(second.us)} "
            f"[{second.ci[0]:.3g}, {second.ci[1]:.3g}]"
        )
    if evidence.crossover:
        lines.append(evidence.crossover)
    return tuple(lines)
