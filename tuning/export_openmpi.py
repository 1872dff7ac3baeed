# SPDX-License-Identifier: Apache-2.0
"""The rules of Open MPI 5's ``coll/tuned``, as its parameter
``coll_tuned_dynamic_rules_filename`` reads them.

The file is positional: counts, then as many entries; a wrong count makes the reader
take one number for another. Per entry: least bytes, algorithm, fan in/out, segment
size. Algorithm 0 leaves the decision to Open MPI. Looked up are the largest number of
ranks and then the largest bytes that are not above the call's; so what was not measured
is closed by a rule with algorithm 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from commrt.errors import TableError
from commrt.select.rules import Cell, Rule
from commrt.select.table import Table
from commrt.tuning.export import Exported, cells_to_say, comment, rule_words
from commrt.tuning.table_writer import NATIVE

__all__ = ["OPENMPI", "export_openmpi"]


class _Collective(NamedTuple):
    """An operation as Open MPI knows it."""

    number: int
    """Place in its list of collectives."""
    total: bool
    """True if its bytes are ours times the ranks."""
    sizes_differ: bool
    """True if ranks may compute different bytes for the same call."""
    algorithms: Mapping[str, int]
    """Ours to its number, where both send the same blocks to the same ranks."""


OPENMPI: Mapping[str, _Collective] = {
    "allgather": _Collective(
        0, True, False, {"dissemination": 2, "recursive_doubling": 3, "ring": 4}
    ),
    "allreduce": _Collective(
        2, False, False, {"recursive_doubling": 3, "ring": 4, "halving_doubling": 6}
    ),
    "alltoall": _Collective(
        3, True, False, {"direct": 1, "pairwise": 2, "dissemination": 3}
    ),
    "barrier": _Collective(6, False, False, {"dissemination": 4}),
    "bcast": _Collective(
        7, False, False, {"direct": 1, "binomial": 6, "halving_doubling": 8, "ring": 9}
    ),
    # The bytes are those of the send arguments, which matter on some ranks only.
    "gather": _Collective(9, True, True, {"direct": 1, "binomial": 2}),
    "reduce": _Collective(
        11, False, False, {"direct": 1, "binomial": 5, "halving_doubling": 7}
    ),
    # MPI_Reduce_scatter_block, which is what was measured: blocks of equal length.
    "reduce_scatter": _Collective(13, False, False, {"halving_doubling": 3}),
    "scatter": _Collective(15, True, True, {"direct": 1, "binomial": 2}),
}
_POWERS_OF_TWO_ONLY = {("allgather", "recursive_doubling")}
"""Otherwise Open MPI runs something else in its place; ours folds."""
_OWN_DECISION = 0
_HEADER = (
    "Rules for coll/tuned of Open MPI 5, from a selection table of commrt.",
    "To use them: mpiexec --mca coll_tuned_use_dynamic_rules 1 --mca "
    "coll_tuned_dynamic_rules_filename FILE ... Without the first parameter they are "
    "ignored.",
    "The times behind them are those of commrt's own engine. Open MPI runs the same "
    "schedules over its own transport: measure before you rely on them.",
    "Algorithm 0 leaves the decision to Open MPI; so do numbers of ranks that were not "
    "measured. Bytes are as Open MPI counts them. Segment size 0: none.",
)


class _Line(NamedTuple):
    """One entry: from these bytes on, this algorithm."""

    nbytes: int
    algorithm: int
    words: str


def export_openmpi(table: Table) -> Exported:
    """Return the rules file; TableError if it would say nothing.

    Communicators are told apart by their number of ranks alone.
    """
    cells, left_out = cells_to_say(table, "host", lambda cell: (cell.op, cell.ranks))
    said: dict[str, dict[int, list[_Line]]] = {}
    count = 0
    for cell, rules in cells:
        if cell.ranks is None or cell.op not in OPENMPI:
            left_out += [
                f"{rule_words(rule)}: for any number of ranks" for rule in rules
            ]
            continue
        lines, reasons = _lines(cell, cell.ranks, rules)
        left_out += reasons
        found = sum(line.algorithm != _OWN_DECISION for line in lines)
        if found:
            count += found
            said.setdefault(cell.op, {})[cell.ranks] = lines
    if not count:
        raise TableError(
            "no file was written: Open MPI has none of the algorithms that the table "
            "picks, so the file would say nothing:\n  " + "\n  ".join(left_out)
        )
    text = (
        comment([*_HEADER, "", "Not in this file:", *left_out])
        if left_out
        else (comment(_HEADER))
    )
    text += f"{len(said)}  # collectives\n"
    for op in sorted(said, key=lambda one: OPENMPI[one].number):
        text += _collective(op, said[op])
    return Exported(text, count, tuple(left_out))


def _collective(op: str, by_ranks: Mapping[int, Sequence[_Line]]) -> str:
    stop = [_Line(0, _OWN_DECISION, "not measured: Open MPI decides")]
    sets = dict(by_ranks)
    for ranks in by_ranks:
        sets.setdefault(ranks + 1, stop)
    text = f"{OPENMPI[op].number}  # {op}\n{len(sets)}  # numbers of ranks\n"
    for ranks in sorted(sets):
        text += f"{ranks}  # ranks\n{len(sets[ranks])}  # ranges\n"
        for line in sets[ranks]:
            text += f"{line.nbytes} {line.algorithm} 0 0  # {line.words}\n"
    return text


def _lines(
    cell: Cell, ranks: int, rules: Sequence[Rule]
) -> tuple[list[_Line], list[str]]:
    """Return a cell's entries, and why some of them leave the decision to Open MPI."""
    ours = OPENMPI[cell.op]
    if ours.sizes_differ and len({rule.use for rule in rules}) > 1:
        # A root in place, and ranks that only receive, count other bytes than the rest:
        # they would run another algorithm, and wait for ever.
        why = "its ranks may count different bytes, so only one choice for all is safe"
        return [], [f"{rule_words(rule)}: {why}" for rule in rules]
    lines: list[_Line] = []
    left_out = []
    for rule in rules:
        number, why = _number(cell, ranks, rule)
        if why:
            left_out.append(f"{rule_words(rule)}: {why}")
        first = rule.match.lo * (ranks if ours.total else 1)
        words = str(rule.use) if number else f"{rule.use}: Open MPI decides"
        if not lines or lines[-1].algorithm != number:
            lines.append(_Line(first, number, words))
    return lines, left_out


def _number(cell: Cell, ranks: int, rule: Rule) -> tuple[int, str]:
    """Return Open MPI's number, and what is lost; 0 with the reason if it has none."""
    use = rule.use
    if use.name == NATIVE:
        return _OWN_DECISION, ""
    if use.backend not in ("shm", "mpi"):
        return _OWN_DECISION, f"Open MPI has no {use.backend}"
    number = OPENMPI[cell.op].algorithms.get(use.algorithm)
    if number is None:
        return _OWN_DECISION, f"Open MPI has no such {cell.op}"
    odd = ranks & (ranks - 1) != 0
    if odd and (cell.op, use.algorithm) in _POWERS_OF_TWO_ONLY:
        return _OWN_DECISION, "Open MPI has it for powers of two only"
    if use.params:
        names = ", ".join(use.params)
        return number, f"said without {names}, which only commrt's transport has"
    return number, ""
