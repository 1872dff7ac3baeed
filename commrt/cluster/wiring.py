# SPDX-License-Identifier: Apache-2.0
"""Commands that turn a network into bridges, cables and tables of addresses.

All switches are bridges in one network namespace. They neither learn nor flood: each
has a fixed entry for every host, so circles of switches do no harm.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from commrt.cluster.rates import bucket
from commrt.cluster.relay import Cut
from commrt.cluster.routes import hops
from commrt.cluster.topology import Topology

__all__ = ["ETHERNET_NBYTES", "INTERFACE", "Wiring", "hosts_file"]

INTERFACE = "eth0"
"""The name of each host's network interface."""
ETHERNET_NBYTES = 14
"""Header of each packet beside the MTU, which token buckets count, too."""
_TCP_IP_NBYTES = 52
"""Headers of TCP, with its time stamps, and IPv4 in each packet."""
_NETWORK = "10.77"


@dataclass(frozen=True)
class Wiring:
    """A network, and what its hosts and switches are to be told."""

    topology: Topology
    mtu: int
    """Bytes of the largest packet, without its Ethernet header."""
    burst_nbytes: int | None = None
    """Bytes that a link lets pass at once; None: see ``bucket``."""

    @property
    def data_share(self) -> float:
        """The part of a link's rate that is left for data beside TCP's headers."""
        return (self.mtu - _TCP_IP_NBYTES) / (self.mtu + ETHERNET_NBYTES)

    def address(self, host: str) -> str:
        """Return a host's address of IPv4."""
        high, low = divmod(self.topology.hosts.index(host) + 1, 256)
        return f"{_NETWORK}.{high}.{low}"

    def hardware_address(self, host: str) -> str:
        """Return the address of a host's interface."""
        high, low = divmod(self.topology.hosts.index(host) + 1, 256)
        return f"02:00:0a:4d:{high:02x}:{low:02x}"

    def port(self, index: int, end: str) -> str:
        """Return the name of a switch's end of a link."""
        return f"p{index}{'ab'[self.topology.links[index].ends.index(end)]}"

    def cables(self, namespaces: Mapping[str, str]) -> Iterator[str]:
        """Yield commands of ``ip`` for the namespace of the switches.

        Args:
            namespaces: paths of the hosts' network namespaces.
        """
        yield "link set dev lo up"
        for switch in self.topology.switches:
            name = self._bridge(switch)
            yield (
                f"link add name {name} mtu {self.mtu} type bridge stp_state 0 "
                f"mcast_snooping 0"
            )
            yield f"link set dev {name} up"
        for index, link in enumerate(self.topology.links):
            yield from self._cables(index, namespaces)
            for end in link.ends:
                if end in self.topology.switches:
                    port, bridge = self.port(index, end), self._bridge(end)
                    yield f"link set dev {port} master {bridge} up"

    def cuts(self) -> list[Cut]:
        """Return the links that the relay delays."""
        return [
            Cut((self._cut_end(index, 0), self._cut_end(index, 1)), link.latency_us)
            for index, link in enumerate(self.topology.links)
            if link.latency_us
        ]

    def tables(self) -> Iterator[str]:
        """Yield commands of ``bridge`` for the namespace of the switches."""
        for port, _ in self._ports():
            yield (
                f"link set dev {port} learning off flood off mcast_flood off "
                f"bcast_flood off"
            )
        for hop in hops(self.topology):
            port = self.port(hop.link, hop.switch)
            address = self.hardware_address(hop.host)
            yield f"fdb add {address} dev {port} master static"

    def switch_rates(self) -> Iterator[str]:
        """Yield commands of ``tc`` for the namespace of the switches."""
        for port, rate in self._ports():
            if rate is not None:
                yield f"qdisc add dev {port} root {bucket(rate, self.burst_nbytes)}"

    def host_addresses(self, host: str) -> Iterator[str]:
        """Yield commands of ``ip`` for a host's namespace."""
        yield "link set dev lo up"
        yield f"addr add {self.address(host)}/16 dev {INTERFACE}"
        yield f"link set dev {INTERFACE} up"
        for other in self.topology.hosts:
            if other != host:
                yield (
                    f"neigh add {self.address(other)} lladdr "
                    f"{self.hardware_address(other)} dev {INTERFACE} nud permanent"
                )

    def host_rates(self, host: str) -> Iterator[str]:
        """Yield commands of ``tc`` for a host's namespace."""
        [(_, index)] = self.topology.neighbors(host)
        rate = self.topology.links[index].rate
        if rate is not None:
            yield f"qdisc add dev {INTERFACE} root {bucket(rate, self.burst_nbytes)}"

    def _bridge(self, switch: str) -> str:
        return f"b{self.topology.switches.index(switch)}"

    def _ports(self) -> Iterator[tuple[str, int | None]]:
        """Yield the names and rates of all ends of links at switches."""
        for index, link in enumerate(self.topology.links):
            for end in link.ends:
                if end in self.topology.switches:
                    yield self.port(index, end), link.rate

    @staticmethod
    def _cut_end(index: int, end: int) -> str:
        """Return the name of the relay's interface beside one end of a link."""
        return f"c{index}{'ab'[end]}"

    def _cables(self, index: int, namespaces: Mapping[str, str]) -> Iterator[str]:
        """Yield the commands for a link: one cable, or one from each end to a relay."""
        link = self.topology.links[index]
        one, other = link.ends
        if not link.latency_us:
            if one in namespaces:
                one, other = other, one
            yield self._cable(
                self.port(index, one), self._end(index, other, namespaces)
            )
            return
        for number, end in enumerate(link.ends):
            mine = self._cut_end(index, number)
            yield self._cable(mine, self._end(index, end, namespaces))
            yield f"link set dev {mine} up"

    def _cable(self, near: str, far: str) -> str:
        return f"link add name {near} mtu {self.mtu} type veth peer name {far}"

    def _end(self, index: int, end: str, namespaces: Mapping[str, str]) -> str:
        """Return what ``ip`` is told of a cable's end at a host or a switch."""
        if end not in namespaces:
            return f"{self.port(index, end)} mtu {self.mtu}"
        return (
            f"{INTERFACE} address {self.hardware_address(end)} mtu {self.mtu} "
            f"netns {namespaces[end]}"
        )


def hosts_file(wiring: Wiring) -> str:
    """Return the text of /etc/hosts."""
    lines = [f"{wiring.address(host)} {host}" for host in wiring.topology.hosts]
    return "\n".join(["127.0.0.1 localhost", *lines]) + "\n"
