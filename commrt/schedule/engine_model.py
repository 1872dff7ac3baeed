# SPDX-License-Identifier: Apache-2.0
"""The engine's rules, in Python: in which order lowered programs may run.

An instruction of a fragment runs when

- it lies in the window: less than twice the program's length beyond the first
  unfinished one, counted over all fragments in order;
- its dependencies are done and its messages have arrived;
- its messages' lines are free: message ``i`` of a pair has line ``i mod L``, free once
  message ``i - L`` is acknowledged (ids count over fragments);
- its payload slot is free: publish ``p`` needs publish ``p - Q`` acknowledged by all
  its receivers, ``Q`` being the publishes of one fragment.

A message is acknowledged when the instruction that takes it is done. Running one
instruction never disables another, so one maximal run decides for all.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence

from commrt.errors import ScheduleError
from commrt.schedule.lower import MESSAGE, Entry, Lowered

__all__ = ["LINES", "EngineModel"]

LINES = 64
"""Message lines per ordered pair of ranks."""
_NAMED = 3
"""Number of reasons that the message about a deadlock names."""

Fact = tuple[str, int, int, int]
"""("done", rank, position, 0), ("sent" or "acked", from, to, message id)."""
Node = tuple[int, int]
"""rank, position; position = fragment * instructions + instruction."""


class EngineModel:
    """One run of all ranks. Iterate over (rank, fragment, instruction) as they run.

    Args:
        lowered: the programs of all ranks.
        fragments: how many fragments they run.
        lines: message lines per ordered pair of ranks.
        has_lines: whether a rank's messages to a peer use lines and slots, as they do
            in shared memory; others are buffered without a bound.
    """

    def __init__(
        self,
        lowered: Sequence[Lowered],
        fragments: int,
        lines: int = LINES,
        has_lines: Callable[[int, int], bool] = lambda rank, peer: True,
    ) -> None:
        self.lowered = lowered
        self.fragments = fragments
        self.lines = lines
        self.has_lines = has_lines
        self._entries = [
            [
                (one.inputs_of(i), one.outputs_of(i), one.deps_of(i))
                for i in range(len(one))
            ]
            for one in lowered
        ]

    def __iter__(self) -> Iterator[tuple[int, int, int]]:
        self._facts: set[Fact] = set()
        self._waiters: dict[Fact, list[Node]] = {}
        self._unmet: dict[Node, int] = {}
        self._ready: list[list[int]] = [[] for _ in self.lowered]
        self._first = [0] * len(self.lowered)
        for rank, own in enumerate(self._entries):
            for place in range(len(own) * self.fragments):
                self._enlist((rank, place))
        active = list(range(len(self.lowered)))
        while active:
            rank = active.pop()
            while (position := self._next(rank)) is not None:
                fragment, index = divmod(position, len(self._entries[rank]))
                yield rank, fragment, index
                for fact in self._effects(rank, fragment, index):
                    active.extend(self._establish(fact))
        self._check_finished()

    def _enlist(self, node: Node) -> None:
        rank, position = node
        fragment, index = divmod(position, len(self._entries[rank]))
        needs = self._needs(rank, fragment, index)
        self._unmet[node] = len(needs)
        for fact in needs:
            self._waiters.setdefault(fact, []).append(node)
        if not needs:
            heapq.heappush(self._ready[rank], position)

    def _next(self, rank: int) -> int | None:
        ready = self._ready[rank]
        window = 2 * len(self._entries[rank])
        if not ready or ready[0] >= self._first[rank] + window:
            return None
        return heapq.heappop(ready)

    def _needs(self, rank: int, fragment: int, index: int) -> set[Fact]:
        inputs, outputs, deps = self._entries[rank][index]
        base = fragment * len(self._entries[rank])
        needs: set[Fact] = {("done", rank, base + dep, 0) for dep in deps}
        for peer, k in _messages(inputs):
            message = fragment * self.lowered[rank].messages_in[peer] + k
            needs.add(("sent", peer, rank, message))
        for peer, k in _messages(outputs):
            if not self.has_lines(rank, peer):
                continue
            count = self.lowered[rank].messages_out[peer]
            message = fragment * count + k
            if message >= self.lines:
                needs.add(("acked", rank, peer, message - self.lines))
            if fragment:
                # Slot p - Q: the same publish of the fragment before.
                needs.add(("acked", rank, peer, message - count))
        return needs

    def _effects(self, rank: int, fragment: int, index: int) -> list[Fact]:
        inputs, outputs, _ = self._entries[rank][index]
        one = self.lowered[rank]
        position = fragment * len(one) + index
        facts: list[Fact] = [("done", rank, position, 0)]
        for peer, k in _messages(outputs):
            facts.append(("sent", rank, peer, fragment * one.messages_out[peer] + k))
        for peer, k in _messages(inputs):
            facts.append(("acked", peer, rank, fragment * one.messages_in[peer] + k))
        return facts

    def _establish(self, fact: Fact) -> set[int]:
        """Record a fact; return the ranks that may go on because of it."""
        self._facts.add(fact)
        changed = set()
        for node in self._waiters.pop(fact, ()):
            self._unmet[node] -= 1
            if not self._unmet[node]:
                heapq.heappush(self._ready[node[0]], node[1])
                changed.add(node[0])
        if fact[0] == "done":
            rank = fact[1]
            while ("done", rank, self._first[rank], 0) in self._facts:
                self._first[rank] += 1
                changed.add(rank)
        return changed

    def _check_finished(self) -> None:
        for rank, own in enumerate(self._entries):
            if self._first[rank] == len(own) * self.fragments:
                continue
            fragment, index = divmod(self._first[rank], len(own))
            missing = sorted(self._needs(rank, fragment, index) - self._facts)
            named = ", ".join(map(_describe, missing[:_NAMED]))
            more = len(missing) - _NAMED
            raise ScheduleError(
                f"lowered program deadlocks: rank {rank} fragment {fragment} "
                f"instruction {index} waits for {named}"
                f"{f' and {more} more' if more > 0 else ''}, which never come"
            )


def _messages(entries: Sequence[Entry]) -> list[tuple[int, int]]:
    return [entry[1:3] for entry in entries if entry[0] == MESSAGE]


def _describe(fact: Fact) -> str:
    kind, a, b, c = fact
    if kind == "done":
        return f"its own instruction at position {b}"
    if kind == "sent":
        return f"message {c} from rank {a}"
    return f"rank {b} to acknowledge message {c}"
