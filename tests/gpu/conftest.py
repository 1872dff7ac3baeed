# SPDX-License-Identifier: Apache-2.0
"""What tests on a GPU share: the device, ranks as processes, a narrower leak guard."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from run_ranks import RunRanks
from torch_ranks import torchrun

from commrt.devices.cuda import why_missing, why_no_card
from commrt.devices.registry import cuda_device
from commrt.errors import BackendError
from commrt.nccl import libnccl

__all__ = ["torchrun"]

_GRACE_S = 20.0


@pytest.fixture(autouse=True)
def leak_guard() -> Iterator[None]:
    """Fail a test that leaves threads of Python or shared memory.

    A driver opens files whenever it likes and keeps them to the end of the process, so
    descriptors, which other tests look at, too, say nothing here.
    """
    before = _held()
    yield
    deadline = time.monotonic() + _GRACE_S
    while left := _held() - before:
        gc.collect()
        if time.monotonic() > deadline:
            pytest.fail("left behind: " + ", ".join(sorted(left)))
        threading.Event().wait(0.01)


def _held() -> set[str]:
    threads = {f"thread {t.name} ({t.ident})" for t in threading.enumerate()}
    return threads | {str(path) for path in Path("/dev/shm").glob("commrt*")}


@pytest.fixture
def gpu() -> Any:
    """Return the first GPU, which streams' flags work on; skip where there is none."""
    reason = why_missing()
    if reason is not None:
        pytest.skip(reason)
    device = cuda_device(0)
    if not device.memory_flags:
        pytest.skip(f"{device.name} has no stream memory operations")
    return device


@pytest.fixture
def ranks(tmp_path: Path) -> RunRanks:
    """Return a way to run functions on processes that share the GPU.

    This process opens no device: its own context would take turns with theirs.
    """
    reason = why_no_card()
    if reason is not None:
        pytest.skip(reason)
    return RunRanks(tmp_path)


@pytest.fixture
def nccl_ranks(ranks: RunRanks) -> RunRanks:
    """Return such a way where there is NCCL."""
    try:
        libnccl.find()
    except BackendError as error:
        pytest.skip(str(error))
    return ranks


@pytest.fixture
def torch_ranks(torchrun: Any) -> Any:
    """Return a way to run functions on torchrun's ranks, which share the GPU."""
    reason = why_no_card()
    if reason is not None:
        pytest.skip(reason)
    pytest.importorskip("torch")
    return torchrun
