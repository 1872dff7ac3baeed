# SPDX-License-Identifier: Apache-2.0
"""The best cut of layers into stages on places of unequal speed.

Dynamic programming goes through the stages from the first one on. Places of equal speed
and memory stand for each other, so a state is how many places of each kind have a stage
already, and how many layers they have. Bellman's principle holds, since the time of the
slowest stage so far only grows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from commrt.errors import UsageError, shown
from commrt.layers.pipeline.placement import (
    Floats,
    Placement,
    edge_seconds,
    number_of_stages,
    numbers_of,
)

__all__ = ["partition"]

_MOST_STEPS = 2_000_000_000
"""Comparisons, about five seconds of them; beyond it the order must be given."""

Used: TypeAlias = tuple[int, ...]
"""How many places of each kind have a stage."""
Choice: TypeAlias = npt.NDArray[np.int64]
"""For each number of layers: how many of them earlier stages have."""


class _Kind(NamedTuple):
    """Places that are alike."""

    places: list[int]
    seconds: Floats
    """[i, j]: of a stage with layers i to j - 1 here; inf where there is none."""


def partition(
    costs: Sequence[float],
    speeds: Sequence[float],
    stages: int | None = None,
    *,
    transfers: Sequence[float] | None = None,
    order: str = "any",
    nbytes: Sequence[float] | None = None,
    limits: Sequence[float] | None = None,
) -> Placement:
    """Return the cut whose slowest stage is as quick as that of any cut.

        placement = partition([4, 1, 2, 6, 2], [1.0, 2.0], 2)
        placement.ranges   # (range(0, 2), range(2, 5))
        placement.places   # (0, 1)

    A stage takes its layers' costs, divided by the speed of its place, and the
    transfers at its two ends: for a message both ranks are busy.

    Args:
        costs: of each layer, for a micro-batch forward and backward, such as
            ``measure_layers`` returns: seconds on a place of speed 1.
        speeds: of each place.
        stages: their number; None: as many as places. If fewer, the best places get
            one each.
        transfers: seconds of the message at each boundary between two layers.
        order: "any": each place may run any stage. "given": places have stages in
            their own order.
        nbytes: memory of each layer, with ``limits``.
        limits: memory of each place, in the same unit.

    Exact, and the same on all ranks; of equally good cuts it takes one by a fixed rule.
    Raises UsageError for more stages than layers or places, where no cut fits into
    memory, and where the search would take too long: with order="any" it takes about
    (places of a kind + 1), multiplied over kinds, times kinds · layers² steps.
    """
    what = "partition"
    work = numbers_of(what, "costs", costs)
    speed = numbers_of(what, "speeds", speeds, is_strict=True)
    number = number_of_stages(what, stages, len(work), len(speed))
    if order not in ("any", "given"):
        raise UsageError(f'{what}: order={shown(order)} must be "any" or "given"')
    edges = edge_seconds(what, transfers, len(work))
    memory, room = _memory(nbytes, limits, len(work), len(speed))
    kinds = [*_kinds(work, speed, edges, memory, room)]
    found = (_any_order if order == "any" else _given_order)(kinds, number)
    if found is None:
        raise UsageError(
            f"{what}: no cut into {number} stages fits into limits={shown(limits)}; "
            f"use more stages, or places with more memory"
        )
    return found


def _memory(
    nbytes: Sequence[float] | None,
    limits: Sequence[float] | None,
    num_layers: int,
    num_places: int,
) -> tuple[Floats, Floats]:
    what = "partition"
    if (nbytes is None) != (limits is None):
        raise UsageError(
            f"{what}: nbytes, the memory of layers, and limits, that of places, belong "
            f"together; pass both, or none"
        )
    if nbytes is None or limits is None:
        return np.zeros(num_layers), np.zeros(num_places)
    memory = numbers_of(what, "nbytes", nbytes)
    room = numbers_of(what, "limits", limits)
    for name, given, right in (
        ("nbytes", memory, num_layers),
        ("limits", room, num_places),
    ):
        if len(given) != right:
            each = "layer" if name == "nbytes" else "place"
            raise UsageError(
                f"{what}: {name} has {len(given)} numbers; expected {right}, one for "
                f"each {each}"
            )
    return memory, room


def _kinds(
    work: Floats, speed: Floats, edges: Floats, memory: Floats, room: Floats
) -> Iterator[_Kind]:
    """Yield the kinds of places, in the order of their first one."""
    sums, needed = _sums(work), _sums(memory)
    alike: dict[tuple[float, float], list[int]] = {}
    for place, key in enumerate(zip(speed.tolist(), room.tolist(), strict=True)):
        alike.setdefault(key, []).append(place)
    for (quick, most), places in alike.items():
        seconds = sums / quick + (edges[:, None] + edges[None])
        seconds[~(needed <= most)] = np.inf  # also where there is no such stage
        yield _Kind(places, seconds)


def _sums(values: Floats) -> Floats:
    """Return [i, j]: the sum of values i to j - 1, NaN unless i < j.

    Each is added up by itself: a difference of two sums from the start would lose the
    digits of small values behind large ones.
    """
    number = len(values)
    found = np.full((number + 1, number + 1), np.nan)
    for first in range(number):
        found[first, first + 1 :] = np.cumsum(values[first:])
    return found


def _extended(before: Floats, seconds: Floats) -> tuple[Floats, Choice]:
    """Return the slowest stage's time with a stage more, and where that one starts."""
    with_it = np.maximum(before[:, None], seconds)
    starts = with_it.argmin(0)
    return with_it[starts, np.arange(len(before))], starts


def _any_order(kinds: Sequence[_Kind], stages: int) -> Placement | None:
    num_states = math.prod(len(kind.places) + 1 for kind in kinds)
    num_ends = len(kinds[0].seconds)
    if num_states * len(kinds) * num_ends**2 > _MOST_STEPS:
        raise UsageError(
            f"partition: {sum(len(kind.places) for kind in kinds)} places of "
            f"{len(kinds)} kinds in any order are too many to try; pass order='given', "
            f"or round speeds so that fewer of them differ"
        )
    start = np.full(num_ends, np.inf)
    start[0] = 0.0
    none = (0,) * len(kinds)
    level: dict[Used, Floats] = {none: start}
    trails: list[dict[Used, tuple[Choice, Choice]]] = []
    for _ in range(stages):
        following: dict[Used, Floats] = {}
        trail: dict[Used, tuple[Choice, Choice]] = {}
        for used, before in level.items():
            for number, kind in enumerate(kinds):
                if used[number] == len(kind.places):
                    continue
                after = (*used[:number], used[number] + 1, *used[number + 1 :])
                seconds, starts = _extended(before, kind.seconds)
                if after not in following:
                    following[after] = np.full(num_ends, np.inf)
                    nothing = np.full(num_ends, -1)
                    trail[after] = nothing, nothing.copy()
                is_better = seconds < following[after]
                following[after][is_better] = seconds[is_better]
                trail[after][0][is_better] = starts[is_better]
                trail[after][1][is_better] = number
        level = following
        trails.append(trail)
    used = min(level, key=lambda each: (level[each][-1], each))
    if not math.isfinite(level[used][-1]):
        return None
    stop, ranges, chosen = num_ends - 1, [], []
    for trail in reversed(trails):
        starts, numbers = trail[used]
        first, number = int(starts[stop]), int(numbers[stop])
        ranges.append(range(first, stop))
        used = (*used[:number], used[number] - 1, *used[number + 1 :])
        chosen.append(kinds[number].places[used[number]])
        stop = first
    return Placement(tuple(reversed(ranges)), tuple(reversed(chosen)))


def _given_order(kinds: Sequence[_Kind], stages: int) -> Placement | None:
    at = {place: kind.seconds for kind in kinds for place in kind.places}
    num_ends = len(kinds[0].seconds)
    best = np.full((stages + 1, num_ends), np.inf)
    best[0, 0] = 0.0
    trails: list[
        Choice
    ] = []  # [stages, layers]: where the last one starts; -1: not here
    for place in range(len(at)):
        trail = np.full((stages + 1, num_ends), -1)
        for number in range(min(stages, place + 1), 0, -1):
            seconds, starts = _extended(best[number - 1], at[place])
            is_better = seconds < best[number]
            best[number][is_better] = seconds[is_better]
            trail[number][is_better] = starts[is_better]
        trails.append(trail)
    if not math.isfinite(best[stages, -1]):
        return None
    number, stop, ranges, chosen = stages, num_ends - 1, [], []
    for place in reversed(range(len(at))):
        first = int(trails[place][number, stop])
        if first < 0:
            continue
        ranges.append(range(first, stop))
        chosen.append(place)
        number, stop = number - 1, first
        if not number:
            break
    return Placement(tuple(reversed(ranges)), tuple(reversed(chosen)))
