# SPDX-License-Identifier: Apache-2.0
"""Simulated times equal those of SimGrid 4.1 (model CM02) on a star, to six digits.

The values were computed with SimGrid: hosts with links of 12.5 GB/s and 1 us around one
switch, 16 MiB on 64 ranks and 64 MiB on more.
"""

from __future__ import annotations

import pytest

from commrt import algorithms
from commrt.sim.costs import Costs
from commrt.sim.simulate import simulate
from commrt.sim.topologies.crossbars import Star

_MIB = 1 << 20
EAGER, RENDEZVOUS = Costs(), Costs(eager_nbytes=0)


@pytest.mark.parametrize("costs", [EAGER, RENDEZVOUS], ids=["eager", "rendezvous"])
@pytest.mark.parametrize(
    ("name", "ranks", "nbytes", "num_messages", "time_us"),
    [
        ("halving_doubling", 64, 16 * _MIB, 768, 2666.412),
        ("halving_doubling", 256, 64 * _MIB, 4096, 10727.475),
        ("halving_doubling", 1024, 64 * _MIB, 20480, 10766.932),
        ("ring", 256, 64 * _MIB, 130560, 11715.475),
    ],
)
def test_times_on_a_star_are_those_of_simgrid(
    name: str, ranks: int, nbytes: int, num_messages: int, time_us: float, costs: Costs
) -> None:
    schedule = algorithms.schedule("allreduce", name, ranks)
    run = simulate(schedule, Star(ranks).network(), nbytes, costs=costs)
    assert len(run.messages.send) == num_messages
    assert run.time_us == pytest.approx(time_us, abs=0.0006)
