# SPDX-License-Identifier: Apache-2.0
"""The CUDA driver whose card is the CPU does what an H200 was seen to do.

And commrt holds to it: what a stream takes behind a wait is bounded.
"""

from __future__ import annotations

from pathlib import Path

import cuda_on_host
import pytest
from held_streams import (
    beside_captures,
    calls_beside_frees,
    calls_that_wait,
    commands_behind_a_wait,
    copies_that_wait,
    many_pieces,
    touch,
)
from run_ranks import RunRanks

DEADLINE_S = 300.0
WAIT = ["free", "pinned_free", "load_kernels"]
GPU_TESTS = Path(__file__).parents[2] / "gpu"


@pytest.fixture
def process(tmp_path: Path) -> RunRanks:
    return RunRanks(tmp_path)


@pytest.mark.parametrize(
    ("queues", "wait"),
    [
        (None, WAIT),
        (8, WAIT),
        (1, [*WAIT, "pageable copy", "copy and synchronize"]),
    ],
)
def test_calls_that_wait_for_a_held_stream(
    queues: int | None, wait: list[str], process: RunRanks
) -> None:
    environ = cuda_on_host.environment(queues=queues)
    [found] = process(
        *(1, calls_that_wait), env=environ, deadline_s=DEADLINE_S, expected=wait
    )
    assert found == wait


def test_a_stream_takes_1020_commands_behind_a_wait(process: RunRanks) -> None:
    environ = cuda_on_host.environment()
    [found] = process(
        *(1, commands_behind_a_wait), env=environ, deadline_s=DEADLINE_S, number=1020
    )
    assert found == [True, False]


def test_staged_calls_of_many_pieces_fit(process: RunRanks) -> None:
    """All commands of a call are given before the host begins with its part."""
    environ = cuda_on_host.environment()
    found = process(
        *(2, many_pieces),
        env=environ,
        deadline_s=DEADLINE_S,
        pieces=2000,
        nbytes=256,
    )
    assert found == [True, True]


@pytest.mark.parametrize(
    ("kind", "algorithm"),
    [
        ("allreduce", "staged/direct"),
        ("allreduce", "staged/direct{piece=256}"),
        ("allreduce", "ipc/direct"),
        ("messages", None),
        ("a function", None),
        ("compressed", None),
        ("sparse", None),
    ],
)
def test_another_thread_frees_memory_beside_calls(
    kind: str, algorithm: str | None, seed: int, process: RunRanks
) -> None:
    """A free waits for the streams that a call holds, and holds up the call's rest."""
    found = process(
        *(2, calls_beside_frees),
        env=cuda_on_host.environment(seed=seed),
        deadline_s=DEADLINE_S,
        kind=kind,
        number=200,
        algorithm=algorithm,
    )
    assert found == [True, True]


def test_other_threads_beside_captures(process: RunRanks) -> None:
    """Only a capture in global mode ends by what another thread asks."""
    environ = {**cuda_on_host.environment(), "PYTHONPATH": str(GPU_TESTS)}
    [found] = process(1, beside_captures, env=environ, deadline_s=DEADLINE_S)
    asked, ended = found["global"]
    assert "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED" in asked
    assert "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED" in ended
    fine = ["query: True", "alloc: allowed", "the capture is good"]
    assert found["thread"] == found["relaxed"] == fine


def test_copies_that_wait_for_their_own_stream(process: RunRanks) -> None:
    """Those of pageable memory, and those between host memory, pinned or not."""
    wait = ["pinned to pinned", "pageable to device", "device to pageable"]
    [found] = process(
        *(1, copies_that_wait),
        env=cuda_on_host.environment(),
        deadline_s=DEADLINE_S,
        expected=wait,
    )
    assert found == wait


@pytest.mark.parametrize("guard", [True, False])
def test_the_guard_ends_who_touches_memory_of_the_device(
    guard: bool, process: RunRanks
) -> None:
    done = process.failing(
        *(1, touch),
        env=cuda_on_host.environment(guard=guard),
        deadline_s=DEADLINE_S,
    )
    assert done.ok != guard, done.describe_failure()
    assert ("SIGSEGV" in done.stderr) == guard
