# SPDX-License-Identifier: Apache-2.0
"""Networks as plain data: hosts, switches, and links with a rate each.

A host has one link, to a switch. Switches may have any links among them, circles too.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from commrt.cluster.latency import check_latency
from commrt.errors import UsageError, shown
from commrt.vocabulary.link_rates import check_rate, rate_text

__all__ = [
    "MOST_HOSTS",
    "Link",
    "Topology",
    "fat_tree",
    "loop_network",
    "star",
    "with_latency",
]

MOST_HOSTS = 128
"""Hosts of one cluster. Each one is a process, and knows all others."""
_MOST_SWITCHES = 128
_MOST_LINKS = 2048
_NAME = re.compile(r"[a-z]([a-z0-9-]{0,30}[a-z0-9])?")


@dataclass(frozen=True)
class Link:
    """A cable between two of a network's members."""

    ends: tuple[str, str]
    """Names of a host and a switch, or of two switches."""
    rate: int | None = None
    """Bits a second in each direction; None: as fast as the machine is."""
    latency_us: int = 0
    """The time that a packet is on its way, beside that of its bytes; 0: none."""


@dataclass(frozen=True)
class Topology:
    """A network. Making one checks it.

    Raises:
        UsageError: a name is wrong or given twice, a host has not exactly one link,
            some hosts cannot reach each other, or a rate cannot be kept.
    """

    hosts: tuple[str, ...]
    switches: tuple[str, ...]
    links: tuple[Link, ...]

    def __post_init__(self) -> None:
        _check_number("hosts", len(self.hosts), 1, MOST_HOSTS)
        _check_number("switches", len(self.switches), 1, _MOST_SWITCHES)
        _check_number("links", len(self.links), 1, _MOST_LINKS)
        _check_names((*self.hosts, *self.switches))
        for link in self.links:
            self._check_link(link)
        self._check_host_links()
        self._check_connected()

    def switch_of(self, host: str) -> str:
        """Return the switch that a host is linked to."""
        return next(switch for switch, _ in self.neighbors(host))

    def neighbors(self, name: str) -> list[tuple[str, int]]:
        """Return who is linked to a member, with the link's place in ``links``."""
        found = []
        for index, link in enumerate(self.links):
            if name in link.ends:
                one, other = link.ends
                found.append((other if name == one else one, index))
        return found

    def _check_link(self, link: Link) -> None:
        for end in link.ends:
            if end not in self.hosts and end not in self.switches:
                raise UsageError(
                    f"link {'-'.join(link.ends)}: {shown(end)} is neither a host nor a "
                    f"switch of this network; add it, or correct the link"
                )
        if link.ends[0] == link.ends[1]:
            raise UsageError(f"link {'-'.join(link.ends)}: its two ends are the same")
        if all(end in self.hosts for end in link.ends):
            raise UsageError(
                f"link {'-'.join(link.ends)} joins two hosts; put a switch between them"
            )
        if link.rate is not None:
            check_rate(link.rate, f"{rate_text(link.rate)} of {'-'.join(link.ends)}")
        check_latency(link.latency_us, link.rate, "-".join(link.ends))

    def _check_host_links(self) -> None:
        counts = Counter(end for link in self.links for end in link.ends)
        for host in self.hosts:
            if counts[host] != 1:
                raise UsageError(
                    f"host {host} has {counts[host]} links; each host needs exactly "
                    f"one, to a switch"
                )

    def _check_connected(self) -> None:
        beside: dict[str, list[str]] = {}
        for link in self.links:
            for one, other in (link.ends, link.ends[::-1]):
                beside.setdefault(one, []).append(other)
        reached, todo = {self.hosts[0]}, [self.hosts[0]]
        while todo:
            found = {*beside.get(todo.pop(), ())} - reached
            reached |= found
            todo += found
        lost = [host for host in self.hosts if host not in reached]
        if lost:
            raise UsageError(
                f"{self.hosts[0]} cannot reach {', '.join(lost)}: the network is not "
                f"connected; add links between its switches"
            )


def star(num_hosts: int, rate: int | None = None) -> Topology:
    """Return hosts around one switch."""
    hosts = _hosts(num_hosts)
    return Topology(hosts, ("s1",), tuple(Link((host, "s1"), rate) for host in hosts))


def fat_tree(
    num_hosts: int,
    rate: int | None = None,
    *,
    per_switch: int = 4,
    spines: int = 2,
    oversubscription: float = 1.0,
) -> Topology:
    """Return a tree of two levels: switches with hosts, each linked to every spine.

    Args:
        num_hosts: number of hosts.
        rate: bits a second of a host's link.
        per_switch: hosts of a lower switch.
        spines: upper switches.
        oversubscription: the rate of a lower switch's full set of hosts over the rate
            of all of its links to spines.
    """
    _check_number("hosts per switch", per_switch, 1, MOST_HOSTS)
    _check_number("spines", spines, 1, _MOST_SWITCHES)
    if not 0.1 <= oversubscription <= 100:
        raise UsageError(
            f"oversubscription {oversubscription}: expected a number from 0.1 to 100"
        )
    hosts, leaves, links = _on_switches(num_hosts, per_switch, rate)
    upper = tuple(f"spine{number + 1}" for number in range(spines))
    up = None
    if rate is not None:
        up = max(1, round(rate * per_switch / (oversubscription * spines)))
    links += [Link((leaf, spine), up) for leaf in leaves for spine in upper]
    return Topology(hosts, (*leaves, *upper), tuple(links))


def loop_network(
    num_hosts: int,
    rate: int | None = None,
    *,
    per_switch: int = 2,
    chords: Sequence[int] | None = None,
) -> Topology:
    """Return a Distributed Loop Network: a ring of switches with chords.

    Args:
        num_hosts: number of hosts.
        rate: bits a second of every link.
        per_switch: hosts of a switch.
        chords: how many switches further each chord leads; by default 2, 8, 32, ... up
            to half of the ring.
    """
    _check_number("hosts per switch", per_switch, 1, MOST_HOSTS)
    hosts, ring, links = _on_switches(num_hosts, per_switch, rate)
    size = len(ring)
    if chords is None:
        chords = [2 * 4**power for power in range(4) if 2 * 4**power <= size // 2]
    pairs: list[tuple[str, str]] = []
    for length in (1, *chords):
        if not 1 <= length <= max(1, size // 2):
            raise UsageError(
                f"chord {length}: expected lengths from 1 to {max(1, size // 2)}, half "
                f"of the ring of {size} switches"
            )
        for index in range(size):
            one, other = ring[index], ring[(index + length) % size]
            if one != other and not {(one, other), (other, one)} & {*pairs}:
                pairs.append((one, other))
    links += [Link(pair, rate) for pair in pairs]
    return Topology(hosts, ring, tuple(links))


def with_latency(topology: Topology, latency_us: int) -> Topology:
    """Return a network whose links all have a latency."""
    links = (replace(link, latency_us=latency_us) for link in topology.links)
    return replace(topology, links=tuple(links))


def _hosts(num_hosts: int) -> tuple[str, ...]:
    _check_number("hosts", num_hosts, 1, MOST_HOSTS)
    return tuple(f"h{number + 1}" for number in range(num_hosts))


def _on_switches(
    num_hosts: int, per_switch: int, rate: int | None
) -> tuple[tuple[str, ...], tuple[str, ...], list[Link]]:
    """Return hosts, switches with so many hosts each, and the links between them."""
    hosts = _hosts(num_hosts)
    switches = tuple(f"s{i + 1}" for i in range(-(-num_hosts // per_switch)))
    links = [Link((h, switches[i // per_switch]), rate) for i, h in enumerate(hosts)]
    return hosts, switches, links


def _check_number(what: str, number: int, least: int, most: int) -> None:
    if not least <= number <= most:
        raise UsageError(f"{number} {what}: expected a number from {least} to {most}")


def _check_names(names: Iterable[str]) -> None:
    for name, times in Counter(names).items():
        if not _NAME.fullmatch(name) or name == "localhost":
            raise UsageError(
                f"name {shown(name)}: expected at most 32 lower-case letters, digits "
                f"and hyphens, a letter first, and not localhost"
            )
        if times > 1:
            raise UsageError(f"{name} is given {times} times; names must differ")
