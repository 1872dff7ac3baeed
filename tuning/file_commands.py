# SPDX-License-Identifier: Apache-2.0
"""``commrt-tune`` report, merge and export: from files to files, without ranks."""

from __future__ import annotations

import argparse
import datetime
import sys
from pathlib import Path
from typing import Any

from commrt.errors import TableError, UsageError
from commrt.files.visible import visible, visible_lines
from commrt.files.write import write_file
from commrt.select.fingerprint import this_machine
from commrt.select.locate import LocatedTable, locate
from commrt.select.schema import DEFAULT_TIE_MARGIN
from commrt.select.table import Table, load_file
from commrt.tuning import measure
from commrt.tuning.decide import decide
from commrt.tuning.export_nccl import export_nccl
from commrt.tuning.export_openmpi import export_openmpi
from commrt.tuning.merge import is_recording, merge, read_input
from commrt.tuning.recording_reader import load_recording
from commrt.tuning.report import report
from commrt.tuning.samples import Recording
from commrt.tuning.table_writer import make_table, write_yaml

__all__ = ["add_commands", "table_of"]

_EXPORTS = {"openmpi": export_openmpi, "nccl": export_nccl}
_DEFAULT_PAGE = Path("commrt-tune-report.html")


def add_commands(commands: Any) -> None:
    """Add the three to the parser's commands."""
    shown = commands.add_parser("report", help="a table as a page for people (HTML)")
    shown.set_defaults(command=_report)
    shown.add_argument(
        "table",
        nargs="?",
        type=Path,
        metavar="TABLE",
        help="file (default: what --raw decides, else the one in force here); a "
        "recording alone is as --raw",
    )
    shown.add_argument(
        "--raw", type=Path, metavar="RAW", help="recording, for every candidate's times"
    )
    shown.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        default=_DEFAULT_PAGE,
        help=f"default: {_DEFAULT_PAGE}",
    )
    merged = commands.add_parser("merge", help="tables and recordings into one table")
    merged.set_defaults(command=_merge)
    merged.add_argument(
        "inputs",
        nargs="+",
        type=Path,
        metavar="FILE",
        help="two or more tables (.yaml) or recordings (.json, .json.gz)",
    )
    merged.add_argument("--out", type=Path, metavar="FILE", required=True)
    merged.add_argument(
        "--same-machine",
        action="store_true",
        help="recordings that name no machine are of this one, too",
    )
    exported = commands.add_parser("export", help="a table for another library")
    exported.set_defaults(command=_export)
    exported.add_argument(
        "table",
        nargs="?",
        type=Path,
        metavar="TABLE",
        help="file (default: the one in force here)",
    )
    exported.add_argument("--to", choices=sorted(_EXPORTS), required=True)
    exported.add_argument(
        "--out", type=Path, metavar="FILE", help="default: standard output"
    )


def table_of(path: Path | None) -> Table:
    """Return the table in a file, or without one the table in force here."""
    known = measure.catalog()
    if path is not None:
        return load_file(path, known)
    located: LocatedTable = locate()
    table = located.parse(known)
    if table is None:
        raise TableError(f"no table is in force here: {located.why}")
    return table


def _report(arguments: argparse.Namespace) -> int:
    if arguments.raw is None and arguments.table and is_recording(arguments.table):
        arguments.raw, arguments.table = arguments.table, None
    recording = None if arguments.raw is None else load_recording(arguments.raw)
    if arguments.table is None and recording is not None:
        table = _decided(recording, arguments.raw)
        source = f"Choices and times from the recording {arguments.raw.name}"
        if recording.machine is None:
            source += ", which names no machine: the one shown here wrote this page"
    else:
        table = table_of(arguments.table)
        source = f"Choices from {table.name}"
        if recording is not None:
            source += f", times from the recording {arguments.raw.name}"
    _write(arguments.out, visible_lines(report(table, recording, source)))
    print(f"Written to {arguments.out}")
    return 0


def _decided(recording: Recording, path: Path) -> Table:
    """Return the table that ``commrt-tune run`` made of the recording."""
    decisions = decide(recording, DEFAULT_TIE_MARGIN)
    if not decisions:
        raise TableError(
            f"{path} holds no measurement that decides anything: measure again with "
            f"commrt-tune run"
        )
    return make_table(
        decisions,
        recording.machine or this_machine(),
        software=recording.software,
        method={},
        tie_margin=DEFAULT_TIE_MARGIN,
        date=recording.date or _today(),
    )


def _merge(arguments: argparse.Namespace) -> int:
    if len(arguments.inputs) < 2:
        raise UsageError(
            f"merge takes two files or more, found {len(arguments.inputs)}: name "
            f"tables or recordings"
        )
    known = measure.catalog()
    inputs = [read_input(path, known) for path in arguments.inputs]
    merged = merge(inputs, known, same_machine=arguments.same_machine, date=_today())
    write_yaml(merged.text, arguments.out)
    print(visible_lines("\n".join(merged.lines)))
    print(f"Written to {arguments.out}")
    return 0


def _export(arguments: argparse.Namespace) -> int:
    exported = _EXPORTS[arguments.to](table_of(arguments.table))
    if exported.left_out:
        print(f"Not said to {arguments.to}:", file=sys.stderr)
        for line in exported.left_out:
            print(f"  {visible(line)}", file=sys.stderr)
    if arguments.out is None:
        print(visible_lines(exported.text), end="")
        return 0
    _write(arguments.out, visible_lines(exported.text))
    print(f"{exported.said} choices written to {arguments.out}")
    return 0


def _write(path: Path, text: str) -> None:
    try:
        write_file(path, text, parents=True)
    except OSError as error:
        raise TableError(f"cannot write {path}: {error}") from error


def _today() -> str:
    return datetime.date.today().isoformat()
