# SPDX-License-Identifier: Apache-2.0
"""Operations whose slots move on from call to call, and the probe that decides it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from commrt.comm import core_of
from commrt.local import run
from commrt.request import wait_all

LANE_NBYTES = 4 << 20
COUNTS = (2049, 4096, 12_000, 30_000, 65_536, 70_001, 200_000, 3)
"""Of float32: from below what moves to several fragments."""


def numbers(rank: int, call: int, count: int) -> Any:
    """Return whole numbers that tell ranks, calls and places apart."""
    return ((np.arange(count) * 7 + 31 * rank + 13 * call) % 97).astype(np.float32)


@pytest.mark.parametrize("window", [0, 8192, 100_000, 1 << 20, LANE_NBYTES, 1 << 30])
@pytest.mark.parametrize(
    ("size", "algorithm"),
    [(2, "direct"), (2, "recursive_doubling"), (3, "ring"), (4, "direct")],
)
def test_sums_are_right_wherever_their_slots_lie(
    size: int, algorithm: str, window: int
) -> None:
    way = f"local/{algorithm}"

    def main(comm: Any) -> list[Any]:
        core_of(comm).set_slot_window(window)
        wrong = []
        for call in range(40):
            count = COUNTS[call % len(COUNTS)]
            want = sum(numbers(rank, call, count) for rank in range(size))
            x = numbers(comm.rank, call, count)
            got = comm.allreduce(x, out=np.empty_like(x), algorithm=way)
            if not np.array_equal(got, want):
                wrong.append((call, count))
        return wrong

    assert run(size, main, timeout_s=300) == [[]] * size


@pytest.mark.parametrize("window", [50_000, 1 << 20])
def test_many_in_flight_share_lanes_and_windows(window: int) -> None:
    def main(comm: Any) -> list[int]:
        core_of(comm).set_slot_window(window)
        counts = [COUNTS[call % len(COUNTS)] for call in range(60)]
        outs = [np.empty(count, np.float32) for count in counts]
        wait_all(
            [
                comm.allreduce(
                    numbers(comm.rank, call, count), out=out, nonblocking=True
                )
                for call, (count, out) in enumerate(zip(counts, outs, strict=True))
            ]
        )
        return [
            call
            for call, (count, out) in enumerate(zip(counts, outs, strict=True))
            if not np.array_equal(
                out, sum(numbers(rank, call, count) for rank in range(3))
            )
        ]

    assert run(3, main, timeout_s=300) == [[]] * 3


def test_ranks_need_not_agree_about_windows() -> None:
    def main(comm: Any) -> bool:
        core_of(comm).set_slot_window((0, 1 << 20, 200_000)[comm.rank])
        for call in range(30):
            x = numbers(comm.rank, call, 20_000)
            want = np.concatenate([numbers(rank, call, 20_000) for rank in range(3)])
            got = comm.allgather(x, out=np.empty_like(want))
            if not np.array_equal(got, want):
                return False
        return True

    assert run(3, main, timeout_s=300) == [True] * 3


def test_both_ways_are_measured_or_neither() -> None:
    """Threads may be off their cores: then time runs out, for both."""

    def main(comm: Any) -> list[tuple[float, float]]:
        return [
            core_of(comm).probe_slots_ns(1 - comm.rank, 1 << 20, 5.0) for _ in range(2)
        ]

    for found in zip(*run(2, main, timeout_s=300), strict=True):
        for same_ns, moving_ns in found:
            assert (same_ns > 0) == (moving_ns > 0)


def test_a_probe_whose_partner_does_not_come_gives_up_and_spoils_nothing() -> None:
    def main(comm: Any) -> tuple[float, float]:
        found = (0.0, 0.0)
        if comm.rank == 0:
            found = core_of(comm).probe_slots_ns(1, 1 << 20, 0.01)
        comm.barrier()
        if comm.rank == 1:  # the partner of a probe that is over
            found = core_of(comm).probe_slots_ns(0, 1 << 20, 0.01)
        comm.barrier()
        x = numbers(comm.rank, 0, 50_000)
        want = numbers(0, 0, 50_000) + numbers(1, 0, 50_000)
        assert np.array_equal(comm.allreduce(x), want)
        return found

    assert run(2, main, timeout_s=300) == [(-1.0, -1.0)] * 2
