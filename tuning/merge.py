# SPDX-License-Identifier: Apache-2.0
"""``commrt-tune merge``: tables and recordings of one machine into one table.

A cell (operation, ranks, placement, link class) comes as a whole from one place, so its
ranges tile as they did there. Recordings decide theirs anew, all launches together;
what only a table has is taken over; of two tables the better founded one wins. Every
difference is said.
"""

from __future__ import annotations

import datetime
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median_low

from commrt.errors import TableError
from commrt.select.facts import LINK_CLASSES
from commrt.select.fingerprint import Machine, this_machine
from commrt.select.rules import Cell, Rule
from commrt.select.schema import DEFAULT_TIE_MARGIN, METHOD_KEYS
from commrt.select.table import Catalog, Table, load, load_file
from commrt.select.tree import MAX_NBYTES
from commrt.select.write import dump
from commrt.tuning.decide import ENOUGH_LAUNCHES, decide
from commrt.tuning.export import cell_words
from commrt.tuning.merge_recordings import join
from commrt.tuning.recording_reader import load_recording
from commrt.tuning.regret import held_out_regret
from commrt.tuning.samples import Recording
from commrt.tuning.summary import human_nbytes
from commrt.tuning.table_writer import make_table
from commrt.tuning.tested_pairs import keep_pairs
from commrt.vocabulary.operations import COLLECTIVES

__all__ = ["Input", "Merged", "merge", "read_input"]


@dataclass(frozen=True)
class Input:
    """One file to merge: a table or a recording."""

    name: str
    """File, for messages."""
    table: Table | None = None
    """The table, if it is one."""
    recording: Recording | None = None
    """The recording, if it is one."""

    @property
    def machine(self) -> Machine | None:
        """The machine that was measured, if it says so."""
        if self.table is not None:
            return self.table.machine
        return None if self.recording is None else self.recording.machine


@dataclass(frozen=True)
class Merged:
    """The merged recording."""

    table: Table
    """Everything, once."""
    text: str
    """The same as YAML."""
    lines: Sequence[str]
    """The origin of each cell, and the conflicts."""


@dataclass(frozen=True)
class _Source:
    """A cell's rules, and who says so."""

    name: str
    rules: Sequence[Rule]

    @property
    def launches(self) -> int:
        """Number of launches that measured a point, typically; 0 without evidence."""
        seen = [
            point.launches
            for rule in self.rules
            if rule.evidence is not None
            for point in rule.evidence.points
        ]
        return median_low(seen) if seen else 0

    @property
    def date(self) -> str:
        """Date of the newest of its evidence; empty: unknown."""
        dates = [rule.evidence.date or "" for rule in self.rules if rule.evidence]
        return max(map(_iso_date, dates), default="")

    @property
    def worth(self) -> tuple[int, str, int]:
        """Orders sources: enough launches, then the newer one, then more launches."""
        return min(self.launches, ENOUGH_LAUNCHES), self.date, self.launches

    def __str__(self) -> str:
        launches = f"{self.launches} {'launch' if self.launches == 1 else 'launches'}"
        return f"{self.name} ({launches}, {self.date or 'no date'})"


def _iso_date(text: str) -> str:
    """Return a date as it sorts, empty where it is none: tables do not check it."""
    try:
        return datetime.date.fromisoformat(text).isoformat()
    except ValueError:
        return ""


def is_recording(path: Path) -> bool:
    """Return whether a file is named as recordings are, and not as tables."""
    return path.name.endswith((".json", ".json.gz"))


def read_input(path: Path, known: Catalog) -> Input:
    """Return the file's table or recording, told apart by the name."""
    if is_recording(path):
        return Input(str(path), recording=load_recording(path))
    return Input(str(path), table=load_file(path, known))


def merge(
    inputs: Sequence[Input], known: Catalog, *, same_machine: bool, date: str
) -> Merged:
    """Return one table of all inputs.

    Args:
        inputs: two or more.
        known: the algorithms that exist; recordings may hold others.
        same_machine: believe that recordings that name no machine are of this one.
        date: of what is decided from recordings that have none.

    Raises:
        TableError: they are of different machines, or nothing can be decided.
    """
    machine = _one_machine(inputs, same_machine)
    tables = [one for one in inputs if one.table is not None]
    recorded = [
        (one.name, one.recording) for one in inputs if one.recording is not None
    ]
    joined, lines = join(recorded, known)
    margin, more = _margin(tables)
    decisions = decide(joined, margin)
    software = _together(
        [one.table.software for one in tables if one.table]
        + [recording.software for _, recording in recorded]
    )
    method = _method(tables)
    together = keep_pairs(
        [(one.name, one.table) for one in tables if one.table],
        [(name, recording.software) for name, recording in recorded],
    )
    held_out = held_out_regret(joined, decisions)
    if held_out.cells:
        method["held_out"] = held_out.for_table()
    decided = make_table(
        decisions,
        machine,
        software=software,
        method={key: method[key] for key in METHOD_KEYS if key in method},
        tie_margin=margin,
        date=max((one.date for _, one in recorded), default="") or date,
        together=together,
    )
    anew = _cells("raw data", decided.rules)
    rules, chosen = _choose(anew, tables)
    if not rules:
        raise TableError("nothing to merge: the inputs hold no rule and no sample")
    table = replace(decided, rules=tuple(rules), name="merged table")
    # The inputs were checked; the output is checked, too, before anybody relies on it.
    text = dump(table)
    if len(text.encode()) > MAX_NBYTES:
        raise TableError(
            f"the merged table has {len(rules)} rules in {len(text.encode())} bytes, "
            f"and no table may have more than {MAX_NBYTES} bytes: merge fewer files"
        )
    load(text, "merged table", known)
    said = [*more, *together.lines, *_versions(software)]
    return Merged(table, text, [*lines, *said, *chosen])


def _one_machine(inputs: Sequence[Input], same_machine: bool) -> Machine:
    """Return the machine of all inputs; TableError where they differ or do not say."""
    named = [(one.name, one.machine) for one in inputs]
    known = [(name, machine) for name, machine in named if machine is not None]
    if len({machine.fingerprint for _, machine in known}) > 1:
        each = "; ".join(
            f"{name}: {machine.cpu.model}, fingerprint {machine.fingerprint[:12]}"
            for name, machine in known
        )
        raise TableError(
            f"only tables and recordings of one machine can be merged, and these are "
            f"of different ones ({each})"
        )
    silent = [name for name, machine in named if machine is None]
    if silent and not same_machine:
        raise TableError(
            f"{', '.join(silent)} does not say on which machine it was measured, as an "
            f"older commrt wrote it: if it was the same one, say --same-machine"
        )
    return known[-1][1] if known else this_machine()


def _margin(tables: Sequence[Input]) -> tuple[float, list[str]]:
    margins = sorted({one.table.tie_margin for one in tables if one.table is not None})
    if len(margins) == 1:
        return margins[0], []
    if not margins:
        return DEFAULT_TIE_MARGIN, []
    words = ", ".join(f"{margin:g}" for margin in margins)
    return DEFAULT_TIE_MARGIN, [
        f"The tables have different tie margins ({words}): {DEFAULT_TIE_MARGIN:g} is "
        f"written."
    ]


def _together(sections: Sequence[Mapping[str, object]]) -> dict[str, object]:
    """Return all keys; values that differ stand side by side."""
    values: dict[str, list[object]] = {}
    for section in sections:
        for key, value in section.items():
            seen = values.setdefault(key, [])
            if value not in seen:
                seen.append(value)
    return {
        key: seen[0] if len(seen) == 1 else " | ".join(map(str, seen))
        for key, seen in values.items()
    }


def _versions(software: Mapping[str, object]) -> Iterator[str]:
    for key, value in software.items():
        if " | " in str(value):
            yield f"Measured with different versions of {key}: {value}"


def _method(tables: Sequence[Input]) -> dict[str, object]:
    """Return the facts that all tables say alike about their measurements."""
    methods = [one.table.method for one in tables if one.table is not None]
    first = methods[0] if methods else {}
    alike = {
        key: value
        for key, value in first.items()
        if key != "held_out" and all(one.get(key) == value for one in methods)
    }
    return alike | {"command": " ".join(["commrt-tune", *sys.argv[1:]])}


def _cells(name: str, rules: Sequence[Rule]) -> dict[Cell, _Source]:
    cells: dict[Cell, list[Rule]] = {}
    for rule in rules:
        cells.setdefault(rule.cell, []).append(rule)
    return {
        cell: _Source(name, sorted(each, key=lambda rule: rule.match.lo))
        for cell, each in cells.items()
    }


def _choose(
    anew: Mapping[Cell, _Source], tables: Sequence[Input]
) -> tuple[list[Rule], list[str]]:
    """Return the rules of all cells, and where each came from."""
    offers: dict[Cell, list[_Source]] = {cell: [one] for cell, one in anew.items()}
    for table in tables:
        if table.table is not None:
            for cell, source in _cells(table.name, table.table.rules).items():
                offers.setdefault(_known(cell, offers), []).append(source)
    rules: list[Rule] = []
    lines: list[str] = []
    for cell in sorted(offers, key=_place):
        sources = offers[cell]
        # The last one named wins among equals: max takes the first of equals.
        winner = anew.get(cell) or max(reversed(sources), key=lambda one: one.worth)
        rules += winner.rules
        others = [one for one in sources if one is not winner]
        how = "decided from" if cell in anew else "taken from"
        lines.append(f"{cell_words(cell)}: {how} {winner}")
        for other in others:
            lines += [f"  {text}" for text in _differences(winner, other)]
    return rules, lines


def _known(cell: Cell, cells: Iterable[Cell]) -> Cell:
    """Return a cell for a network that is like this one's, if there is one."""
    if cell.network is None:
        return cell
    for other in cells:
        if other.network is None or not other.network.is_like(cell.network):
            continue
        if other == cell._replace(network=other.network):
            return other
    return cell


def _place(cell: Cell) -> tuple[int, int, int, int, str]:
    # Unknown names come last, and the check of the whole table names them.
    links: list[str] = [*LINK_CLASSES, str(cell.link_class)]
    ops: list[str] = [*COLLECTIVES, cell.op]
    return (
        cell.ranks or 0,
        cell.nodes or 0,
        links.index(str(cell.link_class)),
        ops.index(cell.op),
        str(cell),
    )


def _differences(winner: _Source, other: _Source) -> Iterator[str]:
    """Yield the ranges where the other one says something else."""
    starts = sorted({r.match.lo for r in (*winner.rules, *other.rules)})
    found: list[tuple[int, int | None, str]] = []
    for lo, hi in zip(starts, [*starts[1:], None], strict=True):
        mine, its = _at(winner.rules, lo), _at(other.rules, lo)
        if mine.use == its.use:
            continue
        words = f"{mine.use}, not {its.use}"
        if found and found[-1][1] == lo and found[-1][2] == words:
            found[-1] = (found[-1][0], hi, words)
        else:
            found.append((lo, hi, words))
    if not found:
        yield f"{other} says the same"
    for first, end, words in found:
        span = f"{human_nbytes(first) if first else 0} to {human_nbytes(end)}"
        yield f"conflict with {other} from {span}: {words}"


def _at(rules: Sequence[Rule], nbytes: int) -> Rule:
    return next(rule for rule in reversed(rules) if rule.match.lo <= nbytes)
