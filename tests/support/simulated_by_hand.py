# SPDX-License-Identifier: Apache-2.0
"""A second simulator, plain and slow: all rates are found anew at every event.

It knows eager messages on shared links, and no costs of cores. Times are fractions'
floats; nothing is kept from one event to the next but bytes left.
"""

from __future__ import annotations

import math

from commrt.schedule.execute import match
from commrt.schedule.ir import Op, Schedule
from commrt.sim.topologies.network import Network

__all__ = ["ends_by_hand", "fair_rates", "messages_of"]

Place = tuple[int, int]


def fair_rates(
    ways: dict[Place, list[int]], rates: list[float], limits: list[float]
) -> dict[Place, float]:
    """Return the max-min fair rates of flows: raise all at once until one is full."""
    found: dict[Place, float] = {}
    open_ = dict(ways)
    while open_:
        level = math.inf
        for link, rate in enumerate(rates):
            users = [flow for flow, way in open_.items() if link in way]
            if users:
                used = sum(found[flow] for flow in found if link in ways[flow])
                level = min(level, (rate - used) / len(users))
        for way in open_.values():
            level = min(level, *(limits[link] for link in way))
        stuck = [
            flow
            for flow, way in open_.items()
            if any(limits[link] <= level for link in way)
            or any(_is_full(link, level, open_, found, ways, rates) for link in way)
        ]
        for flow in stuck:
            found[flow] = level
        for flow in stuck:
            del open_[flow]
    return found


def _is_full(
    link: int,
    level: float,
    open_: dict[Place, list[int]],
    found: dict[Place, float],
    ways: dict[Place, list[int]],
    rates: list[float],
) -> bool:
    users = sum(link in way for way in open_.values())
    used = sum(found[flow] for flow in found if link in ways[flow])
    return used + level * users >= rates[link] * (1 - 1e-12)


def messages_of(
    schedule: Schedule, num_elements: int, itemsize: int
) -> dict[Place, tuple[Place, int]]:
    """Return for each send its receive and its bytes."""
    programs = schedule.programs()
    partners = match(programs)
    found: dict[Place, tuple[Place, int]] = {}
    for rank, program in enumerate(programs):
        bounds = [space.bounds(num_elements) for space in program.spaces]
        for index, step in enumerate(program.steps):
            if step.op is Op.SEND:
                edges = bounds[step.src.space]
                length = edges[step.src.hi] - edges[step.src.lo]
                found[rank, index] = partners[rank, index], length * itemsize
    return found


def ends_by_hand(
    schedule: Schedule,
    network: Network,
    nbytes: int,
    *,
    in_order: bool = False,
    queued_nbytes: int = 0,
) -> dict[Place, float]:
    """Return when each message has arrived, in microseconds; rank i is on host i."""
    programs = schedule.programs()
    messages = messages_of(schedule, nbytes // 4, 4)
    by_recv = {recv: send for send, (recv, _) in messages.items()}
    waits = {
        (rank, index): {(rank, dep) for dep in step.deps}
        for rank, program in enumerate(programs)
        for index, step in enumerate(program.steps)
    }
    done: set[Place] = set()
    arrived: set[Place] = set()
    latent: dict[Place, float] = {}
    left: dict[Place, float] = {}
    links = network.links
    rates, limits = links.shared_rate.tolist(), links.flow_rate.tolist()
    ways = {send: network.way(send[0], recv[0]) for send, (recv, _) in messages.items()}
    ends: dict[Place, float] = {}
    lines: dict[Place, list[Place]] = {}  # of a pair: who flows, and who waits for it
    free: dict[
        int, float
    ] = {}  # of first links: when the last one that queues has left
    enters: dict[Place, float] = {}
    passes: dict[Place, float] = {}
    flowing: dict[Place, list[int]] = {}
    now = 0.0
    while True:
        progress = True
        while progress:
            progress = False
            for place, deps in waits.items():
                if place in done or not deps <= done:
                    continue
                if place in by_recv and by_recv[place] not in arrived:
                    continue
                done.add(place)
                progress = True
                if place in messages:
                    latent[place] = now + float(links.latency_us[ways[place]].sum())
        for send in [
            send for send, time in latent.items() if time <= now * (1 + 1e-12)
        ]:
            del latent[send]
            (recv, length), way = messages[send], ways[send]
            if 0 < length <= queued_nbytes:
                start = max(now, free.get(way[0], 0.0))
                passes[send] = start + length / min(rates[way[0]], limits[way[0]])
                free[way[0]], enters[send] = passes[send], start
                continue
            line = lines.setdefault((send[0], recv[0]), [])
            line.append(send)
            if not in_order or len(line) == 1:
                flowing[send], left[send] = way, float(length)
        for send in [
            send for send, time in enters.items() if time <= now * (1 + 1e-12)
        ]:
            del enters[send]
            flowing[send] = ways[send][1:]
            left[send] = float(messages[send][1]) if flowing[send] else 0.0
        ended = [
            send
            for send, rest in left.items()
            if rest <= 0 and passes.get(send, 0.0) <= now * (1 + 1e-12)
        ]
        if ended:
            for send in ended:
                del left[send]
                arrived.add(send)
                ends[send] = now
                line = lines.get((send[0], messages[send][0][0]), [])
                if send in line:
                    line.remove(send)
                    if in_order and line:
                        flowing[line[0]] = ways[line[0]]
                        left[line[0]] = float(messages[line[0]][1])
            continue
        if not left and not latent and not enters:
            break
        moving = {send: flowing[send] for send, rest in left.items() if rest > 0}
        speeds = fair_rates(moving, rates, limits)
        times = {
            send: now + left[send] / speeds[send] if send in moving else passes[send]
            for send in left
        }
        after = min([*times.values(), *latent.values(), *enters.values()])
        for send, rest in left.items():
            over = times[send] <= after * (1 + 1e-12)
            if send in moving:
                left[send] = 0.0 if over else rest - speeds[send] * (after - now)
        now = after
    assert len(done) == len(waits)
    return ends
