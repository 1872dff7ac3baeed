# SPDX-License-Identifier: Apache-2.0
"""Dragonfly: groups of routers, all joined within a group, and all groups joined.

Kim, Dally, Scott and Abts, "Technology-driven, highly-scalable dragonfly topology"
(ISCA 2008). Routing is minimal: to the router that has the cable to the other group,
over it, and to the host's router. The paper's non-minimal routing is not modelled.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from commrt.errors import UsageError
from commrt.sim.topologies.network import (
    Cable,
    Ints,
    LinkBuilder,
    Network,
    Ways,
    check_count,
    check_links,
    ways_of_columns,
)

__all__ = ["Dragonfly"]


@dataclass(frozen=True)
class Dragonfly:
    """Groups of routers with hosts each."""

    groups: int
    routers: int
    """Routers of a group."""
    hosts: int
    """Hosts of a router."""
    global_ports: int
    """Cables of a router to other groups."""
    cable: Cable = field(default_factory=Cable)
    """Between routers of a group."""
    global_cable: Cable | None = None
    """Between groups; as ``cable`` where left out."""
    host_cable: Cable | None = None
    """Between a host and its router; as ``cable`` where left out."""

    def network(self) -> Network:
        """Return the network."""
        g, a, p, h = self.groups, self.routers, self.hosts, self.global_ports
        for what, number in (("groups", g), ("routers", a), ("hosts", p)):
            check_count(what, number)
        check_count("global_ports", h, 0)
        if g - 1 > a * h:
            raise UsageError(
                f"{g} groups, but a group has {a} routers with {h} global ports each; "
                f"expected at most {a * h + 1} groups, so that every two are joined"
            )
        check_links(2 * g * a * p + g * a * (a - 1) + g * (g - 1))
        num_hosts, num_routers = g * a * p, g * a
        build = LinkBuilder()
        hosts = np.arange(num_hosts)
        up, down = build.both(
            hosts, num_hosts + hosts // p, self.host_cable or self.cable
        )
        first, second = np.nonzero(~np.eye(a, dtype=bool))
        local = np.full((num_routers, a), -1)
        for group in range(g):
            start = num_hosts + group * a
            links = build.add(start + first, start + second, self.cable)
            local[group * a + first, second] = links
        source, target = np.nonzero(~np.eye(g, dtype=bool))
        # The port by which a group reaches another: groups follow its own, without it.
        port = np.full((g, g), 0)
        port[source, target] = target - (target > source)
        door = port // max(h, 1)
        between = np.full((g, g), -1)
        between[source, target] = build.add(
            num_hosts + source * a + door[source, target],
            num_hosts + target * a + door[target, source],
            self.global_cable or self.cable,
        )

        def ways(source: Ints, target: Ints) -> Ways:
            apart = source != target
            here, there = source // p, target // p
            group, other = here // a, there // a
            leaves = group != other
            inner, last = here % a, there % a
            exit_to = np.where(leaves, door[group, other], last)
            enter_at = np.where(leaves, door[other, group], last)
            columns = [
                np.where(apart, up[source], -1),
                np.where(inner != exit_to, local[here, exit_to], -1),
                np.where(leaves, between[group, other], -1),
                np.where(enter_at != last, local[other * a + enter_at, last], -1),
                np.where(apart, down[target], -1),
            ]
            return ways_of_columns(columns, len(source))

        def name(node: int) -> str:
            if node < num_hosts:
                return f"h{node}"
            return "r{}.{}".format(*divmod(node - num_hosts, a))

        return Network(
            f"dragonfly of {g} groups, {a} routers each, {p} hosts each",
            *(num_hosts, num_hosts + num_routers, name, build.links(), ways),
            (0, num_hosts),
            drawing="ring",
        )
