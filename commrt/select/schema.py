# SPDX-License-Identifier: Apache-2.0
"""Schema ``commrt-tune/1``: a tree of values to checked, frozen data.

Every key is known, every value has its type and bounds, every name exists. The first
thing that is wrong raises a TableError with file, line and path.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar, cast

from commrt.errors import suggest
from commrt.select.facts import LINK_CLASSES, Candidate, ParamValue
from commrt.select.fingerprint import Cpu, Gpu, Machine, Nic
from commrt.select.network import Network
from commrt.select.rules import (
    QUALITIES,
    VERDICTS,
    Cell,
    Evidence,
    Match,
    Point,
    Quality,
    Rule,
    RunnerUp,
    Verdict,
)
from commrt.select.tree import Node, Scalar, fail
from commrt.vocabulary.dtypes import DTYPES, ReduceOp
from commrt.vocabulary.operations import COLLECTIVES

__all__ = [
    "KEPT_APART",
    "METHOD_KEYS",
    "SCHEMA",
    "SOFTWARE_KEYS",
    "YARDSTICKS",
    "Catalog",
    "Parameters",
    "read_defaults",
    "read_info",
    "read_machine",
    "read_rules",
    "read_schema",
    "take",
]

SCHEMA = "commrt-tune/1"
DEFAULT_TIE_MARGIN = 0.04
DEVICES = ("host", "cuda")
KEPT_APART = (("mpi", "nccl"),)
"""Engines that are not at work at the same time on a device, unless a table says so."""
YARDSTICKS = {"host": "mpi/native", "cuda": "nccl/native"}
"""The candidate that a table's points compare with (``native_us``), by device."""
_DTYPE_NAMES = tuple(dtype.name for dtype in DTYPES)
_REDOP_NAMES = tuple(op.name.lower() for op in ReduceOp)
_NAMED_MATCHES: Mapping[str, Collection[str]] = {
    "link_class": LINK_CLASSES,
    "device": DEVICES,
    "dtype": _DTYPE_NAMES,
    "redop": _REDOP_NAMES,
}
_COUNTED_MATCHES = ("ranks", "nodes", "ppn")
_WORD = re.compile(r"[A-Za-z0-9_.-]{1,64}")

T = TypeVar("T")


SOFTWARE_KEYS = ("commrt", "python", "numpy", "mpi", "nccl", "cuda", "ucx", "env")
METHOD_KEYS = (
    *(
        "sync",
        "clock",
        "launches",
        "order",
        "seed",
        "warmup",
        "reps",
        "stop",
        "per_rep",
    ),
    *("stat", "outliers", "dtype", "budget_s", "held_out", "date", "command"),
    "simulated",
)


Parameters = Mapping[str, Callable[[ParamValue], str | None]]
"""Checks of values, by name: each returns the fault of a value, or None."""


@dataclass(frozen=True)
class Catalog:
    """Names that a table may use; passed in: this layer imports none of them."""

    algorithms: Mapping[str, Collection[str]] = field(default_factory=dict)
    """Backends, with the names of their algorithms where ``offered`` is None."""
    offered: Callable[[str, str], Collection[str]] | None = None
    """Backend and operation to names of algorithms, whether usable here or not. It is
    asked for what a table says: to find all takes a tenth of a second."""
    parameters: Callable[[str, str, str, int | None], Parameters | None] | None = None
    """Operation, backend, algorithm and ranks (None: any) to the parameters; None, or
    its answer None: any word may be one."""

    def names(self, backend: str, coll: str) -> Collection[str]:
        """Return the algorithms that ``backend`` has for ``coll``."""
        if self.offered is None:
            return self.algorithms[backend]
        return self.offered(backend, coll)


def take(
    node: Node, required: Collection[str], optional: Collection[str]
) -> dict[str, Node]:
    """Return the mapping's children; unknown and missing keys are errors."""
    keys = _mapping(node)
    allowed = [*required, *optional]
    for key, child in keys.items():
        if key not in allowed:
            raise fail(child, f"unknown key {key!r}{suggest(key, allowed)}")
    for key in required:
        if key not in keys:
            raise fail(node, f"key {key!r} is missing")
    return keys


def read_machine(node: Node) -> Machine:
    """Return the machine the table was made on; its fingerprint must fit the facts."""
    keys = take(node, ["fingerprint", "cpu"], ["gpus", "nics", "kernel", "host"])
    cpu = take(keys["cpu"], ["model", "sockets", "cores"], [])
    machine = Machine(
        Cpu(_text(cpu["model"]), _count(cpu["sockets"]), _count(cpu["cores"])),
        tuple(_gpu(item) for item in _items(keys.get("gpus"))),
        tuple(_nic(item) for item in _items(keys.get("nics"))),
        _optional(keys.get("kernel"), _text, ""),
        _optional(keys.get("host"), _text, ""),
    )
    fingerprint = _text(keys["fingerprint"])
    if fingerprint != machine.fingerprint:
        raise fail(
            keys["fingerprint"],
            f"{fingerprint[:16]!r}... is not the fingerprint of the machine described "
            f"beside it, which is {machine.fingerprint}; measure again with "
            f"commrt-tune run",
        )
    return machine


def read_info(node: Node, allowed: Collection[str]) -> dict[str, object]:
    """Return a section that is recorded but decides nothing: names to plain values."""
    keys = take(node, [], allowed)
    return {key: _plain(child, levels=2) for key, child in keys.items()}


def read_schema(node: Node) -> None:
    """Check the schema's name; a newer table needs a newer commrt."""
    if node.value != SCHEMA:
        raise fail(
            node,
            f"expected schema {SCHEMA!r}, found {_kind(node)}; measure again with "
            f"commrt-tune run",
        )


def read_defaults(node: Node) -> tuple[float, tuple[tuple[str, ...], ...]]:
    """Return the margin of a tie, and the engines that were tested together.

    The other defaults have one allowed value.
    """
    keys = take(node, [], ["unmatched", "tie", "tie_margin", "tested_together"])
    for key, only in (("unmatched", "model"), ("tie", "keep_simpler")):
        if key in keys:
            _name(keys[key], (only,), key)
    margin = _optional(keys.get("tie_margin"), _time, DEFAULT_TIE_MARGIN)
    return margin, tuple(map(_pair, _items(keys.get("tested_together"))))


def _pair(node: Node) -> tuple[str, ...]:
    """Return two engines, of those that are kept apart otherwise."""
    named = tuple(sorted(_text(each) for each in _list(node)))
    if named not in KEPT_APART:
        known = ", ".join(f"[{', '.join(pair)}]" for pair in KEPT_APART)
        raise fail(node, f"these are not kept apart on a device; known: {known}")
    return named


def read_rules(node: Node, known: Catalog) -> tuple[Rule, ...]:
    """Return the checked rules; the ranges of every cell tile [0, ∞)."""
    rules = tuple(_rule(child, known) for child in _list(node))
    cells: dict[Cell, list[int]] = {}
    for index, rule in enumerate(rules):
        cells.setdefault(rule.cell, []).append(index)
    for members in cells.values():
        _check_tiling(node, rules, members)
    return rules


def _check_tiling(node: Node, rules: Sequence[Rule], members: list[int]) -> None:
    nodes = _list(node)
    expected: int | None = 0
    for index in sorted(members, key=lambda index: rules[index].match.lo):
        here = take(nodes[index], [], ["op", "match", "use", "evidence"])["match"]
        lo = rules[index].match.lo
        at = Node(None, f"{here.path}.bytes", here.line, here.source)
        if expected is None or lo < expected:
            raise fail(
                at,
                f"{lo} overlaps another rule with the same match; begin where that "
                f"one ends",
            )
        if lo > expected:
            raise fail(
                at,
                f"no rule with the same match covers [{expected}, {lo}); add one, or "
                f"widen another",
            )
        expected = rules[index].match.hi
    if expected is not None:
        raise fail(
            at,
            f"no rule with the same match covers [{expected}, null); add one, or "
            f"widen another",
        )


def _rule(node: Node, known: Catalog) -> Rule:
    """Return one checked rule."""
    keys = take(node, ["op", "match", "use"], ["evidence"])
    op = _name(keys["op"], COLLECTIVES, "operation")
    match = _match(keys["match"])
    where = _Where(op, match.ranks, known)
    use = _candidate(keys["use"], where)
    evidence = _optional(
        keys.get("evidence"), lambda child: _evidence(child, where), None
    )
    return Rule(op, match, use, evidence, node.line)


def _match(node: Node) -> Match:
    keys = take(node, ["bytes"], [*_COUNTED_MATCHES, *_NAMED_MATCHES, "network"])
    lo, hi = _range(keys["bytes"])
    counts = {key: _count_or_any(keys.get(key)) for key in _COUNTED_MATCHES}
    names = {
        key: _name_or_any(keys.get(key), allowed, key)
        for key, allowed in _NAMED_MATCHES.items()
    }
    return Match(
        lo,
        hi,
        ranks=counts["ranks"],
        nodes=counts["nodes"],
        ppn=counts["ppn"],
        link_class=names["link_class"],
        device=names["device"],
        dtype=names["dtype"],
        redop=names["redop"],
        network=_optional(keys.get("network"), _network, None),
    )


def _network(node: Node) -> Network | None:
    if node.value == "any":
        return None
    keys = take(node, ["library", "gbps", "latency_us"], [])
    gbps, latency_us = _time(keys["gbps"]), _time(keys["latency_us"])
    for key, value in (("gbps", gbps), ("latency_us", latency_us)):
        if value <= 0:
            raise fail(keys[key], f"{value:g} must be above 0")
    return Network(_text(keys["library"]), gbps, latency_us)


def _count_or_any(node: Node | None) -> int | None:
    return None if node is None or node.value == "any" else _count(node)


def _name_or_any(node: Node | None, allowed: Collection[str], key: str) -> str | None:
    if node is None or node.value == "any":
        return None
    return _name(node, allowed, key)


def _range(node: Node) -> tuple[int, int | None]:
    ends = _list(node)
    if len(ends) != 2:
        raise fail(node, "expected [first, beyond], as in [0, 4096] or [4096, null]")
    lo = _count(ends[0], smallest=0)
    hi = None if ends[1].value is None else _count(ends[1])
    if hi is not None and hi <= lo:
        raise fail(node, f"the range [{lo}, {hi}) is empty; expected an end above {lo}")
    return lo, hi


class _Where(NamedTuple):
    """The names that a candidate is checked against."""

    coll: str
    ranks: int | None
    known: Catalog


_OTHERS_BACKEND = (
    " A backend of another package is known where that package is installed (entry "
    "point group commrt.backends)."
)
_OTHERS_ALGORITHM = (
    " An algorithm of another package (@commrt.algorithm) is known once the module "
    "that registers it is imported: import it before commrt.init()."
)


def _candidate(node: Node, where: _Where) -> Candidate:
    keys = take(node, ["backend", "alg"], ["params"])
    known = where.known
    backend = _name(keys["backend"], known.algorithms, "backend", _OTHERS_BACKEND)
    algorithm = _name(
        keys["alg"],
        known.names(backend, where.coll),
        f"{backend} {where.coll} algorithm",
        _OTHERS_ALGORITHM,
    )
    candidate = Candidate(
        backend, algorithm, _optional(keys.get("params"), _params, {})
    )
    if candidate.params and known.parameters is not None:
        allowed = known.parameters(where.coll, backend, algorithm, where.ranks)
        if allowed is not None:
            _check_params(keys["params"], candidate, allowed)
    return candidate


def _params(node: Node) -> dict[str, ParamValue]:
    params: dict[str, ParamValue] = {}
    for key, child in _mapping(node).items():
        value = child.value
        for word in (key, value):
            if isinstance(word, str) and not _WORD.fullmatch(word):
                raise fail(
                    child,
                    f"{word[:64]!r} is not a word of a parameter; expected 1 to 64 "
                    f"letters, digits, _, . or -",
                )
        if isinstance(value, bool) or not isinstance(value, int | str):
            raise fail(child, f"expected an integer or a word, found {_kind(child)}")
        params[key] = value
    return params


def _check_params(node: Node, use: Candidate, allowed: Parameters) -> None:
    """Raise unless every parameter of ``use`` exists and may have its value."""
    for name, child in _mapping(node).items():
        if name not in allowed:
            hint = suggest(name, allowed) or ": it takes none."
            raise fail(child, f"unknown parameter {name!r} of {use.name}{hint}")
        wrong = allowed[name](use.params[name])
        if wrong is not None:
            raise fail(child, f"{use.name}: {wrong}")


def _mapping(node: Node) -> dict[str, Node]:
    if not isinstance(node.value, dict):
        raise fail(node, f"expected a mapping, found {_kind(node)}")
    return node.value


def _evidence(node: Node, where: _Where) -> Evidence:
    keys = take(
        node, ["verdict"], ["points", "runner_up", "crossover", "date", "quality"]
    )
    return Evidence(
        cast("Verdict", _name(keys["verdict"], VERDICTS, "verdict")),
        tuple(_point(point) for point in _items(keys.get("points"))),
        _optional(keys.get("runner_up"), lambda child: _runner_up(child, where), None),
        _optional(keys.get("crossover"), _text, None),
        _optional(keys.get("date"), _text, None),
        _optional(keys.get("quality"), _quality, None),
    )


def _quality(node: Node) -> Quality:
    return cast("Quality", _name(node, QUALITIES, "quality"))


def _point(node: Node) -> Point:
    more = ["native_us", "disturbed"]
    keys = take(node, ["bytes", "us", "ci", "n", "launches"], more)
    return Point(
        _count(keys["bytes"], smallest=0),
        _time(keys["us"]),
        _interval(keys["ci"]),
        _count(keys["n"]),
        _count(keys["launches"]),
        _optional(keys.get("native_us"), _time, None),
        _optional(keys.get("disturbed"), lambda child: _count(child, smallest=0), 0),
    )


def _runner_up(node: Node, where: _Where) -> RunnerUp:
    keys = take(node, ["backend", "alg", "bytes", "us", "ci"], ["params"])
    use_keys = ("backend", "alg", "params")
    use: dict[str, Node] = {key: keys[key] for key in use_keys if key in keys}
    return RunnerUp(
        _candidate(Node(use, node.path, node.line, node.source), where),
        _count(keys["bytes"], smallest=0),
        _time(keys["us"]),
        _interval(keys["ci"]),
    )


def _interval(node: Node) -> tuple[float, float]:
    ends = _list(node)
    if len(ends) != 2:
        raise fail(node, "expected [low, high] in microseconds")
    low, high = _time(ends[0]), _time(ends[1])
    if high < low:
        raise fail(
            node,
            f"the interval [{low}, {high}] ends before it begins; expected the lower "
            f"number first",
        )
    return low, high


def _gpu(node: Node) -> Gpu:
    keys = take(node, ["model", "count"], [])
    return Gpu(_text(keys["model"]), _count(keys["count"]))


def _nic(node: Node) -> Nic:
    keys = take(node, ["model", "count"], ["gbps"])
    gbps = _optional(keys.get("gbps"), _time, None)
    return Nic(_text(keys["model"]), _count(keys["count"]), gbps)


def _optional(node: Node | None, read: Callable[[Node], T], default: T) -> T:
    return default if node is None or node.value is None else read(node)


def _name(node: Node, allowed: Collection[str], what: str, more: str = "") -> str:
    name = _text(node)
    if name not in allowed:
        raise fail(node, f"unknown {what} {name!r}{suggest(name, allowed)}{more}")
    return name


def _text(node: Node) -> str:
    if not isinstance(node.value, str):
        raise fail(node, f"expected a text, found {_kind(node)}")
    return node.value


def _count(node: Node, smallest: int = 1) -> int:
    if isinstance(node.value, bool) or not isinstance(node.value, int):
        raise fail(node, f"expected a whole number, found {_kind(node)}")
    if node.value < smallest:
        raise fail(node, f"{node.value} is too small: expected {smallest} or more")
    return node.value


def _time(node: Node) -> float:
    if isinstance(node.value, bool) or not isinstance(node.value, int | float):
        raise fail(node, f"expected a number, found {_kind(node)}")
    if node.value < 0:
        raise fail(node, f"{node.value} is negative; expected 0 or more")
    return float(node.value)


def _list(node: Node) -> list[Node]:
    if not isinstance(node.value, list):
        raise fail(node, f"expected a list, found {_kind(node)}")
    return node.value


def _items(node: Node | None) -> list[Node]:
    """Return the items of a list that may be absent."""
    return [] if node is None or node.value is None else _list(node)


def _plain(node: Node, levels: int) -> object:
    if not isinstance(node.value, dict | list):
        return node.value
    if levels == 0:
        raise fail(
            node, "nested deeper than this section allows; write a plain value here"
        )
    if isinstance(node.value, list):
        return [_plain(child, levels - 1) for child in node.value]
    return {key: _plain(child, levels - 1) for key, child in node.value.items()}


def _kind(node: Node) -> str:
    """Return the value there, for messages; long values are cut."""
    if isinstance(node.value, dict):
        return "a mapping"
    if isinstance(node.value, list):
        return "a list"
    value: Scalar = node.value
    if value is None:
        return "nothing"
    text = repr(value)
    return f"{text[:40]}..." if len(text) > 43 else text
