# SPDX-License-Identifier: Apache-2.0
"""Sharded embedding bags return the rows and learn the gradients of torch's."""

from __future__ import annotations

import pytest
from embedding_cases import FORMS, compare, counts_of
from tensor3d_cases import NEAR


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("kind", FORMS)
def test_bags_on_few_ranks_are_torchs(kind: str, ranks: int) -> None:
    for seed in (0, 1):
        off = compare(FORMS[kind], counts_of(ranks, seed), seed=seed)
        assert max(off.values()) < NEAR, off


@pytest.mark.full(sample=4)
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("ranks", [4, 8])
@pytest.mark.parametrize("kind", FORMS)
def test_bags_on_more_ranks_are_torchs(kind: str, ranks: int, seed: int) -> None:
    off = compare(FORMS[kind], counts_of(ranks, seed), seed=seed)
    assert max(off.values()) < NEAR, off
