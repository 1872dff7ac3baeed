# SPDX-License-Identifier: Apache-2.0
"""Mixtures of experts on grids compute and learn what a plain loop does."""

from __future__ import annotations

import pytest
from expert_cases import (
    Form,
    Split,
    batches_of,
    compare,
    splits_of,
)
from tensor3d_cases import NEAR

FORMS = {
    "top-1": Form(top_k=1, num_shared=0),
    "top-2 of 7, shared": Form(num_experts=7, num_shared=2, normalize=True),
    "gelu, top-3": Form(top_k=3, activation="gelu", num_shared=0, d_hidden=3),
    "capacity": Form(top_k=2, capacity_factor=0.8),
    "one expert": Form(num_experts=1, top_k=1, num_shared=0, activation="relu"),
    "modules": Form(num_experts=5, top_k=2, of_modules=True),
    "modules, capacity": Form(of_modules=True, capacity_factor=0.6, num_shared=0),
}


@pytest.mark.parametrize("split", [(1, 1, 1), *splits_of(2)])
@pytest.mark.parametrize("kind", FORMS)
def test_one_and_two_ranks_are_a_plain_loop(kind: str, split: Split) -> None:
    form = FORMS[kind]
    assert max(compare(form, split, batches_of(split, 4, form)).values()) < NEAR


@pytest.mark.full(sample=12)
@pytest.mark.parametrize("split", splits_of(4))
@pytest.mark.parametrize("kind", FORMS)
def test_four_ranks_are_a_plain_loop(kind: str, split: Split) -> None:
    form = FORMS[kind]
    assert max(compare(form, split, batches_of(split, 5, form)).values()) < NEAR
