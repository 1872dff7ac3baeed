# SPDX-License-Identifier: Apache-2.0
"""``python -m commrt draw``: a picture of an algorithm's schedule."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from commrt import algorithms
from commrt.commands.verify import collectives_of, load, nodes_of, parse_params
from commrt.errors import ScheduleError, UsageError
from commrt.files.write import write_file
from commrt.schedule.draw import draw
from commrt.schedule.verify import verify
from commrt.vocabulary.operations import SCHEDULED

__all__ = ["main"]

MOST_RANKS = 128


def main(argv: Sequence[str] | None = None) -> int:
    """Write a picture; return 0 if it was, 1 if not, 2 for a wrong call.

    A wrong algorithm has a picture, too, unless it never ends: seeing it may help.
    """
    args = _parser().parse_args(argv)
    try:
        name = load(args.name)
        known = collectives_of(name, args.coll)
        if args.ranks > MOST_RANKS:
            raise UsageError(
                f"--ranks {args.ranks}: nobody could read the picture; draw at most "
                f"{MOST_RANKS}"
            )
        where = next(iter(nodes_of(known[0], name, args.ranks, args.nodes)), None)
        size = max(args.ranks, 1)
        having = [one for one in known if name in algorithms.names(one, size, where)]
        known = having or known
        params = parse_params(args.params)
        schedule = algorithms.schedule(
            *(known[0], name, args.ranks, args.root, params, where)
        )
        picture = draw(schedule)
        out = Path(args.out or f"{known[0]}-{name}-{args.ranks}.svg")
        write_file(out, picture)
    except UsageError as error:
        print(f"commrt draw: {error}", file=sys.stderr)
        return 2
    except (ScheduleError, OSError) as error:
        print(f"commrt draw: no picture: {error}", file=sys.stderr)
        return 1
    others = ", ".join(known[1:])
    also = f"; {name} is also one for {others}: choose by --coll" if others else ""
    print(f"{out}: {known[0]}{also}")
    try:
        verify(schedule)
    except ScheduleError as error:
        print(f"commrt draw: the algorithm is wrong: {error}", file=sys.stderr)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m commrt draw",
        description="Draw an algorithm's schedule as SVG: a lane per rank, a column "
        "per message of the critical path, and what every message carries.",
    )
    parser.add_argument(
        "name", help="an algorithm, path.py:algorithm or module:algorithm"
    )
    parser.add_argument(
        "--coll",
        choices=SCHEDULED,
        help="the operation (default: the first that has the algorithm)",
    )
    parser.add_argument("--ranks", type=int, default=8, help="number of ranks (8)")
    parser.add_argument("--root", type=int, default=0, help="a rank (0)")
    parser.add_argument(
        "--nodes", help="ranks per node, as 2,3, where the algorithm asks (two halves)"
    )
    parser.add_argument(
        "--params", default="", help="parameters, as k=2 or k=2,parts=4"
    )
    parser.add_argument("--out", help="file to write (default: COLL-NAME-RANKS.svg)")
    return parser
