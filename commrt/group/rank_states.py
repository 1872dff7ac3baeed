# SPDX-License-Identifier: Apache-2.0
"""A table of ranks for the error of a wait: what each one does, and did last.

Ranks of this node are read from memory that they share with this one, and the kernel
says which of their processes are stopped or have ended. Ranks of other nodes are asked:
over gloo's connections, or by datagrams where MPI carries the messages.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol, cast

from commrt import _native
from commrt.vocabulary.operations import RECEIVED, SENT

__all__ = [
    "Asked",
    "Elsewhere",
    "RankState",
    "ask_elsewhere",
    "own_wait",
    "rank_states",
    "table_of",
]

_MOST_IN_TEXT = 8
"""Most lines of a table in a text; ``error.ranks`` has all ranks."""


@dataclass(frozen=True)
class RankState:
    """What a rank does, as far as another one can tell."""

    rank: int
    """Rank of the communicator whose operation did not finish."""
    state: Literal["waiting", "computing", "stopped", "dead", "left", "unknown"] = (
        "unknown"
    )
    """``computing``: its process runs, and is in no wait of commrt's. ``stopped``: by
    a signal or a debugger. ``left``: it has ended by itself, with its part done.
    ``unknown``: it is on another node, and has not answered, or cannot be asked."""
    started: int | None = None
    """Collectives that it has started on the communicator; None: not known."""
    last: str = ""
    """The operation that was the latest of these; empty where it is not known."""
    age_s: float | None = None
    """Seconds since that began; None where it is not known."""
    waits_in: str = ""
    """The operation that it waits in; empty where it waits in none, or only in
    commrt's own."""
    waits_seq: int | None = None
    """Number of that."""
    waits_on: str = ""
    """The communicator of that."""
    waits_for: int | None = None
    """The other rank of a message that it waits for; None: any, or no message."""
    waits_s: float | None = None
    """Seconds since that wait began; None where it does not wait."""

    @property
    def last_seq(self) -> int | None:
        """Number of the latest collective that it has started; None: of none."""
        return self.started - 1 if self.started else None


Elsewhere = Mapping[int, RankState]
"""The states of ranks of other nodes that were asked. Of one that has not answered, the
number of collectives is not known."""
Row = tuple[Any, ...]
"""The engine's words on a rank (``_native.rank_states``)."""


class Asked(Protocol):
    """Carries questions to ranks of other nodes."""

    def ask(self, abouts: Mapping[int, int], tag: int) -> Mapping[int, Row | None]:
        """Return what each peer says that a rank of its node does."""
        ...

    def has_ended(self, peer: int) -> bool:
        """Return whether nothing comes from this peer any more."""
        ...


def rank_states(
    group: _native.Group, here: Collection[int], elsewhere: Elsewhere
) -> tuple[RankState, ...]:
    """Return what each rank of a group does now; ``here``: the ranks of this node."""
    found = [_state_of(row[0], row) for row in _native.rank_states(group)]
    return tuple(
        # One that has died or left does not answer.
        one
        if one.rank in here or one.state != "unknown"
        else elsewhere.get(one.rank, RankState(one.rank))
        for one in found
    )


def ask_elsewhere(
    asked: Asked,
    members: Mapping[int, int],
    tag: int,
    beside: Callable[[int], Sequence[int]],
) -> dict[int, RankState]:
    """Return what ranks of other nodes say that they do.

    Where a rank does not answer, another one of its node says whether it is stopped.

    Args:
        asked: carries the questions.
        members: for each of these ranks of the job, its rank in the group.
        tag: names the group.
        beside: returns the ranks of the job on a rank's node.
    """
    told = asked.ask({at: at for at in members}, tag)
    states = {at: _answered(rank, told[at]) for at, rank in members.items()}
    silent = [at for at in members if told[at] is None]
    abouts = {}
    for at in silent:
        free = (one for one in beside(at) if told.get(one) and one not in abouts)
        for neighbor in free:
            abouts[neighbor] = at
            break
    for neighbor, row in (asked.ask(abouts, tag) if abouts else {}).items():
        at = abouts[neighbor]
        if row:
            states[at] = RankState(members[at], row[1])
    return {
        rank: RankState(rank, "dead") if asked.has_ended(at) else states[at]
        for at, rank in members.items()
    }


def _answered(rank: int, row: Row | None) -> RankState:
    if row is None:
        return RankState(rank)
    # Without a row it has no such communicator yet, or none any more.
    return _state_of(rank, row) if row else RankState(rank, "computing", 0)


def _state_of(rank: int, row: Row) -> RankState:
    _, state, started, last, age_s, wait = row
    if state == "unknown":
        return RankState(rank)
    found = RankState(rank, cast(Any, state), started, last)
    if last:
        found = replace(found, age_s=age_s)
    if wait is None:
        return found
    waits_in, seq, on, peer, seconds = wait
    found = replace(found, waits_s=seconds)
    if not waits_in:
        return found
    other = peer if peer >= 0 else None
    return replace(
        found, waits_in=waits_in, waits_seq=seq, waits_on=on, waits_for=other
    )


def own_wait(
    states: Sequence[RankState], rank: int, what: str, seq: int, on: str, seconds: float
) -> tuple[RankState, ...]:
    """Return the states with that of the rank that raises: it waits.

    ``what``: the operation in words, "recv #0 from rank 1, tag 0".
    """
    peer = re.search(r" (?:to|from) rank (\d+)", what)
    mine = replace(
        states[rank],
        state="waiting",
        waits_in=what.partition(" ")[0],
        waits_seq=seq,
        waits_on=on,
        waits_s=seconds,
        waits_for=None if peer is None else int(peer[1]),
    )
    return (*states[:rank], mine, *states[rank + 1 :])


def table_of(states: Sequence[RankState], name: str, seq: int) -> str:
    """Return a line for each rank; of many ranks, only for those that are in the way.

    Args:
        states: the ranks' states.
        name: the communicator whose operation did not finish.
        seq: the number of that operation.
    """
    shown = [*states]
    if len(shown) > _MOST_IN_TEXT:
        shown = [one for one in states if not _waits_there(one, name, seq)]
    lines = [f"\n  rank {one.rank}: {_line(one, name)}" for one in shown]
    left = len(states) - min(len(lines), _MOST_IN_TEXT)
    if left:
        lines = lines[:_MOST_IN_TEXT]
        lines.append(f"\n  and {left} other ranks: the error's .ranks has all")
    return "".join(lines)


def _waits_there(one: RankState, name: str, seq: int) -> bool:
    waits = one.state == "waiting" and one.waits_seq == seq
    return waits and one.waits_on == name[: len(one.waits_on)]


def _line(one: RankState, name: str) -> str:
    said = [_doing(one, name)]
    if one.waits_in and (one.waits_in, one.waits_seq) == (one.last, one.last_seq):
        return said[0]
    if one.started == 0:
        said.append("it has started no collective here")
    elif one.started is not None and one.last and one.age_s is not None:
        said.append(
            f"its last collective here was {one.last} #{one.last_seq}, which began "
            f"{one.age_s:.1f} s ago"
        )
    elif one.started is not None:
        said.append(f"it has started {one.started} collectives here")
    return "; ".join(said)


def _doing(one: RankState, name: str) -> str:
    """Return what a rank does in words, without what it did before."""
    if one.state == "unknown":
        known = one.started is not None
        return "on another node" + ("" if known else ", not known from here")
    if one.waits_s is None:
        return one.state
    if not one.waits_in:
        return f"{one.state} for {one.waits_s:.1f} s in commrt"
    whom = "any rank" if one.waits_for is None else f"rank {one.waits_for}"
    peer = f" to {whom}" if one.waits_in in SENT else ""
    peer = f" from {whom}" if one.waits_in in RECEIVED else peer
    on = "" if name.startswith(one.waits_on) else f" on {one.waits_on}"
    return f"{one.state} for {one.waits_s:.1f} s in {one.waits_in} " + (
        f"#{one.waits_seq}{peer}{on}"
    )
