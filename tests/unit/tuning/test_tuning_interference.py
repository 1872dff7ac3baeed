# SPDX-License-Identifier: Apache-2.0
"""What the kernel says of other programs on the ranks' cores."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from commrt.tuning import interference
from commrt.tuning.interference import (
    WAKE_UP_US,
    CoreTime,
    Reference,
    WaitingTime,
    others_share,
)

STAT = """cpu  500 0 300 9000 10 5 5 60 0 0
cpu0 100 0 50 4000 5 1 1 {0} 0 0
cpu1 200 0 50 4000 5 1 1 {1} 0 0
cpu2 900 0 90 4000 5 1 1 99 0 0
intr 1 2 3
"""


def test_the_kernel_counts_how_long_a_thread_waited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "schedstat"
    path.write_text("123456 5000 7\n")
    monkeypatch.setattr(interference, "_SCHEDSTAT", str(path))
    waiting = WaitingTime()
    assert waiting.us() == 5.0
    path.write_text("123456 2500500 8\n")
    assert waiting.us() == 2500.5


def test_a_thread_that_slept_may_wake_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "schedstat"
    monkeypatch.setattr(interference, "_SCHEDSTAT", str(path))
    path.write_text("0 0 0\n")
    waiting = WaitingTime(wake_up_us=WAKE_UP_US)
    path.write_text("9000 100000 1\n")
    before_us = waiting.us()
    # Three messages, each of which woke the thread after 50 us: nobody else ran.
    path.write_text("9000 250000 4\n")
    assert waiting.us() - before_us <= 0
    # Another program had the core for 400 us before one of them.
    path.write_text("9000 650000 4\n")
    assert waiting.us() - before_us == pytest.approx(550 - 3 * WAKE_UP_US)


@pytest.mark.parametrize("text", [None, "", "no numbers here\n", "1 2\n"])
def test_without_the_kernels_count_two_clocks_say_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None
) -> None:
    path = tmp_path / "schedstat"
    if text is not None:
        path.write_text(text)
    monkeypatch.setattr(interference, "_SCHEDSTAT", str(path))
    wall, own = iter([10_000, 20_000]), iter([4_000, 6_000])
    monkeypatch.setattr(interference.time, "perf_counter_ns", lambda: next(wall))
    monkeypatch.setattr(interference.time, "thread_time_ns", lambda: next(own))
    waiting = WaitingTime()
    assert [waiting.us(), waiting.us()] == [6.0, 14.0]


def test_the_cores_of_this_process_alone_are_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "stat"
    path.write_text(STAT.format(0, 10))
    monkeypatch.setattr(interference, "_STAT", str(path))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    now = iter([0.0, 0.0, 1.0])
    monkeypatch.setattr(interference.time, "monotonic", lambda: next(now))
    core_time = CoreTime()
    core_time.start()
    path.write_text(STAT.format(20, 40).replace("cpu1 200", "cpu1 260"))
    passed_s, busy_s, stolen_s, _ = core_time.row()
    tick_s = 1 / os.sysconf("SC_CLK_TCK")
    assert passed_s == 2.0
    assert busy_s == pytest.approx(60 * tick_s)
    assert stolen_s == pytest.approx(50 * tick_s)


@pytest.mark.parametrize(("counted", "ticks"), [(True, 20 + 60 + 7), (False, 80)])
def test_interrupts_count_as_work_where_messages_do_not_cause_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, counted: bool, ticks: int
) -> None:
    path = tmp_path / "stat"
    path.write_text(STAT.format(0, 10))
    monkeypatch.setattr(interference, "_STAT", str(path))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    core_time = CoreTime(of_interrupts=counted)
    grown = STAT.format(0, 10).replace("cpu0 100 0 50", "cpu0 120 0 50")
    grown = grown.replace("cpu1 200 0 50 4000 5 1 1", "cpu1 260 0 50 4000 5 4 5")
    path.write_text(grown)
    _, busy_s, _, _ = core_time.row()
    assert busy_s == pytest.approx(ticks / os.sysconf("SC_CLK_TCK"))


def test_a_system_that_does_not_say_is_taken_to_be_idle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interference, "_STAT", str(tmp_path / "none"))
    assert CoreTime().row()[1:3] == [0, 0]


def test_ranks_that_share_cores_see_what_no_rank_used() -> None:
    # Two cores for a second: 1.9 s of work, of which two ranks did 0.7 s each.
    rows = [[2.0, 1.9, 0.0, 0.7], [2.0, 1.85, 0.0, 0.7]]
    assert others_share(rows, share_cores=True) == pytest.approx(0.25)
    assert others_share(rows, share_cores=False) == 0.0


def test_each_machine_has_cores_of_its_own() -> None:
    """Together the ranks of both did 1.4 s; on the second machine others did 0.6 s."""
    rows = [
        [1.0, 0.7, 0.0, 0.4],
        [1.0, 0.7, 0.0, 0.3],
        [1.0, 1.0, 0.0, 0.2],
        [1.0, 1.0, 0.0, 0.2],
    ]
    machines = [5, 5, 9, 9]
    assert others_share(rows[:2], share_cores=True) == pytest.approx(0.0)
    share = others_share(rows, share_cores=True, machines=machines)
    assert share == pytest.approx(0.6)
    mixed = [rows[2], rows[0], rows[3], rows[1]]
    assert others_share(mixed, share_cores=True, machines=[9, 5, 9, 5]) == share


def test_what_a_hypervisor_took_counts_always() -> None:
    rows = [[1.0, 0.5, 0.0, 0.5], [1.0, 0.3, 0.4, 0.3]]
    assert others_share(rows, share_cores=False) == pytest.approx(0.4)


def test_too_short_a_time_says_nothing() -> None:
    """The kernel counts in hundredths of a second."""
    assert others_share([[0.05, 0.05, 0.05, 0.0]], share_cores=True) == 0.0


def test_the_reference_is_the_least_of_a_few_times(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = iter([0, 9000, 10_000, 13_000, 20_000, 28_000])
    reference = Reference()
    monkeypatch.setattr(interference.time, "perf_counter_ns", lambda: next(now))
    assert reference.us() == 3.0
