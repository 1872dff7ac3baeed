# SPDX-License-Identifier: Apache-2.0
"""Loads of links over time, from the messages of a simulated run."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from commrt.errors import UsageError
from commrt.sim.simulate import Simulated
from commrt.sim.topologies.network import Floats, Ints

__all__ = ["Crossings", "crossings", "link_series"]

MOST_CROSSINGS = 8_000_000


@dataclass(frozen=True)
class Crossings:
    """Each message on each link of its way."""

    message: Ints
    link: Ints


def crossings(run: Simulated) -> Crossings:
    """Return which messages passed which links.

    Raises:
        UsageError: there are more of them than memory should hold.
    """
    messages = run.messages
    source = run.hosts[run.ranks_of(messages.send)]
    target = run.hosts[run.ranks_of(messages.recv)]
    pairs, own = np.unique(source * run.network.num_hosts + target, return_inverse=True)
    ways = run.network.find_ways(*np.divmod(pairs, run.network.num_hosts))
    way = ways.of_pair[own] + messages.way
    hops = ways.starts[way + 1] - ways.starts[way]
    total = int(hops.sum())
    if total > MOST_CROSSINGS:
        raise UsageError(
            f"{total:,} messages on links, all together; a picture is made of at most "
            f"{MOST_CROSSINGS:,}, so take fewer ranks or another algorithm"
        )
    message = np.repeat(np.arange(len(way)), hops)
    within = np.arange(total) - np.repeat(np.cumsum(hops) - hops, hops)
    link = ways.links[ways.starts[way][message] + within].astype(np.int64)
    return Crossings(message, link)


def link_series(run: Simulated, bins: int) -> Floats:
    """Return the part of each link's rate that was used, by link and by span of time.

    A message counts with its mean rate while it flows.
    """
    passed, messages = crossings(run), run.messages
    start = messages.flowing_us[passed.message]
    span = messages.ended_us[passed.message] - start
    nbytes = messages.nbytes[passed.message]
    moves = span > 0
    link, start, span = passed.link[moves], start[moves], span[moves]
    rate = nbytes[moves] / span
    count = len(run.network.links)
    width = run.time_us / bins if run.time_us else 1.0
    before: Floats = np.zeros(count)
    found = np.empty((count, bins))
    for number in range(bins):
        passed_by = rate * np.clip(width * (number + 1) - start, 0, span)
        total = np.bincount(link, passed_by, minlength=count).astype(np.float64)
        found[:, number] = (total - before) / width
        before = total
    capacity = run.network.links.shared_rate
    finite = np.isfinite(capacity)
    capacity = np.where(finite, capacity, run.network.links.flow_rate)
    return found / np.where(np.isfinite(capacity), capacity, 1.0)[:, None]
