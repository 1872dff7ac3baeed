# SPDX-License-Identifier: Apache-2.0
"""A table for people, and what it says about one call."""

from __future__ import annotations

import math

from commrt.select.facts import Candidate, CommFacts, Query
from commrt.select.policy import Offers, Policy
from commrt.select.rules import Cell, Rule
from commrt.select.table import Table
from commrt.tuning.summary import human_nbytes
from commrt.vocabulary.operations import COLLECTIVES

__all__ = ["explain", "show"]


def show(table: Table) -> str:
    """Return the machine, the method and every rule, one line each."""
    cpu = table.machine.cpu
    lines = [
        f"table        {table.name}",
        f"digest       {table.digest}",
        f"machine      {cpu.model}, {cpu.sockets} sockets, {cpu.cores} cores",
        f"fingerprint  {table.machine.fingerprint}",
    ]
    lines += [f"{key:<13}{value}" for key, value in table.software.items()]
    lines += [f"{key:<13}{value}" for key, value in table.method.items()]
    cell: Cell | None = None
    for rule in table.rules:
        if rule.cell != cell:
            cell = rule.cell
            lines += ["", _heading(cell)]
        lines.append(_line(rule))
    return "\n".join(lines)


def explain(table: Table, query: Query, facts: CommFacts) -> str:
    """Return the table's words on a call on a communicator like ``facts``."""
    hit = table.lookup(facts, query)
    if hit is None:
        covered = sorted({rule.op for rule in table.rules}, key=COLLECTIVES.index)
        return (
            f"{query}: no rule for {facts.size} ranks on {facts.nodes} nodes with "
            f"{facts.link_class} links; the model decides there. "
            f"The table covers {', '.join(covered) or 'nothing'}."
        )
    return str(Policy(facts, table, _NamedInTable(table)).explain(query))


class _NamedInTable(Offers):
    """Every candidate that a table names, at an unknown cost."""

    def __init__(self, table: Table) -> None:
        self._table = table

    def runnable(self, query: Query) -> list[Candidate]:
        rules = self._table.rules
        return list(dict.fromkeys(r.use for r in rules if r.op == query.coll))

    def predicted_us(self, query: Query, candidate: Candidate) -> float:
        return math.inf


def _heading(cell: Cell) -> str:
    keys = [
        f"{name}={value}"
        for name, value in zip(cell._fields[1:], cell[1:], strict=True)
        if value is not None
    ]
    return f"{cell.op} ({', '.join(keys)})"


def _line(rule: Rule) -> str:
    match, evidence = rule.match, rule.evidence
    span = f"[{human_nbytes(match.lo)}, {human_nbytes(match.hi)})"
    text = f"  {span:<16}{rule.use!s:<40}"
    if evidence is None:
        return text.rstrip()
    text += evidence.verdict
    if evidence.quality is not None:
        text += f" ({evidence.quality} evidence)"
    if evidence.points:
        first, last = evidence.points[0], evidence.points[-1]
        text += f", {first.us:g} us at {human_nbytes(first.nbytes)}"
        if last is not first:
            text += f" to {last.us:g} us at {human_nbytes(last.nbytes)}"
    if evidence.runner_up is not None:
        second = evidence.runner_up
        text += (
            f"; next {second.candidate} {second.us:g} us at "
            f"{human_nbytes(second.nbytes)}"
        )
    return text
