# SPDX-License-Identifier: Apache-2.0
"""Networks from descriptions: a YAML file, a preset, a text of the command line.

A description has a ``kind`` and the fields of that kind's class in ``topologies/``.
A file without a kind lists hosts, switches and links, as ``commrt.cluster`` reads them.
"""

from __future__ import annotations

import types
from dataclasses import MISSING, dataclass, fields, replace
from importlib import resources
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

from commrt.errors import UsageError, suggest
from commrt.files.read import Kind, read_text
from commrt.sim.costs import Costs
from commrt.sim.platform_files import read_platform
from commrt.sim.quantities import parse_latency, parse_rate
from commrt.sim.topologies.crossbars import Full, Star
from commrt.sim.topologies.dragonflies import Dragonfly
from commrt.sim.topologies.fat_trees import FatTree, KAryFatTree
from commrt.sim.topologies.gpu_clusters import GpuCluster
from commrt.sim.topologies.graphs import Graph, NamedLink
from commrt.sim.topologies.loop_networks import LoopNetwork
from commrt.sim.topologies.network import Cable, Network
from commrt.sim.topologies.tori import Mesh, Torus
from commrt.sim.values import Value, from_inline, from_yaml

__all__ = ["KINDS", "Described", "load_network", "preset_names"]

KINDS: dict[str, type[Any]] = {
    "star": Star,
    "full": Full,
    "torus": Torus,
    "mesh": Mesh,
    "dragonfly": Dragonfly,
    "fat_tree": FatTree,
    "k_ary_fat_tree": KAryFatTree,
    "loop": LoopNetwork,
    "gpu_cluster": GpuCluster,
}
"""The classes of regular networks by the name that a description gives them."""
_GRAPH = "graph"
_ABOUT = ("kind", "name", "notes", "costs")
_CABLE = ("rate", "latency", "bundle")
_FILE = Kind("file of a network", "YAML with a kind, or XML", 8_000_000, UsageError)


@dataclass(frozen=True)
class Described:
    """A network, and the costs that its description gives."""

    network: Network
    costs: Costs


def load_network(text: str, source: str = "--topology") -> Described:
    """Return the network of a file, of a preset, or of an inline description.

    Args:
        text: the path of a ``.yaml`` or ``.xml`` file, the name of a preset, or a kind
            with its fields, as ``torus:dims=8x8,rate=100gbit,latency=1us``.
        source: what messages call an inline description.

    Raises:
        UsageError: it cannot be read, or a part is wrong; the message has the place.
    """
    path = Path(text)
    if path.suffix == ".xml":
        graph = read_platform(read_text(path, _FILE), str(path))
        return Described(_made(graph, Value("", str(path))), Costs())
    if path.suffix in (".yaml", ".yml"):
        return _described(from_yaml(read_text(path, _FILE), str(path)))
    if text in preset_names():
        file = resources.files("commrt.sim") / "presets" / f"{text}.yaml"
        return _described(from_yaml(file.read_text("utf-8"), f"preset {text}"))
    return _described(from_inline(text, source))


def preset_names() -> list[str]:
    """Return the names of the descriptions that come with commrt."""
    folder = resources.files("commrt.sim") / "presets"
    names = (one.name for one in folder.iterdir())
    return sorted(name[:-5] for name in names if name.endswith(".yaml"))


def _described(value: Value) -> Described:
    data = value.data if isinstance(value.data, dict) else {}
    kind = data["kind"].text() if "kind" in data else _GRAPH
    if kind != _GRAPH and kind not in KINDS:
        known = [*KINDS, _GRAPH, *preset_names()]
        raise data["kind"].wrong(
            f"unknown kind of network {kind!r}{suggest(kind, known)} A file's name "
            f"ends in .yaml or .xml."
        )
    if kind == _GRAPH:
        made = _graph(value)
    else:
        made = _instance(KINDS[kind], value, inline=_ABOUT)
    network = _made(made, value)
    if "name" in data:
        network = replace(network, name=data["name"].text())
    if "notes" in data:
        notes = tuple(note.text() for note in _listed(data["notes"]))
        network = replace(network, notes=notes)
    return Described(network, _costs(data.get("costs")))


def _made(shape: Any, value: Value) -> Network:
    try:
        network: Network = shape.network()
    except UsageError as error:
        raise value.wrong(error) from error
    return network


def _costs(value: Value | None) -> Costs:
    if value is None:
        return Costs()
    made: Costs = _instance(Costs, value)
    return made


def _instance(shape: type[Any], value: Value, inline: tuple[str, ...] = ()) -> Any:
    """Return an instance of a dataclass from the values of its fields."""
    hints = get_type_hints(shape)
    own = {one.name: one for one in fields(shape)}
    short = _CABLE if "cable" in own or "cables" in own else ()
    required = [
        name
        for name, one in own.items()
        if one.default is MISSING and one.default_factory is MISSING
    ]
    given = value.mapping([*own, *short, *inline], required)
    arguments = {
        name: _converted(hints[name], part)
        for name, part in given.items()
        if name in own
    }
    if any(name in given for name in short):
        name = "cable" if "cable" in own else "cables"
        if name in arguments:
            raise value.wrong(
                f"{name} and one of {', '.join(short)} are given; write the rate and "
                f"the latency within {name}"
            )
        cable = _cable({key: given[key] for key in short if key in given}, value)
        arguments[name] = cable if name == "cable" else (cable,)
    try:
        return shape(**arguments)
    except UsageError as error:
        raise value.wrong(error) from error


def _converted(kind: Any, value: Value) -> Any:
    origin = get_origin(kind)
    if origin in (Union, types.UnionType):
        if value.data == "null":
            return None
        return _converted(
            next(x for x in get_args(kind) if x is not types.NoneType), value
        )
    if origin is tuple:
        return tuple(_converted(get_args(kind)[0], one) for one in value.items())
    if kind is Cable:
        return _cable(value.mapping(_CABLE, ()), value)
    if kind is FatTree:
        return _instance(FatTree, value)
    plain = {int: value.integer, float: value.number, bool: value.flag, str: value.text}
    return plain[kind]()


def _cable(parts: dict[str, Value], value: Value) -> Cable:
    """Return a cable from its rate, latency and bundle; each has a default."""
    usual = Cable()
    rate, latency = parts.get("rate"), parts.get("latency")
    try:
        return Cable(
            usual.gbytes_per_s if rate is None else parse_rate(rate.text()) / 1000,
            usual.latency_us if latency is None else parse_latency(latency.text()),
            parts["bundle"].integer() if "bundle" in parts else 1,
        )
    except UsageError as error:
        where = rate or latency or value
        raise where.wrong(error) from error


def _listed(value: Value) -> list[Value]:
    if not isinstance(value.data, list):
        raise value.wrong("expected a list")
    return value.data


def _graph(value: Value) -> Graph:
    known = (*_ABOUT, "hosts", "switches", "links")
    parts = value.mapping(known, ("hosts", "links"))
    hosts = [one.text() for one in _listed(parts["hosts"])]
    given = _listed(parts["switches"]) if "switches" in parts else []
    switches = [one.text() for one in given]
    nodes = {*hosts, *switches}
    links: list[NamedLink] = []
    for entry in _listed(parts["links"]):
        fields_ = entry.mapping(("ends", *_CABLE, "one_way"), ("ends",))
        ends = _listed(fields_["ends"])
        if len(ends) != 2:
            raise fields_["ends"].wrong(f"{len(ends)} names; a link has two ends")
        for end in ends:
            if end.text() not in nodes:
                raise end.wrong(
                    f"no host or switch is called {end.text()!r}"
                    f"{suggest(end.text(), nodes)}"
                )
        tail, head = (end.text() for end in ends)
        if tail == head:
            raise entry.wrong(f"both ends of the link are {tail}")
        rate = fields_.get("rate")
        latency = fields_.get("latency")
        try:
            each = float("inf") if rate is None else parse_rate(rate.text())
        except UsageError as error:
            raise (rate or entry).wrong(error) from error
        try:
            latency_us = 0.0 if latency is None else parse_latency(latency.text())
        except UsageError as error:
            raise (latency or entry).wrong(error) from error
        bundle = fields_["bundle"].integer() if "bundle" in fields_ else 1
        if bundle < 1:
            raise fields_["bundle"].wrong(f"{bundle} cables; expected 1 or more")
        links.append(NamedLink(tail, head, each * bundle, each, latency_us))
        if "one_way" not in fields_ or not fields_["one_way"].flag():
            links.append(NamedLink(head, tail, each * bundle, each, latency_us))
    return Graph(
        f"network of {len(hosts)} hosts and {len(switches)} switches",
        *(hosts, switches, links),
    )
