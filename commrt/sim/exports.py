# SPDX-License-Identifier: Apache-2.0
"""``commrt-sim goal`` and ``chakra``: logs of a run, written for other simulators."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from commrt.files.visible import visible
from commrt.files.write import write_file
from commrt.sim.chakra import write_chakra
from commrt.sim.costs import Costs
from commrt.sim.goal import goal_of_tasks
from commrt.sim.log_tasks import LoggedTasks, log_tasks
from commrt.trace.job import load

__all__ = ["add_exports"]


def add_exports(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
) -> None:
    """Add the two commands to those of ``commrt-sim``."""
    for name, run, what, out in (
        ("goal", _goal, "GOAL, for LogGOPSim and ATLAHS", "file to write"),
        ("chakra", _chakra, "traces of MLCommons Chakra",
         "a file OUT.RANK.et is written for each rank"),
    ):  # fmt: skip
        parser = commands.add_parser(name, help=f"write logs of a run as {what}")
        parser.set_defaults(run=run)
        parser.add_argument("logs", nargs="+", metavar="LOG",
                            help="logs of COMMRT_TRACE, or their folder")  # fmt: skip
        parser.add_argument("--out", required=True, help=out)
        parser.add_argument("--job", help="which one, where there are several")
        parser.add_argument("--native-as", metavar="ALGORITHM,...", default="",
                            help="stand for collectives of libraries")  # fmt: skip
        parser.add_argument("--leave-out", action="store_true",
                            help="leave out calls of unknown messages")  # fmt: skip
        for cost in ("reduce_us_per_byte", "copy_us_per_byte"):
            parser.add_argument(f"--{cost.replace('_', '-')}", type=float, default=0.0,
                                help="work of a core for each byte (0)")  # fmt: skip


def _tasks(args: argparse.Namespace) -> LoggedTasks:
    job = load(args.logs, args.job)
    costs = Costs(
        reduce_us_per_byte=args.reduce_us_per_byte,
        copy_us_per_byte=args.copy_us_per_byte,
    )
    native_as = [*filter(None, args.native_as.split(","))]
    made = log_tasks(job, costs=costs, native_as=native_as, leave_out=args.leave_out)
    for note in job.notes:
        print(f"note: {visible(note)}", file=sys.stderr)
    for why, count in made.left_out.most_common():
        print(f"note: {count} calls left out: {visible(why)}", file=sys.stderr)
    return made


def _goal(args: argparse.Namespace) -> int:
    ranks = _tasks(args).ranks
    write_file(Path(args.out), goal_of_tasks(len(ranks), ranks))
    print(f"{args.out}: written, {len(ranks)} ranks, {sum(map(len, ranks))} tasks")
    return 0


def _chakra(args: argparse.Namespace) -> int:
    ranks = _tasks(args).ranks
    paths = write_chakra(Path(args.out), ranks)
    print(f"{paths[0]} and on: written, {len(ranks)} ranks")
    return 0
