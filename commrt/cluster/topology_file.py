# SPDX-License-Identifier: Apache-2.0
"""Networks from a YAML file: hosts, switches and links."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from commrt.cluster.latency import parse_latency
from commrt.cluster.topology import Link, Topology
from commrt.errors import UsageError, shown, suggest
from commrt.files.read import Kind, read_text
from commrt.vocabulary.link_rates import parse_rate

__all__ = ["read_topology"]

_KIND = Kind("file of a network", "YAML with hosts and links", 65_536, UsageError)
_KEYS = ("hosts", "links", "switches")


def read_topology(path: Path) -> Topology:
    """Return the network that a file describes.

    Raises:
        UsageError: it cannot be read, or a part of it is wrong; the message has the
            place.
    """
    text = read_text(path, _KIND)
    import yaml  # here: stars need no file

    try:
        tree = yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}: " if mark is not None else ""
        problem = getattr(error, "problem", None) or "this is not YAML"
        raise _KIND.refused(path, f"{where}{problem}") from error
    try:
        return _topology(tree)
    except UsageError as error:
        raise _KIND.refused(path, str(error)) from error


def _topology(tree: Any) -> Topology:
    parts = _mapping(tree, "the file", _KEYS, _KEYS)
    links = [
        _link(entry, f"links[{index}]")
        for index, entry in enumerate(_list(parts["links"], "links"))
    ]
    return Topology(
        _names(parts["hosts"], "hosts"),
        _names(parts["switches"], "switches"),
        tuple(links),
    )


def _link(entry: Any, place: str) -> Link:
    parts = _mapping(entry, place, ("ends", "rate", "latency"), ("ends",))
    ends = _names(parts["ends"], f"{place}.ends")
    if len(ends) != 2:
        raise UsageError(f"{place}.ends has {len(ends)} names; a link has two ends")
    rate, latency = parts.get("rate", "unlimited"), parts.get("latency", "none")
    if not isinstance(rate, str):
        raise UsageError(f"{place}.rate: expected a rate such as 500mbit")
    if not isinstance(latency, str):
        raise UsageError(f"{place}.latency: expected a latency such as 200us")
    try:
        return Link((ends[0], ends[1]), parse_rate(rate), parse_latency(latency))
    except UsageError as error:
        raise UsageError(f"{place}: {error}") from error


def _mapping(
    value: Any, place: str, known: tuple[str, ...], needed: tuple[str, ...]
) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise UsageError(f"{place}: expected a mapping with {', '.join(needed)}")
    for key in value:
        if key not in known:
            raise UsageError(f"{place}: unknown key {shown(key)}{suggest(key, known)}")
    for key in needed:
        if key not in value:
            raise UsageError(f"{place}: {key} is missing; add it")
    return value


def _list(value: Any, place: str) -> list[Any]:
    if not isinstance(value, list):
        raise UsageError(f"{place}: expected a list")
    return value


def _names(value: Any, place: str) -> tuple[str, ...]:
    names = _list(value, place)
    for name in names:
        if not isinstance(name, str):
            raise UsageError(f"{place}: {shown(name)} is no name; quote it")
    return tuple(names)
