# SPDX-License-Identifier: Apache-2.0
"""``python -m commrt trace``: what the ranks of a job have called."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from commrt.errors import UsageError
from commrt.files.visible import visible, visible_lines
from commrt.files.write import write_file
from commrt.trace.job import Job, load
from commrt.trace.log import KEYS
from commrt.trace.perfetto import write_perfetto
from commrt.trace.picture import picture
from commrt.trace.summary import summary_text

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; return 0, 1 where something could not be written, 2 for misuse."""
    args = _parser().parse_args(argv)
    try:
        by = list(filter(None, (vars(args).get("by") or "").split(",")))
        wrong = [name for name in by if name not in KEYS]
        if wrong:
            raise UsageError(f"--by {wrong[0]}: expected of {', '.join(KEYS)}")
        job = load(args.files, args.job)
        if args.command == "summarize":
            print(visible_lines(summary_text(job, by)), end="")
            return 0
        return _write(job, args)
    except UsageError as error:
        print(f"commrt trace {args.command}: {visible(str(error))}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"commrt trace {args.command}: {visible(str(error))}", file=sys.stderr)
        return 1


def _write(job: Job, args: argparse.Namespace) -> int:
    out = Path(args.out)
    for note in job.notes:
        print(f"note: {visible(note)}", file=sys.stderr)
    if args.command == "plot":
        write_file(out, picture(job))
        print(f"{out}: {len(job.logs)} of {job.size} ranks")
        return 0
    count = write_perfetto(job, out)
    print(f"{out}: {count} events; open it at https://ui.perfetto.dev")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m commrt trace",
        description="Show what the ranks of a job have called, from the logs that "
        "COMMRT_TRACE=FOLDER or commrt.trace.record(FOLDER) made.",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    summarize = commands.add_parser(
        "summarize", help="tables: volume and time, by dimension, operation and size"
    )
    summarize.add_argument(
        "--by", help=f"one table by these, with commas: {', '.join(KEYS)}"
    )
    plot = commands.add_parser("plot", help="the same as a picture, in SVG")
    perfetto = commands.add_parser(
        "perfetto", help="a track per rank and group, for https://ui.perfetto.dev"
    )
    for one, default in (
        (plot, "commrt-trace.svg"),
        (perfetto, "commrt-trace.json.gz"),
    ):
        one.add_argument("--out", default=default, help=f"file to write ({default})")
    for one in (summarize, plot, perfetto):
        one.add_argument("--job", help="which job, where there are logs of several")
        one.add_argument("files", nargs="+", help="logs, or folders that have some")
    return parser
