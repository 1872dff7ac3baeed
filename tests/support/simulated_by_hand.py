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
Flow = tuple[Place, int]
"""A message, and the part of it: 1 on what follows a link where it queues."""


def fair_rates(
    ways: dict[Flow, list[int]], rates: list[float], limits: list[float]
) -> dict[Flow, float]:
    """Return the max-min fair rates of flows: raise all at once until one is full."""
    found: dict[Flow, float] = {}
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
    open_: dict[Flow, list[int]],
    found: dict[Flow, float],
    ways: dict[Flow, list[int]],
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
    links = network.links
    rates, limits = links.shared_rate.tolist(), links.flow_rate.tolist()
    ways = {send: network.way(send[0], recv[0]) for send, (recv, _) in messages.items()}
    lines: dict[object, list[Place]] = {}  # who passes, and who waits for it
    parts: dict[tuple[Place, int], list[int]] = {}  # what flows now, and on which links
    left: dict[tuple[Place, int], float] = {}
    ends: dict[Place, float] = {}
    now = 0.0

    def line_of(send: Place) -> object:
        recv, length = messages[send]
        if length <= queued_nbytes and ways[send]:
            return ways[send][0]
        return (send[0], recv[0]) if in_order else send

    def flow(send: Place) -> None:
        (_, length), way = messages[send], ways[send]
        apart = 0 < length <= queued_nbytes and len(way) > 1
        for part, own in enumerate([way[:1], way[1:]] if apart else [way]):
            parts[send, part], left[send, part] = own, float(length)

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
            line = lines.setdefault(line_of(send), [])
            line.append(send)
            if len(line) == 1:
                flow(send)
        ended = [each for each, rest in left.items() if rest <= 0]
        if ended:
            for send, part in ended:
                del left[send, part], parts[send, part]
                if part == 0:  # whoever waits behind it may pass
                    line = lines[line_of(send)]
                    line.remove(send)
                    if line:
                        flow(line[0])
                if not {(send, 0), (send, 1)} & {*left}:
                    arrived.add(send)
                    ends[send] = now
            continue
        if not left and not latent:
            break
        speeds = fair_rates(parts, rates, limits)
        times = {each: now + left[each] / speeds[each] for each in left}
        after = min([*times.values(), *latent.values()])
        for each, rest in left.items():
            over = times[each] <= after * (1 + 1e-12)
            left[each] = 0.0 if over else rest - speeds[each] * (after - now)
        now = after
    assert len(done) == len(waits)
    return ends
