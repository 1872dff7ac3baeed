# SPDX-License-Identifier: Apache-2.0
"""Drawn programs with a drawn fault: typed errors, no hang, and all who live go on.

The fixture of every test looks for threads, descriptors and memory that are left.
"""

from __future__ import annotations

import pytest
from random_faults import KINDS, complaints, draw_plan


@pytest.mark.full(sample=30)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("number", range(72))
def test_a_random_fault_in_random_calls(kind: str, number: int, seed: int) -> None:
    plan = draw_plan(f"{seed} {number}", kind)
    assert complaints(plan) == []
