# SPDX-License-Identifier: Apache-2.0
"""Fat trees: every node of a level has several nodes above it.

The form is the extended generalised fat tree of Oehring, Ibel, Das and Kumar ("On
generalized fat trees", IPPS 1995): a node of level l has ``down[l]`` nodes below and
``up[l]`` above. The k-ary fat tree of Al-Fares, Loukissas and Vahdat ("A scalable,
commodity data center network architecture", SIGCOMM 2008) is one of them.

A message rises to the first node that is above both hosts, and descends. Only on the
way up it has a choice. Static routing takes the destination's digits (d-mod-k: Zahavi,
Johnson, Kerbyson and Lang, "Optimized InfiniBand fat-tree routing for shift all-to-all
communication patterns", Concurrency and Computation 22, 2010); adaptive routing the
least loaded way when a message leaves.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

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
    every_way,
    ways_of_columns,
)

__all__ = ["FatTree", "KAryFatTree", "TreeLinks"]

MOST_WAYS = 64
"""Ways of a pair among which adaptive routing chooses."""


@dataclass(frozen=True)
class FatTree:
    """A fat tree, from the hosts up."""

    down: tuple[int, ...]
    """Nodes below each node of level 1, 2, ...; their product is the hosts."""
    up: tuple[int, ...]
    """Nodes above each node of level 0, 1, ...; the first is 1: hosts have one port."""
    cables: tuple[Cable, ...] = field(default_factory=lambda: (Cable(),))
    """Cables above each level; one for all, if there is one."""
    routing: str = "static"
    """``static`` (d-mod-k) or ``adaptive``."""

    @cached_property
    def num_hosts(self) -> int:
        """Number of hosts."""
        return int(np.prod(self.down, dtype=object))

    def network(self) -> Network:
        """Return the network."""
        build = LinkBuilder()
        tree = self.wire(build, np.arange(self.check()), self.num_hosts)

        def name(node: int) -> str:
            return f"h{node}" if node < self.num_hosts else tree.switch_name(node)

        return Network(
            f"fat tree of {self.num_hosts} hosts, down {self.down}, up {self.up}, "
            f"{self.routing} routing",
            *(self.num_hosts, tree.num_nodes, name, build.links(), tree.ways),
            (0, *tree.first[1:]),
        )

    def check(self) -> int:
        """Return the number of hosts, or raise UsageError."""
        if not self.down or len(self.down) != len(self.up):
            raise UsageError(
                f"down has {len(self.down)} levels and up has {len(self.up)}; expected "
                f"as many, and at least one"
            )
        if len(self.cables) not in (1, len(self.down)):
            raise UsageError(
                f"{len(self.cables)} cables for {len(self.down)} levels; expected one, "
                f"or one for each level"
            )
        for number in (*self.down, *self.up):
            check_count("each of down and up", number)
        if self.up[0] != 1:
            raise UsageError(
                f"up begins with {self.up[0]}; expected 1: a host has one port, so let "
                f"it be several hosts or a bundle of cables"
            )
        if self.routing not in ("static", "adaptive"):
            raise UsageError(
                f"routing is {self.routing!r}; expected static or adaptive"
            )
        check_links(2 * self.num_hosts)
        return self.num_hosts

    def wire(self, build: LinkBuilder, ports: Ints, first_switch: int) -> TreeLinks:
        """Add the switches above these ports, and their links."""
        cables = self.cables * (len(self.down) // len(self.cables))
        return TreeLinks(self, build, ports, first_switch, cables)


class TreeLinks:
    """The links of a fat tree whose lowest level is given as nodes of a network."""

    def __init__(
        self,
        tree: FatTree,
        build: LinkBuilder,
        ports: Ints,
        first_switch: int,
        cables: tuple[Cable, ...],
    ) -> None:
        self.tree = tree
        levels = len(tree.down)
        below = [int(np.prod(tree.down[:level])) for level in range(levels + 1)]
        above = [int(np.prod(tree.up[:level])) for level in range(levels + 1)]
        self.below, self.above = below, above
        counts = [below[levels] // below[n] * above[n] for n in range(levels + 1)]
        check_links(max(counts))
        # Levels of switches follow one another from ``first_switch`` on.
        self.first = [first_switch] * (levels + 1)
        for level in range(1, levels + 1):
            before = counts[level - 1] if level > 1 else 0
            self.first[level] = self.first[level - 1] + before
        self.num_nodes = self.first[levels] + counts[levels]
        self.rising: list[Ints] = []
        self.falling: list[Ints] = []
        for level in range(levels):
            check_links(counts[level] * tree.up[level])
            node = np.repeat(np.arange(counts[level]), tree.up[level])
            digit = np.tile(np.arange(tree.up[level]), counts[level])
            row, column = np.divmod(node, above[level])
            parent = row // tree.down[level] * above[level + 1]
            parent += column + above[level] * digit
            lower = ports[node] if level == 0 else self.first[level] + node
            rising, falling = build.both(
                lower, self.first[level + 1] + parent, cables[level]
            )
            self.rising.append(rising)
            self.falling.append(falling)

    def switch_name(self, node: int) -> str:
        """Return ``sw2.5``: the level, and the number on it."""
        levels = range(1, len(self.first))
        level = max(each for each in levels if self.first[each] <= node)
        return f"sw{level}.{node - self.first[level]}"

    def columns(self, source: Ints, target: Ints, turn: Ints) -> list[Ints]:
        """Return the links from port to port, hop by hop, -1 for none.

        Args:
            source: numbers of ports.
            target: likewise.
            turn: number of the way; 0 is the static one.
        """
        up = self.tree.up
        levels = len(up)
        # The level of the first node that is above both.
        meet = np.zeros(len(source), np.int64)
        for level in range(levels):
            apart = source // self.below[level] != target // self.below[level]
            meet = np.where(apart, level + 1, meet)
        columns, falling = [], []
        column = np.zeros(len(source), np.int64)
        for level in range(levels):
            rises = level < meet
            other = turn // self.above[level] if level else np.zeros_like(turn)
            digit = (target // self.above[level] + other) % up[level]
            node = source // self.below[level] * self.above[level] + column
            rising = self.rising[level][node * up[level] + digit]
            columns.append(np.where(rises, rising, -1))
            node = target // self.below[level] * self.above[level] + column
            fall = self.falling[level][node * up[level] + digit]
            falling.append(np.where(rises, fall, -1))
            column = column + self.above[level] * digit
        return [*columns, *falling[::-1]]

    @property
    def num_ways(self) -> int:
        """Ways of a pair that ``columns`` is asked for."""
        if self.tree.routing == "static":
            return 1
        return min(self.above[-1], MOST_WAYS)

    def ways(self, source: Ints, target: Ints) -> Ways:
        """Return the ways from ports to ports."""
        each = self.num_ways
        columns = self.columns(*every_way(source, target, each))
        return ways_of_columns(columns, len(source), each)


@dataclass(frozen=True)
class KAryFatTree:
    """Three levels of switches with k ports each: k^3/4 hosts."""

    k: int
    """Ports of a switch; even."""
    oversubscription: int = 1
    """Hosts of a lower switch for each of its ports up."""
    cable: Cable = field(default_factory=Cable)
    routing: str = "static"

    def network(self) -> Network:
        """Return the network."""
        check_count("k", self.k, 2)
        check_count("oversubscription", self.oversubscription)
        if self.k % 2:
            raise UsageError(f"k is {self.k}; expected an even number of ports")
        half = self.k // 2
        down = (half * self.oversubscription, half, self.k)
        return FatTree(down, (1, half, half), (self.cable,), self.routing).network()
