# SPDX-License-Identifier: Apache-2.0
"""Decisions and their evidence as a table, and the table as a file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

from commrt.errors import TableError
from commrt.files.write import write_file
from commrt.select.facts import Candidate
from commrt.select.fingerprint import Machine
from commrt.select.rules import (
    Evidence,
    Match,
    Point,
    Quality,
    Rule,
    RunnerUp,
    Verdict,
)
from commrt.select.schema import YARDSTICKS
from commrt.select.table import Table
from commrt.select.write import dump
from commrt.tuning.decide import ENOUGH_LAUNCHES, Decision, Range, tied
from commrt.tuning.statistics import Estimate
from commrt.tuning.tested_pairs import Kept

__all__ = ["NATIVE", "NATIVES", "make_table", "write_table", "write_yaml"]

NATIVE = "mpi/native"
"""The library's own collective: what every choice is compared with."""
NATIVES = tuple(YARDSTICKS.values())
"""The same for either kind of memory; no group of launches has both."""
_GOOD_CLEAN, _FAIR_CLEAN = 0.9, 0.5
"""Shares of the repetitions that counted."""
_GOOD_DOUBT, _FAIR_DOUBT = 0.05, 0.1
"""Standard errors of a time, in parts of it."""
_FAIR_LAUNCHES = 2


def make_table(
    decisions: Sequence[Decision],
    machine: Machine,
    *,
    software: Mapping[str, object],
    method: Mapping[str, object],
    tie_margin: float,
    date: str,
    kept: Sequence[Rule] = (),
    together: Kept | None = None,
) -> Table:
    """Return the table that the decisions make, with rules that are ``kept`` behind.

    ``together`` is what stays of the engines that older tables call tested together.
    """
    pairs = together or Kept()
    rules = tuple(
        _rule(decision, chosen, date)
        for decision in decisions
        for chosen in decision.ranges
    )
    return Table(
        machine,
        (*rules, *kept),
        {**pairs.software, **software},
        method,
        tie_margin,
        tested_together=pairs.pairs,
    )


def write_table(table: Table, path: Path) -> None:
    """Write the table so that a reader sees the old one or the new one, never half."""
    write_yaml(dump(table), path)


def write_yaml(text: str, path: Path) -> None:
    """Write the text of a table, as ``write_table`` does."""
    try:
        write_file(path, text, parents=True)
    except OSError as error:
        raise TableError(f"cannot write the table to {path}: {error}") from error


def _rule(decision: Decision, chosen: Range, date: str) -> Rule:
    group = decision.group
    match = Match(
        chosen.lo,
        chosen.hi,
        ranks=group.ranks,
        nodes=group.nodes,
        ppn=group.ppn,
        link_class=group.link_class,
        device=group.device,
        network=group.network,
    )
    return Rule(decision.op, match, chosen.candidate, _evidence(decision, chosen, date))


def _evidence(decision: Decision, chosen: Range, date: str) -> Evidence:
    mine = decision.curves[chosen.candidate].estimates
    inside = [
        nbytes
        for nbytes in sorted(mine)
        if nbytes >= chosen.lo and (chosen.hi is None or nbytes < chosen.hi)
    ]
    natives = [
        curve.estimates
        for candidate, curve in decision.curves.items()
        if candidate.name in NATIVES
    ]
    points = tuple(
        _point(nbytes, mine[nbytes], natives[0].get(nbytes) if natives else None)
        for nbytes in inside
    )
    where = inside[len(inside) // 2] if inside else max(chosen.lo, min(mine))
    second = _runner_up(decision, chosen.candidate, where)
    if not points:
        return Evidence("extrapolated", (), second, chosen.crossover, date)
    verdict = _verdict(decision, chosen.candidate, where, second)
    quality = _quality([mine[nbytes] for nbytes in inside])
    return Evidence(verdict, points, second, chosen.crossover, date, quality)


def _verdict(
    decision: Decision, chosen: Candidate, nbytes: int, second: RunnerUp | None
) -> Verdict:
    if second is None:
        return "only"
    equals = tied(decision.curves, nbytes, decision.margin)
    if chosen not in equals:
        return "unsure"
    return "tie" if len(equals) > 1 else "win"


def _quality(seen: Sequence[Estimate]) -> Quality:
    """Return how far the typical one of a range's measurements can be trusted."""
    launches = median(len(one.launches) for one in seen)
    clean = median(one.clean for one in seen)
    doubt = median(one.doubt for one in seen)
    if launches >= ENOUGH_LAUNCHES and clean >= _GOOD_CLEAN and doubt <= _GOOD_DOUBT:
        return "good"
    if launches < _FAIR_LAUNCHES or clean < _FAIR_CLEAN or doubt > _FAIR_DOUBT:
        return "poor"
    return "fair"


def _point(nbytes: int, seen: Estimate, native: Estimate | None) -> Point:
    return Point(
        nbytes,
        _short(seen.us),
        (_short(seen.ci[0]), _short(seen.ci[1])),
        seen.n,
        len(seen.launches),
        None if native is None else _short(native.us),
        round(seen.n * (1 / seen.clean - 1)),
    )


def _runner_up(decision: Decision, winner: Candidate, nbytes: int) -> RunnerUp | None:
    """Return the best of the others at the measured size nearest below ``nbytes``."""
    others = [
        (curve.estimates[nbytes], candidate)
        for candidate, curve in decision.curves.items()
        if candidate != winner and nbytes in curve.estimates
    ]
    if not others:
        return None
    seen, candidate = min(others, key=lambda pair: pair[0].us)
    ci = (_short(seen.ci[0]), _short(seen.ci[1]))
    return RunnerUp(candidate, nbytes, _short(seen.us), ci)


def _short(us: float) -> float:
    """Return microseconds with the four digits that a measurement can justify."""
    return float(f"{us:.4g}")
