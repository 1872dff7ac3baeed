# SPDX-License-Identifier: Apache-2.0
"""A CUDA driver that refuses a call, and ranks that are killed, in calls on a device.

The driver is the one whose card is the CPU (``tests/support/cuda_on_host``); the ranks
are processes that share its memory.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import cuda_on_host
import pytest
from failing_driver_calls import died, failed_for_good, failed_in_turn
from run_ranks import RunRanks

DEADLINE_S = 300.0
OUT_OF_MEMORY = 2
STAGED = (
    *("cuEventRecord", "cuStreamWaitEvent", "cuMemcpyAsync"),
    *("cuStreamWriteValue32", "cuStreamWaitValue32"),
)
FUNCTIONS = {
    "staged/direct": STAGED,
    # More pieces than are on their way at once: given while the host is at work.
    "staged/direct{piece=2048}": STAGED,
    "ipc/direct": (
        *("cuEventRecord", "cuStreamWaitEvent", "cuLaunchKernel"),
        *("cuStreamWriteValue32", "cuStreamWaitValue32"),
    ),
}
ALL_FUNCTIONS = {**FUNCTIONS, "messages": STAGED, "compressed": STAGED}
"""What a call has the driver do once it has its number. Before, a rank refuses its
call, and may try again: its peers wait for it."""


@pytest.fixture
def ranks(tmp_path: Path) -> RunRanks:
    return RunRanks(tmp_path)


@pytest.mark.full(sample=1)
@pytest.mark.parametrize("algorithm", ALL_FUNCTIONS)
def test_each_call_of_the_driver_may_fail(
    algorithm: str, seed: int, ranks: RunRanks
) -> None:
    """The rank says which; its peers hear of it at once; later calls say so, too."""
    functions = ALL_FUNCTIONS[algorithm]
    failing, peer = ranks(
        *(2, failed_in_turn),
        env=cuda_on_host.environment(seed=seed),
        deadline_s=DEADLINE_S,
        algorithm=algorithm,
        functions=functions,
        result=OUT_OF_MEMORY,
    )
    for function in functions:
        assert len(failing[function]) >= 1, f"{function} was not called"
        for (said, then_said), (heard, then_heard) in zip(
            failing[function], peer[function], strict=True
        ):
            assert said.startswith("DeviceError: "), said
            assert f"{function}() on CUDA device 0: " in said, said
            assert then_said.startswith("RevokedError: "), then_said
            # It may have had all that it needs.
            assert heard == "done" or heard.startswith("RevokedError: "), heard
            assert then_heard.startswith("RevokedError: "), then_heard


@pytest.mark.parametrize("algorithm", ALL_FUNCTIONS)
def test_an_error_that_stays(algorithm: str, seed: int, ranks: RunRanks) -> None:
    function = random.Random(seed).choice(ALL_FUNCTIONS[algorithm])
    failing, peer = ranks(
        *(2, failed_for_good),
        env=cuda_on_host.environment(seed=seed),
        deadline_s=DEADLINE_S,
        algorithm=algorithm,
        name=function,
    )
    assert failing[0].startswith("DeviceFailedError: "), failing
    assert all(f"{function}() on" in said for said in failing), failing
    assert all("end the process" in said for said in failing), failing
    assert peer[0] == "done" or peer[0].startswith("RevokedError: "), peer
    assert peer[1].startswith("RevokedError: "), peer


@pytest.mark.full(sample=2)
@pytest.mark.parametrize("max_delay_us", [0, 200])
@pytest.mark.parametrize("algorithm", FUNCTIONS)
def test_a_rank_that_is_killed(
    algorithm: str, max_delay_us: int, seed: int, tmp_path: Path
) -> None:
    """Its peers have its memory open; they are told, and end in good order."""
    RunRanks(tmp_path, options=("--keep-going",)).failing(
        *(3, died),
        env=cuda_on_host.environment(seed=seed, max_delay_us=max_delay_us),
        deadline_s=DEADLINE_S,
        algorithm=algorithm,
    )
    for rank in (0, 2):
        result = tmp_path / "died_0" / f"{rank}.json"
        assert result.exists(), f"rank {rank} did not end as it should"
        said, then_said = json.loads(result.read_text())
        assert said.startswith(("PeerFailedError: ", "RevokedError: ")), said
        assert "rank 1 has died" in said or "gave up" in said, said
        assert then_said.startswith(("PeerFailedError: ", "RevokedError: ")), then_said
    assert not (tmp_path / "died_0" / "1.json").exists()
