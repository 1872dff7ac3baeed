# SPDX-License-Identifier: Apache-2.0
"""How good the choices are on launches that did not shape them.

Regret at a size is the time of the choice over the time of the best candidate measured
in the same held-out launch. Held-out sizes lie off the tuner's grid.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from commrt.bench.timing_loop import median_interval
from commrt.select.facts import Candidate
from commrt.tuning.decide import Decision, decide
from commrt.tuning.samples import Group, Launch, Recording
from commrt.tuning.statistics import geometric_mean
from commrt.tuning.table_writer import NATIVE

__all__ = ["Regret", "held_out_regret", "leave_one_out"]

_Interval = tuple[float, float, float]
"""Median, low and high end, in µs."""
Choose = Callable[[Group, str, int], Candidate | None]


@dataclass(frozen=True)
class Regret:
    """Geometric means over held-out cells."""

    cells: int
    """Cells (launch, operation, size) where the choice was measured."""
    regret: float
    """Time of the choice over that of the best; 1 is perfect."""
    worst: float
    """The largest single ratio."""
    beyond: float
    """The largest ratio of the low end of the choice's interval to the high end of the
    best one's; 1 where they overlap everywhere."""
    versus_native: float | None
    """Time of the choice over that of mpi/native, None where it was not measured."""
    unmeasured: int
    """Cells without a rule, or whose choice was not measured."""

    def for_table(self) -> dict[str, int | float]:
        """Return what a table records."""
        ratios = {"regret": self.regret, "worst": self.worst, "beyond_ci": self.beyond}
        rounded = {name: float(f"{value:.4g}") for name, value in ratios.items()}
        return {"cells": self.cells, **rounded}


@dataclass
class _Tally:
    """Ratios collected cell by cell."""

    ratios: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    natives: list[float] = field(default_factory=list)
    unmeasured: int = 0

    def add(self, recording: Recording, launch: Launch, choose: Choose) -> None:
        """Judge ``choose`` on every cell of one launch."""
        cells: dict[tuple[Group, str, int], dict[Candidate, _Interval]] = defaultdict(
            dict
        )
        for sample in recording.samples:
            if sample.launch == launch.index and sample.us:
                times = cells[recording.group_of(sample), sample.op, sample.nbytes]
                times[sample.candidate] = median_interval(list(sample.us))
        for (group, op, nbytes), times in cells.items():
            choice = choose(group, op, nbytes)
            if choice is None or choice not in times:
                self.unmeasured += 1
                continue
            us, low_us, _ = times[choice]
            best_us, _, best_high_us = min(times.values())
            self.ratios.append(us / best_us)
            self.gaps.append(low_us / best_high_us)
            native = [seen[0] for one, seen in times.items() if one.name == NATIVE]
            self.natives += [us / native_us for native_us in native[:1]]

    def result(self) -> Regret:
        """Return the geometric means."""
        return Regret(
            len(self.ratios),
            geometric_mean(self.ratios),
            max(self.ratios, default=1.0),
            max([1.0, *self.gaps]),
            geometric_mean(self.natives) if self.natives else None,
            self.unmeasured,
        )


def held_out_regret(recording: Recording, decisions: Iterable[Decision]) -> Regret:
    """Return the regret on the launches that were held out of the tuning."""
    tally, choose = _Tally(), _chooser(decisions)
    for launch in recording.launches.values():
        if launch.held_out:
            tally.add(recording, launch, choose)
    return tally.result()


def leave_one_out(recording: Recording, margin: float) -> Regret:
    """Return the regret where each launch in turn is judged by all the others."""
    tally = _Tally()
    for launch in recording.launches.values():
        others = decide(_without(recording, launch), margin)
        tally.add(recording, launch, _chooser(others))
    return tally.result()


def _without(recording: Recording, launch: Launch) -> Recording:
    kept = {
        index: other
        for index, other in recording.launches.items()
        if index != launch.index
    }
    samples = [sample for sample in recording.samples if sample.launch in kept]
    return Recording(kept, samples, recording.failures, recording.orders)


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
