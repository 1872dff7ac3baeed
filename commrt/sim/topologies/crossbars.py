# SPDX-License-Identifier: Apache-2.0
"""Networks with one switch, and with none: a star, and a cable for each pair."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

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

__all__ = ["Full", "Star"]


@dataclass(frozen=True)
class Star:
    """Hosts around one switch."""

    hosts: int
    cable: Cable = field(default_factory=Cable)
    """Between a host and the switch. A message passes two, so twice its latency."""

    def network(self) -> Network:
        """Return the network."""
        check_count("hosts", self.hosts)
        check_links(2 * self.hosts)
        build, hosts = LinkBuilder(), np.arange(self.hosts)
        switch = np.full(self.hosts, self.hosts)
        up, down = build.both(hosts, switch, self.cable)

        def ways(source: Ints, target: Ints) -> Ways:
            apart = source != target
            columns = [
                np.where(apart, up[source], -1),
                np.where(apart, down[target], -1),
            ]
            return ways_of_columns(columns, len(source))

        return Network(
            f"star of {self.hosts} hosts",
            self.hosts,
            self.hosts + 1,
            lambda node: f"h{node}" if node < self.hosts else "sw0",
            build.links(),
            ways,
            (0, self.hosts),
        )


@dataclass(frozen=True)
class Full:
    """Hosts with a cable between every two."""

    hosts: int
    cable: Cable = field(default_factory=Cable)

    def network(self) -> Network:
        """Return the network."""
        count = self.hosts
        check_count("hosts", count)
        check_links(count * (count - 1))
        build = LinkBuilder()
        source, target = np.nonzero(~np.eye(count, dtype=bool))
        numbers = np.full((count, count), -1)
        numbers[source, target] = build.add(source, target, self.cable)

        def ways(source: Ints, target: Ints) -> Ways:
            return ways_of_columns([numbers[source, target]], len(source))

        return Network(
            f"cables between every two of {count} hosts",
            *(count, count, lambda node: f"h{node}", build.links(), ways, (0,)),
            drawing="ring",
        )
