# SPDX-License-Identifier: Apache-2.0
"""Tumours of the breast: 569 rows of 30 measurements, and which are benign.

They are "Breast Cancer Wisconsin (Diagnostic)" by W. Wolberg, O. Mangasarian, N. Street
and W. Street (1993), UCI Machine Learning Repository, doi 10.24432/C5DW2B, licensed
under CC BY 4.0, in the order in which scikit-learn has them (``load_breast_cancer``).
Each of ten features of the cells has a mean, a standard error, and the mean of its
three worst values. The numbers are stored as float32; nothing else was changed.
"""

from __future__ import annotations

from importlib import resources
from typing import Any, NamedTuple

import numpy as np
import torch

from commrt.layers.embeddings import EmbeddingTable

__all__ = ["NUM_DENSE", "TABLES", "Samples", "load_measurements", "load_samples"]

NUM_DENSE = 10
"""Numbers of a sample that are no categories: the means."""
DIM = 8
BINS = 8
"""A measurement's category is the part of the data, of eight, that it lies in."""
CROSSED = 53
"""Rows that pairs of categories are hashed to."""
PAIRS = ((0, 1), (2, 5), (3, 7), (4, 8), (6, 9))
"""Features whose worst values are crossed."""

TABLES = (
    EmbeddingTable("errors", 10 * BINS, DIM, sharding="row", lookups=10, init_std=0.1),
    EmbeddingTable(
        *("worst", 10 * BINS, DIM, "mean"),
        sharding="column",
        lookups=10,
        init_std=0.1,
    ),
    *(
        EmbeddingTable(f"cross_{one}_{other}", CROSSED, DIM, init_std=0.1)
        for one, other in PAIRS
    ),
)
"""One bag of ten errors, one of ten worst values, and bags of one crossed pair."""


class Samples(NamedTuple):
    """Samples of the data."""

    dense: torch.Tensor
    """(samples, 10), float64, of mean 0 and variance 1 over all samples."""
    bags: list[torch.Tensor]
    """(samples, length) of each table, int64."""
    is_benign: torch.Tensor
    """(samples,), float64: 0 or 1."""

    def of(self, numbers: torch.Tensor) -> Samples:
        """Return the samples of some numbers."""
        bags = [each[numbers] for each in self.bags]
        return Samples(self.dense[numbers], bags, self.is_benign[numbers])


def load_measurements() -> tuple[Any, Any]:
    """Return measurements (569, 30) of float32, and 1 for each benign tumour."""
    path = resources.files("commrt.examples") / "tumours.npz"
    with path.open("rb") as file, np.load(file) as held:
        return held["measurements"], held["is_benign"]


def load_samples() -> Samples:
    """Return all samples, with quantised and hashed categories."""
    measured, is_benign = load_measurements()
    means, errors, worst = np.split(measured.astype(np.float64), 3, axis=1)
    dense = (means - means.mean(0)) / means.std(0)
    first = np.arange(10) * BINS
    error_bins, worst_bins = _quantised(errors), _quantised(worst)
    bags = [error_bins + first, worst_bins + first]
    for one, other in PAIRS:
        pair = worst_bins[:, one] * BINS + worst_bins[:, other]
        bags.append((pair * 2654435761 % 2**32 % CROSSED)[:, None])
    return Samples(
        torch.from_numpy(dense),
        [torch.from_numpy(np.ascontiguousarray(each)) for each in bags],
        torch.from_numpy(is_benign.astype(np.float64)),
    )


def _quantised(values: Any) -> Any:
    """Return the part of the data that each value lies in, int64, column by column."""
    ends = np.quantile(values, np.arange(1, BINS) / BINS, axis=0)
    return (values[:, None, :] >= ends[None]).sum(1)
