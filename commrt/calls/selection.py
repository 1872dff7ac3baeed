# SPDX-License-Identifier: Apache-2.0
"""The candidates that a communicator's calls may run, and the choice among them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from commrt import backends
from commrt.arrays.host import numpy_type
from commrt.backends.base import Attached
from commrt.calls import arguments
from commrt.errors import UsageError, suggest
from commrt.group.group import Group
from commrt.planning import host_plans
from commrt.planning.ordering import wanted_order
from commrt.planning.spec import PlanSpec
from commrt.select.facts import Candidate, Query, without_compression
from commrt.select.policy import Explanation, Offers, Policy, Rejected
from commrt.select.schema import DEVICES
from commrt.select.table import Table
from commrt.select.wishes import Wish, Wishes
from commrt.vocabulary.dtypes import is_known
from commrt.vocabulary.operations import rule_nbytes
from commrt.vocabulary.reductions import BoundReduction, Reduction
from commrt.vocabulary.wire_formats import COMPRESS

if TYPE_CHECKING:
    from commrt.calls.arguments import Bound, Call

__all__ = ["Selection"]


_MOST_KEPT = 1024


class Choices:
    """Keeps what the policy chose for vector operations and for compressed calls.

    Programs may have new counts in every call. An alltoallv's query is the same for all
    of them, and asking the model takes longer than all the rest of making a plan. The
    dispatcher knows no plan of what is compressed, so that is asked every time.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._kept: dict[Any, Candidate] = {}

    def forget(self) -> None:
        """Ask again from here on: what can run has changed."""
        self._kept.clear()

    def of(self, query: Query, call: Call) -> Candidate:
        """Return what runs ``query``, for a call's wishes."""
        params = tuple(sorted((call.params or {}).items()))
        key = query, call.backend, call.algorithm, params
        found = self._kept.get(key)
        if found is None:
            wishes = {"backend": call.backend, "algorithm": call.algorithm}
            choice = self._policy.choose(query, **wishes, params=call.params)
            found = choice.candidate
            if call.spec.count_arguments or COMPRESS in found.params:
                if len(self._kept) >= _MOST_KEPT:
                    self._kept.clear()
                self._kept[key] = found
        return found


class Selection(Offers):
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
        self._attached = attached
        self._before = {
            name: _more_preferred(attached, one) for name, one in attached.items()
        }
        """By name, the backends that may claim a query before this one runs it."""
        self.policy = Policy(group.facts, table, self, wishes)
        self.choices = Choices(self.policy)

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
        """Return what a call would run, why, and what was rejected; print it.

        ``nbytes`` are the bytes that select a rule (``operations.rule_nbytes``);
        ``device`` is ``cuda`` for arrays on devices. ``backend``, ``algorithm`` and
        ``params`` are what the call itself asks for.
        """
        query = self.question("explain", coll, nbytes, dtype, op, root, device)
        return self.policy.explain(
            query, backend=backend, algorithm=algorithm, params=params
        )

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
        if device not in DEVICES:
            raise UsageError(f"{what}: device={device!r}{suggest(device, DEVICES)}")
        query = replace(query, device=device)
        if query.op is None:
            return query
        order = wanted_order(self._group.deterministic, query.op, user, query.dtype)
        label = query.op if user is None else user.label
        return replace(query, op=label, order=order)

    def choose(self, call: Call, bound: Bound) -> Candidate:
        """Return what runs a call, without what a rule compresses it to."""
        query, candidate = self.asked(call, bound)
        if call.spec.compresses:
            candidate = without_compression(candidate)
        # Parameters that the call gives make it another program.
        reason = self._why_refused(query, candidate)
        if reason is not None:
            raise UsageError(f"{candidate} must not run {query}: {reason}")
        return candidate

    def asked(self, call: Call, bound: Bound) -> tuple[Query, Candidate]:
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

    def planned(self, call: Call, bound: Bound) -> Any:
        """Return the plan of a call, made anew by the backend that is to run it."""
        candidate = self.choose(call, bound)
        user = None
        if call.user is not None and bound.x is not None:
            user = BoundReduction(call.user, numpy_type(bound.x))
        return self._of(candidate).plan(
            PlanSpec(
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
        )

    # -- for the policy ----------------------------------------------------------

    def runnable(self, query: Query) -> list[Candidate]:
        """Return the candidates that can run ``query`` here, simplest first."""
        found = self._found(query)
        return [each for each in found if self._why_refused(query, each) is None]

    def _found(self, query: Query) -> list[Candidate]:
        """Return the backends' candidates, whatever order they combine in."""
        found: list[Candidate] = []
        for attached in self._attached.values():
            found.extend(attached.candidates(query))
        return found

    def _of(self, candidate: Candidate) -> Attached:
        return self._attached[candidate.backend]

    def _why_refused(self, query: Query, candidate: Candidate) -> str | None:
        return self._of(candidate).why_refused(query, candidate)

    def predicted_us(self, query: Query, candidate: Candidate) -> float:
        """Return the predicted microseconds of a candidate; ``inf`` means never."""
        return self._of(candidate).predicted_us(query, candidate)

    def floor_us(self, query: Query, candidate: Candidate) -> float:
        """Return what ``predicted_us`` is at least, which is quicker to find."""
        return self._of(candidate).floor_us(query, candidate)

    def allows(self, query: Query, candidate: Candidate) -> bool:
        """Return whether a candidate may have parameters beyond those offered."""
        return self._of(candidate).allows(query, candidate)

    def only_on_request(self, query: Query, candidate: Candidate) -> str | None:
        """Return why a candidate runs only on request; None where it needs none."""
        for name in self._before[candidate.backend]:
            first = self._attached[name].claims(query)
            if first is not None:
                return f"{first} unless a table, COMMRT_ALGORITHM or the call says so"
        return self._of(candidate).only_on_request(query, candidate)

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
        if query.order == "any" and not by_user:
            return refused
        told = {str(each.candidate) for each in refused}
        allowed = {str(each) for each in self.runnable(query)}
        plain = replace(query, order="any", op="sum" if by_user else query.op)
        for each in self._found(plain):
            if str(each) not in allowed and str(each) not in told:
                reason = self._why_refused(query, each) or "knows no reduction of yours"
                refused.append(Rejected(each, reason))
        return refused


def _memory(call: Call, bound: Bound) -> str:
    """Return the kind of memory that a call's arrays are in."""
    return "host" if bound.on is None and call.stream is None else "cuda"


def _more_preferred(attached: Mapping[str, Attached], one: Attached) -> list[str]:
    """Return the names of the backends that have a larger precedence, those first."""
    ahead = [each for each in attached if attached[each].precedence > one.precedence]
    return sorted(ahead, key=lambda each: -attached[each].precedence)
