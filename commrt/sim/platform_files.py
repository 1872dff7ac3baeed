# SPDX-License-Identifier: Apache-2.0
"""Platforms of SimGrid: XML to a network, and a network to XML.

Read are zones (routing Full, Floyd, Dijkstra, Cluster, None), hosts, routers, links
(SHARED, FATPIPE, SPLITDUPLEX), routes, routes between zones, and flat clusters with or
without a backbone: version 4 of the form that SimGrid's manual calls "platform files".
Speeds of hosts are not used. A document type is skipped, never fetched; documents that
declare entities are refused, since they can grow without bounds.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from xml.sax.saxutils import quoteattr

import numpy as np

from commrt.errors import UsageError, shown, suggest
from commrt.files.plain_xml import XmlReader
from commrt.sim.platform_zones import Zone, way_between
from commrt.sim.quantities import parse_latency, parse_rate
from commrt.sim.topologies.graphs import Graph, NamedLink
from commrt.sim.topologies.network import Network, check_links

__all__ = ["platform_xml", "read_platform"]

_MOST_WRITTEN = 3_000_000
_IGNORED = ("prop", "config", "storage", "storage_type", "disk", "mount", "trace",
            "trace_connect", "random", "argument", "gpu")  # fmt: skip
_ROUTES = ("route", "zoneRoute", "ASroute", "bypassRoute")
_INFINITE = float("inf")


@dataclass(frozen=True)
class _Link:
    """A link of the file: one of ours, or one for each direction."""

    up: int
    down: int
    duplex: bool


def read_platform(text: str, source: str) -> Graph:
    """Return the network of a platform file.

    Args:
        text: XML.
        source: the name of the file, for messages.

    Raises:
        UsageError: it is no XML, declares entities, or has what is not supported; the
            message has the line.
    """
    document = XmlReader(source)
    reader = _Reader(document)
    document.read(text, reader.start, reader.end)
    return reader.graph()


class _Reader:
    """Takes the elements one by one, with the zones that are open."""

    def __init__(self, document: XmlReader) -> None:
        self._document = document
        self._source = document.source
        self._open = document.open
        self._zone: Zone | None = None
        self._zone_of: dict[str, Zone] = {}
        self._hosts: list[str] = []
        self._routers: list[str] = []
        self._zones: dict[str, Zone] = {}
        self._by_name: dict[str, _Link] = {}
        self._links: list[NamedLink] = []
        self._route: tuple[Zone, dict[str, str], list[int], list[int]] | None = None
        self._takes: dict[str, Callable[[Mapping[str, str]], None]] = {
            "host": self._host,
            "router": self._router,
            "link": self._new_link,
            "backbone": self._backbone,
            "host_link": self._host_link,
            "link_ctn": self._step,
            "cluster": self._cluster,
        }

    def graph(self) -> Graph:
        """Return what was read."""
        if not self._hosts:
            raise UsageError(f"{self._source}: the platform has no host")

        def route(source: str, target: str) -> list[int] | None:
            found = way_between(self._zone_of, source, target)
            return None if found is None else list(found)

        return Graph(
            f"platform {self._source}",
            *(self._hosts, self._routers, self._placed(), route),
        )

    def _placed(self) -> list[NamedLink]:
        """Return the links, with their ends where a route says them."""
        ends: dict[int, tuple[str, str]] = {}
        for zone in self._zones.values():
            for (tail, head), links in zone.routes.items():
                if len(links) == 1 and tail in self._zone_of and head in self._zone_of:
                    ends.setdefault(links[0], (tail, head))
        return [
            replace(one, tail=ends[number][0], head=ends[number][1])
            if number in ends
            else one
            for number, one in enumerate(self._links)
        ]

    def wrong(self, problem: object) -> UsageError:
        """Return the error that says what is wrong on this line."""
        return self._document.wrong(problem)

    def start(self, tag: str, given: Mapping[str, str]) -> None:
        """Take an element."""
        if len(self._open) == 1:
            return self._platform(tag, given)
        if tag in ("zone", "AS"):
            return self._enter(given)
        if tag in _IGNORED:
            return None
        if tag in _ROUTES and tag != "bypassRoute":
            return self._begin_route(given)
        if tag not in self._takes:
            known = (*self._takes, *_ROUTES[:2], "zone")
            raise self.wrong(f"<{tag}> is not supported{suggest(tag, known)}")
        self._takes[tag](given)
        return None

    def end(self, tag: str) -> None:
        """Leave an element."""
        if tag in ("zone", "AS") and self._zone is not None:
            self._zone = self._zone.parent
        if tag in _ROUTES:
            self._end_route()

    def _platform(self, tag: str, given: Mapping[str, str]) -> None:
        version = given.get("version", "")
        if tag != "platform" or not re.fullmatch(r"4(\.\d)?", version):
            raise self.wrong(
                f"<{tag} version={version!r}> begins the file; expected <platform "
                f'version="4.1">, as SimGrid 3.16 and newer write it'
            )

    def _need(self, given: Mapping[str, str], key: str) -> str:
        return self._document.needed(given, key)

    def _here(self) -> Zone:
        if self._zone is None:
            raise self.wrong(f"<{self._open[-1]}> lies in no zone; put it into one")
        return self._zone

    def _enter(self, given: Mapping[str, str]) -> None:
        name, routing = self._need(given, "id"), given.get("routing", "None").lower()
        known = ("full", "floyd", "dijkstra", "dijkstracache", "cluster", "none")
        if routing not in known:
            raise self.wrong(
                f"routing {given['routing']!r} is not supported; expected Full, Floyd, "
                f"Dijkstra, Cluster or None"
            )
        self._zone = self._add_zone(name, routing)

    def _add_zone(self, name: str, routing: str) -> Zone:
        if name in self._zones or name in self._zone_of:
            raise self.wrong(f"{shown(name)} is given twice")
        zone = self._zones[name] = Zone(name, routing, self._zone)
        return zone

    def _add_node(self, name: str, zone: Zone, names: list[str]) -> None:
        if name in self._zone_of or name in self._zones:
            raise self.wrong(f"{shown(name)} is given twice")
        self._zone_of[name] = zone
        names.append(name)

    def _host(self, given: Mapping[str, str]) -> None:
        self._add_node(self._need(given, "id"), self._here(), self._hosts)

    def _router(self, given: Mapping[str, str]) -> None:
        name = self._need(given, "id")
        self._add_node(name, self._here(), self._routers)
        if self._here().routing == "cluster":
            self._here().up[name] = self._here().down[name] = []

    def _new_link(self, given: Mapping[str, str]) -> None:
        self._add_link(
            *(self._need(given, "id"), self._need(given, "bandwidth")),
            *(given.get("latency", "0"), given.get("sharing_policy", "SHARED")),
        )

    def _add_link(self, name: str, bandwidth: str, latency: str, policy: str) -> _Link:
        if name in self._by_name:
            raise self.wrong(f"link {shown(name)} is given twice")
        if policy not in ("SHARED", "FATPIPE", "SPLITDUPLEX"):
            raise self.wrong(
                f"link {name}: sharing_policy {policy!r} is not supported; expected "
                f"SHARED, FATPIPE or SPLITDUPLEX"
            )
        try:
            rate = parse_rate(bandwidth, bare="Bps")
            latency_us = parse_latency(latency, bare="s")
            check_links(len(self._links) + 2)
        except UsageError as error:
            raise self.wrong(f"link {name}: {error}") from error
        shared = _INFINITE if policy == "FATPIPE" else rate
        duplex = policy == "SPLITDUPLEX"
        first = len(self._links)
        for suffix in ("_UP", "_DOWN") if duplex else ("",):
            full = f"{name}{suffix}"
            self._links.append(NamedLink("", "", shared, rate, latency_us, full))
        made = self._by_name[name] = _Link(first, first + duplex, duplex)
        return made

    def _named_link(self, name: str) -> _Link:
        if name not in self._by_name:
            hint = suggest(name, self._by_name) if len(self._by_name) < 20 else ""
            raise self.wrong(f"no link before this line is called {shown(name)}{hint}")
        return self._by_name[name]

    def _begin_route(self, given: Mapping[str, str]) -> None:
        zone = self._here()
        for key in ("src", "dst"):
            name = self._need(given, key)
            inside = self._zone_of.get(name) or self._zones.get(name)
            if inside is None:
                raise self.wrong(f"no host, router or zone is called {shown(name)}")
            gateway = given.get(f"gw_{key}")
            if name in self._zones and gateway not in self._zone_of:
                raise self.wrong(
                    f"gw_{key} of zone {name} is {shown(gateway)}; expected a host or "
                    f"router of it"
                )
        self._route = zone, dict(given), [], []

    def _step(self, given: Mapping[str, str]) -> None:
        if self._route is None:
            raise self.wrong("<link_ctn> lies in no route")
        link = self._named_link(self._need(given, "id"))
        direction = given.get("direction", "NONE")
        if direction not in ("UP", "DOWN", "NONE"):
            raise self.wrong(f"direction {direction!r}; expected UP, DOWN or NONE")
        ahead, back = (link.up, link.down)
        if direction == "DOWN":
            ahead, back = back, ahead
        self._route[2].append(ahead)
        self._route[3].insert(0, back)

    def _end_route(self) -> None:
        if self._route is None:
            return
        zone, given, ahead, back = self._route
        self._route = None
        both = given.get("symmetrical", "YES").upper() == "YES"
        pair = given["src"], given["dst"]
        gateways = given.get("gw_src", pair[0]), given.get("gw_dst", pair[1])
        for ends, doors, links in (
            (pair, gateways, ahead),
            (pair[::-1], gateways[::-1], back),
        )[: 1 + both]:
            if ends in zone.routes and links is ahead:
                raise self.wrong(f"a second route from {ends[0]} to {ends[1]}")
            zone.routes.setdefault(ends, links)
            if "gw_src" in given or "gw_dst" in given:
                zone.gateways.setdefault(ends, doors)

    def _backbone(self, given: Mapping[str, str]) -> None:
        self._new_link(given)
        zone, link = self._here(), self._by_name[given["id"]]
        zone.up = {name: [*links, link.up] for name, links in zone.up.items()}
        zone.up[""] = [link.up]

    def _host_link(self, given: Mapping[str, str]) -> None:
        zone, name = self._here(), self._need(given, "id")
        if name not in self._zone_of:
            raise self.wrong(f"no host is called {shown(name)}")
        up = self._named_link(self._need(given, "up"))
        down = self._named_link(self._need(given, "down"))
        zone.up[name] = [up.up, *zone.up.get("", [])]
        zone.down[name] = [down.down]

    def _cluster(self, given: Mapping[str, str]) -> None:
        if given.get("topology", "FLAT") != "FLAT":
            raise self.wrong(
                f"clusters with topology {given['topology']} are not supported; write "
                f"a YAML file with kind: torus, fat_tree or dragonfly"
            )
        name = self._need(given, "id")
        zone = self._add_zone(name, "cluster")
        prefix, suffix = given.get("prefix", ""), given.get("suffix", "")
        middle: list[int] = []
        if "bb_bw" in given:
            policy = given.get("bb_sharing_policy", "SHARED")
            lat = given.get("bb_lat", "0")
            middle = [
                self._add_link(f"{name}_backbone", given["bb_bw"], lat, policy).up
            ]
        for number in self._radical(self._need(given, "radical")):
            host = f"{prefix}{number}{suffix}"
            self._add_node(host, zone, self._hosts)
            link = self._add_link(
                *(f"{host}_link", self._need(given, "bw"), given.get("lat", "0")),
                given.get("sharing_policy", "SPLITDUPLEX"),
            )
            zone.up[host], zone.down[host] = [link.up, *middle], [link.down]
        router = given.get("router_id", f"{prefix}{name}_router{suffix}")
        self._add_node(router, zone, self._routers)
        zone.up[router], zone.down[router] = middle, []

    def _radical(self, text: str) -> list[int]:
        found: list[int] = []
        for part in text.split(","):
            form = re.fullmatch(r"\s*(\d{1,9})(?:-(\d{1,9}))?\s*", part)
            if form is None:
                raise self.wrong(f"radical {text!r}: expected numbers, as in 0-7,9")
            first, last = int(form[1]), int(form[2] or form[1])
            try:
                check_links(2 * (len(found) + last - first + 1))
            except UsageError as error:
                raise self.wrong(f"radical {text!r}: {error}") from error
            found.extend(range(first, last + 1))
        return found


def platform_xml(network: Network) -> str:
    """Return a network as a platform of SimGrid with a route for every two hosts.

    Each way is the network's first one: adaptive routing is not written. SimGrid has
    the same times with ``--cfg=network/model:CM02 --cfg=network/crosstraffic:0`` where
    all ways have one latency; it gives flows with a shorter one more of a link.

    Raises:
        UsageError: the file would have more than some millions of lines.
    """
    hosts = network.num_hosts
    source, target = np.nonzero(~np.eye(hosts, dtype=bool))
    if hosts * (hosts - 1) > _MOST_WRITTEN:
        raise UsageError(
            f"{hosts} hosts need {hosts * (hosts - 1):,} routes; a platform file is "
            f"written for {_MOST_WRITTEN:,} at most, so take a smaller network"
        )
    ways = network.find_ways(source, target)
    lines = [
        "<?xml version='1.0'?>",
        '<!DOCTYPE platform SYSTEM "https://simgrid.org/simgrid.dtd">',
        f"<!-- {network.name.replace('--', '- -')}, written by commrt -->",
        '<platform version="4.1">',
        ' <zone id="network" routing="Full">',
    ]
    lines += [
        f'  <host id={quoteattr(network.node_name(host))} speed="1Gf"/>'
        for host in range(hosts)
    ]
    steps: list[str] = []
    links = network.links
    columns = (links.shared_rate, links.flow_rate, links.latency_us)
    for number, (shared, each, latency_us) in enumerate(
        zip(*(column.tolist() for column in columns), strict=True)
    ):
        name = quoteattr(f"{number} {network.link_name(number)}")
        rate, step = min(shared, each), f"<link_ctn id={name}/>"
        policy = "FATPIPE" if shared == _INFINITE else "SHARED"
        if each < shared < _INFINITE:
            # The bundle's rate, and that of one cable for each flow.
            rate, one = shared, quoteattr(f"{number} one cable")
            step += f"<link_ctn id={one}/>"
            lines.append(
                f'  <link id={one} bandwidth="{each * 1e6:.17g}Bps" latency="0s" '
                f'sharing_policy="FATPIPE"/>'
            )
        lines.append(
            f'  <link id={name} bandwidth="{rate * 1e6:.17g}Bps" '
            f'latency="{latency_us / 1e6:.17g}s" sharing_policy="{policy}"/>'
        )
        steps.append(step)
    names = [quoteattr(network.node_name(host)) for host in range(hosts)]
    for pair, (one, other) in enumerate(
        zip(source.tolist(), target.tolist(), strict=True)
    ):
        way = ways.of_pair[pair]
        found = ways.links[ways.starts[way] : ways.starts[way + 1]]
        lines.append(
            f'  <route src={names[one]} dst={names[other]} symmetrical="NO">'
            f"{''.join(steps[link] for link in found)}</route>"
        )
    return "\n".join([*lines, " </zone>", "</platform>", ""])
