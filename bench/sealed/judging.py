# SPDX-License-Identifier: Apache-2.0
"""How sealed predictions came out: winners, regret, errors of time, the worst cells."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, median
from typing import Any

from commrt.bench.sealed.cells import Cell
from commrt.bench.sealed.measuring import Times
from commrt.bench.sealed.predicting import OPENMPI, SIMULATOR, TWO_NUMBERS

__all__ = ["Judged", "judged", "report"]

_TIE = 1.03
"""A winner within so many times the best one's time is right: it takes as long."""
_WORST = 20
_COLUMNS = "right | mean regret where wrong | of all | error of time"


@dataclass(frozen=True)
class Judged:
    """One predictor's word on one cell, beside the measurement."""

    cell: Cell
    winner: str
    """The candidate that it named."""
    best: str
    """The candidate that was the quickest."""
    regret: float
    """Measured time of the one over that of the other, less 1."""
    error: float | None
    """Predicted time of the winner over its measured one, less 1; None: no time was
    predicted."""

    @property
    def is_right(self) -> bool:
        """True if it named the best one, or one that takes as long."""
        return self.regret <= _TIE - 1


def judged(
    cells: Sequence[Cell], predictions: Mapping[str, Any], times: Times, who: str
) -> list[Judged]:
    """Return one predictor's outcome for all cells."""
    found = []
    for cell in cells:
        middles = {name: median(mine) for name, mine in times[cell.key].items()}
        best = min(middles, key=middles.__getitem__)
        row = predictions[cell.key]
        winner = row["winners"][who]
        us = row["us"].get(who, {}).get(winner)
        error = None if us is None else us / middles[winner] - 1
        regret = middles[winner] / middles[best] - 1
        found.append(Judged(cell, winner, best, regret, error))
    return found


def report(
    cells: Sequence[Cell], predictions: Mapping[str, Any], times: Times
) -> Iterator[str]:
    """Yield the lines of a report, as tables of Markdown."""
    known = {
        who: judged(cells, predictions, times, who)
        for who in (SIMULATOR, TWO_NUMBERS, OPENMPI)
    }
    yield from _table(f"all {len(cells)} cells", known)
    for what in ("network", "op", "nbytes"):
        yield ""
        mine = known[SIMULATOR]
        yield f"| {what} | cells | {_COLUMNS} |"
        yield "|---|---:|---:|---:|---:|---:|"
        for value in dict.fromkeys(getattr(one.cell, what) for one in mine):
            part = [one for one in mine if getattr(one.cell, what) == value]
            yield f"| {value} | {len(part)} | {_figures(part)} |"
    yield ""
    yield from _all_candidates(cells, predictions, times)
    yield ""
    yield "| cell | predicted winner | regret | error of its time | best |"
    yield "|---|---|---:|---:|---|"
    worst = sorted(known[SIMULATOR], key=_badness, reverse=True)[:_WORST]
    for one in worst:
        yield (
            f"| {one.cell.key} | {one.winner} | {one.regret:.0%} | {one.error:+.0%} | "
            f"{one.best} |"
        )


def _badness(one: Judged) -> float:
    return max(one.regret, abs(one.error or 0.0))


def _table(title: str, known: Mapping[str, Sequence[Judged]]) -> Iterator[str]:
    yield f"| {title} | {_COLUMNS} |"
    yield "|---|---:|---:|---:|---:|"
    for who, mine in known.items():
        yield f"| {who} | {_figures(mine)} |"


def _figures(mine: Sequence[Judged]) -> str:
    right = mean(one.is_right for one in mine)
    wrong = [one.regret for one in mine if not one.is_right]
    errors = [abs(one.error) for one in mine if one.error is not None]
    regret = f"{mean(wrong):.1%}" if wrong else "none"
    off = f"{median(errors):.1%}" if errors else ""
    everywhere = mean(one.regret for one in mine)
    return f"{right:.1%} | {regret} | {everywhere:.1%} | {off}"


def _all_candidates(
    cells: Sequence[Cell], predictions: Mapping[str, Any], times: Times
) -> Iterator[str]:
    """Yield the errors of all times, not only of winners'."""
    for who in (SIMULATOR, TWO_NUMBERS):
        errors = [
            abs(us / median(times[cell.key][name]) - 1)
            for cell in cells
            for name, us in predictions[cell.key]["us"][who].items()
        ]
        within = mean(error <= 0.1 for error in errors)
        yield (
            f"{who}: {len(errors)} times of all candidates, median error "
            f"{median(errors):.1%}, {within:.0%} within 10 %"
        )
