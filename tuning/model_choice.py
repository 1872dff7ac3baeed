# SPDX-License-Identifier: Apache-2.0
"""The choice without a table, for every size that was measured.

The tuner's table replaces it, so it is what a measurement has to beat.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial

from commrt import algorithms
from commrt.planning.prediction import floor_us, predicted_us
from commrt.select.facts import LINK_CLASSES, Candidate, CommFacts, Query
from commrt.select.model import cheapest
from commrt.tuning.samples import Group, Recording
from commrt.vocabulary.operations import COLLECTIVES, operation

__all__ = ["Unasked", "choice_without_table"]

Unasked = Callable[[float], "Candidate | None"]
"""What runs at a size where no table says anything; None where that is not known."""


def choice_without_table(recording: Recording, group: Group, op: str) -> Unasked:
    """Return the model's choice by size, for one operation of a group of launches.

    That is what the ranks said themselves. Recordings by an older commrt do not have
    it: there the model is asked again, about the schedules that were measured.
    """
    said = {
        nbytes: candidate
        for (ranks, links, each, nbytes), candidate in recording.unasked.items()
        if (ranks, links, each) == (group.ranks, group.link_class, op)
    }
    if said:
        sizes = sorted(said)

        def known(nbytes: float) -> Candidate | None:
            return said[min(sizes, key=lambda size: abs(size - nbytes))]

        return known
    facts = _facts(recording, group)
    measured = recording.orders.get(op, []) if op in COLLECTIVES else []
    able = [one for one in measured if _runs_unasked(one, op)]
    if facts is None or not able:
        return lambda nbytes: None
    return partial(_modelled, facts, op, tuple(able))


def _runs_unasked(candidate: Candidate, op: str) -> bool:
    """Return whether a call may have a candidate without asking, on one node."""
    offered = {"k", "shots"}
    return (
        candidate.backend in ("shm", "mpi")
        and candidate.algorithm in algorithms.names(op)
        and not candidate.params.keys() - offered
    )


def _facts(recording: Recording, group: Group) -> CommFacts | None:
    """Return the facts of a group's launches; None where the model is not asked."""
    if group.device != "host" or group.nodes > 1:
        return None
    if group.link_class not in LINK_CLASSES:
        return None
    for launch in recording.launches.values():
        if launch.group._replace(link_class=group.link_class) == group:
            return CommFacts(
                group.ranks,
                group.nodes,
                group.ppn,
                launch.facts.cores,
                group.link_class,
            )
    return None


@lru_cache(maxsize=4096)
def _modelled(
    facts: CommFacts, op: str, able: tuple[Candidate, ...], nbytes: float
) -> Candidate:
    query = Query(op, round(nbytes), root=0 if operation(op).has_root else None)
    return cheapest(
        able, partial(predicted_us, facts, query), partial(floor_us, facts, query)
    )[0]
