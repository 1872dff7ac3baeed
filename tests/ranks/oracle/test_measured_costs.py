# SPDX-License-Identifier: Apache-2.0
"""Ranks measure their collectives for the oracle, in groups of every size."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from commrt.errors import UsageError
from commrt.local import run
from commrt.oracle.clocks import Stopwatch
from commrt.oracle.measuring import measured_costs
from commrt.oracle.transfers import COLLECTIVES, Group, Transfer

QUICK = {"sizes": (64, 4096), "window_s": 1e-4, "rounds": 1}
FORMS = {1: [], 2: [(2, 1)], 3: [(3, 1)], 4: [(2, 1), (2, 2), (4, 1)]}


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("clock", ["wall", "cores"])
def test_every_form_of_a_group_is_measured(ranks: int, clock: str) -> None:
    def main(comm: Any) -> Any:
        return measured_costs(comm, clock=clock, **QUICK)  # type: ignore[arg-type]

    first, *others = run(ranks, main)
    keys = {(coll, *form) for coll in COLLECTIVES for form in FORMS[ranks]}
    assert {*first.points} == keys
    assert all(other.points == first.points for other in others)
    for (coll, size, _), points in first.points.items():
        whole = 1 if coll == "message" else size
        assert [n // 4 % whole for n, _ in points] == [0, 0], "blocks are even"
    group = Group("data", ranks, 1, ranks)
    assert first.seconds(Transfer("allreduce", group, 500, 1, "test")) > 0
    assert f"measured by {ranks} ranks" in first.origin


def test_one_rank_has_nothing_to_measure() -> None:
    def main(comm: Any) -> None:
        with pytest.raises(UsageError, match="one rank sends nothing"):
            measured_costs(comm)

    run(1, main)


def test_no_sizes_are_refused_on_all_ranks() -> None:
    def main(comm: Any) -> None:
        with pytest.raises(UsageError, match="expected bytes"):
            measured_costs(comm, sizes=())

    run(2, main)


def test_times_are_the_same_on_all_ranks() -> None:
    def main(comm: Any) -> tuple[float, float]:
        watch = Stopwatch(comm, window_s=1e-4, rounds=2)
        x = np.zeros(16, np.float32)
        return watch.mean_s(lambda: x.sum()), watch.together_s(
            lambda: comm.allreduce(x)
        )

    found = run(3, main)
    assert {*found} == {found[0]}
    assert min(found[0]) > 0


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        ({"clock": "sun"}, "clock is 'sun'"),
        ({"window_s": 0.0}, "window_s is 0.0"),
        ({"rounds": 0}, "rounds 0"),
    ],
)
def test_a_watch_without_sense_is_refused(wrong: dict[str, Any], problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        Stopwatch(None, **wrong)


def test_one_process_needs_no_communicator() -> None:
    watch = Stopwatch(None, window_s=1e-4, rounds=1)
    calls: list[int] = []
    assert watch.mean_s(lambda: calls.append(1)) > 0
    assert watch.together_s(lambda: calls.append(1), most=1) > 0
    assert len(calls) >= 4
