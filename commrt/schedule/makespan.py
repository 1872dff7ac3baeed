# SPDX-License-Identifier: Apache-2.0
"""When a schedule would end on ranks with one port each: what waits for what, and whom.

A message starts when its send may start and the ports of both ranks are free, takes
its *length*, and keeps both ports busy for its *occupancy*. A rank's sends leave in the
order in which they may start, and none passes one that waits for its receiver's port. A
rank's port out and its port in work side by side; local steps take no time.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Mapping, Sequence

from commrt.schedule.execute import Place, followers_of
from commrt.schedule.ir import Op, Slice, Step

__all__ = ["Timeline"]


class Timeline:
    """The steps of all ranks, which must end, to be played with different messages.

    Args:
        steps: of each rank.
        partners: the other end of each message.
    """

    def __init__(
        self, steps: Sequence[Sequence[Step]], partners: Mapping[Place, Place]
    ) -> None:
        self._steps = steps
        self._partners = partners
        self._followers = [followers_of(own) for own in steps]

    def makespan(self, takes: Callable[[int, Slice], tuple[float, float]]) -> float:
        """Return when the last message has arrived, with everyone starting at 0.

        Args:
            takes: length and occupancy of a message of these blocks of this rank.
        """
        steps, partners, followers = self._steps, self._partners, self._followers
        waiting = [[len(step.deps) for step in own] for own in steps]
        ready = [[0.0] * len(own) for own in steps]
        port_out, port_in = [0.0] * len(steps), [0.0] * len(steps)
        sends: list[list[tuple[float, int]]] = [[] for _ in steps]
        # Who sends next: of a rank, only the entry with the time in `turn` is valid.
        queue: list[tuple[float, int, int]] = []
        turn = [math.inf] * len(steps)
        arrived: dict[Place, float] = {}
        posted: set[Place] = set()
        last = 0.0
        todo = [
            (rank, index)
            for rank, own in enumerate(waiting)
            for index, count in enumerate(own)
            if not count
        ]

        def finish(rank: int, index: int, time: float) -> None:
            for follower in followers[rank][index]:
                ready[rank][follower] = max(ready[rank][follower], time)
                waiting[rank][follower] -= 1
                if not waiting[rank][follower]:
                    todo.append((rank, follower))

        def take_turn(rank: int) -> None:
            if sends[rank]:
                time, index = sends[rank][0]
                time = max(time, port_out[rank])
                if time < turn[rank]:
                    turn[rank] = time
                    heapq.heappush(queue, (time, index, rank))

        while todo or queue:
            while todo:
                rank, index = todo.pop()
                step = steps[rank][index]
                if step.op is Op.SEND:
                    heapq.heappush(sends[rank], (ready[rank][index], index))
                    take_turn(rank)
                elif step.peer < 0:
                    finish(rank, index, ready[rank][index])
                elif (rank, index) in arrived:
                    at = max(arrived[rank, index], ready[rank][index])
                    finish(rank, index, at)
                else:
                    posted.add((rank, index))
            if not queue:
                break
            time, _, rank = heapq.heappop(queue)
            if time != turn[rank]:
                continue
            turn[rank] = math.inf
            _, index = heapq.heappop(sends[rank])
            where, peer = steps[rank][index].src, steps[rank][index].peer
            start = max(time, port_in[peer])
            assert where is not None
            length, occupancy = takes(rank, where)
            port_out[rank] = port_in[peer] = start + occupancy
            last = max(last, start + length)
            take_turn(rank)
            # Its blocks may be written again when it is through, not when it has left.
            finish(rank, index, start + length)
            other = partners[rank, index]
            if other in posted:
                finish(*other, max(start + length, ready[peer][other[1]]))
            else:
                arrived[other] = start + length
        return last
