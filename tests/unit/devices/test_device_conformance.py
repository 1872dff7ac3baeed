# SPDX-License-Identifier: Apache-2.0
"""Simulated devices and devices of threads do what the probes say; so does a GPU.

tests/gpu runs the same probes on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from device_probes import PROBES, STRICT_PROBES, Rig
from graph_probes import GRAPH_PROBES
from timing_probes import TIMING_PROBES

from commrt.devices import SimWorld, ThreadDevice

Probe = Callable[[Rig], None]
ALL = PROBES + STRICT_PROBES + GRAPH_PROBES + TIMING_PROBES
SEEDS = 30
FULL_SEEDS = 500


@pytest.fixture
def seeds(full: bool, seed: int) -> range:
    number = FULL_SEEDS if full else SEEDS
    return range(seed, seed + number)


def name(probe: Probe) -> str:
    return probe.__name__


@pytest.mark.parametrize("queues", [1, 2, 8])
@pytest.mark.parametrize("probe", ALL, ids=name)
def test_simulated_devices_pass_for_every_seed(
    probe: Probe, queues: int, seeds: range
) -> None:
    for each in seeds:
        with SimWorld(seed=each, queues=queues) as world:
            rig = Rig(world.device(), "simulated", queues)
            probe(rig)
            rig.release()
            world.run_until_idle()


@pytest.mark.parametrize("probe", ALL, ids=name)
@pytest.mark.parametrize("max_delay_us", [0, 300])
def test_devices_of_threads_pass(probe: Probe, max_delay_us: int, seed: int) -> None:
    with ThreadDevice(seed=seed, max_delay_us=max_delay_us) as device:
        probe(Rig(device, "threads"))
