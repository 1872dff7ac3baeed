# SPDX-License-Identifier: Apache-2.0
"""Transport parameters that a launch tries: those of the candidates that lead so far.

Every candidate with every parameter would take hours. So the first launches measure the
defaults. From the second one on, the leader of each size is tried with one parameter
changed at a time, and so is the next one if it is close.

A variant that is not ahead of the leader in two launches is not tried again. There is
one exception: if it is ahead at the sizes on both sides, then these two launches have
met an unusual state of the machine. All of that holds for each class of the links by
itself: a variant may win in one of them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise
from statistics import median

from commrt.backends.catalog import own_variants
from commrt.backends.staged.collectives import COPIES, PIECE
from commrt.backends.variants import transport_variants
from commrt.planning.host_plans import TransportParams, split_params
from commrt.planning.prediction import full_nbytes
from commrt.select.facts import Candidate, Query
from commrt.select.schema import DEFAULT_TIE_MARGIN
from commrt.tuning.decide import decide
from commrt.tuning.job import Item, middle, size_pairs
from commrt.tuning.samples import Recording
from commrt.tuning.table_writer import NATIVES

__all__ = ["sizes_to_refine", "variants_to_try"]

_AHEAD = 0.98
"""Time of a variant over that of its leader that is worth a further launch."""
_TRIED = 2
"""Launches after which a variant must be ahead."""
_LEADERS = 2
_NEXT_LEADER = 1.1
"""``_LEADERS`` candidates are tried with other parameters, if they take at most
``_NEXT_LEADER`` times as long as the first: a parameter may help one of them alone."""

Cell = tuple[str, int]
"""Operation, rule bytes."""
Place = tuple[str, int, str]
"""Operation, rule bytes, class of the links."""


def variants_to_try(
    recording: Recording,
    ranks: int,
    dtype: str,
    max_nbytes: int,
    *,
    held_out: bool,
    thorough: bool = True,
) -> list[Item]:
    """Return the variants that the next launch measures beside the candidates it finds.

    A launch that judges the table measures, at its sizes off the grid, what would be
    chosen there and what was still in the running at the grid's sizes on both sides.
    """
    alive: dict[Cell, dict[Candidate, None]] = defaultdict(dict)
    for (op, nbytes, _), variants in _in_the_running(recording, ranks, dtype, thorough):
        alive[op, nbytes].update(dict.fromkeys(variants))
    if not held_out:
        return [
            Item(op, nbytes, str(one))
            for (op, nbytes), variants in alive.items()
            for one in variants
        ]
    found: dict[Item, None] = {}
    decisions = decide(recording, DEFAULT_TIE_MARGIN)
    for op in recording.orders:
        pairs = size_pairs(op, ranks, dtype, max_nbytes)
        for at, (grid, between) in enumerate(pairs):
            above = pairs[min(at + 1, len(pairs) - 1)][0]
            variants = [*alive.get((op, grid), ()), *alive.get((op, above), ())]
            variants += [
                one.at(between)
                for one in decisions
                if (one.op, one.group.ranks) == (op, ranks)
            ]
            for one in filter(_is_variant, variants):
                found[Item(op, between, str(one))] = None
    return list(found)


def sizes_to_refine(
    recording: Recording, ranks: int, dtype: str, max_nbytes: int
) -> list[Cell]:
    """Return the sizes off the grid that the next launch is to measure, too.

    Where the choice changes between two sizes of the grid, the one halfway says more
    about where than the straight lines of both. A size once begun is gone on with.
    """
    found: dict[Cell, None] = {}
    grids = {
        op: [grid for grid, _ in size_pairs(op, ranks, dtype, max_nbytes)]
        for op in recording.orders
    }
    for sample in recording.samples:
        launch = recording.launches[sample.launch]
        shapes = launch.facts.size == ranks and not launch.held_out
        if shapes and sample.nbytes not in grids[sample.op]:
            found[sample.op, sample.nbytes] = None
    for one in decide(recording, DEFAULT_TIE_MARGIN):
        if one.group.ranks != ranks:
            continue
        for low, high in pairwise(grids[one.op]):
            changes = any(low < part.lo <= high for part in one.ranges)
            between = middle(one.op, ranks, dtype, low, high)
            if changes and low < between < high:
                found[one.op, between] = None
    return list(found)


def _in_the_running(
    recording: Recording, ranks: int, dtype: str, thorough: bool
) -> Iterator[tuple[Place, list[Candidate]]]:
    """Yield the variants that have not lost, or not at the sizes on both sides."""
    rivals = dict(_variants_of_leaders(recording, ranks, dtype, thorough))
    ahead = {
        place: {one for one, is_ahead in variants.items() if is_ahead}
        for place, variants in rivals.items()
    }
    sizes: dict[tuple[str, str], list[int]] = defaultdict(list)
    for op, nbytes, links in sorted(rivals):
        sizes[op, links].append(nbytes)
    for (op, links), along in sizes.items():
        for at, nbytes in enumerate(along):
            around: set[Candidate] = set()
            if 0 < at < len(along) - 1:
                low, high = along[at - 1], along[at + 1]
                around = ahead[op, low, links] & ahead[op, high, links]
            place = op, nbytes, links
            kept = ahead[place] | around
            yield place, [one for one in rivals[place] if one in kept]


def _variants_of_leaders(
    recording: Recording, ranks: int, dtype: str, thorough: bool
) -> Iterator[tuple[Place, dict[Candidate, bool]]]:
    """Yield the variants that did not fail, and whether they have not lost."""
    failed = {
        (one.op, one.candidate) for one in recording.failures if one.ranks == ranks
    }
    crowded = any(
        one.facts.link_class == "oversubscribed"
        for one in recording.launches.values()
        if one.facts.size == ranks
    )
    layouts = (
        one.facts.layout
        for one in recording.launches.values()
        if one.facts.size == ranks
    )
    nodes = next(layouts, None)
    for place, ratios in _ratios(recording, ranks).items():
        op, nbytes, _ = place
        schedules = {one: r for one, r in ratios.items() if one.name not in NATIVES}
        plain = {one: median(r) for one, r in schedules.items() if not _is_variant(one)}
        if not plain:
            continue
        least = min(plain.values())
        full = full_nbytes(Query(op, nbytes, dtype), ranks)
        tried: list[Candidate] = []
        for leader in sorted(plain, key=lambda one: plain[one])[:_LEADERS]:
            if plain[leader] > _NEXT_LEADER * least:
                break
            own = own_variants(leader, full)
            if own is None:
                own = transport_variants(
                    *(op, leader, ranks, full, dtype),
                    thorough=thorough,
                    crowded=crowded,
                    nodes=nodes,
                )
            tried += own
        yield (
            place,
            {
                one: _may_win(schedules.get(one, []), least)
                for one in tried
                if (op, one) not in failed
            },
        )


def _may_win(ratios: list[float], least: float) -> bool:
    return len(ratios) < _TRIED or median(ratios) < _AHEAD * least


def _is_variant(candidate: Candidate) -> bool:
    params = candidate.params
    if PIECE in params or COPIES in params:
        return True
    return split_params(params)[1] != TransportParams()


def _ratios(
    recording: Recording, ranks: int
) -> dict[Place, dict[Candidate, list[float]]]:
    """Return every candidate's time over the best of its launch."""
    times: dict[tuple[int, str, int, str], dict[Candidate, float]] = defaultdict(dict)
    for sample in recording.samples:
        launch = recording.launches[sample.launch]
        if launch.facts.size == ranks and not launch.held_out and sample.us:
            links = recording.group_of(sample).link_class
            cell = times[sample.launch, sample.op, sample.nbytes, links]
            cell[sample.candidate] = median(sample.us)
    found: dict[Place, dict[Candidate, list[float]]] = {}
    for (_, op, nbytes, links), by_candidate in times.items():
        best = min(by_candidate.values())
        cell_ratios = found.setdefault((op, nbytes, links), {})
        for candidate, us in by_candidate.items():
            cell_ratios.setdefault(candidate, []).append(us / best)
    return found
