# SPDX-License-Identifier: Apache-2.0
"""Benchmarks over torch.distributed: ranks of torchrun measure, rank 0 tells."""

from __future__ import annotations

import json
from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from commrt.bench.machine import describe_machine
from commrt.bench.raw_data import write_output

Rows = list[dict[str, Any]]

__all__ = ["Rows", "measure_models", "names_of", "report"]


def names_of(known: Collection[str]) -> Callable[[str], list[str]]:
    """Return an argument's type: known names with commas between them."""

    def names(text: str) -> list[str]:
        for name in text.split(","):
            if name not in known:
                raise ArgumentTypeError(f"{name}: expected {', '.join(known)}")
        return text.split(",")

    return names


def measure_models(
    program: str,
    models: Collection[str],
    measure: Callable[[list[str], int], Rows],
    text: Callable[[Rows], str],
    argv: Sequence[str] | None,
) -> int:
    """Run the command line of a benchmark of models; return its exit status.

    Args:
        program: Name of the module.
        models: Names of all of them.
        measure: Takes names and a number of turns; called on every rank.
        text: The table of the rows.
        argv: The words behind the program's name; None: those of this process.
    """
    parser = ArgumentParser(prog=f"python -m {program}")
    parser.add_argument(
        "--workload",
        type=names_of(models),
        default=list(models),
        help="models to train",
    )
    parser.add_argument("--blocks", type=int, default=15, help="turns of each way")
    parser.add_argument("--out", help="write all times to this file")
    given = parser.parse_args(argv)
    report(lambda: measure(given.workload, given.blocks), text, given.out)
    return 0


def report(
    measure: Callable[[], Rows], text: Callable[[Rows], str], out: str | None
) -> None:
    """Measure in a process group of commrt, print a table, and keep all times.

    Args:
        measure: Called on every rank; its rows are those of rank 0.
        text: The table of the rows.
        out: The file that the rows are written to, with the machine; None: nowhere.
    """
    import torch.distributed as dist

    dist.init_process_group("commrt")
    try:
        rows = measure()
        if dist.get_rank() == 0:
            print(text(rows))
            if out:
                found = {"machine": describe_machine(), "rows": rows}
                write_output(Path(out), json.dumps(found))
    finally:
        dist.destroy_process_group()
