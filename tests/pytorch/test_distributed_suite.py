# SPDX-License-Identifier: Apache-2.0
"""torch's own tests of a backend: a few of the fast ones in each run, else all."""

from __future__ import annotations

import random

import pytest
from distributed_names import PASSING
from distributed_suite import run, run_names

SAMPLE = 6
LEAST = 89
"""Pass with two ranks and no GPU; on gloo 91, of which two are for it alone."""
GATED = {
    # torch.distributed.monitored_barrier is for gloo's groups only; the group's own
    # method, which the third of these tests calls, is not.
    "test_monitored_barrier_gloo",
    "test_monitored_barrier_gloo_subgroup",
}


def test_some_of_torchs_own_tests(seed: int) -> None:
    names = random.Random(seed).sample(PASSING, SAMPLE)
    assert run_names("commrt", names) == dict.fromkeys(names, "passed")


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_all_of_torchs_own_tests() -> None:
    found = run("commrt", "", {})
    failed = {
        name: how for name, how in found.items() if how not in ("passed", "skipped")
    }
    assert {*failed} <= GATED, failed
    assert sum(how == "passed" for how in found.values()) >= LEAST
    assert all(found[name] == "passed" for name in PASSING)
