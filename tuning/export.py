# SPDX-License-Identifier: Apache-2.0
"""``commrt-tune export``: a table's choices in the words of other libraries.

Only what the other library really has is translated. Everything else is listed, in the
file and to the caller: a wrong translation would be worse than none.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from commrt.select.facts import LINK_CLASSES
from commrt.select.rules import Cell, Rule
from commrt.select.table import Table
from commrt.tuning.summary import human_nbytes

__all__ = ["Exported", "cell_words", "cells_to_say", "comment", "rule_words"]

_COMMENT = 88


@dataclass(frozen=True)
class Exported:
    """A file for another library."""

    text: str
    """The text of the file."""
    said: int
    """Rules that the file says."""
    left_out: tuple[str, ...]
    """The rules that it leaves out, with a reason each."""


def cells_to_say(
    table: Table, device: str, key: Callable[[Cell], object]
) -> tuple[list[tuple[Cell, list[Rule]]], list[str]]:
    """Return the cells that another library can tell apart, and why not the others.

    Args:
        table: the choices.
        device: the kind of memory the other library is asked for.
        key: what the other library looks rules up by; the first cell of equal keys is
            taken, near links before far ones.
    """
    cells: dict[Cell, list[Rule]] = {}
    for rule in table.rules:
        cells.setdefault(rule.cell, []).append(rule)
    order: dict[str, int] = {name: place for place, name in enumerate(LINK_CLASSES)}
    taken: dict[object, Cell] = {}
    kept, left_out = [], []
    for cell in sorted(cells, key=lambda one: order.get(one.link_class or "", -1)):
        if cell.device not in (None, device):
            why = f"is about {cell.device} memory"
        elif cell.dtype is not None or cell.redop is not None:
            why = "depends on the element type or the reduction, which is no key there"
        elif key(cell) in taken:
            why = f"looks there like {cell_words(taken[key(cell)])}, which is taken"
        else:
            taken[key(cell)] = cell
            kept.append((cell, sorted(cells[cell], key=lambda one: one.match.lo)))
            continue
        left_out.append(f"{cell_words(cell)}: {why}")
    return kept, left_out


def cell_words(cell: Cell) -> str:
    """Return a cell for people."""
    keys = [
        f"{name}={value}"
        for name, value in zip(cell._fields[1:], cell[1:], strict=True)
        if value is not None and name != "device"
    ]
    return f"{cell.op} ({', '.join(keys)})"


def rule_words(rule: Rule) -> str:
    """Return a rule for people."""
    lo, hi = rule.match.lo, rule.match.hi
    return (
        f"{cell_words(rule.cell)} from {human_nbytes(lo) if lo else 0} "
        f"to {human_nbytes(hi)}: {rule.use}"
    )


def comment(lines: Iterable[str] | Sequence[str]) -> str:
    """Return lines of comment, each short: some readers cut at 255 characters."""
    return "".join(
        f"# {part}\n"
        for line in lines
        for part in textwrap.wrap(line, _COMMENT, subsequent_indent="  ") or [""]
    )
