# SPDX-License-Identifier: Apache-2.0
"""``commrt-sim``: times of algorithms on networks that nobody here has, simulated."""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from commrt import algorithms
from commrt.commands.console import until_reader_leaves
from commrt.commands.verify import parse_params
from commrt.errors import CommError, ScheduleError, UsageError
from commrt.files.write import write_file
from commrt.schedule.ir import ParamValue, Schedule
from commrt.sim.chakra import write_chakra
from commrt.sim.costs import Costs
from commrt.sim.critical_path import critical_path, describe
from commrt.sim.exports import add_exports
from commrt.sim.fragments import fragmented, num_fragments
from commrt.sim.goal import goal_text
from commrt.sim.named_schedules import imported, is_file, named_schedule
from commrt.sim.network_files import KINDS, Described, load_network, preset_names
from commrt.sim.pictures.animation import animation
from commrt.sim.pictures.gantt import gantt
from commrt.sim.pictures.heat_map import heat_map
from commrt.sim.placements import machines, place
from commrt.sim.platform_files import platform_xml
from commrt.sim.quantities import nbytes_text, parse_nbytes, time_text
from commrt.sim.simulate import Simulated, simulate
from commrt.sim.studies import STUDIES
from commrt.sim.tasks import schedule_tasks
from commrt.vocabulary.operations import SCHEDULED

__all__ = ["main"]

MOST_RANKS = 65_536
_COSTS = {
    "send_overhead_us": "work of the sender's core for each message, in microseconds",
    "receive_overhead_us": "work of the receiver's core for each message, likewise",
    "reduce_us_per_byte": "work for each byte that is reduced",
    "copy_us_per_byte": "work for each byte that is copied",
    "eager_nbytes": "longest message that leaves before its receive (all do)",
    "local_latency_us": "latency between two ranks of one host",
    "local_gbytes_per_s": "rate between two ranks of one host (unlimited)",
    "queued_nbytes": "longest message that passes its first link behind earlier ones "
    "(none does)",
    "burst_nbytes": "bytes that a link that rested passes at once (0)",
    "contention_penalty": "loss of shared links: with n flows they carry "
    "1/(1 + penalty (1 - 1/n)) of their rate",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return 0, 1 for a wrong schedule, 2 for a wrong call."""
    parser = _parser()
    args = parser.parse_args(argv)
    try:
        return until_reader_leaves(lambda: int(args.run(args)))
    except ScheduleError as error:
        print(f"commrt-sim: the schedule is wrong: {error}", file=sys.stderr)
        return 1
    except (CommError, OSError) as error:
        print(f"commrt-sim: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="commrt-sim",
        description="Simulate algorithms on networks. Every time that is printed is "
        "simulated, none is measured.",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    run = commands.add_parser("run", help="simulate algorithms and compare their times")
    run.set_defaults(run=_run)
    run.add_argument("algorithms", nargs="+", metavar="ALGORITHM",
                     help="a name, path.py:name, module:name, "
                     "or a file of MSCCL (.xml)")  # fmt: skip
    _add_network(run)
    run.add_argument("--coll", choices=SCHEDULED, default="allreduce",
                     help="the operation (allreduce)")  # fmt: skip
    run.add_argument("--ranks", type=int, required=True, help="number of ranks")
    run.add_argument("--bytes", default="1MiB",
                     help="lengths of the vector, as 64KiB,1MiB (1MiB)")  # fmt: skip
    run.add_argument("--itemsize", type=int, default=4, help="bytes an element (4)")
    run.add_argument("--root", type=int, default=0, help="a rank (0)")
    run.add_argument("--params", default="", help="parameters, as k=8,parts=4")
    run.add_argument("--placement", default="block",
                     help="block, cyclic, random:SEED or file:PATH")  # fmt: skip
    run.add_argument("--unverified", action="store_true",
                     help="simulate without proving the schedule first")  # fmt: skip
    for name, text in _COSTS.items():
        kind = int if name.endswith("_nbytes") else float
        run.add_argument(f"--{name.replace('_', '-')}", type=kind, help=text)
    run.add_argument("--handshake", action="store_true", default=None,
                     help="rendezvous costs a request and an answer")  # fmt: skip
    run.add_argument("--in-order", action="store_true", default=None,
                     help="messages of a pair flow one after the other")  # fmt: skip
    run.add_argument("--chunk", metavar="BYTES", default="",
                     help="cut messages into fragments of about this length, as ranks "
                     "do; with --in-order")  # fmt: skip
    for name, text in (
        ("gantt", "chart of ranks and links over time (SVG)"),
        ("heat", "map of the network with the load of its links (SVG)"),
        ("animation", "page that plays the run (HTML)"),
        ("goal", "schedule in GOAL, for LogGOPSim and ATLAHS"),
        ("chakra", "trace of MLCommons Chakra for each rank, FILE.RANK.et"),
        ("json", "document for programs (JSON)"),
    ):
        run.add_argument(f"--{name}", metavar="FILE", help=f"write a {text}")
    run.add_argument("--timings", action="store_true",
                     help="print how long the work here took (measured)")  # fmt: skip
    run.add_argument("--explain", action="store_true",
                     help="tell the critical path in words")  # fmt: skip
    known = commands.add_parser("networks", help="list kinds of networks and presets")
    known.set_defaults(run=_networks)
    export = commands.add_parser("export", help="write a network as SimGrid's XML")
    export.set_defaults(run=_export)
    _add_network(export)
    export.add_argument("--out", required=True, metavar="FILE", help="file to write")
    add_exports(commands)
    study = commands.add_parser("study", help="repeat a published study")
    study.set_defaults(run=_study)
    study.add_argument("name", choices=sorted(STUDIES), help="which one")
    study.add_argument("--quick", action="store_true", help="a part of it, in seconds")
    return parser


def _add_network(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--topology",
        required=True,
        help="a .yaml or .xml file, a preset, or a kind with its numbers, as "
        "torus:dims=8x8,rate=100gbit,latency=1us; see commrt-sim networks",
    )


def _run(args: argparse.Namespace) -> int:
    if not 1 <= args.ranks <= MOST_RANKS:
        raise UsageError(f"--ranks {args.ranks}: expected 1 to {MOST_RANKS:,}")
    lengths = [parse_nbytes(text) for text in args.bytes.split(",")]
    described = load_network(args.topology)
    costs = _costs(described, args)
    hosts = place(described.network, args.ranks, args.placement)
    names = [imported(name) for name in args.algorithms]
    params = _params_of(args, names)
    asks = "gantt", "heat", "animation", "goal", "chakra"
    pictures = [one for one in asks if getattr(args, one)]
    if (pictures or args.explain) and (len(names), len(lengths)) != (1, 1):
        asked = [f"--{one}" for one in pictures] or ["--explain"]
        raise UsageError(
            f"{', '.join(asked)}: {len(names)} algorithms and {len(lengths)} lengths; "
            f"expected one of each, since it is about one run"
        )
    network = described.network
    print(f"simulated: {args.coll}, {args.ranks} ranks, {args.placement} placement")
    print(f"network: {network.name}")
    for note in network.notes:
        print(f"  {note}")
    results: list[list[Simulated]] = []
    for name in names:
        clock = _Clock(name)
        where = tuple(machines(network)[hosts].tolist())
        schedule, prove = named_schedule(
            name, args.coll, args.ranks, args.root, params[name], where
        )
        schedule.programs()
        clock.lap("recording the schedule")
        if not args.unverified:
            prove()
            clock.lap("proving it")
        runs = []
        for nbytes in lengths:
            played, length = _cut(name, schedule, nbytes, args)
            runs.append(
                simulate(
                    *(played, network, length, hosts),
                    itemsize=args.itemsize,
                    costs=costs,
                )
            )
        clock.lap(f"simulating {len(runs)} x {len(runs[0].messages.send):,} messages")
        if args.timings:
            print(clock.text())
        results.append(runs)
    _print_table(names, lengths, results)
    if args.explain:
        run = results[0][0]
        print("\n".join(describe(run, critical_path(run))))
    _write(args, results, costs)
    return 0


def _cut(
    name: str, schedule: Schedule, nbytes: int, args: argparse.Namespace
) -> tuple[Schedule, int]:
    """Return what is simulated for a length, and the length that is asked for then."""
    if not args.chunk:
        return schedule, nbytes
    if is_file(name):
        raise UsageError(
            f"--chunk: {name} is a file, whose messages are what it says; leave it out"
        )
    chunk, unit = parse_nbytes(args.chunk), args.itemsize * schedule.length_unit
    if chunk < 1:
        raise UsageError(f"--chunk {args.chunk}: expected 1 byte or more")
    if unit < 1 or nbytes % unit:
        return schedule, nbytes  # simulate says what is wrong
    num_elements = nbytes // args.itemsize
    number = num_fragments(schedule, num_elements, args.itemsize, chunk)
    return fragmented(schedule, num_elements, args.itemsize, number), 0


class _Clock:
    """Times of this process's own work."""

    def __init__(self, name: str) -> None:
        self._parts: list[str] = []
        self._name = name
        self._last = time.perf_counter()

    def lap(self, what: str) -> None:
        """Count the time since the last lap for ``what``."""
        now = time.perf_counter()
        self._parts.append(f"{what} {now - self._last:.1f} s")
        self._last = now

    def text(self) -> str:
        """Return all laps, and the most memory that the process ever had."""
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
        return f"{self._name}, measured here: {', '.join(self._parts)}, {most} MiB"


def _costs(described: Described, args: argparse.Namespace) -> Costs:
    given = {one.name: getattr(args, one.name) for one in fields(Costs)}
    asked = {name: value for name, value in given.items() if value is not None}
    return replace(described.costs, **asked)


def _params_of(
    args: argparse.Namespace, names: Sequence[str]
) -> dict[str, dict[str, ParamValue]]:
    """Return for each algorithm those of the parameters that it has."""
    given = parse_params(args.params)
    found: dict[str, dict[str, ParamValue]] = {}
    for name in names:
        known = (
            {}
            if is_file(name)
            else algorithms.param_choices(args.coll, name, args.ranks)
        )
        found[name] = {key: given[key] for key in given if key in known}
    unused = given.keys() - {key for one in found.values() for key in one}
    if unused:
        raise UsageError(
            f"--params: none of {', '.join(names)} has {', '.join(sorted(unused))}"
        )
    return found


def _print_table(
    names: Sequence[str], lengths: Sequence[int], results: list[list[Simulated]]
) -> None:
    width = max(map(len, names))
    print(f"{'':{width}}" + "".join(f"{nbytes_text(n):>16}" for n in lengths))
    for name, runs in zip(names, results, strict=True):
        times = "".join(f"{time_text(run.time_us):>16}" for run in runs)
        print(f"{name:{width}}{times}")
    if len(names) > 1:
        best = [
            f"{min(zip((run.time_us for run in runs), names, strict=True))[1]} "
            f"({nbytes_text(nbytes)})"
            for nbytes, runs in zip(lengths, zip(*results, strict=True), strict=True)
        ]
        print(f"fastest, simulated: {', '.join(best)}")


def _write(
    args: argparse.Namespace, results: list[list[Simulated]], costs: Costs
) -> None:
    run = results[0][0]
    for path, make in (
        (args.gantt, gantt),
        (args.heat, heat_map),
        (args.animation, animation),
    ):
        if path:
            write_file(Path(path), make(run))
            print(f"{path}: written, simulated")
    if args.goal:
        text = goal_text(run.schedule, run.num_elements, run.itemsize, costs)
        write_file(Path(args.goal), text)
        print(f"{args.goal}: written")
    if args.chakra:
        tasks = schedule_tasks(run.schedule, run.num_elements, run.itemsize, costs)
        paths = write_chakra(Path(args.chakra), tasks)
        print(f"{paths[0]} and on: written, {len(paths)} ranks")
    if args.json:
        rows = [_record(run) for runs in results for run in runs]
        write_file(Path(args.json), json.dumps(rows, indent=1) + "\n")
        print(f"{args.json}: written, simulated")


def _record(run: Simulated) -> dict[str, Any]:
    schedule = run.schedule
    return {
        "simulated": True,
        "coll": schedule.coll,
        "algorithm": schedule.algorithm,
        "params": schedule.params,
        "ranks": schedule.size,
        "nbytes": run.num_elements * run.itemsize,
        "network": run.network.name,
        "time_us": run.time_us,
        "messages": len(run.messages.send),
        "most_flows_on_a_link": int(run.links.peak_flows.max(initial=0)),
    }


def _networks(args: argparse.Namespace) -> int:
    print("kinds (--topology KIND:name=value,...):")
    for kind, shape in KINDS.items():
        names = ", ".join(one.name for one in fields(shape))
        print(f"  {kind:15} {(shape.__doc__ or '').splitlines()[0]}")
        print(f"  {'':15} {names}")
    print("presets (--topology NAME):")
    for name in preset_names():
        network = load_network(name).network
        print(f"  {name:15} {network.name}: {network.num_hosts:,} hosts")
        for note in network.notes:
            print(f"  {'':15} {note}")
    return 0


def _export(args: argparse.Namespace) -> int:
    write_file(Path(args.out), platform_xml(load_network(args.topology).network))
    print(
        f"{args.out}: written; run SimGrid with --cfg=network/model:CM02 "
        f"--cfg=network/crosstraffic:0"
    )
    return 0


def _study(args: argparse.Namespace) -> int:
    for line in STUDIES[args.name](args.quick):
        print(line, flush=True)
    return 0
