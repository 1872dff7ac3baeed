# SPDX-License-Identifier: Apache-2.0
"""Match of rules with facts: exact ones first, then any, then the nearest rank count.

The order is total, so every rank finds the same rule from the same facts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from commrt.select.facts import CommFacts, Query
from commrt.select.rules import Match, Rule

__all__ = ["Hit", "best_rule"]

# On one machine the ranks of one launch lie near and of the next one far; a table that
# saw only one of the two still knows more than the model. Nothing else stands in:
# oversubscribed cores and networks change which algorithm wins.
_STANDS_IN = {"near": "far", "far": "near"}


@dataclass(frozen=True)
class Hit:
    """A rule that applies."""

    index: int
    """Its place in the table."""
    rule: Rule
    """The rule."""
    extrapolated: str | None
    """Difference between the measured situation and this one; None if there is none."""


def best_rule(rules: Sequence[Rule], facts: CommFacts, query: Query) -> Hit | None:
    """Return the rule with the closest match, None if nothing comparable was seen."""
    best: tuple[tuple[float, ...], Hit] | None = None
    for index, rule in enumerate(rules):
        match = rule.match
        if rule.op != query.coll or not _covers(match, query.nbytes):
            continue
        distance = _distance(match, facts, query)
        if distance is not None and (best is None or distance < best[0]):
            best = distance, Hit(index, rule, _difference(match, facts))
    return None if best is None else best[1]


def _covers(match: Match, nbytes: int) -> bool:
    return match.lo <= nbytes and (match.hi is None or nbytes < match.hi)


def _distance(match: Match, facts: CommFacts, query: Query) -> tuple[float, ...] | None:
    """Return the distance of the rule's facts from these, most important first.

    In each place 0 is equal, 0.5 is any, more is a stand-in; None: not comparable.
    """
    places = (
        _ranks(match, facts),
        _place(match.link_class, facts.link_class),
        _place(match.device, query.device),
        _place(match.dtype, query.dtype),
        _place(match.redop, query.op),
        _nodes(match, facts),
        _ppn(match, facts),
        _network(match, facts),
    )
    if any(math.isinf(place) for place in places):
        return None
    return places


def _ranks(match: Match, facts: CommFacts) -> float:
    if match.ranks is None or match.ranks == facts.size:
        return _place(match.ranks, facts.size)
    if match.ranks > facts.size or match.ranks < 2:
        return math.inf
    return 1 + math.log2(facts.size / match.ranks)


def _place(wanted: int | str | None, found: int | str | None) -> float:
    if wanted is None:
        return 0.5
    if wanted == found:
        return 0.0
    if isinstance(wanted, str) and _STANDS_IN.get(wanted) == found:
        return 1.0
    return math.inf


def _nodes(match: Match, facts: CommFacts) -> float:
    """One node and several are different worlds; among several, fewer stand in."""
    place = _place(match.nodes, facts.nodes)
    wanted = match.nodes or facts.nodes
    if math.isinf(place) and _fewer_ranks(match, facts) and 1 < wanted < facts.nodes:
        return 1 + math.log2(facts.nodes / wanted)
    return place


def _ppn(match: Match, facts: CommFacts) -> float:
    place = _place(match.ppn, facts.ppn)
    if math.isinf(place) and _fewer_ranks(match, facts) and match.ppn is not None:
        return 1 + abs(math.log2(facts.ppn / match.ppn))
    return place


def _network(match: Match, facts: CommFacts) -> float:
    """Another library or another network is a different world."""
    if match.network is not None and facts.nodes == 1:
        return math.inf
    if match.network is None or facts.network is None:
        return 0.5
    return 0.5 * match.network.distance(facts.network)


def _fewer_ranks(match: Match, facts: CommFacts) -> bool:
    return match.ranks is not None and match.ranks < facts.size


def _difference(match: Match, facts: CommFacts) -> str | None:
    differences = []
    if _fewer_ranks(match, facts):
        differences.append(f"measured with {match.ranks} ranks, here are {facts.size}")
    if match.link_class not in (None, facts.link_class):
        differences.append(
            f"measured on {match.link_class} links, here they are {facts.link_class}"
        )
    return "; ".join(differences) or None
