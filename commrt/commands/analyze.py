# SPDX-License-Identifier: Apache-2.0
"""``python -m commrt analyze``: where ranks diverged first, and who is missing."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from commrt.errors import UsageError
from commrt.files.visible import visible, visible_lines
from commrt.trace.divergence import compare, verdict_lines
from commrt.trace.dump_flight import write_for_torch
from commrt.trace.dump_reader import Dump, find_dumps, read_dump

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return 0, 1 where a file was damaged or not written, 2 else.

    Damaged dumps are left out and named; without any other dump that is misuse.
    """
    args = _parser().parse_args(argv)
    try:
        dumps, damaged = _read(find_dumps(args.files))
        verdict = compare(dumps, args.job)
        if args.json:
            print(json.dumps(verdict.as_json(), indent=1))
        else:
            text = "".join(f"{visible(line)}\n" for line in verdict_lines(verdict))
            print(visible_lines(text), end="")
        if args.flight is not None:
            folder = Path(args.flight)
            for dump in dumps:
                if dump.job == verdict.job:
                    write_for_torch(dump, folder)
        for error in damaged:
            print(f"commrt analyze: left out: {visible(str(error))}", file=sys.stderr)
        return 1 if damaged else 0
    except UsageError as error:
        print(f"commrt analyze: {visible(str(error))}", file=sys.stderr)
        return 2
    except (OSError, ValueError) as error:
        print(f"commrt analyze: {visible(str(error))}", file=sys.stderr)
        return 1


def _read(paths: Sequence[Path]) -> tuple[list[Dump], list[UsageError]]:
    """Return the dumps, and what is wrong with those that cannot be read.

    Raises UsageError where none can.
    """
    dumps: list[Dump] = []
    damaged: list[UsageError] = []
    for path in paths:
        try:
            dumps.append(read_dump(path))
        except UsageError as error:
            damaged.append(error)
    if damaged and not dumps:
        raise damaged[0]
    return dumps, damaged


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m commrt analyze",
        description="Name the first operation at which the ranks of a job diverged, "
        "and who is missing, from the dumps that COMMRT_DUMP=FOLDER or "
        "commrt.trace.dump(FOLDER) made.",
    )
    parser.add_argument("--json", action="store_true", help="the same as JSON")
    parser.add_argument("--job", help="which job, where there are dumps of several")
    parser.add_argument(
        "--flight",
        metavar="FOLDER",
        help="also write the files that torch's analyser reads (fr_trace FOLDER)",
    )
    parser.add_argument("files", nargs="+", help="dumps, or folders that have some")
    return parser
