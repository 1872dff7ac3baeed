# SPDX-License-Identifier: Apache-2.0
"""Searches for the best cut of a pipeline, on random platforms.

    python -m commrt.bench.shisha
    python -m commrt.bench.shisha --platforms 50 --layers 10 --places 3

A platform has layers whose costs are log-normal (sigma 0.75) and places whose speeds
are uniform in 1 to 4. A trial is a cut whose slowest stage is timed, by its costs. The
best cut of all is known, since ``partition`` finds it. ``fraction`` is the part of the
best throughput that a search settles for. Searches that draw cuts by chance begin with
a random one, and may take a tenth of the trials of an exhaustive search: hill climbing
takes a random neighbour if it is better, simulated annealing also a worse one, with a
probability that falls. ``first`` counts trials until 0.95 of the best throughput is
reached, on platforms where a search reaches it, and ``reached`` the part of these. The
seed alone decides what is drawn.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import NamedTuple

from commrt.layers.pipeline import Placement, Shisha, partition, stage_seconds

__all__ = ["Outcome", "main", "measure", "num_cuts"]

GOAL = 0.95


class Platform(NamedTuple):
    """Costs of layers, and speeds of places."""

    costs: list[float]
    speeds: list[float]

    @classmethod
    def drawn(cls, seed: int, layers: int, places: int) -> Platform:
        """Return the platform of a seed."""
        draws = random.Random(seed)
        costs = [draws.lognormvariate(0, 0.75) for _ in range(layers)]
        return cls(costs, [draws.uniform(1, 4) for _ in range(places)])

    def seconds(self, cut: Placement) -> tuple[float, ...]:
        """Return the time of each stage."""
        return stage_seconds(cut, self.costs, self.speeds)

    def slowest(self, cut: Placement) -> float:
        """Return the time of the slowest stage."""
        return max(self.seconds(cut))


class Outcome(NamedTuple):
    """How well a search did on one platform."""

    fraction: float
    """Of the best throughput."""
    trials: int
    first: int | None
    """Trials until the goal; None: it was not reached."""


Search = Callable[[Platform, int, int], list[float]]
"""Takes a platform, a number of trials and a seed; returns each trial's time."""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print a table."""
    parser = argparse.ArgumentParser("python -m commrt.bench.shisha")
    parser.add_argument("--platforms", type=int, default=200, help="how many")
    parser.add_argument("--layers", type=int, default=12, help="of the model")
    parser.add_argument("--places", type=int, default=4, help="as many stages")
    parser.add_argument("--seed", type=int, default=0, help="of the first platform")
    given = parser.parse_args(argv)
    if given.platforms < 1 or not 1 <= given.places <= given.layers:
        parser.error(
            "expected a platform at least, and a layer at least for each place"
        )
    number = num_cuts(given.layers, given.places)
    print(
        f"{given.platforms} platforms, {given.layers} layers on {given.places} places: "
        f"an exhaustive search takes {number} trials"
    )
    print(
        f"{'search':<22}{'mean':>8}{'worst':>8}{'trials':>8}{'most':>6}"
        f"{'first':>8}{'reached':>9}"
    )
    settings = given.platforms, given.layers, given.places, given.seed
    for name, outcomes in measure(*settings).items():
        fractions = [each.fraction for each in outcomes]
        trials = [each.trials for each in outcomes]
        firsts = [each.first for each in outcomes if each.first is not None]
        first = f"{fmean(firsts):8.1f}" if firsts else f"{'-':>8}"
        print(
            f"{name:<22}{fmean(fractions):8.3f}{min(fractions):8.3f}"
            f"{fmean(trials):8.1f}{max(trials):6d}{first}"
            f"{len(firsts) / len(outcomes):9.0%}"
        )
    return 0


def measure(
    platforms: int, layers: int, places: int, seed: int
) -> dict[str, list[Outcome]]:
    """Return the outcomes of each search on the same platforms."""
    most = max(1, num_cuts(layers, places) // 10)
    found: dict[str, list[Outcome]] = {name: [] for name in SEARCHES}
    for number in range(platforms):
        platform = Platform.drawn(seed + number, layers, places)
        best = platform.slowest(partition(*platform))
        for name, search in SEARCHES.items():
            times = search(platform, most, seed + number)
            good = (at for at, each in enumerate(times, 1) if best / each >= GOAL)
            found[name].append(Outcome(best / min(times), len(times), next(good, None)))
    return found


def num_cuts(layers: int, places: int) -> int:
    """Return the trials of an exhaustive search: all cuts, on places in any order."""
    return math.comb(layers - 1, places - 1) * math.factorial(places)


def _shisha(platform: Platform, most: int, seed: int) -> list[float]:
    search, times = Shisha(*platform), []
    while not search.is_settled:
        cut = search.propose()
        times.append(platform.slowest(cut))
        search.observe(platform.seconds(cut))
    return times


def _first_cut(platform: Platform, most: int, seed: int) -> list[float]:
    return [platform.slowest(Shisha(*platform).propose())]


def _hill_climbing(platform: Platform, most: int, seed: int) -> list[float]:
    draws = random.Random(seed)
    cut = _random_cut(platform, draws)
    times = [platform.slowest(cut)]
    lowest = times[0]
    while len(times) < most:
        other = _neighbour(cut, draws)
        times.append(platform.slowest(other))
        if times[-1] < lowest:
            cut, lowest = other, times[-1]
    return times


def _annealing(platform: Platform, most: int, seed: int) -> list[float]:
    draws = random.Random(seed)
    cut = _random_cut(platform, draws)
    now = platform.slowest(cut)
    times = [now]
    while len(times) < most:
        other = _neighbour(cut, draws)
        then = platform.slowest(other)
        heat = 0.3 * (1 - len(times) / most) + 1e-9  # of the present time
        if then <= now or draws.random() < math.exp((now - then) / (heat * now)):
            cut, now = other, then
        times.append(then)
    return times


def _random_cut(platform: Platform, draws: random.Random) -> Placement:
    layers, places = len(platform.costs), len(platform.speeds)
    inner = sorted(draws.sample(range(1, layers), places - 1))
    ranges = map(range, [0, *inner], [*inner, layers])
    return Placement(tuple(ranges), tuple(draws.sample(range(places), places)))


def _neighbour(cut: Placement, draws: random.Random) -> Placement:
    """Return a cut with one boundary moved by a layer, or two places swapped."""
    stages = len(cut.ranges)
    while stages > 1:
        if draws.random() < 0.25:
            one, other = draws.sample(range(stages), 2)
            places = [*cut.places]
            places[one], places[other] = places[other], places[one]
            return cut._replace(places=tuple(places))
        ends = [each.stop for each in cut.ranges]
        ends[draws.randrange(stages - 1)] += draws.choice((-1, 1))
        ranges = tuple(map(range, [0, *ends[:-1]], ends))
        if all(ranges):
            return cut._replace(ranges=ranges)
    return cut


SEARCHES: dict[str, Search] = {
    "Shisha": _shisha,
    "Shisha's first cut": _first_cut,
    "hill climbing": _hill_climbing,
    "simulated annealing": _annealing,
}


if __name__ == "__main__":
    sys.exit(main())
