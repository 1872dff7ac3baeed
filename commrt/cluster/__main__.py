# SPDX-License-Identifier: Apache-2.0
"""``python -m commrt.cluster up|run|measure|down|list``: a cluster on one machine."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from commrt.cluster.building import Cluster, built_cluster
from commrt.cluster.entering import run_inside
from commrt.cluster.latency import parse_latency
from commrt.cluster.launchers import (
    LAUNCHERS,
    of_mpiexec,
    of_torchrun,
    on_hosts,
    parse_ranks,
)
from commrt.cluster.measure import measure
from commrt.cluster.programs import check_root
from commrt.cluster.runner import Program, run_programs
from commrt.cluster.state import FOLDER, cluster_names, find_cluster
from commrt.cluster.supervisor import bring_down, bring_up
from commrt.cluster.topology import (
    Topology,
    fat_tree,
    loop_network,
    star,
    with_latency,
)
from commrt.cluster.topology_file import read_topology
from commrt.cluster.wiring import ETHERNET_NBYTES, Wiring
from commrt.commands.console import until_reader_leaves
from commrt.errors import CommError, UsageError, suggest
from commrt.vocabulary.link_rates import parse_rate

__all__ = ["main"]

_SHAPES = ("star", "fat-tree", "loop")
_SMALLEST_MTU, _LARGEST_MTU = 1280, 9000
_LARGEST_BURST = 1_000_000_000
_LONGEST_S = 50.0


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return the exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    split = words.index("--") if "--" in words else len(words)
    said = _parser().parse_args(words[:split])
    said.program = words[split + 1 :]
    command: Callable[[argparse.Namespace], int] = said.command
    try:
        return until_reader_leaves(lambda: command(said))
    except CommError as error:
        print(f"commrt cluster: {error}", file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m commrt.cluster",
        description="Make hosts on this machine, with a network of links and switches "
        "between them, and run programs there. It needs root, on Linux.",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    up = commands.add_parser("up", help="make a cluster that stays until down")
    up.add_argument("name", metavar="NAME", help="how to call it")
    up.set_defaults(command=_up)
    run = commands.add_parser(
        "run",
        help="run a program: run NAME -- PROGRAM...; with --hosts, in a new cluster "
        "that ends with it",
    )
    run.set_defaults(command=_run)
    where = run.add_mutually_exclusive_group()
    where.add_argument(
        "--on", metavar="HOSTS", help="run it on these hosts, as h1,h2 (the first one)"
    )
    where.add_argument(
        "--all", action="store_true", help="run it on every host, side by side"
    )
    where.add_argument(
        "--launcher", choices=LAUNCHERS, help="start ranks of it as this launcher does"
    )
    run.add_argument(
        "--ranks", metavar="N", help="ranks of a launcher per host, as 2 or 2,1,1 (1)"
    )
    run.add_argument(
        "--mpiexec-args",
        metavar="WORDS",
        help="options for mpiexec itself, as '-x NAME --tag-output'",
    )
    test = commands.add_parser(
        "measure", help="send data between hosts, and compare with the rates asked for"
    )
    test.set_defaults(command=_measure)
    test.add_argument(
        "--seconds", type=float, default=1.0, help="how long each pair sends (1)"
    )
    for one in (run, test):
        one.add_argument(
            "name", metavar="NAME", nargs="?", help="a cluster that up has made"
        )
    down = commands.add_parser("down", help="end a cluster and all that runs in it")
    down.add_argument("name", metavar="NAME", help="the cluster")
    down.set_defaults(command=_down)
    shown = commands.add_parser("list", help="print the names of all clusters")
    shown.set_defaults(command=_list)
    for one in (up, run, test):
        _add_network(one)
    for one in (up, run, test, down, shown):
        one.add_argument(
            "--folder",
            type=Path,
            default=FOLDER,
            help=f"where clusters with a name are noted ({FOLDER})",
        )
    return parser


def _add_network(parser: argparse.ArgumentParser) -> None:
    network = parser.add_argument_group("the network")
    network.add_argument("--hosts", type=int, metavar="N", help="number of hosts")
    network.add_argument(
        "--topology",
        default="star",
        metavar="SHAPE",
        help="star, fat-tree, loop (a ring of switches with chords) or a YAML file "
        "(star)",
    )
    network.add_argument(
        "--rate", default="unlimited", help="of each link, as 500mbit (unlimited)"
    )
    network.add_argument(
        "--latency", default="none", help="of each link, as 200us; it needs a rate"
    )
    network.add_argument(
        "--per-switch", type=int, metavar="N", help="hosts of a switch (4; loop: 2)"
    )
    network.add_argument(
        "--spines", type=int, metavar="N", help="upper switches of a fat tree (2)"
    )
    network.add_argument(
        "--oversubscription",
        type=float,
        metavar="X",
        help="of a fat tree: rate of a switch's hosts over that of its links up (1)",
    )
    network.add_argument(
        "--chords", metavar="N,N", help="lengths of a loop's chords (2,8,32,...)"
    )
    network.add_argument(
        "--mtu", type=int, default=_LARGEST_MTU, help=f"largest packet ({_LARGEST_MTU})"
    )
    network.add_argument(
        "--burst",
        type=int,
        metavar="BYTES",
        help="what a link with a rate lets pass at once after a rest (1 ms of its "
        "rate, at least 68000); with little, and a small MTU, links are like cables",
    )


def _wiring(said: argparse.Namespace) -> Wiring:
    """Return the network that the options describe."""
    if not _SMALLEST_MTU <= said.mtu <= _LARGEST_MTU:
        raise UsageError(
            f"--mtu {said.mtu}: expected {_SMALLEST_MTU} to {_LARGEST_MTU} bytes"
        )
    latency_us = parse_latency(said.latency)
    topology = _topology(said)
    if latency_us:
        topology = with_latency(topology, latency_us)
    _check_burst(said, topology)
    return Wiring(topology, said.mtu, said.burst)


def _check_burst(said: argparse.Namespace, topology: Topology) -> None:
    if said.burst is None:
        return
    least = said.mtu + ETHERNET_NBYTES
    if not least <= said.burst <= _LARGEST_BURST:
        raise UsageError(
            f"--burst {said.burst}: expected {least}, which is a packet of --mtu "
            f"{said.mtu} with its header, to {_LARGEST_BURST} bytes"
        )
    if all(link.rate is None for link in topology.links):
        raise UsageError("--burst is for links with a rate: add --rate")


def _topology(said: argparse.Namespace) -> Topology:
    shape, rate = said.topology, parse_rate(said.rate)
    if shape not in _SHAPES:
        if shape.endswith((".yaml", ".yml")) or "/" in shape:
            if said.hosts is not None or rate is not None or said.latency != "none":
                raise UsageError(
                    f"{shape} has the hosts, rates and latencies; leave --hosts, "
                    f"--rate and --latency out"
                )
            _check_unused(said, "a file", ())
            return read_topology(Path(shape))
        raise UsageError(
            f"--topology {shape!r}{suggest(shape, (*_SHAPES, 'FILE.yaml'))}"
        )
    if said.hosts is None:
        raise UsageError("say how many hosts, by --hosts N")
    if shape == "star":
        _check_unused(said, shape, ())
        return star(said.hosts, rate)
    if shape == "loop":
        _check_unused(said, shape, ("per_switch", "chords"))
        chords = None if said.chords is None else _numbers("--chords", said.chords)
        return loop_network(
            said.hosts, rate, per_switch=said.per_switch or 2, chords=chords
        )
    _check_unused(said, shape, ("per_switch", "spines", "oversubscription"))
    return fat_tree(
        said.hosts,
        rate,
        per_switch=said.per_switch or 4,
        spines=said.spines or 2,
        oversubscription=said.oversubscription or 1.0,
    )


def _check_unused(
    said: argparse.Namespace, shape: str, allowed: tuple[str, ...]
) -> None:
    for name in ("per_switch", "spines", "oversubscription", "chords"):
        given = getattr(said, name)
        option = f"--{name.replace('_', '-')}"
        if given is not None and name not in allowed:
            raise UsageError(f"{option} says nothing about {shape}; leave it out")
        if given is not None and not isinstance(given, str) and given <= 0:
            raise UsageError(f"{option} {given}: expected a number above 0")


def _numbers(option: str, text: str) -> list[int]:
    words = text.split(",")
    if not all(word.isdecimal() and len(word) < 5 for word in words):
        raise UsageError(f"{option} {text!r}: expected numbers, as 2,8")
    return [int(word) for word in words]


def _words(option: str, text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise UsageError(f"{option} {text!r}: {error}") from error


def _up(said: argparse.Namespace) -> int:
    _check_no_program(said)
    wiring = _wiring(said)
    check_root()
    bring_up(said.name, wiring, said.folder)
    hosts = wiring.topology.hosts
    print(f"{said.name}: {len(hosts)} hosts, {hosts[0]} to {hosts[-1]}")
    return 0


def _run(said: argparse.Namespace) -> int:
    if not said.program:
        raise UsageError("no program: write it after --, as in run NAME -- hostname")
    if said.ranks is not None and said.launcher is None:
        raise UsageError("--ranks needs a --launcher; --on and --all start one program")
    if said.mpiexec_args is not None and said.launcher != "mpiexec":
        raise UsageError("--mpiexec-args needs --launcher mpiexec")
    own_options = _words("--mpiexec-args", said.mpiexec_args or "")
    with _cluster(said) as cluster:
        programs = _programs(said, cluster, own_options)
        return run_inside(
            cluster.first, lambda: run_programs(programs, cluster.processes)
        )


def _programs(
    said: argparse.Namespace, cluster: Cluster, own_options: Sequence[str]
) -> list[Program]:
    environ, hosts = dict(os.environ), cluster.wiring.topology.hosts
    if said.launcher is not None:
        ranks = parse_ranks(said.ranks or "1", hosts)
        if said.launcher == "mpiexec":
            return of_mpiexec(ranks, said.program, environ, own_options=own_options)
        return of_torchrun(cluster.wiring, ranks, said.program, environ)
    chosen = hosts if said.all else tuple((said.on or hosts[0]).split(","))
    for index, host in enumerate(chosen):
        if host not in hosts:
            raise UsageError(f"--on: no host {host!r}{suggest(host, hosts)}")
        if host in chosen[:index]:
            raise UsageError(f"--on: {host} is asked for twice; name it once")
    return on_hosts(chosen, said.program, environ)


def _measure(said: argparse.Namespace) -> int:
    _check_no_program(said)
    if not 0.1 <= said.seconds <= _LONGEST_S:
        raise UsageError(f"--seconds {said.seconds}: expected 0.1 to {_LONGEST_S:g}")
    with _cluster(said) as cluster:
        return run_inside(cluster.first, lambda: measure(cluster, said.seconds))


def _down(said: argparse.Namespace) -> int:
    _check_no_program(said)
    bring_down(said.name, said.folder)
    return 0


def _list(said: argparse.Namespace) -> int:
    _check_no_program(said)
    for name in cluster_names(said.folder):
        print(name)
    return 0


def _cluster(said: argparse.Namespace) -> AbstractContextManager[Cluster]:
    """Return the cluster of a name, or a new one, which ends with this command."""
    is_new = said.hosts is not None or said.topology not in _SHAPES
    if is_new == (said.name is not None):
        raise UsageError(
            "name a cluster that up has made, or say by --hosts N what to make; one of "
            "the two"
        )
    if is_new:
        return built_cluster(_wiring(said))
    check_root()
    return nullcontext(find_cluster(said.name, said.folder).cluster)


def _check_no_program(said: argparse.Namespace) -> None:
    if said.program:
        raise UsageError("-- and a program are for run; leave them out")


if __name__ == "__main__":
    sys.exit(main())
