# SPDX-License-Identifier: Apache-2.0
"""The candidates that a communicator's calls may run, and the choice among them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from commrt.arrays.host import numpy_type
from commrt.backends.base import Attached
from commrt.backends.offers import AttachedOffers
from commrt.calls import arguments
from commrt.errors import UsageError, shown, suggest
from commrt.group.group import Group
from commrt.planning import host_plans
from commrt.planning.ordering import wanted_order
from commrt.planning.spec import PlanSpec
from commrt.select.facts import Candidate, Query, without_compression
from commrt.select.policy import Explanation, Policy, Span
from commrt.select.schema import DEVICES
from commrt.select.table import Table
from commrt.select.wishes import Wishes
from commrt.vocabulary.checks import check_flag
from commrt.vocabulary.operations import rule_nbytes
from commrt.vocabulary.reductions import BoundReduction, Reduction

if TYPE_CHECKING:
    from commrt.calls.arguments import Bound, Call

__all__ = ["Selection"]


_MOST_SPANS = 256
"""Spans that a communicator keeps, of some 400 bytes each."""


class Choices:
    """Keeps what the policy chose, with the lengths for which that holds.

    Asking the model takes longer than all the rest of making a plan, and programs may
    have a new length in every call.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._kept: dict[Any, list[Span]] = {}
        self._num_spans = 0

    def forget(self) -> None:
        """Ask again from here on: what can run has changed."""
        self._kept.clear()
        self._num_spans = 0

    def of(self, query: Query, call: Call) -> Span:
        """Return what runs ``query``, for a call's wishes."""
        params = tuple(sorted((call.params or {}).items()))
        key = replace(query, nbytes=0), call.backend, call.algorithm, params
        spans = self._kept.pop(key, [])
        self._kept[key] = spans  # the last used is the last
        for span in spans:
            if span.covers(query.nbytes):
                return span
        wishes = {"backend": call.backend, "algorithm": call.algorithm}
        found = self._policy.span(query, **wishes, params=call.params)
        spans.append(found)
        self._num_spans += 1
        while self._num_spans > _MOST_SPANS:
            oldest = next(iter(self._kept))
            self._num_spans -= len(self._kept.pop(oldest))
        return found


class Selection:
    """Chooses what runs a communicator's calls, among what its backends offer.

    Args:
        group: the ranks.
        attached: the group's backends, by name.
        table: the selection table in force.
        wishes: what is asked for beforehand; the first that speaks of a query holds.
    """

    def __init__(
        self,
        group: Group,
        attached: Mapping[str, Attached],
        table: Table | None,
        wishes: Sequence[Wishes],
    ) -> None:
        self._group = group
        self.offers = AttachedOffers(attached)
        self.policy = Policy(group.facts, table, self.offers, wishes)
        self.choices = Choices(self.policy)
        self.remarks: list[Callable[[Explanation, bool], Explanation]] = []
        """Services' remarks on explanations; told if the reduction is a user's."""

    # -- for users ---------------------------------------------------------------

    def candidates(
        self,
        coll: str,
        nbytes: int,
        *,
        dtype: str = "float32",
        op: str | Reduction = "sum",
        distinct: bool = False,
        device: str = "host",
    ) -> list[Candidate]:
        """Return everything that can run ``coll`` here, simplest first.

        ``nbytes`` are the bytes that select a rule (``operations.rule_nbytes``). With
        ``distinct`` a candidate that runs the very program of an earlier one is left
        out: on two ranks a ring and a direct exchange are one and the same.
        """
        distinct = check_flag("candidates", "distinct", distinct)
        query = self.question("candidates", coll, nbytes, dtype, op, 0, device)
        found = self.policy.candidates(query)
        if not distinct:
            return found
        return host_plans.distinct(coll, found, self._group.facts.layout)

    def explain(
        self,
        coll: str,
        nbytes: int,
        *,
        dtype: str = "float32",
        op: str | Reduction = "sum",
        root: int = 0,
        device: str = "host",
        backend: str | None = None,
        algorithm: str | None = None,
        params: Mapping[str, int | str] | None = None,
    ) -> Explanation:
        """Return what a call would run, why, and what was rejected; print the result.

        ``nbytes`` are the bytes that select a rule (``operations.rule_nbytes``);
        ``device`` is ``cuda`` for arrays on devices. ``backend``, ``algorithm`` and
        ``params`` are what the call itself asks for.
        """
        query = self.question("explain", coll, nbytes, dtype, op, root, device)
        backend, algorithm, params = arguments.check_wishes(
            "explain", backend, algorithm, params
        )
        found = self.policy.explain(
            query, backend=backend, algorithm=algorithm, params=params
        )
        for remark in self.remarks:
            found = remark(found, isinstance(op, Reduction))
        return found

    # -- for calls ---------------------------------------------------------------

    def question(
        self,
        what: str,
        coll: str,
        nbytes: int,
        dtype: str,
        op: str | Reduction,
        root: int,
        device: str = "host",
    ) -> Query:
        """Return the query that arguments of ``what`` describe, checked."""
        user = op if isinstance(op, Reduction) else None
        name = "sum" if user is not None else op
        query = arguments.check_question(
            what, coll, nbytes, dtype, name, root, self._group.size
        )
        if not isinstance(device, str) or device not in DEVICES:
            raise UsageError(
                f"{what}: device={shown(device)}{suggest(device, DEVICES)}"
            )
        query = replace(query, device=device)
        if query.op is None:
            return query
        order = wanted_order(self._group.deterministic, query.op, user, query.dtype)
        label = query.op if user is None else user.label
        return replace(query, op=label, order=order)

    def choose(self, call: Call, bound: Bound) -> Candidate:
        """Return what runs a call, without what a rule compresses it to."""
        return self.span(call, bound).candidate

    def span(self, call: Call, bound: Bound) -> Span:
        """Return what runs a call, and the rule's bytes for which that holds."""
        query, span = self.asked(call, bound)
        if call.spec.compresses:
            span = replace(span, candidate=without_compression(span.candidate))
        candidate = span.candidate
        # Parameters that the call gives make it another program.
        reason = self.offers.why_refused(query, candidate)
        if reason is not None:
            raise UsageError(f"{candidate} must not run {query}: {reason}")
        return span

    def asked(self, call: Call, bound: Bound) -> tuple[Query, Span]:
        """Return a call as a query, and the policy's answer to it."""
        spec = call.spec
        nbytes = bound.num_elements * bound.dtype.itemsize
        records = bound.dtype.kind == "bytes"
        query = Query(
            coll=spec.name,
            nbytes=rule_nbytes(spec.name, nbytes, self._group.size),
            dtype="uint8" if records else bound.dtype.name,
            device=_memory(call, bound),
            op=call.op,
            root=call.root if spec.has_root else None,
        )
        if spec.reduces:
            name = call.reduction.name.lower()
            order = wanted_order(
                self._group.deterministic, name, call.user, query.dtype
            )
            query = replace(query, order=order)
        return query, self.choices.of(query, call)

    def expected_us(self, call: Call, bound: Bound) -> float:
        """Return the microseconds that a call is expected to take; local."""
        query, span = self.asked(call, bound)
        return self.policy.expected_us(query, span.candidate)

    def planned(self, call: Call, bound: Bound) -> tuple[Any, Candidate]:
        """Return the plan of a call, made anew by the backend that is to run it.

        With it goes the choice that it is of.
        """
        spec = self.spec(call, bound, self.choose(call, bound))
        return self.offers.of(spec.candidate).plan(spec), spec.candidate

    def spec(self, call: Call, bound: Bound, candidate: Candidate) -> PlanSpec:
        """Return a call as backends are told of it."""
        user = None
        if call.user is not None and bound.x is not None:
            user = BoundReduction(call.user, numpy_type(bound.x))
        return PlanSpec(
            op=call.spec,
            num_elements=bound.num_elements,
            dtype=bound.dtype,
            reduction=call.reduction,
            root=call.root,
            candidate=candidate,
            in_elements=bound.in_elements,
            out_elements=bound.out_elements,
            has_output=bound.result is not None,
            counts=bound.counts,
            factor=call.factor,
            user=user,
            device=_memory(call, bound),
        )


def _memory(call: Call, bound: Bound) -> str:
    """Return the kind of memory that a call's arrays are in."""
    return "host" if bound.on is None and call.stream is None else "cuda"
