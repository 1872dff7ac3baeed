# SPDX-License-Identifier: Apache-2.0
"""The cells of a report: measured times, choices, and how good these are.

A cell is one operation with one rank count, placement and link class. Times of every
candidate are in a recording only; a table alone has those of its choices, of the MPI
library's own collective, and of the next best at one size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from commrt.errors import TableError
from commrt.select.facts import LINK_CLASSES, Candidate, CommFacts, LinkClass, Query
from commrt.select.rules import Cell, Rule
from commrt.select.table import Table
from commrt.tuning.decide import curves_of, tied
from commrt.tuning.regret import judge
from commrt.tuning.samples import Group, Recording
from commrt.tuning.statistics import Estimate
from commrt.tuning.table_writer import NATIVES

__all__ = ["Judged", "ReportCell", "Seen", "cells_of"]


@dataclass(frozen=True)
class Seen:
    """One candidate's time at one size."""

    us: float
    """Median over launches."""
    ci: tuple[float, float] | None
    """Interval of the median, where it is known."""
    launches: int | None
    """Launches that measured it, where it is known."""


@dataclass(frozen=True)
class Judged:
    """A choice at one size of the launches that did not shape the table."""

    nbytes: int
    """Rule bytes."""
    choice: Candidate
    """The candidate that ``auto`` picks."""
    best: Candidate
    """The fastest there."""
    ratio: float
    """Time of the choice over that of the best, median over launches; at least 1."""


@dataclass(frozen=True)
class ReportCell:
    """One operation on one kind of communicator."""

    op: str
    """Operation."""
    title: str
    """Ranks, nodes and links for people."""
    link_class: str
    """Distance of the ranks; ``any`` if rules do not say."""
    ranks: int
    """Ranks; 0 where rules do not say."""
    times: Mapping[Candidate, Mapping[int, Seen]]
    """Times by candidate, simplest first, and by size."""
    rules: Sequence[Rule]
    """The choices, ascending."""
    tied: Mapping[int, frozenset[Candidate]]
    """Candidates that are as good as the best, by measured size."""
    judged: Sequence[Judged]
    """Held-out sizes, ascending."""
    unjudged: int
    """Held-out sizes whose choice was not measured."""
    note: str
    """Further remark, for instance on a rule that stands in; empty: none."""

    @property
    def sizes(self) -> list[int]:
        """Measured sizes above 0, ascending: axes are logarithmic."""
        return sorted({n for seen in self.times.values() for n in seen if n > 0})

    def at(self, nbytes: int) -> Rule | None:
        """Return the rule for a size, None where the model decides."""
        for rule in self.rules:
            hi = rule.match.hi
            if rule.match.lo <= nbytes and (hi is None or nbytes < hi):
                return rule
        return None


def cells_of(table: Table, recording: Recording | None) -> list[ReportCell]:
    """Return every cell with its facts, by ranks, links and operation.

    With a recording its cells come first, and those that only the table has follow.
    """
    cells = [] if recording is None else list(_recorded(table, recording))
    shown = {rule.cell for cell in cells if not cell.note for rule in cell.rules}
    groups: dict[Cell, list[Rule]] = {}
    for rule in table.rules:
        if rule.cell not in shown:
            groups.setdefault(rule.cell, []).append(rule)
    note = "" if recording is None else _TABLE_ALONE
    cells += [_tabled(cell, rules, note) for cell, rules in groups.items()]
    order: dict[str, int] = {name: place for place, name in enumerate(LINK_CLASSES)}
    return sorted(cells, key=lambda one: (one.ranks, order.get(one.link_class, 99)))


_TABLE_ALONE = (
    "Not in the recording: of each range the times of its choice, of the MPI library's "
    "own collective, and of the next best at one size."
)


def _tabled(cell: Cell, rules: Sequence[Rule], note: str) -> ReportCell:
    """Return a cell made of the evidence of a table's rules."""
    times: dict[Candidate, dict[int, Seen]] = {}
    native: dict[int, Seen] = {}
    ordered = sorted(rules, key=lambda rule: rule.match.lo)
    for rule in ordered:
        evidence = rule.evidence
        if evidence is None:
            continue
        mine = times.setdefault(rule.use, {})
        for point in evidence.points:
            mine[point.nbytes] = Seen(point.us, point.ci, point.launches)
            if point.native_us is not None:
                native[point.nbytes] = Seen(point.native_us, None, point.launches)
        second = evidence.runner_up
        if second is not None:
            seen = times.setdefault(second.candidate, {})
            seen.setdefault(second.nbytes, Seen(second.us, second.ci, None))
    on_device = cell.device not in (None, "host")
    own = times.setdefault(Candidate.parse(NATIVES[on_device]), {})
    for nbytes, at in native.items():
        own.setdefault(nbytes, at)
    return ReportCell(
        cell.op,
        _title(cell),
        cell.link_class or "any",
        cell.ranks or 0,
        {one: seen for one, seen in times.items() if seen},
        ordered,
        {},
        (),
        0,
        note,
    )


def _title(cell: Cell) -> str:
    ranks = "any number of" if cell.ranks is None else str(cell.ranks)
    nodes = "" if cell.nodes in (None, 1) else f" on {cell.nodes} nodes"
    extra = [name for name in (cell.dtype, cell.redop) if name is not None]
    if cell.device not in (None, "host"):
        extra.append(f"{cell.device} memory")
    links = f"{cell.link_class or 'any'} links"
    return ", ".join([f"{ranks} ranks{nodes}", links, *extra])


def _recorded(table: Table, recording: Recording) -> Iterator[ReportCell]:
    for group in recording.groups():
        for op in recording.orders:
            curves = curves_of(recording, group, op)
            if not curves:
                continue
            rules, note = _rules(table, recording, group, op)
            sizes = sorted({size for curve in curves.values() for size in curve.sizes})
            judged, unjudged = _judge(recording, group, op, rules)
            yield ReportCell(
                op,
                _title(_cell(op, group)),
                group.link_class,
                group.ranks,
                {one: _seen(curve.estimates) for one, curve in curves.items()},
                rules,
                {
                    size: frozenset(tied(curves, size, table.tie_margin))
                    for size in sizes
                },
                judged,
                unjudged,
                note,
            )


def _seen(estimates: Mapping[int, Estimate]) -> dict[int, Seen]:
    return {
        nbytes: Seen(one.us, one.ci, len(one.launches))
        for nbytes, one in sorted(estimates.items())
    }


def _rules(
    table: Table, recording: Recording, group: Group, op: str
) -> tuple[list[Rule], str]:
    """Return the rules that apply, and a remark where they were made for others."""
    link_class: LinkClass | None = next(
        (name for name in LINK_CLASSES if name == group.link_class), None
    )
    if link_class is None:
        raise TableError(
            f"the recording has links of class {group.link_class!r}: expected one of "
            f"{', '.join(LINK_CLASSES)}"
        )
    cores = next(
        one.facts.cores
        for one in recording.launches.values()
        if one.facts.size == group.ranks
    )
    where = group.ranks, group.nodes, group.ppn
    facts = CommFacts(*where, cores, link_class, network=group.network)
    hit = table.lookup(facts, Query(op, 0, _DTYPE, group.device))
    if hit is None:
        return [], "The table has no rule for this: the model decides."
    cell = hit.rule.cell
    rules = [rule for rule in table.rules if rule.cell == cell]
    rules.sort(key=lambda rule: rule.match.lo)
    if hit.extrapolated is None:
        return rules, ""
    return rules, f"The rules of another cell stand in here: {hit.extrapolated}."


def _cell(op: str, group: Group) -> Cell:
    place = group.ranks, group.nodes, group.ppn, group.link_class, group.device
    return Cell(op, *place, dtype=None, redop=None, network=group.network)


_DTYPE = "float32"


def _judge(
    recording: Recording, group: Group, op: str, rules: Sequence[Rule]
) -> tuple[list[Judged], int]:
    """Return how good the choices are on held-out launches, and how many are unknown.

    A choice is compared with others within each launch, as in ``regret``.
    """
    rows: dict[int, dict[int, dict[Candidate, Sequence[float]]]] = {}
    for sample in recording.of(group, held_out=True):
        if sample.op == op and sample.us:
            launches = rows.setdefault(sample.nbytes, {})
            launches.setdefault(sample.launch, {})[sample.candidate] = sample.us
    judged, unjudged = [], 0
    for nbytes, launches in sorted(rows.items()):
        choice = next(
            (
                rule.use
                for rule in rules
                if rule.match.lo <= nbytes
                and (rule.match.hi is None or nbytes < rule.match.hi)
            ),
            None,
        )
        verdict = judge(choice, launches.values())
        if verdict is None:
            unjudged += 1
        else:
            judged.append(Judged(nbytes, verdict.choice, verdict.best, verdict.ratio))
    return judged, unjudged
