# SPDX-License-Identifier: Apache-2.0
"""Distributed Loop Networks: switches in a ring, with shortcuts of length 2, 4, 8, ...

Koibuchi, Matsutani, Amano, Hsu and Casanova, "A case for random shortcut topologies for
HPC interconnects" (ISCA 2012), has them as DLN-x; Nguyen and Wahib (CCGRID 2021) run
halving-doubling on one, where each exchange of a bit is one hop. Messages take a way
with the fewest hops, long shortcuts first.
"""

from __future__ import annotations

from collections import deque
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

__all__ = ["LoopNetwork"]


@dataclass(frozen=True)
class LoopNetwork:
    """Switches in a ring with shortcuts, and hosts on each switch."""

    switches: int
    hosts: int
    """Hosts of a switch."""
    cable: Cable = field(default_factory=Cable)
    """Between switches; a bundle of w is the "w" of the paper's names."""
    host_cable: Cable | None = None
    """Between a host and its switch; a single one like ``cable`` where left out."""

    def network(self) -> Network:
        """Return the network."""
        count, each = self.switches, self.hosts
        check_count("switches", count)
        check_count("hosts", each)
        check_links(count * each * 2 + count * 2 * max(count.bit_length() - 1, 1))
        num_hosts = count * each
        own = self.host_cable or Cable(self.cable.gbytes_per_s, self.cable.latency_us)
        build, hosts = LinkBuilder(), np.arange(num_hosts)
        up, down = build.both(hosts, num_hosts + hosts // each, own)
        switches = np.arange(count)
        jumps = _jumps(count)
        links = np.stack(
            [np.full(count, -1)]
            + [
                build.add(
                    num_hosts + switches,
                    num_hosts + (switches + jump) % count,
                    self.cable,
                )
                for jump in jumps
            ]
        )
        paths = _paths(count, jumps)

        def ways(source: Ints, target: Ints) -> Ways:
            apart = source != target
            here, there = source // each, target // each
            path = paths[(there - here) % count]
            columns = [np.where(apart, up[source], -1)]
            for hop in range(paths.shape[1]):
                taken = path[:, hop]
                columns.append(links[taken, here])
                here = (here + np.array([0, *jumps])[taken]) % count
            columns.append(np.where(apart, down[target], -1))
            return ways_of_columns(columns, len(source))

        return Network(
            f"distributed loop network of {count} switches, {each} hosts each, "
            f"shortcuts of {self.cable.bundle}",
            *(num_hosts, num_hosts + count),
            lambda node: f"h{node}" if node < num_hosts else f"sw{node - num_hosts}",
            build.links(),
            ways,
            (0, num_hosts),
            drawing="ring",
        )


def _jumps(count: int) -> list[int]:
    """Return the lengths of a switch's cables, modulo the ring, the longest first."""
    lengths = [1 << bit for bit in range(count.bit_length()) if 2 << bit <= count]
    found = [jump for length in lengths[::-1] for jump in (length, -length)]
    # One cable joins two switches that are half a ring apart.
    return [jump for jump in found if 2 * jump != -count]


def _paths(count: int, jumps: list[int]) -> Ints:
    """Return the jumps to each distance, by number from 1, 0 for none."""
    before = {0: (0, 0)}
    todo = deque([0])
    while todo:
        here = todo.popleft()
        for number, jump in enumerate(jumps, start=1):
            there = (here + jump) % count
            if there not in before:
                before[there] = here, number
                todo.append(there)
    rows: list[list[int]] = []
    for distance in range(count):
        row: list[int] = []
        while distance:
            distance, number = before[distance]
            row.append(number)
        rows.append(row[::-1])
    longest = max(map(len, rows))
    return np.array([row + [0] * (longest - len(row)) for row in rows]).reshape(
        count, longest
    )
