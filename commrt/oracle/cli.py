# SPDX-License-Identifier: Apache-2.0
"""``python -m commrt oracle``: projected time and memory of training strategies."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from commrt.backends.catalog import catalog
from commrt.errors import CommError, UsageError, shown
from commrt.files.visible import visible
from commrt.files.write import write_file
from commrt.oracle.costs import ModelledCosts, SimulatedCosts, tabled_costs
from commrt.oracle.files import load_costs, load_table, save_costs, save_table
from commrt.oracle.layer_table import LayerTable
from commrt.oracle.plot import plot
from commrt.oracle.projection import MOST_RANKS, Oracle, Projection, Recommendation
from commrt.oracle.strategies import STRATEGIES
from commrt.oracle.transfers import AlphaBeta, CollectiveCosts
from commrt.select.facts import LINK_CLASSES
from commrt.select.table import load_file
from commrt.sim.network_files import load_network
from commrt.sim.placements import place
from commrt.sim.quantities import (
    nbytes_text,
    parse_latency,
    parse_nbytes,
    parse_rate,
    time_text,
)

__all__ = ["main"]

OPTIMIZERS = {"none": 0, "sgd": 0, "momentum": 1, "adam": 2}
"""Elements that an optimizer keeps for each weight."""
_ABOUT = (
    "Project the time and the memory of training a network, by strategy, before "
    "anybody trains it. Every number of 'project' is projected or simulated, and none "
    "is measured."
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return 0, 1 if nothing fits, 2 for a wrong call."""
    args = _parser().parse_args(argv)
    try:
        return int(args.run(args))
    except CommError as error:
        print(f"commrt oracle: {visible(str(error))}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"commrt oracle: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m commrt oracle", description=_ABOUT)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    project = commands.add_parser("project", help="project strategies, recommend one")
    project.set_defaults(run=_project)
    project.add_argument("table", help="file of layers: YAML, as 'profile' writes it")
    project.add_argument("--ranks", required=True, help="numbers of ranks, as 4,16,64")
    batch = project.add_mutually_exclusive_group(required=True)
    batch.add_argument("--batch", type=int, help="samples of a step, over all ranks")
    batch.add_argument("--batch-per-rank", type=int, help="samples of a step and rank")
    project.add_argument("--samples", type=int, help="samples of an epoch (one batch)")
    project.add_argument("--strategies", help="names, as data,filter (all)")
    project.add_argument("--memory", help="bytes that a rank may keep, as 16GiB")
    project.add_argument("--optimizer", choices=OPTIMIZERS, default="none",
                         help="whose memory counts (none)")  # fmt: skip
    project.add_argument("--item-nbytes", type=int, default=4, help="element (4)")
    project.add_argument("--reuse", type=float, default=1.0,
                         help="part of memory that reuse leaves (1)")  # fmt: skip
    project.add_argument("--segments", type=int, default=4, help="micro-batches (4)")
    project.add_argument("--gradients-by-layer", action="store_true",
                         help="each layer's gradients have an allreduce")  # fmt: skip
    project.add_argument("--flops-per-s", type=float,
                         help="times of layers by flops at this rate")  # fmt: skip
    _add_costs(project)
    project.add_argument("--explain", action="store_true", help="tell limits, too")
    project.add_argument("--all", action="store_true",
                         help="print all grids of strategies (the best)")  # fmt: skip
    project.add_argument("--json", metavar="FILE", help="write all projections")
    project.add_argument("--plot", metavar="FILE", help="draw time over ranks")
    profile = commands.add_parser("profile", help="measure a torch module's layers")
    profile.set_defaults(run=_profile)
    profile.add_argument("maker", help="path.py:function or module:function that "
                         "returns a model and an example")  # fmt: skip
    profile.add_argument("--out", required=True, metavar="FILE", help="file to write")
    profile.add_argument("--pieces", default="", help="pieces to time, too, as 2,4")
    profile.add_argument("--sizes-only", action="store_true", help="measure no times")
    _add_clock(profile)
    measure = commands.add_parser("measure", help="measure this job's collectives")
    measure.set_defaults(run=_measure)
    measure.add_argument("--out", required=True, metavar="FILE", help="file to write")
    _add_clock(measure)
    known = commands.add_parser("strategies", help="list strategies and their axes")
    known.set_defaults(run=_strategies)
    return parser


def _add_clock(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--clock", choices=("wall", "cores"), default="wall",
                        help="cores: without other programs' time (wall)")  # fmt: skip


def _add_costs(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "costs of communication", "one of these; without any, commrt's model"
    )
    group.add_argument("--latency", help="of a message in rings, as 30us; with --rate")
    group.add_argument("--rate", help="of a link, as 12.5GB/s or 100gbit")
    group.add_argument("--contention", default="",
                       help="with --rate: penalties by axis, as data=2")  # fmt: skip
    group.add_argument("--measured", metavar="FILE", help="costs from 'measure'")
    group.add_argument("--table", metavar="FILE", dest="selection",
                       help="selection table of commrt-tune")  # fmt: skip
    group.add_argument("--topology", help="simulate on a network, as commrt-sim does")
    group.add_argument("--placement", default="block", help="with --topology (block)")
    group.add_argument("--no-audit", action="store_true",
                       help="with --topology: groups do not share links")  # fmt: skip
    group.add_argument("--link-class", choices=LINK_CLASSES, default="near",
                       help="of the model (near)")  # fmt: skip


# -- project ---------------------------------------------------------------------------


def _project(args: argparse.Namespace) -> int:
    table = load_table(args.table)
    if args.flops_per_s is not None:
        table = table.with_flops_per_s(args.flops_per_s)
    counts = _counts("--ranks", args.ranks)
    names = None if args.strategies is None else args.strategies.split(",")
    limit = None if args.memory is None else parse_nbytes(args.memory)
    every: list[Projection] = []
    failed = 0
    for ranks in counts:
        batch = args.batch or args.batch_per_rank * ranks
        oracle = _oracle(args, table, ranks, batch)
        if ranks == counts[0]:
            _print_head(oracle, limit)
        try:
            found = oracle.recommend(
                ranks, batch=batch, memory_nbytes=limit, names=names
            )
        except UsageError as error:
            if len(counts) == 1:
                raise
            failed += 1
            print(f"\n{ranks} ranks: {visible(str(error))}")
            continue
        _print_ranks(ranks, batch, found, args)
        every += [*found.ranked, *found.too_large]
    if args.json:
        rows = [_record(one, limit) for one in every]
        write_file(Path(args.json), json.dumps(rows, indent=1) + "\n")
        print(f"{args.json}: written, projected")
    if args.plot:
        plot(every, args.plot, memory_nbytes=limit)
        print(f"{args.plot}: written, projected")
    return 1 if failed == len(counts) else 0


def _counts(name: str, text: str) -> list[int]:
    parts = text.split(",")
    if not all(part.isdecimal() and len(part) < 9 and int(part) for part in parts):
        raise UsageError(f"{name} {shown(text)}: expected numbers above 0, as 4,16,64")
    found = [int(part) for part in parts]
    if max(found) > MOST_RANKS:
        raise UsageError(f"{name} {max(found)}: expected at most {MOST_RANKS:,}")
    return found


def _oracle(
    args: argparse.Namespace, table: LayerTable, ranks: int, batch: int
) -> Oracle:
    return Oracle(
        *(table, _costs(args, ranks), args.samples or batch, args.item_nbytes),
        *(args.reuse, OPTIMIZERS[args.optimizer], args.segments),
        args.gradients_by_layer,
    )


def _costs(args: argparse.Namespace, ranks: int) -> CollectiveCosts:
    """Return the costs that a command line asks for."""
    given = {
        "--rate": args.rate,
        "--measured": args.measured,
        "--table": args.selection,
        "--topology": args.topology,
    }
    asked = [name for name, value in given.items() if value is not None]
    if len(asked) > 1:
        raise UsageError(f"{' and '.join(asked)}: costs have one source; keep one")
    if (args.latency is not None or args.contention) and args.rate is None:
        raise UsageError("--latency and --contention: expected --rate beside them")
    if args.rate is not None:
        rate = parse_rate(args.rate) * 1e6
        latency_us = 0.0 if args.latency is None else parse_latency(args.latency)
        return AlphaBeta(latency_us * 1e-6, 1 / rate, _contention(args.contention))
    if args.measured is not None:
        return load_costs(args.measured)
    if args.selection is not None:
        path = Path(args.selection)
        return tabled_costs(load_file(path, catalog()), str(path))
    if args.topology is not None:
        described = load_network(args.topology)
        hosts = place(described.network, ranks, args.placement)
        return SimulatedCosts(
            *(described.network, hosts),
            costs=described.costs,
            audits=not args.no_audit,
        )
    return ModelledCosts(args.link_class)


def _contention(text: str) -> dict[str, float]:
    found = {}
    for part in filter(None, text.split(",")):
        axis, equals, value = part.partition("=")
        try:
            found[axis] = float(value)
        except ValueError:
            equals = ""
        if not equals or not axis:
            raise UsageError(f"--contention {shown(text)}: expected as data=2,filter=1")
    return found


def _print_head(oracle: Oracle, limit: int | None) -> None:
    table = oracle.table
    print(f"projected: {visible(table.name)}, {len(table)} layers, "
          f"{table.weight_elements:,.0f} weights")  # fmt: skip
    print(f"times of layers: {visible(table.times)}")
    print(f"costs of communication: {visible(oracle.costs.origin)}")
    memory = "any" if limit is None else nbytes_text(limit)
    print(f"samples of an epoch: {oracle.samples:,}; memory of a rank: {memory}")


def _print_ranks(
    ranks: int, batch: int, found: Recommendation, args: argparse.Namespace
) -> None:
    print(f"\n{ranks} ranks, {batch:,} samples a step, projected:")
    columns = f"{'epoch':>12}{'step':>12}{'compute':>12}{'communicate':>13}"
    print(f"{'strategy':22}{columns}{'memory':>12}  {'sends a step':>12}")
    seen: set[str] = set()
    for one in (*found.ranked, *found.too_large):
        if one.strategy in seen and not args.all:
            continue
        seen.add(one.strategy)
        large = "" if one in found.ranked else "  does not fit"
        steps = one.iterations
        print(
            f"{one.name:22}{time_text(one.epoch_s * 1e6):>12}"
            f"{_short(one.step_s):>12}{_short(one.compute_s / steps):>12}"
            f"{_short(one.communication_s / steps):>13}"
            f"{_size(one.memory_nbytes):>12}  {_size(one.sent_nbytes):>12}{large}"
        )
    print(f"recommended: {found.reason}.")
    if args.explain:
        print(found.best.explain())


def _short(seconds: float) -> str:
    number, unit = time_text(seconds * 1e6).split()
    return f"{float(number):.4g} {unit}"


def _size(nbytes: float) -> str:
    if nbytes < 1024:
        return f"{nbytes:.0f} B"
    power = min(4, int(math.log(nbytes, 1024)))
    return f"{nbytes / 1024**power:.4g} {('KiB', 'MiB', 'GiB', 'TiB')[power - 1]}"


def _record(one: Projection, limit: int | None) -> dict[str, Any]:
    return {
        "projected": True,
        "strategy": one.strategy,
        "ways": one.ways,
        "ranks": one.ranks,
        "batch": one.step.batch,
        "iterations": one.iterations,
        "epoch_s": one.epoch_s,
        "compute_s": one.compute_s,
        "communication_s": one.communication_s,
        "memory_nbytes": one.memory_nbytes,
        "fits": limit is None or one.memory_nbytes <= limit,
        "sent_nbytes": one.sent_nbytes,
        "limits": {
            axis: {"most": limit.most, "reason": limit.reason}
            for axis, limit in one.limits.items()
        },
        "costs": one.origin,
    }


# -- measure ---------------------------------------------------------------------------


def _profile(args: argparse.Namespace) -> int:
    model, example = _made(args.maker)
    try:
        from commrt.oracle.torch_layers import layer_sizes, profile
    except ImportError as error:
        raise UsageError(
            "profile needs torch, which is not installed here: pip install "
            "'commrt[torch]'; or write the table by hand"
        ) from error
    pieces = _counts("--pieces", args.pieces) if args.pieces else []
    if args.sizes_only:
        save_table(layer_sizes(model, example), args.out)
        print(f"{args.out}: written, without times")
        return 0
    import torch

    import commrt

    torch.set_num_threads(1)  # ranks share the cores
    with commrt.init() as comm:
        shared = comm if comm.size > 1 else None
        table = profile(model, example, comm=shared, pieces=pieces, clock=args.clock)
        if comm.rank == 0:
            save_table(table, args.out)
            print(f"{args.out}: written, {table.times}")
    return 0


def _made(maker: str) -> tuple[Any, Any]:
    """Import a function, and return the model and the example that it returns."""
    where, colon, name = maker.rpartition(":")
    if not colon or not name.isidentifier():
        raise UsageError(
            f"{shown(maker)}: expected path.py:function or module:function"
        )
    try:
        if where.endswith(".py"):
            spec = importlib.util.spec_from_file_location("commrt_oracle_model", where)
            if spec is None or spec.loader is None:
                raise ImportError(f"{where} is not a Python file")
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
        else:
            module = importlib.import_module(where)
    except (ImportError, OSError, SyntaxError) as error:
        raise UsageError(f"cannot import {shown(where)}: {error}") from error
    made = getattr(module, name, None)
    if not callable(made):
        raise UsageError(f"{shown(where)} has no function {name}; expected one")
    found = made()
    if not isinstance(found, tuple) or len(found) != 2:
        raise UsageError(f"{maker}: returned {shown(found)}; expected model, example")
    return found


def _measure(args: argparse.Namespace) -> int:
    import commrt
    from commrt.oracle.measuring import measured_costs

    with commrt.init() as comm:
        costs = measured_costs(comm, clock=args.clock)
        if comm.rank == 0:
            save_costs(costs, args.out)
            print(f"{args.out}: written, {costs.source}")
    return 0


def _strategies(args: argparse.Namespace) -> int:
    print(f"{'name':14}{'cuts':42}axes")
    for row in STRATEGIES.values():
        axes = [*row.fixed_axes, *(("height", "width") if row.cuts_space else ())]
        print(f"{row.name:14}{row.about:42}{', '.join(axes)}")
    return 0
