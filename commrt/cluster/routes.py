# SPDX-License-Identifier: Apache-2.0
"""Paths through a network: where each switch sends what is meant for a host.

A switch sends to a neighbor that is nearer to the host, so no packet goes in a circle.
Where several are equally near, hosts take turns.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from commrt.cluster.topology import Link, Topology

__all__ = ["Hop", "hops", "path"]


@dataclass(frozen=True)
class Hop:
    """One entry of a switch's table."""

    switch: str
    host: str
    """The destination."""
    link: int
    """The place in ``links`` of the link that leads there."""


def hops(topology: Topology) -> Iterator[Hop]:
    """Yield the tables of all switches."""
    beside = {name: topology.neighbors(name) for name in topology.switches}
    for turn, host in enumerate(topology.hosts):
        far = _distances(topology, beside, host)
        for switch in topology.switches:
            if switch not in far:  # of no host's part of the network
                continue
            nearer = [
                index
                for name, index in beside[switch]
                if (name == host if far[switch] == 1 else _is_nearer(far, name, switch))
            ]
            yield Hop(switch, host, nearer[turn % len(nearer)])


def path(topology: Topology, source: str, destination: str) -> list[Link]:
    """Return the links from one host to another one, in order."""
    table = {(hop.switch, hop.host): hop.link for hop in hops(topology)}
    [(here, index)] = topology.neighbors(source)
    found = [topology.links[index]]
    while here != destination:
        link = topology.links[table[here, destination]]
        here = link.ends[1] if link.ends[0] == here else link.ends[0]
        found.append(link)
    return found


def _is_nearer(far: dict[str, int], name: str, switch: str) -> bool:
    return far.get(name, far[switch]) < far[switch]


def _distances(
    topology: Topology, beside: dict[str, list[tuple[str, int]]], host: str
) -> dict[str, int]:
    """Return how many links each switch is away from a host."""
    far = {topology.switch_of(host): 1}
    todo = [*far]
    for switch in todo:
        for name, _ in beside[switch]:
            if name in beside and name not in far:
                far[name] = far[switch] + 1
                todo.append(name)
    return far
