# SPDX-License-Identifier: Apache-2.0
"""Some kills of the campaign that ``make chaos`` runs whole."""

from __future__ import annotations

import pytest
from chaos_campaign import campaign

KILLS = 8  # with Open MPI, again with MPICH, and torch's: some 20 in a run of the CI


@pytest.mark.whole
@pytest.mark.full(sample=1)
@pytest.mark.parametrize("seed", range(8))
def test_ranks_are_killed_at_random_moments(
    seed: int, pytestconfig: pytest.Config
) -> None:
    jobs = [*campaign(KILLS, seed + 8 * int(pytestconfig.getoption("seed") or 0))]
    assert sum(len(job.recovered_s) for job in jobs) == KILLS
