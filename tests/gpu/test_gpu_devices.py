# SPDX-License-Identifier: Apache-2.0
"""A GPU does what the probes say, which other devices are held to, too."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest
import staged_model
from device_probes import PROBES, Rig
from graph_probes import GRAPH_PROBES
from timing_probes import TIMING_PROBES

from commrt.devices import CudaDevice
from commrt.devices.cuda import open_device, why_missing


@pytest.fixture
def rig() -> Iterator[Rig]:
    reason = why_missing()
    if reason is not None:
        pytest.skip(reason)
    device = open_device()
    if not device.memory_flags:
        pytest.skip(f"{device.name} has no stream memory operations")
    queues = int(os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") or 8)
    rig = Rig(device, "cuda", queues)
    yield rig
    rig.release()


@pytest.mark.parametrize(
    "probe",
    PROBES + GRAPH_PROBES + TIMING_PROBES,
    ids=lambda probe: probe.__name__,
)
def test_a_gpu_passes(probe: Callable[[Rig], None], rig: Rig) -> None:
    probe(rig)


class OneGpu(staged_model.OnThreads):
    """Both ranks on one GPU, their threads as they are."""

    def __init__(self, device: CudaDevice) -> None:
        self.devices = [device, device]


@pytest.mark.parametrize("fails_at", [None, 3])
def test_the_staged_model_sums_right(rig: Rig, fails_at: int | None) -> None:
    if rig.queues == 1:
        pytest.skip("both ranks on one hardware queue: each holds the other one up")
    for _ in range(20):
        staged_model.run(OneGpu(rig.device), fails_at=fails_at)
