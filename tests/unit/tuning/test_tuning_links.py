# SPDX-License-Identifier: Apache-2.0
"""Waiting on a busy machine: nobody spins for ever, and probes end in time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from commrt.bench import timing_loop
from commrt.bench.timing_loop import PROBE_STEP, FlagBarrier, SharedFlags, probe_link
from commrt.tuning import measure
from commrt.tuning.measure import Session


def _flags(tmp_path: Path) -> SharedFlags:
    path = str(tmp_path / "flags")
    SharedFlags.create(path, 2)
    return SharedFlags(path, 2)


@pytest.mark.parametrize("oversubscribed", [False, True])
def test_a_rank_with_a_cpu_of_its_own_lets_others_run_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, oversubscribed: bool
) -> None:
    flags = _flags(tmp_path)

    def other_runs() -> None:
        flags.words[flags.word(0, 1)] = 1

    monkeypatch.setattr(timing_loop.os, "sched_yield", other_runs)
    FlagBarrier(flags, 0, oversubscribed)()
    assert flags.words[flags.word(0, 0)] == 1


def _while_time_passes(monkeypatch: pytest.MonkeyPatch, ns: int) -> None:
    now = iter(range(0, 1 << 60, ns))
    monkeypatch.setattr(timing_loop.time, "perf_counter_ns", lambda: next(now))


def test_a_probe_that_nobody_answers_ends_and_frees_who_comes_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = _flags(tmp_path)
    _while_time_passes(monkeypatch, 100_000)
    assert probe_link(flags, 0, 0) == -1.0
    assert probe_link(flags, 1, 0) == 0.0
    # And the next probe is not disturbed by what the last one left behind.
    assert probe_link(flags, 0, PROBE_STEP) == -1.0
    assert probe_link(flags, 1, PROBE_STEP) == 0.0


def test_a_probe_lets_the_other_rank_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = _flags(tmp_path)
    ping, pong = flags.word(1, 1), flags.word(2, 1)

    def other_runs() -> None:
        flags.words[pong] = flags.words[ping]

    monkeypatch.setattr(timing_loop.os, "sched_yield", other_runs)
    _while_time_passes(monkeypatch, 1)
    assert 0 < probe_link(flags, 0, 0) < 100
    assert flags.words[ping] == PROBE_STEP - 1


def test_a_batch_that_was_interrupted_does_not_make_links_far(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first answer comes after 4 ms, as from a rank that was not on a CPU."""
    flags = _flags(tmp_path)
    ping, pong = flags.word(1, 1), flags.word(2, 1)
    now_ns = 0

    def other_runs() -> None:
        nonlocal now_ns
        now_ns += 4_000_000 if flags.words[ping] == 1 else 60
        flags.words[pong] = flags.words[ping]

    monkeypatch.setattr(timing_loop.os, "sched_yield", other_runs)
    monkeypatch.setattr(timing_loop.time, "perf_counter_ns", lambda: now_ns)
    assert 25 <= probe_link(flags, 0, 0) <= 30


def test_what_was_not_seen_contradicts_nothing(tmp_path: Path) -> None:
    job = {"cpus": 2, "flags": None}
    peer: Any = SimpleNamespace(rank=0, size=2, barrier=None)
    watch = timing_loop._LinkWatch(peer, job)
    watch._flags = _flags(tmp_path)
    for before_ns, after_ns, link_class in (
        (60.0, -1.0, "near"),
        (-1.0, 300.0, "far"),
        (-1.0, -1.0, "unknown"),
        (60.0, 300.0, "mixed"),
    ):
        row: dict[str, Any] = {}
        watch.label(row, before_ns, after_ns)
        assert row["link_class"] == link_class


def test_a_probe_without_an_answer_knows_no_class(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    session: Any = Session.__new__(Session)
    session.size, session.rank = 2, 0
    session._flags, session._probes = object(), 0
    session.barrier = lambda: None
    session.agree = lambda value: value
    found = iter([300.0, -1.0, 60.0])
    starts: list[int] = []

    def probe(flags: object, rank: int, start: int) -> float:
        starts.append(start)
        return next(found)

    monkeypatch.setattr(measure, "probe_link", probe)
    look: Callable[[], str] = session.link_class
    assert [look(), look(), look()] == ["far", "unknown", "near"]
    assert starts == [0, PROBE_STEP, 2 * PROBE_STEP]
