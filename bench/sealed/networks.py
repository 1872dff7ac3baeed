# SPDX-License-Identifier: Apache-2.0
"""The networks of the sealed predictions, as clusters and for the simulator."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from commrt.cluster.routes import path
from commrt.cluster.topology import Topology, fat_tree, loop_network, star
from commrt.cluster.wiring import ETHERNET_NBYTES
from commrt.sim.costs import Costs
from commrt.sim.fragments import CONNECTIONS
from commrt.sim.topologies.crossbars import Star
from commrt.sim.topologies.graphs import Graph, NamedLink
from commrt.sim.topologies.network import Cable, Network

__all__ = [
    "CLUSTER",
    "FITTED_ON",
    "NETWORKS",
    "Numbers",
    "one_switch",
    "simulated",
]

_RATE = 100_000_000
_MTU, _BURST = 1500, 3200
CLUSTER = ("--mtu", str(_MTU), "--burst", str(_BURST))
"""Options of all clusters: packets and buckets so small that a link is like a cable."""
_PACKET_NBYTES = _MTU + ETHERNET_NBYTES
_HEADERS_NBYTES = 52
"""Of IPv4 and TCP, in each packet."""


def _with_a_slow_host(hosts: int) -> Topology:
    """Return a star whose last host has a link of half the rate."""
    made = star(hosts, _RATE)
    slow = replace(made.links[-1], rate=_RATE // 2)
    return replace(made, links=(*made.links[:-1], slow))


def _pair(hosts: int) -> Topology:
    """Return two switches with half of the hosts each, joined by one link."""
    half = hosts // 2
    return fat_tree(
        hosts, _RATE, per_switch=half, spines=1, oversubscription=float(half)
    )


FITTED_ON: Mapping[str, Topology] = {
    "star-2": star(2, _RATE),
    "star-4": star(4, _RATE),
    "loop-5": loop_network(5, _RATE),
}
"""Networks whose times shape the numbers; no prediction is about them."""

NETWORKS: Mapping[str, Topology] = {
    **{f"star-{n}": star(n, _RATE) for n in (3, 5, 6)},
    **{f"slow-{n}": _with_a_slow_host(n) for n in (4, 6)},
    **{f"ring-{n}": loop_network(n, _RATE, per_switch=1, chords=()) for n in (4, 5)},
    **{f"loop-{n}": loop_network(n, _RATE) for n in (4, 6)},
    **{f"pair-{n}": _pair(n) for n in (4, 6)},
    **{
        f"tree-{n}": fat_tree(n, _RATE, per_switch=2, oversubscription=2.0)
        for n in (4, 6)
    },
}
"""One rank a host. ``slow``: a star whose last host has half the rate of the others.
``ring``: a ring of switches with a host each. ``loop``: one with chords, and two hosts
a switch. ``pair``: two switches; one link between them. ``tree``: two levels; a
switch's two hosts share half of what they have."""


@dataclass(frozen=True)
class Numbers:
    """The fitted numbers of one model."""

    values: Mapping[str, float]
    """``share`` of a link's rate that is left for data, ``latency_us`` of a message
    through two links; costs by their names."""

    @property
    def costs(self) -> Costs:
        """Costs of messages over connections of commrt's own."""
        # A bucket passes whole packets.
        packets = _BURST // _PACKET_NBYTES
        tokens = packets * (_MTU - _HEADERS_NBYTES)
        given: dict[str, Any] = {**CONNECTIONS, "burst_nbytes": tokens, **self.values}
        for own in ("share", "latency_us"):
            del given[own]
        return Costs(**given)


def simulated(topology: Topology, numbers: Numbers) -> Network:
    """Return a cluster's network: its links, and the ways that its switches know."""
    share = numbers.values["share"]
    latency_us = numbers.values["latency_us"] / 2
    places = {id(link): index for index, link in enumerate(topology.links)}
    links = []
    for link in topology.links:
        assert link.rate is not None
        rate = link.rate / 8e6 * share
        for tail, head in (link.ends, link.ends[::-1]):
            # A switch passes a packet on once it has all of it.
            waits_us = _PACKET_NBYTES / (link.rate / 8e6)
            after_us = waits_us if tail in topology.switches else 0.0
            links.append(NamedLink(tail, head, rate, rate, latency_us + after_us))

    def route(source: str, target: str) -> list[int]:
        here, found = source, []
        for link in path(topology, source, target):
            backwards = link.ends[1] == here
            found.append(2 * places[id(link)] + backwards)
            here = link.ends[0] if backwards else link.ends[1]
        return found

    return Graph(
        f"{len(topology.hosts)} hosts", topology.hosts, topology.switches, links, route
    ).network()


def one_switch(topology: Topology, numbers: Numbers) -> Network:
    """Return a star of as many hosts: what a model without a network knows."""
    rate = max(link.rate or 0 for link in topology.links) / 8e9
    cable = Cable(rate * numbers.values["share"], numbers.values["latency_us"] / 2)
    return Star(len(topology.hosts), cable).network()
