# SPDX-License-Identifier: Apache-2.0
"""Quality of the choices, judged by launches that did not shape them.

At each size, the choice is compared with every other candidate within each held-out
launch that measured both. The median of these ratios over the launches counts, and the
regret is the largest median. Held-out sizes lie off the tuner's grid. Launches that met
another state of the machine neither shape nor judge (launch_states.py).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from commrt.bench.timing_loop import median_interval
from commrt.select.facts import Candidate
from commrt.tuning.decide import Decision, decide
from commrt.tuning.launch_states import in_usual_state
from commrt.tuning.samples import Group, Recording
from commrt.tuning.statistics import geometric_mean
from commrt.tuning.table_writer import NATIVES

__all__ = ["Regret", "Verdict", "held_out_regret", "judge", "leave_one_out"]

Choose = Callable[[Group, str, int], Candidate | None]
_Row = Mapping[Candidate, Sequence[float]]
"""Times of each candidate's repetitions in one launch, in µs."""


@dataclass(frozen=True)
class Regret:
    """Geometric means over held-out cells."""

    cells: int
    """Cells (links, operation, size) where the choice was measured."""
    regret: float
    """Time of the choice over that of the best; 1 is perfect."""
    worst: float
    """The largest single ratio."""
    beyond: float
    """The largest low end of a ratio's interval; 1 where they all reach down to 1."""
    versus_native: float | None
    """Time of the choice over that of the library's own, None where not measured."""
    unmeasured: int
    """Cells without a rule, or whose choice was not measured."""
    by_launch: float | None = None
    """Regret of single launches, at sizes that several of them judged."""
    foresight: float | None = None
    """The same for what the other judging launches found best at that very size: no
    table can be expected to do better on a machine whose launches differ so much."""

    def for_table(self) -> dict[str, int | float]:
        """Return the figures that a table records."""
        ratios = {"regret": self.regret, "worst": self.worst, "beyond_ci": self.beyond}
        rounded = {name: float(f"{value:.4g}") for name, value in ratios.items()}
        return {"cells": self.cells, **rounded}


@dataclass(frozen=True)
class Verdict:
    """Judgement of a choice at one size."""

    choice: Candidate
    """The chosen candidate."""
    best: Candidate
    """The best candidate; the choice itself if none was better."""
    ratio: float
    """Time of the choice over that of the best: median over launches; at least 1."""
    beyond: float
    """Low end of the ratio's interval."""
    versus_native: float | None
    """Time of the choice over that of the library's own, None where not measured."""


def judge(choice: Candidate | None, launches: Iterable[_Row]) -> Verdict | None:
    """Return the verdict on ``choice`` in these launches; None if none measured it."""
    if choice is None:
        return None
    rows = [row for row in launches if choice in row]
    if not rows:
        return None
    ratios: dict[Candidate, tuple[float, float]] = {choice: (1.0, 1.0)}
    for other in {one: None for row in rows for one in row}:
        both = [row for row in rows if other in row]
        # A candidate that few launches measured has met fewer states of the machine.
        if other != choice and 2 * len(both) >= len(rows):
            ratios[other] = _ratio(choice, other, both)
    best = max(ratios, key=lambda one: ratios[one][0])
    native = next((ratios[one][0] for one in ratios if one.name in NATIVES), None)
    return Verdict(choice, best, *ratios[best], native)


def _ratio(
    choice: Candidate, other: Candidate, rows: Sequence[_Row]
) -> tuple[float, float]:
    """Return the ratio of times, launch by launch: its median and low end.

    A single launch has only the intervals of its repetitions.
    """
    middle, low, _ = median_interval(
        [median(row[choice]) / median(row[other]) for row in rows]
    )
    if len(rows) == 1:
        _, low_us, _ = median_interval(list(rows[0][choice]))
        _, _, high_us = median_interval(list(rows[0][other]))
        low = low_us / high_us
    return middle, low


def _judged(
    recording: Recording, launches: Collection[int], choose: Choose
) -> list[Verdict | None]:
    """Return a verdict per cell that these launches measured."""
    cells = _cells(recording, launches)
    return [judge(choose(*cell), rows) for cell, rows in cells.items()]


def _cells(
    recording: Recording, launches: Collection[int]
) -> dict[tuple[Group, str, int], list[_Row]]:
    """Return what each of these launches measured, by links, operation and size."""
    found: dict[tuple[Group, str, int], dict[int, dict[Candidate, Sequence[float]]]]
    found = defaultdict(lambda: defaultdict(dict))
    for sample in recording.samples:
        if sample.launch in launches and sample.us:
            cell = found[recording.group_of(sample), sample.op, sample.nbytes]
            cell[sample.launch][sample.candidate] = sample.us
    return {cell: [*in_usual_state(rows).values()] for cell, rows in found.items()}


def _with_foresight(
    recording: Recording, launches: Collection[int], choose: Choose
) -> tuple[float | None, float | None]:
    """Return the regret launch by launch of ``choose``, and of who knows the others."""
    chosen, foreseen = [], []
    for cell, rows in _cells(recording, launches).items():
        choice = choose(*cell)
        times = [{one: median(us) for one, us in row.items()} for row in rows]
        for at, row in enumerate(times):
            others = times[:at] + times[at + 1 :]
            known = [one for one in row if all(one in other for other in others)]
            if others and known and choice in row:
                best = min(known, key=lambda one: _typical(one, others))
                chosen.append(row[choice] / min(row.values()))
                foreseen.append(row[best] / min(row.values()))
    if not chosen:
        return None, None
    return geometric_mean(chosen), geometric_mean(foreseen)


def _typical(one: Candidate, rows: Sequence[Mapping[Candidate, float]]) -> float:
    """Return the time of a candidate over that of each launch's best: the median."""
    return median(row[one] / min(row.values()) for row in rows)


def _regret(verdicts: Sequence[Verdict | None]) -> Regret:
    known = [one for one in verdicts if one is not None]
    natives = [one.versus_native for one in known if one.versus_native is not None]
    return Regret(
        len(known),
        geometric_mean(one.ratio for one in known),
        max((one.ratio for one in known), default=1.0),
        max([1.0, *(one.beyond for one in known)]),
        geometric_mean(natives) if natives else None,
        len(verdicts) - len(known),
    )


def held_out_regret(recording: Recording, decisions: Iterable[Decision]) -> Regret:
    """Return the regret on the launches that were held out of the tuning."""
    held = {index for index, one in recording.launches.items() if one.held_out}
    choose = _chooser(decisions)
    by_launch, foresight = _with_foresight(recording, held, choose)
    found = _regret(_judged(recording, held, choose))
    return replace(found, by_launch=by_launch, foresight=foresight)


def leave_one_out(recording: Recording, margin: float) -> Regret:
    """Return the regret where each launch in turn is judged by all the others."""
    verdicts: list[Verdict | None] = []
    for index in recording.launches:
        others = decide(_without(recording, index), margin)
        verdicts += _judged(recording, {index}, _chooser(others))
    return _regret(verdicts)


def _without(recording: Recording, left_out: int) -> Recording:
    kept = {
        index: other for index, other in recording.launches.items() if index != left_out
    }
    samples = [sample for sample in recording.samples if sample.launch in kept]
    return replace(recording, launches=kept, samples=samples)


def _chooser(decisions: Iterable[Decision]) -> Choose:
    known = {(one.group, one.op): one for one in decisions}

    def choose(group: Group, op: str, nbytes: int) -> Candidate | None:
        # As a table's lookup does, the other placement stands in.
        other = {"near": "far", "far": "near"}.get(group.link_class, group.link_class)
        decision = known.get((group, op)) or known.get(
            (group._replace(link_class=other), op)
        )
        return None if decision is None else decision.at(nbytes)

    return choose
