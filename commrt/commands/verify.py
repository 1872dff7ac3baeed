# SPDX-License-Identifier: Apache-2.0
"""``python -m commrt verify``: prove algorithms right for every number of ranks.

A file of MSCCL is proved for the one number of ranks that it is for.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import itertools
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType

from commrt import algorithms
from commrt.errors import ScheduleError, UsageError, suggest
from commrt.msccl.document import Algorithm, read_msccl
from commrt.msccl.schedules import forms_of, from_msccl, verify_msccl
from commrt.schedule.ir import ParamValue
from commrt.schedule.nodes import Nodes, parse_nodes
from commrt.schedule.verify import Report, verify
from commrt.schedule.verify_lowered import verify_lowered
from commrt.schedule.verify_rounds import RoundsReport, verify_rounds
from commrt.vocabulary.operations import SCHEDULED, operation

__all__ = [
    "collectives_of",
    "default_nodes",
    "load",
    "main",
    "nodes_of",
    "parse_params",
]


def main(argv: Sequence[str] | None = None) -> int:
    """Verify an algorithm; return 0 if it is right, 1 if not, 2 for a wrong call."""
    args = _parser().parse_args(argv)
    try:
        if args.name.endswith(".xml"):
            return _verify_file(args)
        name = load(args.name)
        params = parse_params(args.params)
        colls = _with(params, name, collectives_of(name, args.coll))
        sizes = _sizes(args.ranks, args.nodes)
        failures = sum(
            not _verify_all(coll, name, size, args, params)
            for coll in colls
            for size in sizes
        )
    except UsageError as exc:
        print(f"commrt verify: {exc}", file=sys.stderr)
        return 2
    whole = list(sizes) == list(range(sizes[0], sizes[-1] + 1))
    ranks = ",".join(map(str, sizes))
    ranks = f"{sizes[0]}..{sizes[-1]}" if whole and len(sizes) > 1 else ranks
    verdict = "WRONG" if failures else "right"
    print(f"{name} is {verdict} for {', '.join(colls)} on {ranks} ranks")
    return 1 if failures else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m commrt verify",
        description="Prove an algorithm right: matched, free of deadlocks and races, "
        "every contribution in the result exactly once: as written, as the engine runs "
        "it, and in the closed rounds that a GPU's stream runs.",
    )
    parser.add_argument(
        "name",
        help="an algorithm, path.py:algorithm, module:algorithm or a file of MSCCL",
    )
    parser.add_argument(
        "--coll", choices=SCHEDULED, help="one operation (default: all)"
    )
    parser.add_argument("--ranks", help="4, 1..64 or 2,4,8 (1..17)")
    parser.add_argument("--root", default="0", help="a rank or 'all' (0)")
    parser.add_argument(
        "--nodes", help="ranks per node, as 2,3, for algorithms that ask (several)"
    )
    parser.add_argument(
        "--params", default="", help="parameters, as k=2 or k=2,parts=4 (all values)"
    )
    return parser


def _verify_file(args: argparse.Namespace) -> int:
    """Verify a file of MSCCL and print a line for each way in which it is called."""
    given = {"--ranks": args.ranks, "--nodes": args.nodes, "--params": args.params}
    surplus = [option for option, value in given.items() if value]
    if surplus:
        raise UsageError(
            f"{', '.join(surplus)}: {args.name} says itself for which ranks it is; "
            f"leave it out"
        )
    algorithm = read_msccl(Path(args.name))
    coll, size = algorithm.coll, len(algorithm.gpus)
    if args.coll not in (None, coll):
        raise UsageError(f"--coll {args.coll}: {args.name} is for {coll}")
    good = all([_verify_form(algorithm, form, args) for form in forms_of(algorithm)])
    verdict = "right" if good else "WRONG"
    print(f"{algorithm.name} is {verdict} for {coll} on {size} ranks")
    return 0 if good else 1


def _verify_form(
    algorithm: Algorithm, in_place: bool, args: argparse.Namespace
) -> bool:
    coll, size = algorithm.coll, len(algorithm.gpus)
    label = "in place" if in_place else "out of place"
    try:
        for root in _roots(coll, size, args.root):
            made = from_msccl(algorithm, in_place=in_place, root=root)
            report = verify_msccl(made)
    except ScheduleError as error:
        print(f"{coll:14} {size:4} ranks  {label}  WRONG: {error}", flush=True)
        return False
    print(_costs_line(coll, size, report, label), flush=True)
    return True


def load(name: str) -> str:
    """Import ``path.py:name`` or ``module:name``; return the algorithm's name."""
    where, colon, algorithm = name.rpartition(":")
    if not colon:
        if name.endswith(".py"):
            raise UsageError(f"{name} is a file: say which algorithm, as {name}:NAME")
        return name
    try:
        if where.endswith(".py"):
            _import_file(Path(where))
        else:
            importlib.import_module(where)
    except (ImportError, OSError, SyntaxError) as exc:
        raise UsageError(f"cannot import {where!r}: {exc}") from exc
    return algorithm


def _import_file(path: Path) -> ModuleType:
    name = f"commrt_verify_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def collectives_of(name: str, coll: str | None) -> list[str]:
    """Return the operations that have the algorithm, or the one asked for."""
    having = [one for one in SCHEDULED if algorithms.exists(one, name)]
    if not having:
        known = {each for one in SCHEDULED for each in algorithms.names(one)}
        raise UsageError(f"unknown algorithm {name!r}{suggest(name, known)}")
    if coll is None:
        return having
    algorithms.get(coll, name)
    return [coll]


def parse_params(text: str) -> dict[str, ParamValue]:
    """Return parameters from a text such as ``k=2,parts=4``."""
    params: dict[str, ParamValue] = {}
    for one in filter(None, text.split(",")):
        key, _, value = one.partition("=")
        if not key.isidentifier() or not re.fullmatch(r"\w+", value):
            raise UsageError(f"--params {text!r}: expected k=2 or k=2,parts=4")
        params[key] = int(value) if value.isdecimal() else value
    return params


def _with(params: Mapping[str, ParamValue], name: str, colls: list[str]) -> list[str]:
    """Return the operations whose algorithm has all of ``params``."""
    known = {coll: algorithms.param_choices(coll, name, 2) for coll in colls}
    having = [coll for coll in colls if params.keys() <= known[coll].keys()]
    if not having:
        every = sorted({key for choices in known.values() for key in choices})
        raise UsageError(
            f"--params: no operation of {name} has {', '.join(params)}; its "
            f"parameters: {', '.join(every) or 'none'}"
        )
    return having


def _range(text: str) -> list[int]:
    first, dots, last = text.partition("..")
    try:
        sizes = (
            list(range(int(first), int(last) + 1))
            if dots
            else [int(part) for part in text.split(",")]
        )
    except ValueError:
        sizes = []
    if not sizes or min(sizes) < 1:
        raise UsageError(f"--ranks {text!r}: expected 4, 1..64 or 2,4,8")
    return sizes


def _sizes(ranks: str | None, nodes: str | None) -> list[int]:
    if ranks is None and nodes is not None:
        return [sum(int(part) for part in nodes.split(",") if part.isdecimal())]
    return _range(ranks or "1..17")


def _roots(coll: str, size: int, text: str) -> list[int]:
    if not operation(coll).has_root:
        return [0]
    if text == "all":
        return list(range(size))
    if not text.isdigit():
        raise UsageError(f"--root {text!r}: expected a rank or 'all'")
    return [min(int(text), size - 1)]


def _parameters(
    coll: str, name: str, size: int, nodes: Nodes | None
) -> Iterator[dict[str, ParamValue]]:
    choices = algorithms.param_choices(coll, name, size, nodes)
    if nodes is None:
        for values in itertools.product(*choices.values()):
            yield dict(zip(choices, values, strict=True))
        return
    # One at a time: all combinations of inner algorithms are too many.
    yield {}
    for key, one in choices.items():
        yield from ({key: value} for value in one[1:])


def default_nodes(size: int) -> Iterator[Nodes]:
    """Yield some ways in which so many ranks may lie on nodes, equal ones first."""
    for counts in (
        (size - size // 2, size // 2),
        (1, size - 1),
        (2, size - 3, 1),
    ):
        if min(counts) > 0 and max(counts) > 1:
            yield parse_nodes(counts)
    if size > 2:
        # In turn, as mpiexec --map-by node has them.
        yield tuple(rank % 2 for rank in range(size))


def nodes_of(coll: str, name: str, size: int, text: str | None) -> list[Nodes | None]:
    """Return the nodes that an algorithm is asked for on."""
    if not algorithms.get(coll, name).spans_nodes:
        return [None]
    if text is None:
        return [*default_nodes(size)]
    parts = text.split(",")
    if not all(part.isdecimal() and int(part) for part in parts):
        raise UsageError(f"--nodes {text!r}: expected ranks per node, as 2,3")
    nodes = parse_nodes([int(part) for part in parts])
    if len(nodes) != size:
        raise UsageError(f"--nodes {text!r} are {len(nodes)} ranks, not {size}")
    return [nodes]


def _verify_all(
    coll: str,
    name: str,
    size: int,
    args: argparse.Namespace,
    params: dict[str, ParamValue],
) -> bool:
    """Verify one operation on ``size`` ranks and print a line per set of parameters."""
    found = [
        nodes
        for nodes in nodes_of(coll, name, size, args.nodes)
        if algorithms.get(coll, name).supports(size, nodes)
    ]
    if not found:
        print(f"{coll:14} {size:4} ranks  not supported")
    good = True
    for nodes in found:
        for values in [params] if params else _parameters(coll, name, size, nodes):
            good &= _verify_with(coll, name, size, args.root, nodes, values)
    return good


def _verify_with(
    coll: str,
    name: str,
    size: int,
    roots: str,
    nodes: Nodes | None,
    params: dict[str, ParamValue],
) -> bool:

    def can_fuse(rank: int, peer: int) -> bool:
        return nodes is None or nodes[rank] == nodes[peer]

    label = " ".join(f"{key}={value}" for key, value in params.items())
    if nodes is not None:
        label = f"nodes={''.join(map(str, nodes))} {label}"
    try:
        for root in _roots(coll, size, roots):
            schedule = algorithms.schedule(coll, name, size, root, params, nodes)
            report = verify(schedule)
            verify_lowered(schedule, can_fuse=can_fuse)
            rounds = verify_rounds(schedule)
            # The next one needs as much: hundreds may follow.
            schedule.forget_programs()
        print(_line(coll, size, label, report, rounds), flush=True)
    except ScheduleError as exc:
        print(f"{coll:14} {size:4} ranks  {label}  WRONG: {exc}", flush=True)
        return False
    return True


def _line(
    coll: str, size: int, label: str, report: Report, rounds: RoundsReport
) -> str:
    told = f"rounds {rounds.num_rounds:3} of up to {rounds.most_calls} calls  {label}"
    return _costs_line(coll, size, report, told)


def _costs_line(coll: str, size: int, report: Report, label: str) -> str:
    return (
        f"{coll:14} {size:4} ranks  {report.num_steps:6} steps  "
        f"critical path {report.critical_path:4}  "
        f"sent {float(report.sent):7.3f} N  scratch {float(report.scratch):6.2f} N  "
        f"{label}"
    ).rstrip()
