# SPDX-License-Identifier: Apache-2.0
"""Who goes on after a change, with which part of the model, and from which step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from commrt.elastic.copies import difference
from commrt.errors import RecoveryError

__all__ = ["Plan", "Said", "choose"]


@dataclass(frozen=True)
class Said:
    """A rank tells this to the others."""

    done: int | None
    """Steps that it has completed; None for a newcomer."""
    steps: tuple[int, ...]
    """At the begin of which steps it can be."""
    part: int | None
    """Its part of the model; None for a newcomer."""
    arrays: tuple[str, ...] | None
    """Name, type and shape of each array of its model; None: it is made later."""


@dataclass(frozen=True)
class Plan:
    """The change, which each rank computes from what all of them said."""

    members: list[int]
    """Ranks that go on, in their new order: replica by replica."""
    parts: Mapping[int, int]
    """Their parts of the model, by their ranks now."""
    sources: list[int]
    """For each member, the member that has the state of its part."""
    needs: list[bool]
    """For each member, whether it lacks the state."""
    step: int
    """Steps that are completed then."""
    leavers: Mapping[int, str]
    """Ranks that do not go on, and why."""


def choose(said: Sequence[Said], replica_size: int) -> Plan:
    """Return who goes on; raise RecoveryError, on all alike, where nobody can.

    They go on from the last step that all of them completed. A rank that is ahead
    returns to it.
    """
    parts = range(replica_size)
    known: dict[int, list[int]] = {part: [] for part in parts}
    new: list[int] = []
    for rank, one in enumerate(said):
        if one.part is None:
            new.append(rank)
        else:
            known[one.part].append(rank)
    if lost := [part for part in parts if not known[part]]:
        raise RecoveryError(
            f"no rank that lives has part {_listed(lost)} of {replica_size} of the "
            f"model: at least one whole replica must remain"
        )
    step = _step_of(said, known)
    first = {
        part: next(rank for rank in known[part] if step in said[rank].steps)
        for part in parts
    }
    leavers = _strangers(said, known, new, first)
    known = {part: [r for r in known[part] if r not in leavers] for part in parts}
    new = [rank for rank in new if rank not in leavers]
    replicas = (sum(map(len, known.values())) + len(new)) // replica_size
    while sum(max(0, replicas - len(known[part])) for part in parts) > len(new):
        replicas -= 1
    for part in parts:
        while len(known[part]) < replicas:
            known[part].append(new.pop(0))
        # Whoever has the state stays.
        ordered = sorted(known[part], key=lambda rank: (rank != first[part], rank))
        for rank in ordered[replicas:]:
            leavers[rank] = f"its replica lacks other ranks, and {replicas} go on"
        known[part] = sorted(ordered[:replicas])
    for rank in new:
        leavers[rank] = f"{replica_size} ranks make a replica, and it is one too many"
    members = [known[part][number] for number in range(replicas) for part in parts]
    owner = {rank: part for part in parts for rank in known[part]}
    return Plan(
        members,
        owner,
        [members.index(first[owner[rank]]) for rank in members],
        [step not in said[rank].steps for rank in members],
        step,
        leavers,
    )


def _step_of(said: Sequence[Said], known: Mapping[int, Sequence[int]]) -> int:
    """Return the step to go on from, whose begin some rank of each part has whole."""
    steps = [
        {s for rank in ranks for s in said[rank].steps} for ranks in known.values()
    ]
    found = set.intersection(*steps)
    if not found:
        raise RecoveryError(
            "no step's state is whole on the ranks that live: their optimizers have "
            "begun or made an update that others have not; undo='copy' keeps what it "
            "takes to return"
        )
    # A rank has its local state only of steps that it completed.
    done = [one.done for one in said if one.done is not None]
    of_all = [step for step in found if step <= min(done)]
    return max(of_all) if of_all else min(found)


def _strangers(
    said: Sequence[Said],
    known: Mapping[int, Sequence[int]],
    new: Sequence[int],
    first: Mapping[int, int],
) -> dict[int, str]:
    """Return the ranks whose models differ from those that they would get."""
    found = {}
    for rank in [*new, *(rank for ranks in known.values() for rank in ranks)]:
        part = said[rank].part
        theirs = said[first[0 if part is None else part]].arrays
        mine = said[rank].arrays
        if mine is not None and theirs is not None and mine != theirs:
            found[rank] = f"its model is another: {difference(mine, theirs)}"
    return found


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))
