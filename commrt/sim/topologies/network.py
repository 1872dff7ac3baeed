# SPDX-License-Identifier: Apache-2.0
"""Networks as columns: hosts and switches, directed links, ways from host to host.

Nodes are numbers: hosts first, then switches. A link leads one way; a cable is two
links. Every network of this package, however regular, becomes one of these.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from commrt.errors import UsageError

__all__ = [
    "MOST_LINKS",
    "Cable",
    "Columns",
    "Floats",
    "Ints",
    "LinkBuilder",
    "Links",
    "Network",
    "Ways",
    "check_count",
    "check_links",
    "every_way",
    "ways_of_columns",
]

MOST_LINKS = 4_000_000
"""Links of one network. More need gigabytes, and are a slip of the pen as a rule."""
MOST_WAYS = 20_000_000
"""Ways of all pairs of ranks together."""

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Columns = Sequence[Ints]
"""For each hop the link of every pair, -1 where a pair has none."""
Drawing = Literal["tiers", "ring", "grid"]


@dataclass(frozen=True)
class Cable:
    """A connection of two nodes, both ways alike.

    Raises:
        UsageError: a rate that is not above 0, a negative latency, or no cable.
    """

    gbytes_per_s: float = 12.5
    """10^9 bytes a second of one cable, each way."""
    latency_us: float = 1.0
    """Time of the first byte, with the switch at its end."""
    bundle: int = 1
    """Cables side by side. Flows spread over them evenly; one flow uses one cable."""

    def __post_init__(self) -> None:
        if not (self.gbytes_per_s > 0 and self.gbytes_per_s < float("inf")):
            raise UsageError(
                f"a rate of {self.gbytes_per_s} GB/s: expected a finite one above 0"
            )
        if not (self.latency_us >= 0 and self.latency_us < float("inf")):
            raise UsageError(
                f"a latency of {self.latency_us} us: expected a finite one from 0"
            )
        check_count("bundle", self.bundle)


@dataclass(frozen=True)
class Links:
    """All links of a network; index i of each column is link i."""

    tails: Ints
    """The node that a link leaves."""
    heads: Ints
    """The node that it leads to."""
    shared_rate: Floats
    """Bytes per microsecond of all flows together; inf: flows do not hinder others."""
    flow_rate: Floats
    """The most that one flow gets, in bytes per microsecond."""
    latency_us: Floats

    def __len__(self) -> int:
        return len(self.tails)


@dataclass(frozen=True)
class Ways:
    """Ways of pairs of hosts, in rows of rows."""

    of_pair: Ints
    """Way ``of_pair[i]`` up to ``of_pair[i+1]`` are those of pair i, at least one."""
    starts: Ints
    """``links[starts[w]:starts[w+1]]`` are the links of way w; none within a host."""
    links: npt.NDArray[np.int32]


FindWays = Callable[[Ints, Ints], Ways]


@dataclass(frozen=True, eq=False)
class Network:
    """Hosts and switches with links, and the rule by which messages find their way."""

    name: str
    num_hosts: int
    num_nodes: int
    """Hosts and switches."""
    node_name: Callable[[int], str]
    links: Links
    find_ways: FindWays
    """Return the ways from hosts to hosts. Several for a pair: a message takes the
    least loaded one when it leaves."""
    tiers: tuple[int, ...] = ()
    """Where each tier of nodes begins, from the hosts up, for pictures."""
    drawing: Drawing = "tiers"
    hosts_per_node: int = 1
    """Hosts of one machine, which ``placement`` and the oracle of nodes go by."""
    notes: tuple[str, ...] = ()
    """Sources and assumptions, printed with every result."""
    link_names: Sequence[str] | None = None
    """Names of links that have other ones than their ends'."""

    def link_name(self, link: int) -> str:
        """Return ``sw3→sw11``."""
        if self.link_names is not None and self.link_names[link]:
            return self.link_names[link]
        tail, head = int(self.links.tails[link]), int(self.links.heads[link])
        return f"{self.node_name(tail)}→{self.node_name(head)}"

    def way(self, source: int, target: int) -> list[int]:
        """Return the links of the first way between two hosts."""
        pair = np.array([source]), np.array([target])
        found = self.find_ways(*pair)
        return [int(link) for link in found.links[: found.starts[1]]]


class LinkBuilder:
    """Collects the links of a network."""

    def __init__(self) -> None:
        self._parts: list[tuple[Ints, Ints, Cable]] = []
        self._count = 0

    def add(self, tails: Ints, heads: Ints, cable: Cable) -> Ints:
        """Add links from each tail to each head; return their numbers."""
        first, self._count = self._count, self._count + len(tails)
        check_links(self._count)
        self._parts.append((tails, heads, cable))
        return np.arange(first, self._count, dtype=np.int64)

    def both(self, ends: Ints, others: Ints, cable: Cable) -> tuple[Ints, Ints]:
        """Add cables; return the links from each end and those from each other."""
        return self.add(ends, others, cable), self.add(others, ends, cable)

    def links(self) -> Links:
        """Return the columns of all links."""

        def column(value: Callable[[Cable], float]) -> Floats:
            parts = [np.full(len(tails), value(c)) for tails, _, c in self._parts]
            return np.concatenate([np.empty(0), *parts])

        none = np.empty(0, np.int64)
        return Links(
            np.concatenate([none, *(tails for tails, _, _ in self._parts)]),
            np.concatenate([none, *(heads for _, heads, _ in self._parts)]),
            column(lambda c: 1000.0 * c.gbytes_per_s * c.bundle),
            column(lambda c: 1000.0 * c.gbytes_per_s),
            column(lambda c: c.latency_us),
        )


def every_way(source: Ints, target: Ints, each: int) -> tuple[Ints, Ints, Ints]:
    """Return source, target and number of each way of each pair.

    Raises:
        UsageError: there are more ways than memory should hold.
    """
    if len(source) * each > MOST_WAYS:
        raise UsageError(
            f"{len(source):,} pairs of hosts with {each} ways each; at most "
            f"{MOST_WAYS:,} ways can be simulated, so take static routing or fewer "
            f"ranks"
        )
    turn = np.tile(np.arange(each, dtype=np.int64), len(source))
    return np.repeat(source, each), np.repeat(target, each), turn


def ways_of_columns(columns: Columns, num_pairs: int, each: int = 1) -> Ways:
    """Return the ways that lead over one link of each column, in order.

    Args:
        columns: for each hop the link of every way, -1: none.
        num_pairs: number of pairs.
        each: ways of a pair; they follow one another.
    """
    rows = num_pairs * each
    table = np.stack(columns, axis=1) if columns else np.empty((rows, 0), np.int64)
    used = table >= 0
    starts = np.zeros(rows + 1, np.int64)
    np.cumsum(used.sum(axis=1), out=starts[1:])
    of_pair = np.arange(0, rows + 1, each, dtype=np.int64)
    return Ways(of_pair, starts, table[used].astype(np.int32))


def check_count(what: str, number: int, least: int = 1) -> None:
    """Raise UsageError for a number that is too small."""
    if number < least:
        raise UsageError(f"{what} is {number}; expected {least} or more")


def check_links(number: int) -> None:
    """Raise UsageError for more links than a network may have."""
    if number > MOST_LINKS:
        raise UsageError(
            f"the network has {number:,} links or more; at most {MOST_LINKS:,} can be "
            f"simulated, so take a smaller part of it"
        )
