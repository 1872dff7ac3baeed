# SPDX-License-Identifier: Apache-2.0
"""Who goes on after a change, with which part of the model, and from which step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from commrt.errors import RecoveryError

__all__ = ["Plan", "Said", "choose"]


@dataclass(frozen=True)
class Said:
    """A rank tells this to the others."""

    done: int | None
    """Steps whose state it has whole; None where it has none."""
    part: int | None
    """Its part of the model; None for a newcomer."""
    arrays: tuple[str, ...]
    """Name, type and shape of each array of its model."""


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

    The step is the last one that all ranks completed: the lowest of those that have a
    state. A rank that is ahead returns to it.
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
        part: next(rank for rank in known[part] if said[rank].done == step)
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
        [said[rank].done != step for rank in members],
        step,
        leavers,
    )


def _step_of(said: Sequence[Said], known: Mapping[int, Sequence[int]]) -> int:
    """Return the lowest step whose state some rank of each part has whole."""
    steps = [{said[rank].done for rank in ranks} - {None} for ranks in known.values()]
    found = sorted(step for step in set.intersection(*steps) if step is not None)
    if not found:
        raise RecoveryError(
            "no step's state is whole on the ranks that live: their optimizers were "
            "in the middle of an update; undo='copy' keeps what it needs"
        )
    return found[0]


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
        if mine != theirs:
            found[rank] = f"its model is another: {_difference(mine, theirs)}"
    return found


def _difference(mine: Sequence[str], theirs: Sequence[str]) -> str:
    odd = sorted({*mine} ^ {*theirs})
    lines = [f"{line} ({'here' if line in mine else 'there'})" for line in odd[:4]]
    more = f", and {len(odd) - 4} more" if len(odd) > 4 else ""
    return ", ".join(lines) + more if lines else "its arrays come in another order"


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))
