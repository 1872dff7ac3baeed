# SPDX-License-Identifier: Apache-2.0
"""A table of ranks for the error of a wait: what each one does, and did last.

Ranks of this node are read from memory that they share with this one, and the kernel
says which of their processes are stopped or have ended. Ranks of other nodes are asked
how many operations they have started, where gloo carries the messages; of others
nothing is known.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

from commrt import _native
from commrt.vocabulary.operations import RECEIVED, SENT

__all__ = ["Elsewhere", "RankState", "own_wait", "rank_states", "table_of"]

Elsewhere = Mapping[int, int | Literal["ended", "silent"]]
"""For ranks of other nodes that were asked: collectives that they have started, or why
that is not known."""
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
    ``unknown``: it is on another node, and has not answered."""
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


def rank_states(
    group: _native.Group, here: Collection[int], elsewhere: Elsewhere
) -> tuple[RankState, ...]:
    """Return what each rank of a group does now; ``here``: the ranks of this node."""
    found = _native.rank_states(group)
    return tuple(
        _of_node(row) if row[0] in here else _of_other_node(row, elsewhere.get(row[0]))
        for row in found
    )


def _of_node(row: Any) -> RankState:
    rank, state, started, last, age_s, wait = row
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


def _of_other_node(
    row: Any, said: int | Literal["ended", "silent"] | None
) -> RankState:
    rank, state = row[:2]
    started = said if isinstance(said, int) else None
    return RankState(rank, "dead" if said == "ended" else state, started)


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
