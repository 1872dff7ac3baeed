# SPDX-License-Identifier: Apache-2.0
"""Run the steps of all ranks in an order that a rendezvous transport allows.

A step is *posted* when its dependencies are done. A message is done, at both ends, when
both ends are posted; a local step when it is posted. That is the strictest transport: a
schedule that ends here ends on every other one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from commrt.errors import ScheduleError
from commrt.schedule.ir import Op, RankProgram, Step

__all__ = ["Event", "Execution", "followers_of", "match"]

Place = tuple[int, int]
"""rank, step."""
Event = tuple[Place, Place | None]
"""A receive and its send, or a local step and None."""


def match(programs: Sequence[RankProgram]) -> dict[Place, Place]:
    """Return the other end of each message: the k-th send meets the k-th receive."""
    sends: dict[tuple[int, int], list[int]] = {}
    receives: dict[tuple[int, int], list[int]] = {}
    for program in programs:
        for index, step in enumerate(program.steps):
            if step.op is Op.SEND:
                sends.setdefault((program.rank, step.peer), []).append(index)
            elif step.peer >= 0:
                receives.setdefault((step.peer, program.rank), []).append(index)
    partners: dict[Place, Place] = {}
    for pair in sends.keys() | receives.keys():
        src, dst = pair
        sent, received = sends.get(pair, []), receives.get(pair, [])
        if len(sent) != len(received):
            longer, rank = (sent, src) if len(sent) > len(received) else (received, dst)
            extra = longer[min(len(sent), len(received))]
            raise ScheduleError(
                f"rank {src} sends {len(sent)} messages to rank {dst}, which receives "
                f"{len(received)}: {programs[rank].describe_step(extra)} has no "
                f"partner; every send needs one receive"
            )
        for i, j in zip(sent, received, strict=True):
            partners[src, i] = (dst, j)
            partners[dst, j] = (src, i)
    return partners


@dataclass
class Execution:
    """One complete run. Iterate to get its events in order; raises on deadlock.

    Attributes:
        num_steps: messages on the longest path, once the run has ended.
    """

    programs: Sequence[RankProgram]
    partners: dict[Place, Place]
    num_steps: int = 0

    def __iter__(self) -> Iterator[Event]:
        steps = self._steps = [list(program.steps) for program in self.programs]
        self._waiting = [[len(step.deps) for step in own] for own in steps]
        self._followers = [followers_of(own) for own in steps]
        self._level = [[0] * len(own) for own in steps]
        self._posted: set[Place] = set()
        self._ready = [
            (rank, index)
            for rank, own in enumerate(self._waiting)
            for index, count in enumerate(own)
            if not count
        ]
        self._ready.reverse()
        left = sum(map(len, steps))
        while self._ready:
            place = self._ready.pop()
            other = self.partners.get(place)
            if other is None:
                yield place, None
                self._finish(place)
                left -= 1
                continue
            self._posted.add(place)
            if other in self._posted:
                sends = steps[place[0]][place[1]].op is Op.SEND
                yield (other, place) if sends else (place, other)
                self._finish_message(place, other)
                left -= 2
        if left:
            raise ScheduleError(self._explain_deadlock())

    def _finish_message(self, place: Place, other: Place) -> None:
        # A message is one step after its send, however early its receive was posted.
        sends = self._steps[place[0]][place[1]].op is Op.SEND
        src, dst = (place, other) if sends else (other, place)
        arrival = self._level[src[0]][src[1]] + 1
        level = self._level[dst[0]]
        level[dst[1]] = max(level[dst[1]], arrival)
        self.num_steps = max(self.num_steps, arrival)
        self._finish(src)
        self._finish(dst)

    def _finish(self, place: Place) -> None:
        rank, index = place
        level = self._level[rank]
        waiting = self._waiting[rank]
        self._posted.add(place)
        for follower in self._followers[rank][index]:
            level[follower] = max(level[follower], level[index])
            waiting[follower] -= 1
            if not waiting[follower]:
                self._ready.append((rank, follower))
        waiting[index] = -1

    def _explain_deadlock(self) -> str:
        """Follow who waits for whom from a stuck step until it comes round."""
        place = next(
            (rank, index)
            for rank, own in enumerate(self._waiting)
            for index, count in enumerate(own)
            if count >= 0
        )
        seen: list[Place] = []
        while place not in seen:
            seen.append(place)
            place = self._waits_for(place)
        cycle = seen[seen.index(place) :]
        chain = ", which waits for ".join(
            self.programs[rank].describe_step(index) for rank, index in (*cycle, place)
        )
        return (
            f"deadlock when sends wait for their receives: {chain}; break this circle, "
            f"for example receive into scratch, or let one rank receive first"
        )

    def _waits_for(self, place: Place) -> Place:
        rank, index = place
        if place in self._posted:
            return self.partners[place]
        blocked = self._waiting[rank]
        step = self._steps[rank][index]
        return rank, next(dep for dep in step.deps if blocked[dep] >= 0)


def followers_of(steps: Sequence[Step]) -> list[list[int]]:
    """Return the steps that wait for each step."""
    followers: list[list[int]] = [[] for _ in steps]
    for index, step in enumerate(steps):
        for dep in step.deps:
            followers[dep].append(index)
    return followers
