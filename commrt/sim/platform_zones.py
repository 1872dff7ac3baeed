# SPDX-License-Identifier: Apache-2.0
"""Zones of a SimGrid platform, and the way from a host of one to a host of another.

A zone has hosts, routers and zones in it, and routes between them. In a *full* zone a
route leads straight from end to end; in a *Floyd* or *Dijkstra* zone routes are joined,
with as few links as possible; in a *cluster* each host has a link to the middle. To
leave a zone, a message goes to its gateway first.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

__all__ = ["Zone", "way_between"]

Links = Sequence[int]


@dataclass(eq=False)
class Zone:
    """A zone of a platform."""

    name: str
    routing: str
    """``full``, ``floyd``, ``dijkstra``, ``cluster`` or ``none``, in small letters."""
    parent: Zone | None
    routes: dict[tuple[str, str], Links] = field(default_factory=dict)
    """Links between hosts, routers and zones of this one."""
    gateways: dict[tuple[str, str], tuple[str, str]] = field(default_factory=dict)
    """The routers by which two zones of this one are joined."""
    up: dict[str, Links] = field(default_factory=dict)
    """The links of a cluster from a host to the middle."""
    down: dict[str, Links] = field(default_factory=dict)
    """The links of a cluster from the middle to a host."""
    _trees: dict[str, dict[str, tuple[str, Links]]] = field(default_factory=dict)

    def chain(self) -> list[Zone]:
        """Return this zone and those around it, the outermost first."""
        around = self.parent.chain() if self.parent is not None else []
        return [*around, self]

    def inner(self, source: str, target: str) -> list[tuple[str, str, Links]] | None:
        """Return the routes from one member to another, in order; None: no way."""
        if source == target:
            return []
        if self.routing == "cluster":
            if source not in self.up or target not in self.down:
                return None
            return [(source, target, [*self.up[source], *self.down[target]])]
        if (source, target) in self.routes:
            return [(source, target, self.routes[source, target])]
        if self.routing not in ("floyd", "dijkstra", "dijkstracache"):
            return None
        tree = self._trees.get(source)
        if tree is None:
            tree = self._trees[source] = self._tree(source)
        found: list[tuple[str, str, Links]] = []
        while target != source:
            if target not in tree:
                return None
            before, links = tree[target]
            found.append((before, target, links))
            target = before
        return found[::-1]

    def _tree(self, source: str) -> dict[str, tuple[str, Links]]:
        beside: dict[str, list[tuple[str, Links]]] = {}
        for (tail, head), links in self.routes.items():
            beside.setdefault(tail, []).append((head, links))
        tree: dict[str, tuple[str, Links]] = {}
        queue: list[tuple[int, int, str, str, Links]] = [(0, 0, source, "", ())]
        done: set[str] = set()
        number = 0
        while queue:
            length, _, node, before, by = heapq.heappop(queue)
            if node in done:
                continue
            done.add(node)
            if before:
                tree[node] = before, by
            for head, links in beside.get(node, ()):
                if head not in done:
                    number += 1
                    further = length + len(links)
                    heapq.heappush(queue, (further, number, head, node, links))
        return tree


def way_between(zone_of: dict[str, Zone], source: str, target: str) -> Links | None:
    """Return the links from a host or router to another one, or None.

    Args:
        zone_of: the zone of each host and router.
        source: its name.
        target: likewise.
    """
    if source == target:
        return []
    ours, theirs = zone_of[source].chain(), zone_of[target].chain()
    depth = 0
    while depth < min(len(ours), len(theirs)) and ours[depth] is theirs[depth]:
        depth += 1
    if not depth:
        return None
    # Members of the innermost zone that has both: they themselves, or zones in it.
    first = ours[depth].name if depth < len(ours) else source
    last = theirs[depth].name if depth < len(theirs) else target
    legs = ours[depth - 1].inner(first, last)
    if legs is None:
        return None
    found: list[int] = []
    here = source
    for tail, head, links in legs:
        enter = exit_by = None
        if (tail, head) in ours[depth - 1].gateways:
            exit_by, enter = ours[depth - 1].gateways[tail, head]
        inside = way_between(zone_of, here, exit_by or tail)
        if inside is None:
            return None
        found.extend([*inside, *links])
        here = enter or head
    inside = way_between(zone_of, here, target)
    return None if inside is None else [*found, *inside]
