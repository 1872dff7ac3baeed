# SPDX-License-Identifier: Apache-2.0
"""Tables of layers and measured costs as YAML files, which may come from others.

    name: small
    layers:
      - {name: conv, input_elements: 128, output_elements: 256, weight_elements: 76,
         forward_s: 1.0e-5, backward_s: 2.0e-5, filters: 4, channels: 2}

A file has plain values only. What is unknown, missing or out of range is an error with
the file, the line and the place.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from commrt.errors import UsageError
from commrt.files.read import Kind, read_text
from commrt.files.write import write_file
from commrt.oracle.costs import MeasuredCosts
from commrt.oracle.layer_table import CUTS, Layer, LayerTable, Piece
from commrt.sim.values import Value, from_yaml

__all__ = ["load_costs", "load_table", "save_costs", "save_table"]

_MOST_NBYTES = 8_000_000
_TABLE = Kind("table of layers", "YAML with layers", _MOST_NBYTES, UsageError)
_COSTS = Kind("file of costs", "YAML with times", _MOST_NBYTES, UsageError)


def load_table(path: str | Path) -> LayerTable:
    """Return the table of a file.

    Raises:
        UsageError: it cannot be read, or a part is wrong; the message has the place.
    """
    value = from_yaml(read_text(Path(path), _TABLE), str(path), "a name and layers")
    given = value.mapping(("name", "times", "layers"), ("layers",))
    layers = tuple(_layer(each) for each in _listed(given["layers"]))
    name = given["name"].text() if "name" in given else Path(path).stem
    times = given["times"].text() if "times" in given else "given"
    try:
        return LayerTable(name, layers, times)
    except UsageError as error:
        raise value.wrong(error) from error


def save_table(table: LayerTable, path: str | Path) -> None:
    """Write a table to a file that ``load_table`` reads."""
    lines = [f"name: {_quoted(table.name)}", f"times: {_quoted(table.times)}"]
    lines.append("layers:")
    for layer in table:
        rest = json.dumps(_plain(layer))[1:-1]
        lines.append(f"  - {{name: {_quoted(layer.name)}, {rest}}}")
    write_file(Path(path), "\n".join(lines) + "\n")


def _quoted(text: str) -> str:
    """Return a text in YAML's double quotes; JSON's pairs of escapes are none there."""
    plain = (c if c.isprintable() and c not in '"\\' else _escape(c) for c in text)
    return f'"{"".join(plain)}"'


def _escape(character: str) -> str:
    return f"\\U{ord(character):08x}"


def _plain(layer: Layer) -> dict[str, Any]:
    """Return the fields of a layer that differ from their defaults."""
    found: dict[str, Any] = {}
    for one in fields(Layer):
        value = getattr(layer, one.name)
        if one.name == "name":
            continue
        if one.name == "pieces":
            if value:
                found["pieces"] = [
                    {"cut": cut, "ways": ways, **vars(piece)}
                    for (cut, ways), piece in value.items()
                ]
        elif one.default is MISSING or value != one.default:
            found[one.name] = value
    return found


def _layer(value: Value) -> Layer:
    known = [one.name for one in fields(Layer)]
    given = value.mapping(known, known[:3])
    made: dict[str, Any] = {}
    for name, part in given.items():
        made[name] = _READ.get(name, Value.number)(part)
    try:
        return Layer(**made)
    except UsageError as error:
        raise value.wrong(error) from error


def _pieces(value: Value) -> Mapping[Any, Piece]:
    found = {}
    for each in _listed(value):
        names = ("cut", "ways", "sample_s", "call_s")
        part = each.mapping(names, names)
        cut, ways = part["cut"].text(), part["ways"].integer()
        if cut not in CUTS or ways < 1:
            raise each.wrong(
                f"cut {cut!r} into {ways}; expected one of {', '.join(CUTS)}, and 1 or "
                f"more"
            )
        times = part["sample_s"].number(), part["call_s"].number()
        if not all(0 <= time < float("inf") for time in times):
            raise each.wrong("times must be finite numbers from 0")
        found[cut, ways] = Piece(*times)
    return found


_READ: Mapping[str, Callable[[Value], Any]] = {
    "name": Value.text,
    "is_product": Value.flag,
    "channels": Value.integer,
    "filters": Value.integer,
    "experts": Value.integer,
    "experts_of_token": Value.integer,
    "extent": lambda value: tuple(each.integer() for each in _listed(value)),
    "halo_rows": lambda value: tuple(each.number() for each in _listed(value)),
    "pieces": _pieces,
}
"""How fields are read that are no plain numbers."""


def _listed(value: Value) -> list[Value]:
    if not isinstance(value.data, list):
        raise value.wrong("expected a list")
    return value.data


def load_costs(path: str | Path) -> MeasuredCosts:
    """Return the measured costs of a file.

    Raises:
        UsageError: it cannot be read, or a part is wrong; the message has the place.
    """
    value = from_yaml(read_text(Path(path), _COSTS), str(path), "a source and times")
    given = value.mapping(("source", "times"), ("times",))
    points = {}
    for each in _listed(given["times"]):
        names = ("coll", "ranks", "stride", "points")
        part = each.mapping(names, ("coll", "ranks", "points"))
        stride = part["stride"].integer() if "stride" in part else 1
        pairs = []
        for pair in _listed(part["points"]):
            both = _listed(pair)
            if len(both) != 2:
                raise pair.wrong(f"{len(both)} numbers; expected bytes and seconds")
            pairs.append((both[0].integer(), both[1].number()))
        key = part["coll"].text(), part["ranks"].integer(), stride
        if key in points:
            raise each.wrong("these ranks have times already; keep one")
        points[key] = tuple(pairs)
    source = given["source"].text() if "source" in given else Path(path).stem
    try:
        return MeasuredCosts(points, source)
    except UsageError as error:
        raise given["times"].wrong(error) from error


def save_costs(costs: MeasuredCosts, path: str | Path) -> None:
    """Write measured costs to a file that ``load_costs`` reads."""
    lines = [f"source: {_quoted(costs.source)}", "times:"]
    for (coll, ranks, stride), points in costs.points.items():
        plain = {"coll": coll, "ranks": ranks, "stride": stride, "points": points}
        lines.append(f"  - {json.dumps(plain)}")
    write_file(Path(path), "\n".join(lines) + "\n")
