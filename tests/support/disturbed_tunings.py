# SPDX-License-Identifier: Apache-2.0
"""Short tuning runs beside other programs, made of recorded quiet launches.

A few launches of a long recording are a short run. Other programs are put beside it:
they take the ranks' cores for random seconds, and repetitions take as much longer. The
launches that the run has not seen say what its table costs.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import geometric_mean, median

from commrt.select.facts import Candidate
from commrt.select.schema import DEFAULT_TIE_MARGIN
from commrt.tuning.decide import curves_of, decide
from commrt.tuning.fit import Curve
from commrt.tuning.model_choice import choice_without_table
from commrt.tuning.recording_reader import load_recording
from commrt.tuning.samples import Group, Recording, Sample

__all__ = ["Cost", "Hogs", "ShortRun", "cost_of", "disturbed", "short_run"]

_DATA = Path(__file__).parents[2] / "docs" / "data"
_LAUNCH_S = 8.0
_REPETITIONS = 12
_REPETITION_US = 20.0
_LEAST_CLEAN = 3
_KNOWN_LAUNCHES = 4
"""Launches from which a time is known well enough to judge by."""


@dataclass(frozen=True)
class Hogs:
    """Programs that take the cores of the ranks for random seconds."""

    cores: int = 1
    """Cores that they take, each from one rank."""
    on_s: float = 4.0
    """Mean time for which they run."""
    off_s: float = 4.0
    """Mean time for which they do not."""
    seen: float = 1.0
    """Share of the disturbed repetitions that the ranks know to be disturbed."""
    slice_us: float = 3000.0
    """Mean time that the scheduler gives to one of them."""
    slower: float = 0.15
    """Spread of what else becomes slower beside them, which nobody sees."""

    def hits(self, us: float) -> float:
        """Return how likely one of them runs during a repetition of such a length."""
        meets = 1 - 0.5**self.cores  # the ranks begin apart
        return max(meets, 1 - math.exp(-us / self.slice_us * self.cores))


@dataclass(frozen=True)
class Cost:
    """What choices cost, by launches that did not make them."""

    regret: float
    """Geometric mean of their times over the best ones."""
    worst: float
    """The largest of these ratios."""


@dataclass(frozen=True)
class ShortRun:
    """A few launches of a recording, and all the others as judges."""

    recording: Recording
    """What the run measured."""
    truth: Recording
    """All the other launches."""
    group: Group
    """Which of the launches' samples were taken."""

    @property
    def has_judges(self) -> bool:
        """Whether enough launches measured any size."""
        return any(
            _known(curves_of(self.truth, self.group, op)) for op in self.truth.orders
        )


@cache
def _recorded(number: int) -> Recording:
    return load_recording(_DATA / f"tuning-{number}.json.gz")


def short_run(number: int, links: str, seed: int, launches: int = 4) -> ShortRun:
    """Return a run of so many launches of the recording ``tuning-NUMBER``.

    Only what was measured while the links were ``links`` is taken.
    """
    recording = _recorded(number)
    group = next(one for one in recording.groups() if one.link_class == links)
    mine: dict[int, list[Sample]] = defaultdict(list)
    for sample in recording.samples:
        if recording.group_of(sample) == group and sample.us:
            mine[sample.launch].append(sample)
    sizes = {at: len({(s.op, s.nbytes) for s in each}) for at, each in mine.items()}
    whole = [
        at
        for at, number_of_sizes in sizes.items()
        if not recording.launches[at].held_out
        and number_of_sizes > 0.4 * max(sizes.values())
    ]
    drawn = sorted(random.Random(f"{number} {links} {seed}").sample(whole, launches))
    others = {
        at: replace(launch, held_out=False)
        for at, launch in recording.launches.items()
        if at not in drawn
    }
    return ShortRun(
        replace(
            recording,
            launches={at: recording.launches[at] for at in drawn},
            samples=[sample for at in drawn for sample in mine[at]],
        ),
        replace(
            recording,
            launches=others,
            samples=[sample for at in others for sample in mine.get(at, ())],
        ),
        group,
    )


def disturbed(run: ShortRun, hogs: Hogs, seed: int) -> ShortRun:
    """Return the run as it would have been beside such programs."""
    chance = random.Random(f"hogs {seed}")
    launches: dict[int, dict[tuple[str, int], list[Sample]]] = defaultdict(dict)
    for sample in run.recording.samples:
        cell = sample.op, sample.nbytes
        launches[sample.launch].setdefault(cell, []).append(sample)
    samples: list[Sample] = []
    for cells in launches.values():
        busy = list(_spells(hogs, chance))
        order = list(cells.values())
        chance.shuffle(order)
        for place, cell_samples in enumerate(order):
            at_s = place / len(order) * _LAUNCH_S
            length_s = _LAUNCH_S / len(order)
            row = [
                _beside(one, hogs, chance, busy, at_s, length_s) for one in cell_samples
            ]
            # As the ranks do, which leave out a size with too few clean repetitions.
            if all(len(one.us) >= _LEAST_CLEAN for one in row):
                samples += row
    return replace(run, recording=replace(run.recording, samples=samples))


def _spells(hogs: Hogs, chance: random.Random) -> Iterator[tuple[float, float]]:
    """Yield when the programs run, until the launch is over."""
    now_s = -chance.expovariate(1 / hogs.on_s)
    while now_s < _LAUNCH_S:
        end_s = now_s + chance.expovariate(1 / hogs.on_s)
        yield now_s, end_s
        now_s = end_s + chance.expovariate(1 / hogs.off_s)


def _beside(
    sample: Sample,
    hogs: Hogs,
    chance: random.Random,
    busy: list[tuple[float, float]],
    at_s: float,
    length_s: float,
) -> Sample:
    """Return repetitions like these, spread over a size's time."""
    calls = max(1, math.ceil(_REPETITION_US / median(sample.us)))
    times: list[float] = []
    dropped = 0
    for number in range(_REPETITIONS):
        now_s = at_s + (number + 0.5) / _REPETITIONS * length_s
        us = chance.choice(sample.us)
        if any(begin <= now_s < end for begin, end in busy):
            us *= math.exp(abs(chance.gauss(0, hogs.slower)))
            if chance.random() < hogs.hits(us * calls):
                if chance.random() < hogs.seen:
                    dropped += 1
                    continue
                turns = 1 + int(us * calls / hogs.slice_us)
                waits = (chance.expovariate(1 / hogs.slice_us) for _ in range(turns))
                us += sum(waits) / calls
        times.append(us)
    return replace(sample, us=tuple(times), disturbed=dropped)


def cost_of(run: ShortRun) -> tuple[Cost, Cost]:
    """Return what the choices of the run's table cost, and those without a table."""
    decisions = {
        one.op: one
        for one in decide(run.recording, DEFAULT_TIE_MARGIN)
        if one.group == run.group
    }
    by_table: list[float] = []
    by_model: list[float] = []
    for op in run.truth.orders:
        curves = curves_of(run.truth, run.group, op)
        unasked = choice_without_table(run.truth, run.group, op)
        decision = decisions.get(op)
        for nbytes, best_us in _known(curves).items():
            model = unasked(nbytes)
            choice = model if decision is None else decision.at(nbytes)
            by_model.append(_us(curves, model, nbytes) / best_us)
            by_table.append(_us(curves, choice, nbytes) / best_us)
    return _cost(by_table), _cost(by_model)


def _known(curves: dict[Candidate, Curve]) -> dict[int, float]:
    """Return the sizes that enough launches measured, with the best time of each."""
    best: dict[int, float] = {}
    for curve in curves.values():
        for nbytes, seen in curve.estimates.items():
            if len(seen.launches) >= _KNOWN_LAUNCHES:
                best[nbytes] = min(seen.us, best.get(nbytes, math.inf))
    return best


def _us(
    curves: dict[Candidate, Curve], candidate: Candidate | None, nbytes: int
) -> float:
    assert candidate is not None
    return curves[candidate].us(nbytes)


def _cost(ratios: list[float]) -> Cost:
    return Cost(geometric_mean(ratios), max(ratios))
