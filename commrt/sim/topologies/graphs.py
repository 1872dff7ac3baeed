# SPDX-License-Identifier: Apache-2.0
"""Networks of any form: named hosts and switches, links, and shortest or given ways."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from commrt.errors import UsageError, shown, suggest
from commrt.sim.topologies.network import (
    Ints,
    Links,
    Network,
    Ways,
    check_count,
    check_links,
)

__all__ = ["Graph", "NamedLink", "Route"]

Route = Callable[[str, str], Sequence[int] | None]


@dataclass(frozen=True)
class NamedLink:
    """A link that leads one way."""

    tail: str
    head: str
    rate: float
    """Bytes per microsecond of all flows together; inf: flows do not hinder others."""
    flow_rate: float
    """Bytes per microsecond of one flow at most."""
    latency_us: float
    name: str = ""
    """Its name in pictures and messages; by its ends where left out."""


@dataclass(frozen=True)
class Graph:
    """Hosts, switches and links by name. Messages pass through no other host.

    Without ``route`` a message takes the fewest links; of those ways the one with the
    least latency, then the one whose links were named first.
    """

    name: str
    hosts: Sequence[str]
    switches: Sequence[str]
    links: Sequence[NamedLink]
    route: Route | None = None
    """Return the links from a host to another, or None if no way is known."""

    def network(self) -> Network:
        """Return the network.

        Raises:
            UsageError: a name is given twice or unknown, or a host cannot reach
                another one; the message names both.
        """
        check_count("hosts", len(self.hosts))
        check_links(len(self.links))
        names = [*self.hosts, *self.switches]
        numbers: dict[str, int] = {}
        for name in names:
            if name in numbers:
                raise UsageError(f"node {shown(name)} is given twice; rename one")
            numbers[name] = len(numbers)
        for link in self.links:
            for end in (link.tail, link.head):
                if end not in numbers and self.route is None:
                    raise UsageError(
                        f"link {link.tail}→{link.head}: no node is called "
                        f"{shown(end)}{suggest(end, names)}"
                    )
        ends = [(numbers.get(x.tail, -1), numbers.get(x.head, -1)) for x in self.links]
        links = Links(
            np.array([tail for tail, _ in ends], np.int64),
            np.array([head for _, head in ends], np.int64),
            np.array([link.rate for link in self.links], np.float64),
            np.array([link.flow_rate for link in self.links], np.float64),
            np.array([link.latency_us for link in self.links], np.float64),
        )
        finder = _Finder(self, numbers, ends)
        finder.check_connected()
        return Network(
            self.name,
            *(len(self.hosts), len(names), names.__getitem__, links, finder.ways),
            (0, len(self.hosts)) if self.switches else (0,),
            drawing="ring",
            link_names=[x.name for x in self.links] if self.route else None,
        )


class _Finder:
    """Finds ways, each when it is first asked for."""

    def __init__(
        self, graph: Graph, numbers: Mapping[str, int], ends: list[tuple[int, int]]
    ) -> None:
        self._graph = graph
        self._numbers = numbers
        self._ends = ends
        self._num_hosts = len(graph.hosts)
        self._beside: dict[int, list[int]] = {}
        for link, (tail, _) in enumerate(ends):
            self._beside.setdefault(tail, []).append(link)
        self._trees: dict[int, dict[int, int]] = {}

    def check_connected(self) -> None:
        """Raise UsageError if the first host and another cannot reach each other."""
        if self._graph.route is not None:
            for host in range(1, self._num_hosts):
                self._way(0, host)
                self._way(host, 0)
            return
        names = self._graph.hosts
        ahead = self._reached({})
        back: dict[int, list[int]] = {}
        for link, (_, head) in enumerate(self._ends):
            back.setdefault(head, []).append(link)
        behind = self._reached(back)
        for host in range(self._num_hosts):
            if host not in ahead or host not in behind:
                pair = (0, host) if host not in ahead else (host, 0)
                raise self._apart(*(names[one] for one in pair))

    def _reached(self, back: dict[int, list[int]]) -> set[int]:
        seen, todo = {0}, [0]
        while todo:
            node = todo.pop()
            if 0 < node < self._num_hosts:
                continue
            for link in (back or self._beside).get(node, ()):
                other = self._ends[link][0 if back else 1]
                if other not in seen:
                    seen.add(other)
                    todo.append(other)
        return seen

    def _apart(self, source: str, target: str) -> UsageError:
        return UsageError(
            f"host {source} cannot reach host {target}: no way leads there; add links, "
            f"or leave the host out"
        )

    def ways(self, source: Ints, target: Ints) -> Ways:
        """Return the ways of pairs of hosts."""
        starts, links = [0], []
        for pair in zip(source.tolist(), target.tolist(), strict=True):
            links.extend(self._way(*pair))
            starts.append(len(links))
        return Ways(
            np.arange(len(source) + 1, dtype=np.int64),
            np.array(starts, np.int64),
            np.array(links, np.int32),
        )

    def _way(self, source: int, target: int) -> list[int]:
        if source == target:
            return []
        names = self._graph.hosts
        if self._graph.route is not None:
            given = self._graph.route(names[source], names[target])
            if given is None:
                raise self._apart(names[source], names[target])
            return list(given)
        tree = self._trees.get(source)
        if tree is None:
            tree = self._trees[source] = self._tree(source)
        way: list[int] = []
        node = target
        while node != source:
            if node not in tree:
                raise self._apart(names[source], names[target])
            way.append(tree[node])
            node = self._ends[tree[node]][0]
        return way[::-1]

    def _tree(self, source: int) -> dict[int, int]:
        """Return the last link of the way to each node."""
        tree: dict[int, int] = {}
        queue: list[tuple[int, float, int, int]] = [(0, 0.0, -1, source)]
        done: set[int] = set()
        while queue:
            hops, latency, by, node = heapq.heappop(queue)
            if node in done:
                continue
            done.add(node)
            if by >= 0:
                tree[node] = by
            if node < self._num_hosts and node != source:
                continue
            for link in self._beside.get(node, ()):
                head = self._ends[link][1]
                if head not in done:
                    further = latency + self._graph.links[link].latency_us
                    heapq.heappush(queue, (hops + 1, further, link, head))
        return tree
