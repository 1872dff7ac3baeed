# SPDX-License-Identifier: Apache-2.0
"""End of a schedule on ranks with one port each, by the waits of its messages.

A message starts when its send may start and the ports of both ranks are free, takes
its *length*, and keeps both ports busy for its *occupancy*. A rank's sends leave in the
order in which they may start, and none passes one that waits for its receiver's port. A
rank's port out and its port in work side by side; local steps take no time.

Where ranks share nodes, a message on a node takes a part of the time of one between
nodes, and the bytes between nodes go through one port out and one port in per node.

Two clocks run at once. For one messages are empty: each takes 1 and keeps the ports
busy for a share of it. For the other they are nothing but bytes. The first one says in
which order the messages leave.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from commrt.schedule.execute import Place, followers_of
from commrt.schedule.ir import Op, Step
from commrt.schedule.nodes import Nodes

__all__ = ["Ends", "OnNode", "play"]


class OnNode(NamedTuple):
    """The relation of two ranks that share a node."""

    nodes: Nodes
    """The number of the node of each rank."""
    alpha: float
    """Time of an empty message, as part of that of one between nodes."""
    beta: float
    """Time of a byte, likewise."""


class Ends(NamedTuple):
    """Times at which the last message has arrived, with everyone starting at 0."""

    steps: int
    """Messages on the longest chain."""
    rounds: float
    """End with empty messages."""
    data: float
    """End with messages that are nothing but bytes."""
    complete: bool
    """True if all ranks arrived."""


def play(
    steps: Sequence[Sequence[Step]],
    partners: Mapping[Place, Place],
    width: Sequence[Sequence[float]],
    share: float,
    on_node: OnNode | None = None,
) -> Ends:
    """Return the ends of the steps of all ranks.

    Args:
        steps: of each rank.
        partners: the other end of each message.
        width: for each rank and space, the bytes of a block.
        share: how long an empty message keeps the ports busy, as part of its time.
        on_node: which ranks share nodes; None: no two do.
    """
    nodes = on_node.nodes if on_node else tuple(range(len(steps)))
    followers = [followers_of(own) for own in steps]
    waiting = [[len(step.deps) for step in own] for own in steps]
    # Times at which a step may start: messages before it are done, on the two clocks.
    level = [[0] * len(own) for own in steps]
    ready = [[0.0] * len(own) for own in steps]
    byte_ready = [[0.0] * len(own) for own in steps]
    port_out, port_in = [0.0] * len(steps), [0.0] * len(steps)
    # First the ranks' ports, for bytes that stay on a node; then the nodes' ports.
    bytes_out, bytes_in = [0.0] * 2 * len(steps), [0.0] * 2 * len(steps)
    sends: list[list[tuple[float, int]]] = [[] for _ in steps]
    # Next senders: of a rank, only the entry with the time in `turn` is valid.
    queue: list[tuple[float, int, int]] = []
    turn = [math.inf] * len(steps)
    arrived: dict[Place, tuple[int, float, float]] = {}
    posted: set[Place] = set()
    longest, last, byte_last, left = 0, 0.0, 0.0, len(partners) // 2
    todo = [
        (rank, index)
        for rank, own in enumerate(waiting)
        for index, count in enumerate(own)
        if not count
    ]

    def finish(rank: int, index: int, hops: int, time: float, byte_time: float) -> None:
        hops = max(hops, level[rank][index])
        for follower in followers[rank][index]:
            level[rank][follower] = max(level[rank][follower], hops)
            ready[rank][follower] = max(ready[rank][follower], time)
            byte_ready[rank][follower] = max(byte_ready[rank][follower], byte_time)
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

    def receive(place: Place, hops: int, time: float, byte_time: float) -> None:
        rank, index = place
        time = max(time, ready[rank][index])
        finish(*place, hops, time, max(byte_time, byte_ready[rank][index]))

    while todo or queue:
        while todo:
            rank, index = todo.pop()
            step = steps[rank][index]
            if step.op is Op.SEND:
                heapq.heappush(sends[rank], (ready[rank][index], index))
                take_turn(rank)
            elif step.peer < 0:
                finish(rank, index, 0, ready[rank][index], byte_ready[rank][index])
            elif (rank, index) in arrived:
                receive((rank, index), *arrived[rank, index])
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
        assert where is not None
        nbytes = (where.hi - where.lo) * width[rank][where.space]
        length, way_out, way_in = (
            1.0,
            len(steps) + nodes[rank],
            len(steps) + nodes[peer],
        )
        if on_node and nodes[rank] == nodes[peer]:
            length, way_out, way_in = on_node.alpha, rank, peer
            nbytes *= on_node.beta
        start = max(time, port_in[peer])
        port_out[rank] = port_in[peer] = start + share * length
        end = start + length
        byte_start = max(byte_ready[rank][index], bytes_out[way_out], bytes_in[way_in])
        byte_end = bytes_out[way_out] = bytes_in[way_in] = byte_start + nbytes
        hops = level[rank][index] + 1
        left -= 1
        longest = max(longest, hops)
        last, byte_last = max(last, end), max(byte_last, byte_end)
        take_turn(rank)
        # Its blocks may be written again when it is through, not when it has left.
        finish(rank, index, 0, end, byte_end)
        other = partners[rank, index]
        if other in posted:
            receive(other, hops, end, byte_end)
        else:
            arrived[other] = hops, end, byte_end
    return Ends(longest, last, byte_last, left == 0 and len(posted) <= len(partners))
