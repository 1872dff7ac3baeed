# SPDX-License-Identifier: Apache-2.0
"""Samples of ranks, and their exchange in one process, written with lists."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np

from commrt.layers.samples.draws import drawn_of, num_between, num_drawn, order_of

Ids = list[list[int]]

COUNTS = {
    1: [(7,), (0,), (1,)],
    2: [(5, 6), (0, 4), (1, 1), (0, 0)],
    3: [(9, 0, 4), (1, 2, 30)],
    4: [(7, 8, 8, 1), (0, 0, 5, 0)],
    8: [(3, 0, 10, 1, 1, 6, 2, 12)],
}
"""Numbers of samples of the ranks."""
CASES = [counts for every in COUNTS.values() for counts in every]
FRACTIONS = (0.0, 0.3, 0.5, 1.0)


def ids_of(counts: tuple[int, ...]) -> Ids:
    """Return numbers of samples, those of each rank, in the order of ranks."""
    ends = np.cumsum([0, *counts]).tolist()
    return [[*range(low, high)] for low, high in pairwise(ends)]


def samples_of(ids: Any) -> dict[str, Any]:
    """Return samples of several types and shapes that their number decides."""
    number = np.asarray(ids, np.int64)
    return {
        "picture": np.multiply.outer(number, np.arange(6.0).reshape(2, 3)) + 0.5,
        "id": number,
        "flag": number % 3 == 0,
        "nothing": np.zeros((len(number), 0), np.float32),
        "word": np.array([f"n{each}" for each in number], "U5"),
    }


def check_samples(found: dict[str, Any]) -> list[int]:
    """Return the numbers of samples, all of whose arrays must be of one another."""
    wanted = samples_of(found["id"])
    assert [*found] == [*wanted]
    for name, array in wanted.items():
        assert found[name].dtype == array.dtype
        np.testing.assert_array_equal(found[name], array)
    numbers: list[int] = found["id"].tolist()
    return numbers


def exchanged(ids: Ids, fraction: float, seed: int, epoch: int) -> Ids:
    """Return the numbers of each rank's samples in the next epoch, in its order."""
    size = len(ids)
    drawn = [num_drawn(fraction, len(own)) for own in ids]
    boxes: list[dict[int, list[int]]] = [{} for _ in ids]  # by the rank they come from
    kept = []
    for rank, own in enumerate(ids):
        if size == 1:
            kept.append(own)
            continue
        sends, _ = num_between(drawn, rank, seed, epoch)
        places = drawn_of(len(own), drawn[rank], rank, seed, epoch).tolist()
        gone = set()
        for to in range(size):
            mine, places = places[: sends[to]], places[sends[to] :]
            if to != rank:
                boxes[to][rank] = [own[place] for place in mine]
                gone |= {*mine}
        assert places == []
        kept.append([each for place, each in enumerate(own) if place not in gone])
    found = []
    for rank, own in enumerate(kept):
        here = own + [
            each for source in sorted(boxes[rank]) for each in boxes[rank][source]
        ]
        order = order_of(len(here), rank, seed, epoch)
        found.append([here[place] for place in order.tolist()])
    return found
