# SPDX-License-Identifier: Apache-2.0
"""``python -m commrt.bench.cluster``: compare libraries between hosts, in one run.

Launches take turns: in each round every library runs once, and each round begins with
another one. Arrays, checks and clocks are those of ``python -m commrt.bench compare``.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from commrt import algorithms
from commrt.bench.bench_operations import MESSAGES, bench_operation
from commrt.bench.cluster.launches import Hosts, hosts_of
from commrt.bench.cluster.placements import Placement, parse_placement
from commrt.bench.cluster.table import OURS, OWN, report
from commrt.bench.launch import PeerSpec, make_job, parse_peer
from commrt.bench.machine import describe_machine
from commrt.bench.option_values import argument, count, seconds, size_list
from commrt.bench.raw_data import check_output, damage_told, read_data, write_output
from commrt.errors import BackendError, CommError, UsageError
from commrt.files.visible import visible_lines
from commrt.vocabulary.link_rates import parse_rate

__all__ = ["SCHEMA", "main"]

SCHEMA = "commrt-compare-hosts/1"
_OPERATIONS = "allreduce,allgather,reduce_scatter,alltoall,bcast,alltoallv,send_recv"
_PLACEMENTS = ("4x1", "2x2", "2,1,1", "2x1")
_KINDS = ("commrt", "mpi4py", "gloo")


@dataclass(frozen=True)
class _Way:
    """A library, or a schedule of commrt, that takes turns with the others."""

    peer: PeerSpec
    launcher: str
    algorithm: str = ""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line; return the exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        return _main(_parser().parse_args(words), words)
    except CommError as error:
        print(f"commrt.bench.cluster: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m commrt.bench.cluster",
        description="Compare commrt with MPI libraries and gloo between hosts that "
        "this machine pretends. It needs root.",
    )
    parser.add_argument(
        *("--placement", "-p"),
        action="append",
        type=argument(parse_placement),
        metavar="HOSTSxRANKS",
        help=f"may be repeated; also 2,1,1: ranks of each host "
        f"({' '.join(_PLACEMENTS)})",
    )
    parser.add_argument("--rate", default="500mbit", help="of each link (500mbit)")
    parser.add_argument("--latency", default="none", help="of each link (none)")
    parser.add_argument("--op", default=_OPERATIONS, help=f"operations ({_OPERATIONS})")
    parser.add_argument(
        "--sizes",
        type=argument(size_list),
        default=[8, 1024, 32768, 1 << 20, 16 << 20],
        help="bytes, as 8:16777216:8 or a list (8,1024,32768,1048576,16777216)",
    )
    parser.add_argument(
        "--peer",
        action="append",
        default=[],
        metavar="NAME=[KIND:]PYTHON",
        help="mpi4py or gloo, in this or another interpreter; may be repeated (mpi4py)",
    )
    parser.add_argument(
        "--launcher",
        choices=("mpiexec", "torchrun"),
        default="mpiexec",
        help="who starts commrt's ranks (mpiexec)",
    )
    parser.add_argument(
        "--launches", type=count(1), default=5, help="of each library (5)"
    )
    parser.add_argument(
        "--own",
        type=count(0),
        default=0,
        metavar="N",
        help="launches of each of commrt's own schedules (0)",
    )
    parser.add_argument(
        "--budget-s", type=seconds, default=1.0, help="for one size of a launch (1)"
    )
    parser.add_argument(
        "--timeout-s", type=seconds, default=300.0, help="of a launch (300)"
    )
    parser.add_argument("--out", type=Path, help="write raw data to this file")
    parser.add_argument("--load", type=Path, help="print the tables of such a file")
    return parser


def _main(args: argparse.Namespace, words: Sequence[str]) -> int:
    if args.load is not None:
        with damage_told(args.load):
            text = report(read_data(args.load, SCHEMA))
        print(visible_lines(text), end="")
        return 0
    if args.out is not None:
        check_output(args.out)
    placements = args.placement or [parse_placement(text) for text in _PLACEMENTS]
    colls = [bench_operation(name).name for name in args.op.split(",")]
    ways = _ways(args)
    data: dict[str, Any] = {
        "schema": SCHEMA,
        "command": ["python", "-m", "commrt.bench.cluster", *words],
        "machine": describe_machine(),
        "rate": args.rate,
        "bits_per_s": parse_rate(args.rate),
        "latency": args.latency,
        "launches": [],
        "failures": [],
    }
    network = ("--rate", args.rate, "--latency", args.latency)
    try:
        for placement in placements:
            with hosts_of(placement, network) as hosts:
                for coll in colls:
                    _compare(args, data, hosts, coll, ways)
    finally:
        # A failure, or Ctrl-C, leaves the times that were measured before it.
        if args.out is not None and data["launches"]:
            write_output(args.out, json.dumps(data))
    print(visible_lines(report(data)), end="")
    return 1 if data["failures"] else 0


def _ways(args: argparse.Namespace) -> list[_Way]:
    ways = [_Way(parse_peer(OURS), args.launcher)]
    for peer in [parse_peer(text) for text in args.peer or ["mpi4py"]]:
        if peer.kind not in _KINDS:
            raise UsageError(
                f"--peer {peer.name}: expected one of {', '.join(_KINDS)} between hosts"
            )
        if peer.name == OURS or peer.name.startswith(OWN):
            raise UsageError(f"--peer {peer.name}: the name is taken; choose another")
        launcher = "torchrun" if peer.kind == "gloo" else "mpiexec"
        ways.append(_Way(peer, launcher))
    return ways


def _compare(
    args: argparse.Namespace,
    data: dict[str, Any],
    hosts: Hosts,
    coll: str,
    ways: Sequence[_Way],
) -> None:
    own = _own_ways(args, coll, hosts.placement)
    for index in range(max(args.launches, args.own if own else 0)):
        these = [*ways] if index < args.launches else []
        these += own if index < args.own else []
        turn = index % len(these)
        for way in [*these[turn:], *these[:turn]]:
            if not _run(args, data, hosts, coll, way) and way in own:
                own.remove(way)  # it cannot run this operation here


def _own_ways(args: argparse.Namespace, coll: str, placement: Placement) -> list[_Way]:
    if args.own == 0 or coll in MESSAGES:
        return []
    names = algorithms.names(coll, placement.size, placement.nodes)
    ours = parse_peer(OURS)
    return [
        _Way(replace(ours, name=f"{OWN}{name}"), args.launcher, f"{coll}:{name}")
        for name in (*names, "native")
    ]


def _run(
    args: argparse.Namespace, data: dict[str, Any], hosts: Hosts, coll: str, way: _Way
) -> bool:
    """Run one launch; add it, or its failure, to the data; return if it succeeded."""
    in_place = way.peer.kind == "gloo" and bench_operation(coll).reduces
    job = make_job(
        coll,
        args.sizes,
        budget_s=args.budget_s,
        in_place=in_place and bench_operation(coll).in_place,
        min_iterations=5,
        warmup=2,
        pin=False,  # each rank would take its share on a host of its own
    )
    label = {"placement": hosts.placement.name, "coll": coll}
    try:
        found = hosts.launch(
            way.peer,
            way.launcher,
            job,
            timeout_s=args.timeout_s,
            algorithm=way.algorithm,
        )
    except BackendError as error:
        if not way.algorithm:
            data["failures"].append(
                {**label, "peer": way.peer.name, "error": str(error)}
            )
        _say(f"# {hosts.placement.name}, {coll}, {way.peer.name}: failed")
        return False
    data["launches"].append({**label, **found})
    took = f"{found['elapsed_s']:.1f} s"
    _say(f"# {hosts.placement.name}, {coll}, {way.peer.name}: {took}")
    return True


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
