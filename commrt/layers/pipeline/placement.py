# SPDX-License-Identifier: Apache-2.0
"""Runs of layers on places: what a partition is, and how long its stages take."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from commrt.errors import UsageError, shown
from commrt.vocabulary.checks import as_integer, as_items

__all__ = ["Floats", "Placement", "number_of_stages", "numbers_of", "stage_seconds"]

Floats: TypeAlias = npt.NDArray[np.float64]


class Placement(NamedTuple):
    """Layers of each stage of a pipeline, and the place that runs it."""

    ranges: tuple[range, ...]
    """For each stage its layers, one stage behind the other."""
    places: tuple[int, ...]
    """For each stage its place: a number in the list of speeds."""

    @property
    def num_layers(self) -> int:
        """Layers of all stages."""
        return self.ranges[-1].stop


def stage_seconds(
    placement: Placement,
    costs: Sequence[float],
    speeds: Sequence[float],
    transfers: Sequence[float] | None = None,
) -> tuple[float, ...]:
    """Return how long each stage takes for a micro-batch, by ``partition``'s costs.

    The longest of them bounds the pipeline: it is the time between two micro-batches.
    """
    what = "stage_seconds"
    work = numbers_of(what, "costs", costs)
    speed = numbers_of(what, "speeds", speeds, least=0.0, is_strict=True)
    edges = edge_seconds(what, transfers, len(work))
    if placement.num_layers != len(work):
        raise UsageError(
            f"{what}: the placement has {placement.num_layers} layers, and costs has "
            f"{len(work)}; pass the cost of each of its layers"
        )
    for stage, place in enumerate(placement.places):
        number = as_integer(place)
        if number is None or not 0 <= number < len(speed):
            raise UsageError(
                f"{what}: stage {stage} of the placement has place {shown(place)}, and "
                f"speeds has {len(speed)} numbers; pass the speed of each place"
            )
    return tuple(
        float(sum(work[layers.start : layers.stop].tolist()) / speed[place])
        + float(edges[layers.start] + edges[layers.stop])
        for layers, place in zip(*placement, strict=True)
    )


def edge_seconds(
    what: str, transfers: Sequence[float] | None, num_layers: int
) -> Floats:
    """Return the transfers at each boundary, with those at both ends, which are none.

    Raises UsageError unless there is one for each boundary between two layers.
    """
    edges = np.zeros(num_layers + 1)
    if transfers is not None:
        given = numbers_of(what, "transfers", transfers, can_be_empty=True)
        if len(given) != num_layers - 1:
            raise UsageError(
                f"{what}: transfers has {len(given)} numbers for {num_layers} layers; "
                f"expected {num_layers - 1}, one for each boundary between two layers"
            )
        edges[1:-1] = given
    return edges


def numbers_of(
    what: str,
    name: str,
    values: Any,
    *,
    least: float = 0.0,
    is_strict: bool = False,
    can_be_empty: bool = False,
) -> Floats:
    """Return numbers as an array; UsageError for anything but a list of finite ones."""
    items = as_items(values)
    bound = f"{'above' if is_strict else 'from'} {least:g}"
    if items is None or not (items or can_be_empty):
        raise UsageError(
            f"{what}: {name}={shown(values)} must be a list of numbers {bound}"
        )
    found = []
    for index, value in enumerate(items):
        try:
            number = math.nan if isinstance(value, bool | str) else float(value)
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        is_low = number <= least if is_strict else number < least
        if not math.isfinite(number) or is_low:
            raise UsageError(
                f"{what}: {name}[{index}]={shown(value)} must be a finite number "
                f"{bound}"
            )
        found.append(number)
    return np.array(found, np.float64)


def number_of_stages(
    what: str, stages: int | None, num_layers: int, num_places: int
) -> int:
    """Return the number of stages; UsageError unless layers and places suffice."""
    number = num_places if stages is None else as_integer(stages)
    if number is None or number < 1:
        raise UsageError(f"{what}: stages={shown(stages)} must be an integer from 1")
    if number > num_layers:
        raise UsageError(
            f"{what}: {number} stages are more than {num_layers} layers, and each "
            f"stage needs one; use fewer stages, or cut layers finer"
        )
    if number > num_places:
        raise UsageError(
            f"{what}: {number} stages are more than {num_places} places; each stage "
            f"has a place of its own"
        )
    return number
