# SPDX-License-Identifier: Apache-2.0
"""Random numbers of an exchange: how many samples go where, which, and their order.

In an exchange each rank draws some of its samples. All drawn samples change places at
random, all ways of doing so being equally likely. A sample may thus come back to its
own rank. Numbers of samples between ranks are drawn from one stream of numbers that all
ranks share, and nobody sends them. Everything else is a rank's own affair, and drawn
from a stream of its own.

Source: Nguyen et al., "Why Globally Re-shuffle? Revisiting Data Shuffling in Large
Scale Deep Learning" (IPDPS 2022), for the exchange of a fraction. There all ranks have
equally many samples; places that are drawn from all alike leave any numbers as they
are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = ["MOST_DRAWN", "Ints", "drawn_of", "num_between", "num_drawn", "order_of"]

Ints: TypeAlias = npt.NDArray[np.int64]

MOST_DRAWN = 10**9 - 1
"""Samples that all ranks may draw at once: numpy's hypergeometric draws end there."""
_SHARED = 0
"""The stream of all ranks; that of a rank has the number rank + 1."""
_PLACES, _ORDER = 0, 1


def num_drawn(fraction: float, num_samples: int) -> int:
    """Return how many samples a rank draws: fraction * num_samples, rounded down.

    The fraction counts as it is written: 0.29 of 100 are 29, though the nearest double
    is a little less than 0.29.
    """
    return math.floor(Fraction(repr(float(fraction))) * num_samples)


def num_between(
    drawn: Sequence[int], rank: int, seed: int, epoch: int
) -> tuple[Ints, Ints]:
    """Return how many samples go to each rank, and how many come from each.

    Args:
        drawn: samples that each rank draws.
        rank: this rank. Its own count is of samples that stay, the same in both.
        seed, epoch: of the stream of numbers.

    Takes a time that grows with the square of the number of ranks.
    """
    draws = _stream(seed, epoch, _SHARED, _PLACES)
    free = np.array(drawn, np.int64)
    sends, recvs = np.zeros_like(free), np.zeros_like(free)
    for source, number in enumerate(drawn):
        row = draws.multivariate_hypergeometric(free, number, method="marginals")
        free -= row
        recvs[source] = row[rank]
        if source == rank:
            sends[:] = row
    return sends, recvs


def drawn_of(num_samples: int, number: int, rank: int, seed: int, epoch: int) -> Ints:
    """Return which samples a rank draws, in random order; places among its own."""
    draws = _stream(seed, epoch, 1 + rank, _PLACES)
    return draws.choice(num_samples, number, replace=False).astype(np.int64)


def order_of(num_samples: int, rank: int, seed: int, epoch: int) -> Ints:
    """Return the order of a rank's samples in an epoch."""
    return _stream(seed, epoch, 1 + rank, _ORDER).permutation(num_samples)


def _stream(seed: int, epoch: int, owner: int, purpose: int) -> np.random.Generator:
    key = (epoch, owner, purpose)
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=key))
