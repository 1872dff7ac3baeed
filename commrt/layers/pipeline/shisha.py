# SPDX-License-Identifier: Apache-2.0
"""Shisha: a cut that improves while the pipeline runs, by times that are measured.

Soomro et al. 2022, "Shisha: Online scheduling of CNN pipelines on heterogeneous
architectures", arXiv 2202.11575.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from commrt.errors import UsageError, shown
from commrt.layers.pipeline.placement import (
    Placement,
    number_of_stages,
    numbers_of,
)
from commrt.vocabulary.checks import as_integer

__all__ = ["Shisha"]

_WORSE = 1.1
"""A settled cut that takes so many times its former time is searched for anew."""


class Shisha:
    """A search for the best cut, one trial a time.

        shisha = Shisha(measure_layers(model, example), speeds=[1, 3, 2])
        while not shisha.is_settled:
            placement = shisha.propose()
            shisha.observe(run_some_steps(placement))  # seconds of each stage

    The first cut merges layers: the one with the least work, with its lighter
    neighbour, until there are as many as stages. The heaviest stage gets the fastest
    place, and so on. Each trial then moves one layer away from the slowest stage,
    towards the lightest other one; of two as light, to the faster place. Stages between
    pass a layer on. A cut that was tried is not tried again. Beyond the paper, where no
    such move is left the slowest stage changes places with one on a faster place, and
    after that the search goes back to the best cut. It settles for that one after
    ``patience`` trials in a row without a better one, or where nothing is left to try.

    Only the order of ``speeds`` counts, so ranks of speed do as well. After the search
    has settled, ``observe`` may go on: where the cut has become slower by more than a
    tenth, such as by a place that slowed down, the search starts again from there.

    Args:
        layer_costs: work of each layer, of which only ratios count.
        speeds: of each place; a larger number is faster.
        patience: trials without a better cut, from 1 (alpha in the paper).
        stages: their number; None: as many as places. If fewer, the fastest ones.

    Local, and the same on all ranks that observe the same times. Raises UsageError for
    more stages than layers or places.
    """

    def __init__(
        self,
        layer_costs: Sequence[float],
        speeds: Sequence[float],
        patience: int = 10,
        *,
        stages: int | None = None,
    ) -> None:
        costs = numbers_of("Shisha", "layer_costs", layer_costs).tolist()
        quick = numbers_of("Shisha", "speeds", speeds, is_strict=True).tolist()
        number = number_of_stages("Shisha", stages, len(costs), len(quick))
        trials = as_integer(patience)
        if trials is None or trials < 1:
            raise UsageError(
                f"Shisha: patience={shown(patience)} must be an integer from 1"
            )
        self._speeds, self._patience = quick, trials
        self._current = self._best = _seed(costs, quick, number)
        self._best_seconds: float | None = None
        self._best_times: list[float] = []
        self._tried = {self._current}
        self._fruitless = self._trials = 0
        self._is_settled = False

    @property
    def is_settled(self) -> bool:
        """True once the search has ended; ``propose`` returns the best cut then."""
        return self._is_settled

    @property
    def num_trials(self) -> int:
        """Cuts that have been observed, each search's own."""
        return self._trials

    @property
    def best_seconds(self) -> float | None:
        """Time of the slowest stage of the best cut; None before the first trial."""
        return self._best_seconds

    def propose(self) -> Placement:
        """Return the cut to try next, or the best one once the search has settled."""
        return self._best if self._is_settled else self._current

    def observe(self, stage_seconds: Sequence[float]) -> None:
        """Take the time of each stage of the proposed cut, and choose the next one."""
        what = "Shisha.observe"
        seconds = numbers_of(what, "stage_seconds", stage_seconds).tolist()
        proposed = self.propose()
        if len(seconds) != len(proposed.ranges):
            raise UsageError(
                f"{what}: stage_seconds has {len(seconds)} numbers; expected "
                f"{len(proposed.ranges)}, one for each stage of the proposed cut"
            )
        slowest = max(seconds)
        if self._is_settled:
            assert self._best_seconds is not None  # a search has a trial
            if slowest <= _WORSE * self._best_seconds:
                return
            self._current, self._tried = self._best, {self._best}
            self._best_seconds, self._is_settled = None, False
        self._trials += 1
        if self._best_seconds is None or slowest < self._best_seconds:
            self._best, self._best_seconds, self._fruitless = proposed, slowest, 0
        else:
            self._fruitless += 1
        if self._best is proposed:
            self._best_times = seconds
        candidates = (
            *_moves(proposed, seconds, self._speeds),
            *_swaps(proposed, seconds, self._speeds),
            *_moves(self._best, self._best_times, self._speeds),
            *_swaps(self._best, self._best_times, self._speeds),
        )
        following = next((each for each in candidates if each not in self._tried), None)
        if following is None or self._fruitless >= self._patience:
            self._is_settled = True
            return
        self._current = following
        self._tried.add(following)

    def __repr__(self) -> str:
        state = "settled" if self._is_settled else "searching"
        return f"<Shisha, {state} after {self._trials} trials>"


def _seed(costs: Sequence[float], speeds: Sequence[float], stages: int) -> Placement:
    """Return the first cut (algorithm 1)."""
    runs = [range(layer, layer + 1) for layer in range(len(costs))]
    weights = list(costs)
    while len(runs) > stages:
        light = min(range(len(runs)), key=lambda at: (weights[at], at))
        beside = [at for at in (light - 1, light + 1) if 0 <= at < len(runs)]
        other = min(beside, key=lambda at: (weights[at], at))
        low, high = sorted((light, other))
        runs[low : high + 1] = [range(runs[low].start, runs[high].stop)]
        weights[low : high + 1] = [weights[low] + weights[high]]
    heaviest = sorted(range(stages), key=lambda at: (-weights[at], at))
    fastest = sorted(range(len(speeds)), key=lambda at: (-speeds[at], at))
    place_of = dict(zip(heaviest, fastest, strict=False))
    return Placement(tuple(runs), tuple(place_of[stage] for stage in range(stages)))


def _moves(
    cut: Placement, seconds: Sequence[float], speeds: Sequence[float]
) -> Iterator[Placement]:
    """Yield cuts in which the slowest stage has a layer less, the best guess first."""
    number = len(seconds)
    slow = max(range(number), key=lambda stage: (seconds[stage], -stage))
    if len(cut.ranges[slow]) == 1:
        return

    def rank(stage: int) -> tuple[float, float, int, int]:
        return (
            *(seconds[stage], -speeds[cut.places[stage]]),
            *(abs(stage - slow), stage),
        )

    for target in sorted((each for each in range(number) if each != slow), key=rank):
        ends = [layers.stop for layers in cut.ranges]
        for boundary in range(min(slow, target), max(slow, target)):
            ends[boundary] += 1 if target < slow else -1
        starts = [0, *ends[:-1]]
        ranges = tuple(map(range, starts, ends))
        if all(ranges):
            yield Placement(ranges, cut.places)


def _swaps(
    cut: Placement, seconds: Sequence[float], speeds: Sequence[float]
) -> Iterator[Placement]:
    """Yield cuts in which the slowest stage has a faster place, the best guess first.

    The other stage gets its place in return; where a place has no stage, nobody does.
    """
    slow = max(range(len(seconds)), key=lambda stage: (seconds[stage], -stage))
    own = cut.places[slow]
    stage_of = {place: stage for stage, place in enumerate(cut.places)}

    def rank(place: int) -> tuple[float, float, int]:
        stage = stage_of.get(place)
        return 0.0 if stage is None else seconds[stage], -speeds[place], place

    faster = [place for place, speed in enumerate(speeds) if speed > speeds[own]]
    for place in sorted(faster, key=rank):
        swapped = {own: place, place: own}
        yield cut._replace(places=tuple(swapped.get(each, each) for each in cut.places))
