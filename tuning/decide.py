# SPDX-License-Identifier: Apache-2.0
"""Decisions: byte ranges and their winners, made of measurements.

What runs without a table, the choice of the model, has to be beaten: another candidate
replaces it where it is faster by more than the doubt about both times. Doubt grows with
the differences between launches, with the spread of repetitions, and with the share of
them that other programs disturbed. Where nothing was measured the model's choice stays.

A candidate is *tied* at a size if its time is within the margin of the best. It is also
tied within twice the margin if a rank test over launches does not tell it from the
best.

A range may use any tied candidate at no cost. Another candidate costs the time that it
loses; every further range has its price, and so has a less simple candidate. A boundary
lies where the two curves cross. So noise moves a choice only between equals, and
seldom.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median, median_low
from typing import NamedTuple

from commrt.select.facts import Candidate
from commrt.tuning.fit import Curve
from commrt.tuning.launch_states import sizes_in_usual_state
from commrt.tuning.model_choice import Unasked, choice_without_table
from commrt.tuning.samples import Group, Recording
from commrt.tuning.statistics import Estimate, estimate, rank_test

__all__ = [
    "ENOUGH_LAUNCHES",
    "Decision",
    "Range",
    "curves_of",
    "decide",
    "divide",
    "tied",
    "undecided",
]

ENOUGH_LAUNCHES = 3
"""Launches on which a choice should rest."""
_PER_OCTAVE = 8
_SWITCH = 0.03 * _PER_OCTAVE
"""Saving that a further range must bring: three per cent over one octave, or less over
more."""
_SIGNIFICANT = 0.05
_LESS_SIMPLE = 0.004
"""Relative saving that a candidate must bring for each place further down the list,
which begins with the simplest."""
_MOST_PRICED = 5
_GIVEN_UP = 1.1
"""Assumed ratio of a candidate's time, at a size where it was given up, to the time of
the best."""
_TWO_LEVELS = 0.1
"""Relative saving that two levels must bring over the flat ones. Between real nodes
they save more than half or nothing. There are so many of them that, after a few
launches, the luckiest would win."""
_NARROWEST_NBYTES = 8
"""A range that holds no second size of the common element types is none."""
_SURE = 1.0
"""Standard errors by which a candidate must beat what runs without a table."""
_UNSEEN = 0.03
"""Cost of anything else where no size near says how the two compare: over one octave
as much as a further range."""
_NEAR_OCTAVES = 2.0
"""Distance of a size that says so, in powers of two."""


def _unknown(nbytes: float) -> Candidate | None:
    return None


@dataclass(frozen=True)
class Range:
    """One candidate for [lo, hi) bytes."""

    lo: int
    """First size."""
    hi: int | None
    """First size beyond; None: no end."""
    candidate: Candidate
    """The candidate to use."""
    crossover: str | None
    """Note on the lower end: where it lies, and by which times; None for the first
    range."""


@dataclass(frozen=True)
class Decision:
    """The ranges of one operation in one group of launches, with what they rest on."""

    op: str
    """Operation."""
    group: Group
    """Ranks, placement, link class."""
    ranges: tuple[Range, ...]
    """Tiling [0, infinity)."""
    curves: Mapping[Candidate, Curve]
    """Fitted times, simplest candidate first."""
    margin: float
    """Relative difference that counts as equal."""

    @property
    def launches(self) -> int:
        """Number of launches that have measured a size, typically."""
        sizes: dict[int, int] = {}
        for curve in self.curves.values():
            for nbytes, seen in curve.estimates.items():
                sizes[nbytes] = max(sizes.get(nbytes, 0), len(seen.launches))
        return median_low(sizes.values())

    def at(self, nbytes: int) -> Candidate:
        """Return the choice for a size."""
        for chosen in reversed(self.ranges):
            if nbytes >= chosen.lo:
                return chosen.candidate
        raise AssertionError("ranges begin at 0")


def decide(recording: Recording, margin: float) -> list[Decision]:
    """Return decisions by the launches that shape the table, for every operation.

    An operation of which fewer than half of the sizes can be trusted has none.
    """
    decisions = []
    for group in recording.groups():
        for op in recording.orders:
            curves = curves_of(recording, group, op)
            sizes = recording.planned(group.ranks, op)
            if curves and _enough(_measured(curves), sizes):
                unasked = choice_without_table(recording, group, op)
                ranges = divide(curves, margin, unasked, sizes)
                decisions.append(Decision(op, group, ranges, curves, margin))
    return _well_founded(decisions)


def _enough(measured: Collection[int], planned: Collection[int]) -> bool:
    return 2 * len(measured) >= len(planned)


def undecided(recording: Recording) -> list[tuple[Group, str, int, int]]:
    """Return operations of which too few sizes can be trusted to decide anything.

    Each with the number of these sizes, and of those to measure. A class of links that
    was met at few sizes is left to the other class; of both the better known counts.
    """
    found = []
    kinds = {group._replace(link_class="") for group in recording.groups()}
    for op in recording.orders:
        for kind in sorted(kinds):
            groups = [
                g for g in recording.groups() if g._replace(link_class="") == kind
            ]
            seen = [
                (len(_measured(curves_of(recording, group, op))), group)
                for group in groups
            ]
            measured, group = max(seen)
            planned = recording.planned(group.ranks, op)
            if planned and not _enough(range(measured), planned):
                found.append((group, op, measured, len(planned)))
    return found


def _well_founded(decisions: list[Decision]) -> list[Decision]:
    """Return the decisions without those that another state of the machine can replace.

    Virtual machines change between near and far. Where one of them was hardly seen, the
    choices made in the other one are better founded, and a table's lookup takes them.
    """
    sound = {
        (one.group, one.op) for one in decisions if one.launches >= ENOUGH_LAUNCHES
    }

    def has_stand_in(one: Decision) -> bool:
        other = {"near": "far", "far": "near"}.get(one.group.link_class)
        return (
            other is not None
            and (
                one.group._replace(link_class=other),
                one.op,
            )
            in sound
        )

    return [
        one
        for one in decisions
        if (one.group, one.op) in sound or not has_stand_in(one)
    ]


def curves_of(recording: Recording, group: Group, op: str) -> dict[Candidate, Curve]:
    """Return the time of every candidate, simplest first.

    A candidate that failed anywhere at these ranks is left out, whatever its speed. One
    dropped as a clear loser has fewer sizes: beyond them the others are not compared
    with it, and between them it counts as slower than the best of the others. So does
    one that fewer than half of a size's launches measured: it was given up there, and
    these few may all have met one state of the machine.
    """
    failed = {
        failure.candidate
        for failure in recording.failures
        if (failure.ranks, failure.op) == (group.ranks, op)
    }
    cells: dict[int, dict[int, dict[Candidate, Sequence[float]]]] = {}
    counts: dict[tuple[int, Candidate], tuple[int, int]] = {}
    for sample in recording.of(group, held_out=False):
        if sample.op == op and sample.us and sample.candidate not in failed:
            launches = cells.setdefault(sample.nbytes, {})
            launches.setdefault(sample.launch, {})[sample.candidate] = sample.us
            clean, all_of_them = counts.get((sample.nbytes, sample.candidate), (0, 0))
            counts[sample.nbytes, sample.candidate] = (
                clean + len(sample.us),
                all_of_them + len(sample.us) + sample.disturbed,
            )
    estimates: dict[Candidate, dict[int, Estimate]] = {}
    least_us: dict[int, float] = {}
    for nbytes, usual in sizes_in_usual_state(cells).items():
        levelled = _levelled(usual.values())
        numbers: dict[Candidate, list[int]] = {}
        for number, row in usual.items():
            for candidate in row:
                numbers.setdefault(candidate, []).append(number)
        found = {}
        for candidate, times in levelled.items():
            clean, all_of_them = counts[nbytes, candidate]
            share = clean / all_of_them
            found[candidate] = estimate(times, share, numbers[candidate])
        kept = {one for one in found if 2 * len(levelled[one]) >= len(usual)}
        given_up_us = _GIVEN_UP * min(found[one].us for one in kept)
        least_us[nbytes] = given_up_us
        for candidate, seen in found.items():
            if candidate not in kept:
                scale = max(1.0, given_up_us / seen.us)
                times = [[scale * us for us in row] for row in levelled[candidate]]
                seen = estimate(times, seen.clean, seen.numbers)
                seen = replace(seen, given_up=True)
            estimates.setdefault(candidate, {})[nbytes] = seen
    return {
        one: Curve(at, {n: us for n, us in least_us.items() if n not in at})
        for one in recording.orders[op]
        if (at := estimates.get(one))
    }


def _levelled(
    launches: Iterable[Mapping[Candidate, Sequence[float]]],
) -> dict[Candidate, list[list[float]]]:
    """Return each candidate's times, launch by launch, on one common level.

    Launches differ by more than candidates do, but within one of them all candidates
    met the same machine. So every launch is scaled to make its best candidate take the
    median of what the best ones took.
    """
    rows = list(launches)
    best = [min(median(us) for us in row.values()) for row in rows]
    level = median(best)
    levelled: dict[Candidate, list[list[float]]] = {}
    for row, best_us in zip(rows, best, strict=True):
        for candidate, us in row.items():
            levelled.setdefault(candidate, []).append(
                [one * level / best_us for one in us]
            )
    return levelled


def tied(
    curves: Mapping[Candidate, Curve], nbytes: float, margin: float
) -> set[Candidate]:
    """Return the candidates that are as good as the best at ``nbytes``."""
    present = _comparable(curves, nbytes)
    best = min(present, key=lambda candidate: present[candidate].us(nbytes))
    best_us = present[best].us(nbytes)
    best_seen = present[best].nearest(nbytes).launches
    found = set()
    for candidate, curve in present.items():
        us = curve.us(nbytes)
        if us > best_us * (1 + 2 * margin):
            continue
        differ = rank_test(curve.nearest(nbytes).launches, best_seen) < _SIGNIFICANT
        if us <= best_us * (1 + margin * (1 if differ else 2)):
            found.add(candidate)
    return found


def _comparable(
    curves: Mapping[Candidate, Curve], nbytes: float
) -> dict[Candidate, Curve]:
    """Return the curves that were measured on both sides of ``nbytes``.

    One that failed or was dropped beyond some size must not be extrapolated into the
    sizes where others were measured; beyond the last size of all everybody is.
    """
    sizes = [size for curve in curves.values() for size in curve.estimates]
    inside = min(max(nbytes, min(sizes)), max(sizes))
    found = {
        candidate: curve
        for candidate, curve in curves.items()
        if min(curve.estimates) <= inside <= max(curve.estimates)
    }
    return found or dict(curves)


def divide(
    curves: Mapping[Candidate, Curve],
    margin: float,
    unasked: Unasked = _unknown,
    sizes: Collection[int] = (),
) -> tuple[Range, ...]:
    """Return the ranges that cost least: lost time plus a price per switch.

    Args:
        curves: the times of every candidate.
        margin: relative difference that counts as equal.
        unasked: what would run without a table.
        sizes: those that were to be measured, as far as others than the curves'.
    """
    grid = _grid({*sizes, *_measured(curves)})
    sets = [tied(curves, nbytes, margin) for nbytes in grid]
    path = _cheapest_path(curves, grid, sets, unasked)
    switches = [at for at in range(1, len(path)) if path[at] != path[at - 1]]
    starts: list[_Start] = [_Start(0, path[0], None)]
    for at in switches:
        earlier, later = path[at - 1], path[at]
        # The switch may lie anywhere where both are tied; the crossing says where.
        # What runs without a table stays even so: it has nothing to prove.
        first, last = at - 1, at
        while (
            first > 0
            and path[first - 1] == earlier
            and later in sets[first]
            and unasked(grid[first]) != earlier
        ):
            first -= 1
        while (
            last + 1 < len(path)
            and path[last + 1] == later
            and earlier in sets[last]
            and unasked(grid[last]) != later
        ):
            last += 1
        cut, why = _boundary(curves, earlier, later, grid[first], grid[last])
        if cut <= grid[first] and later not in sets[first]:
            # Where only one was measured their lines say nothing.
            cut = math.ceil(math.sqrt(grid[first] * grid[first + 1]))
            why = f"{earlier} was not measured beyond; {later}"
        while len(starts) > 1 and cut < _least_end(starts[-1].lo):
            # The range between is too narrow: its neighbours meet there.
            low, high = sorted((starts.pop().lo, cut))
            earlier = starts[-1].candidate
            if earlier == later:
                break
            cut, why = _boundary(curves, earlier, later, low, high)
        if starts[-1].candidate != later:
            cut = max(cut, starts[-1].lo + 1)  # the smallest size may be 1
            starts.append(_Start(cut, later, f"{why} at {cut} B"))
    ends = [start.lo for start in starts[1:]]
    return tuple(
        Range(start.lo, hi, start.candidate, start.why)
        for start, hi in zip(starts, [*ends, None], strict=True)
    )


class _Start(NamedTuple):
    """The start of a range, its candidate, and the reason for the place."""

    lo: int
    candidate: Candidate
    why: str | None


def _least_end(lo: int) -> float:
    """Return where a range from ``lo`` may end: a step of the grid wide, or 8 bytes."""
    return max(lo * 2 ** (1 / _PER_OCTAVE), lo + _NARROWEST_NBYTES)


def _cheapest_path(
    curves: Mapping[Candidate, Curve],
    grid: list[float],
    sets: list[set[Candidate]],
    unasked: Unasked,
) -> list[Candidate]:
    """Return the candidate of each grid size; dynamic programming over the grid."""
    order = list(curves)
    total = {one: 0.0 for one in order}
    choices: list[dict[Candidate, Candidate]] = []
    for index, nbytes in enumerate(grid):
        lost = _lost(curves, nbytes, sets[index], unasked(nbytes))
        cheapest = min(order, key=total.__getitem__)
        came_from = {}
        following = {}
        for one in order:
            moved = total[cheapest] + _SWITCH
            stays = total[one] <= moved
            came_from[one] = one if stays else cheapest
            following[one] = min(total[one], moved) + lost[one]
        choices.append(came_from)
        total = following
    here = min(order, key=total.__getitem__)
    path = [here]
    for came_from in reversed(choices[1:]):
        here = came_from[here]
        path.append(here)
    return path[::-1]


def _lost(
    curves: Mapping[Candidate, Curve],
    nbytes: float,
    equals: set[Candidate],
    unasked: Candidate | None,
) -> dict[Candidate, float]:
    """Return what each one costs: the logarithm of its time over another's.

    The other is what would run without a table, and a candidate's time counts with its
    uncertainty: to replace that one it must be faster for sure. Where that one was not
    measured the other is the best, and who is tied with it costs nothing.

    A less simple candidate must earn its place: a noisy size here and there does not
    move the choice between equals.
    """
    present = _comparable(curves, nbytes)
    lost = {}
    base = unasked if unasked in present else None
    best = min(present, key=lambda one: present[one].us(nbytes))
    best_us = present[best].us(nbytes)
    gain = 0.0
    if base is not None and best not in (base, *(equals & {base})):
        gain = math.log(present[base].us(nbytes) / best_us)
        gain -= _SURE * _doubt(present[best], present[base], nbytes)
    for place, one in enumerate(curves):
        if one not in present:
            lost[one] = math.inf
            continue
        price = _LESS_SIMPLE * min(place, _MOST_PRICED)
        if one.has_two_levels:
            price += _TWO_LEVELS
        behind = 0.0 if one in equals else math.log(present[one].us(nbytes) / best_us)
        if base is None:
            lost[one] = behind + price
        elif one == base:
            lost[one] = 0.0
        else:
            far = _far(present[one], present[base], nbytes)
            lost[one] = behind + price - (min(gain, -_UNSEEN) if far else gain)
    return lost


def _doubt(one: Curve, other: Curve, nbytes: float) -> float:
    """Return the standard error of the logarithm of a ratio of times."""
    return one.nearest(nbytes).doubt_against(other.nearest(nbytes))


def _far(one: Curve, other: Curve, nbytes: float) -> bool:
    """Return whether no size near this one says how the two compare."""
    both = one.estimates.keys() & other.estimates.keys() or one.estimates.keys()
    return min(abs(math.log2(size / nbytes)) for size in both) > _NEAR_OCTAVES


def _measured(curves: Mapping[Candidate, Curve]) -> set[int]:
    """Return the sizes at which anything was measured."""
    return {size for curve in curves.values() for size in curve.estimates}


def _grid(sizes: Collection[int]) -> list[float]:
    """Return sizes, evenly spaced in the logarithm, over those to decide."""
    low, high = math.log2(min(sizes)), math.log2(max(sizes))
    steps = max(1, round((high - low) * _PER_OCTAVE))
    inner = {2 ** (low + (high - low) * step / steps) for step in range(steps + 1)}
    return sorted(inner)


def _boundary(
    curves: Mapping[Candidate, Curve],
    earlier: Candidate,
    later: Candidate,
    low: float,
    high: float,
) -> tuple[int, str]:
    """Return where ``later`` takes over: the crossing in [low, high], or an end; why.

    Where one of them leads throughout, the simpler one is kept while both are tied.
    """
    first, second = curves[earlier], curves[later]

    def lead(nbytes: float) -> float:
        return first.us(nbytes) - second.us(nbytes)

    order = list(curves)
    if lead(low) >= 0 or lead(high) <= 0:
        if order.index(earlier) < order.index(later):
            at, how = high, f"{earlier}, the simpler one, is no longer tied"
        else:
            at, how = low, f"{later}, the simpler one, is tied from here on,"
    else:
        left, right = low, high
        for _ in range(60):
            middle = math.sqrt(left * right)
            left, right = (middle, right) if lead(middle) < 0 else (left, middle)
        at, how = right, f"a+b*n of {earlier} and {later} cross"
    return round(at), how
