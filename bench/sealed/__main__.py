# SPDX-License-Identifier: Apache-2.0
"""``python -m commrt.bench.sealed COMMAND``: see ``--help``."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from commrt.bench.raw_data import write_data
from commrt.bench.sealed.cells import cells, cells_of, fitting_cells
from commrt.bench.sealed.judging import report
from commrt.bench.sealed.measuring import Times, measured
from commrt.bench.sealed.networks import Numbers
from commrt.bench.sealed.predicting import (
    fitted,
    predicted,
    simulator,
    two_numbers,
)
from commrt.commands.console import until_reader_leaves
from commrt.errors import CommError, UsageError
from commrt.files.read import Kind, read_text

_FOLDER = Path("docs/data/sealed/round-2")
_FITTING, _NUMBERS = "fitting-times.json", "numbers.json"
_PREDICTIONS, _TIMES = "predictions.json", "times.json.gz"
_KIND = Kind("file of sealed predictions", "JSON", 1 << 26, UsageError)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return 0, 1 for a failure, 2 for a wrong call."""
    parser = argparse.ArgumentParser(
        prog="python -m commrt.bench.sealed",
        description="Predict which algorithms win on networks, seal the predictions, "
        "measure, and judge. Measuring needs root, for clusters, and torch.",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, function, text in (
        ("fit", _fit, "measure a few cells, and fit both models' numbers to them"),
        ("predict", _predict, "write down who will win in all other cells"),
        ("measure", _measure, "time all candidates of these cells; goes on where it "
         "was stopped"),
        ("judge", _judge, "compare"),
    ):  # fmt: skip
        one = commands.add_parser(name, help=text)
        one.set_defaults(command=function)
        one.add_argument(
            "--folder", type=Path, default=_FOLDER, help=f"of the files ({_FOLDER})"
        )
        if name == "fit":
            one.add_argument(
                "--again", action="store_true", help="take the times that are there"
            )
        if name in ("measure", "judge"):
            one.add_argument("--networks", default="", help="as star-3,loop-4 (all)")
    arguments = parser.parse_args(argv)
    command: Callable[[argparse.Namespace], int] = arguments.command
    try:
        return until_reader_leaves(lambda: command(arguments))
    except CommError as error:
        print(f"commrt sealed: {error}", file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 1


def _fit(arguments: argparse.Namespace) -> int:
    known = fitting_cells()
    path = arguments.folder / _FITTING
    if not arguments.again:
        _write(path, measured(known, _say))
    times: Times = _read(path)
    full = fitted(known, times, simulator(), full=True)
    two = fitted(known, times, two_numbers, full=False)
    _write(
        arguments.folder / _NUMBERS,
        {"full": dict(full.values), "two": dict(two.values)},
    )
    for name, numbers in (("simulator", full), ("two numbers", two)):
        _say(f"{name}: {', '.join(f'{k}={v:.4g}' for k, v in numbers.values.items())}")
    return 0


def _predict(arguments: argparse.Namespace) -> int:
    numbers: dict[str, dict[str, float]] = _read(arguments.folder / _NUMBERS)
    found = predicted(cells(), Numbers(numbers["full"]), Numbers(numbers["two"]))
    _write(arguments.folder / _PREDICTIONS, found)
    _say(f"{len(found)} cells are predicted: commit {arguments.folder / _PREDICTIONS}")
    return 0


def _measure(arguments: argparse.Namespace) -> int:
    path = arguments.folder / _TIMES
    times: dict[str, Any] = _read(path) if path.exists() else {}
    for network in dict.fromkeys(cell.network for cell in _asked(arguments)):
        own = [cell for cell in cells() if cell.network == network]
        if any(cell.key not in times for cell in own):
            times.update(measured(own, _say))
            _write(path, times)
    return 0


def _judge(arguments: argparse.Namespace) -> int:
    times: Times = _read(arguments.folder / _TIMES)
    predictions: dict[str, Any] = _read(arguments.folder / _PREDICTIONS)
    asked = {*filter(None, arguments.networks.split(","))}
    known = [
        cell
        for cell in cells_of(predictions)
        if cell.key in times and (not asked or cell.network in asked)
    ]
    if not known:
        raise UsageError("no cell of these networks is measured yet: measure first")
    for line in report(known, predictions, times):
        _say(line)
    return 0


def _asked(arguments: argparse.Namespace) -> list[Any]:
    known = cells()
    names = {cell.network for cell in known}
    asked = {*filter(None, arguments.networks.split(","))} or names
    if asked - names:
        raise UsageError(
            f"--networks {arguments.networks}: expected some of "
            f"{', '.join(sorted(names))}"
        )
    return [cell for cell in known if cell.network in asked]


def _read(path: Path) -> Any:
    return json.loads(read_text(path, _KIND))


def _write(path: Path, content: Any) -> None:
    write_data(path, json.dumps(content, indent=1) + "\n")


def _say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
