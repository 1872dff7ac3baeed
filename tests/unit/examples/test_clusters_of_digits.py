# SPDX-License-Identifier: Apache-2.0
"""Clusters are found where there are some, and are compared by what they share."""

from __future__ import annotations

import math

import numpy as np
import pytest

from commrt.examples.graph_nmf import NUM_CLUSTERS, clusters_of, mutual_information


def test_mutual_information_is_of_groups_not_of_names() -> None:
    one = np.array([0, 0, 1, 1, 2, 2])
    assert mutual_information(one, np.array([5, 5, 0, 0, 3, 3])) == pytest.approx(1)
    assert mutual_information(one, np.zeros(6, int)) == pytest.approx(0, abs=1e-12)
    assert mutual_information(np.zeros(6, int), np.zeros(6, int)) == 1.0


def test_mutual_information_of_half_a_bit() -> None:
    """One label tells the first bit of two."""
    both = np.array([0, 1, 2, 3])
    half = np.array([0, 0, 1, 1])
    shared = math.log(2) / (0.5 * (math.log(4) + math.log(2)))
    assert mutual_information(both, half) == pytest.approx(shared)


def test_clusters_far_apart_are_found(seed: int) -> None:
    rng = np.random.default_rng(seed)
    truth = rng.permutation(np.repeat(np.arange(NUM_CLUSTERS), 12))
    rows = 40.0 * np.eye(NUM_CLUSTERS)[truth] + rng.standard_normal((120, 10))
    assert mutual_information(clusters_of(rows, 0), truth) == pytest.approx(1)
