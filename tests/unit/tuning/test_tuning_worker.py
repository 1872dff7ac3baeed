# SPDX-License-Identifier: Apache-2.0
"""One rank of a tuning launch: which calls are timed, in which turns, what is said."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tuning_recordings import DIRECT, NEAR

from commrt.bench import timing_loop
from commrt.bench.timing_loop import HostMemory
from commrt.errors import UsageError
from commrt.select.facts import Candidate
from commrt.tuning import turns, worker
from commrt.tuning.job import NOBODY, Item, Job
from commrt.tuning.samples import Recording
from commrt.vocabulary.operations import operation

JOB = Job(("allreduce",), "float32", 1 << 16, False, 1, 1e9)


class FakeSession:
    """A session of one rank whose candidates do what the test wants."""

    rank, size, facts = 0, 1, replace(NEAR, size=1, ppn=1, link_class="single")
    memory = HostMemory()

    def __init__(self, **calls: Callable[[Any], None]) -> None:
        self._calls = calls
        self.turns: list[int] = []
        self.links: list[str] = []
        self.lost = 0.0
        self.taken: list[float] = []
        self.speeds: list[float] = []

    def software(self) -> dict[str, object]:
        return {"commrt": "0"}

    def barrier(self) -> None: ...

    def candidates(self, op: str, nbytes: int, dtype: str) -> Sequence[Candidate]:
        return [Candidate("shm", name) for name in self._calls]

    def model_us(self, op: str, nbytes: int, dtype: str, candidate: Candidate) -> float:
        return 1e9 if candidate.algorithm == "hopeless" else 1.0

    def buffers(self, op: str, nbytes: int, dtype: str) -> Any:
        trial = SimpleNamespace(
            x=np.empty(nbytes // 4, np.float32),
            out=np.zeros(nbytes // 4, np.float32),
            spec=operation(op).__dict__,
            coll=op,
            root=0,
            num_x=nbytes // 4,
            memory=self.memory,
        )
        trial.fill_out = lambda: trial.out.fill(0)
        return trial

    def bind(self, trial: Any, candidate: Candidate) -> Callable[[], None]:
        return lambda: self._calls[candidate.algorithm](trial)

    def link_class(self) -> str:
        return self.links.pop(0) if self.links else "near"

    def unasked(self, op: str, nbytes: int, dtype: str) -> Candidate:
        return Candidate("shm", next(iter(self._calls)))

    def lost_us(self) -> float:
        return self.lost

    def watch_cores(self) -> None: ...

    def others_share(self) -> float:
        return self.taken.pop(0) if self.taken else 0.0

    def reference_us(self) -> float:
        return self.speeds.pop(0) if self.speeds else 1.0

    def turn_of(self, index: int) -> None:
        self.turns.append(index)

    def worst(self, values: list[float]) -> list[float]:
        return values

    def agree(self, value: float) -> float:
        return value


def _copy(trial: Any) -> None:
    trial.out[:] = trial.x


def _refuse(trial: Any) -> None:
    raise UsageError("not for this size")


def _measured(
    job: Job = JOB, links: Sequence[str] = (), **calls: Callable[[Any], None]
) -> list[dict[str, Any]]:
    session = FakeSession(**calls)
    session.links = list(links)
    return _measured_by(session, job)


def _measured_by(session: Any, job: Job) -> list[dict[str, Any]]:
    lines: list[str] = []
    worker.measure(session, replace(job, max_repetitions=4), lines.append)
    return [json.loads(text) for text in lines]


def _of(messages: list[dict[str, Any]], kind: str) -> set[str]:
    return {message["candidate"] for message in messages if message["tune"] == kind}


def test_only_right_results_are_timed() -> None:
    def lazy(trial: Any) -> None: ...

    messages = _measured(direct=_copy, lazy=lazy, refuse=_refuse)
    assert _of(messages, "sample") == {"shm/direct"}
    assert _of(messages, "wrong") == {"shm/lazy", "shm/refuse"}
    assert messages[-1] == {"tune": "end"}


def test_the_model_and_earlier_failures_shorten_the_list() -> None:
    job = replace(JOB, excluded=(("allreduce", "shm/ring"),))
    job = replace(job, skipped=(Item("allreduce", 8, "shm/direct"),))
    messages = _measured(job, direct=_copy, ring=_copy, hopeless=_copy)
    timed = [(m["candidate"], m["nbytes"]) for m in messages if m["tune"] == "begin"]
    assert {candidate for candidate, _ in timed} == {"shm/direct"}
    assert ("shm/direct", 8) not in timed
    assert ("shm/direct", 32) in timed


def test_who_lost_is_left_out_in_the_same_class_of_links_alone() -> None:
    lost = tuple((Item("allreduce", n, "shm/ring"), "far") for n in (8, 32, 64, 128))
    calls = {"direct": _copy, "ring": _copy}
    near = _measured(replace(JOB, losers=lost), **calls)
    assert _of(near, "sample") == {"shm/direct", "shm/ring"}
    far = _measured(replace(JOB, losers=lost), ["far"] * 99, **calls)
    tried = {(m["nbytes"], m["candidate"]) for m in far if m["tune"] == "sample"}
    assert {(8, "shm/direct"), (512, "shm/ring")} <= tried
    assert not {(nbytes, "shm/ring") for nbytes in (8, 32, 64, 128)} & tried


def test_what_all_lost_is_not_even_begun() -> None:
    lost = tuple((Item("allreduce", 8, f"shm/{one}"), "near") for one in ("a", "b"))
    messages = _measured(replace(JOB, losers=lost), a=_copy, b=_copy)
    begun = {m["nbytes"] for m in messages if m["tune"] == "begin"}
    assert 8 not in begun
    assert 32 in begun
    assert messages[-1] == {"tune": "end"}


def test_the_order_is_random_by_seed_and_keeps_a_size_together() -> None:
    def order(seed: int) -> list[tuple[int, str]]:
        messages = _measured(replace(JOB, seed=seed), direct=_copy, ring=_copy)
        begun = [m for m in messages if m["tune"] == "begin"]
        return [(message["nbytes"], message["candidate"]) for message in begun]

    assert order(1) == order(1) != order(2)
    sizes_met = [nbytes for nbytes, _ in order(1)]
    assert all(a == b for a, b in zip(sizes_met[::2], sizes_met[1::2], strict=True))


class Clock:
    """Time that passes only in calls, as long as each is said to take."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._now_ns = 0
        monkeypatch.setattr(turns, "time", self)
        monkeypatch.setattr(timing_loop, "time", self)

    def perf_counter_ns(self) -> int:
        return self._now_ns

    def monotonic(self) -> float:
        return self._now_ns / 1e9

    def copying_in(self, us: float) -> Callable[[Any], None]:
        def call(trial: Any) -> None:
            self._now_ns += round(us * 1000)
            _copy(trial)

        return call


def test_the_candidates_of_a_size_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    session: Any = FakeSession(direct=clock.copying_in(1.0), ring=clock.copying_in(1.2))
    job = replace(JOB, max_nbytes=8, relative_ci=-1.0)  # never narrow enough
    worker.measure(session, replace(job, max_repetitions=20), lambda _: None)
    *numbers, last = session.turns
    assert last == NOBODY
    # Twice nobody, then each one's check and three warm-ups.
    assert set(numbers[:2]) == {NOBODY}
    numbers = numbers[10:]
    rounds = [set(numbers[at : at + 2]) for at in range(0, len(numbers), 2)]
    assert len(rounds) >= 4
    assert all(both == {0, 1} for both in rounds)
    assert len({tuple(numbers[at : at + 2]) for at in range(0, len(numbers), 2)}) == 2


def test_one_that_has_lost_gets_no_more_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    calls = {"direct": clock.copying_in(100), "slow": clock.copying_in(160)}
    session: Any = FakeSession(**calls)
    lines: list[str] = []
    job = replace(JOB, max_nbytes=8, relative_ci=-1.0, max_repetitions=50)
    worker.measure(session, job, lines.append)
    messages = [json.loads(text) for text in lines]
    counts = {m["candidate"]: len(m["us"]) for m in messages if m["tune"] == "sample"}
    assert counts["shm/direct"] >= 50
    assert counts["shm/slow"] <= 15  # two turns, and one at the end


def test_three_repetitions_are_enough_when_time_is_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock(monkeypatch)
    session: Any = FakeSession(direct=clock.copying_in(1e6))
    lines: list[str] = []
    job = replace(JOB, max_nbytes=8, relative_ci=-1.0, budget_s=3.0)
    worker.measure(session, job, lines.append)
    (sample,) = (m for m in map(json.loads, lines) if m["tune"] == "sample")
    assert sample["us"] == [1e6] * 3


def test_a_size_that_outlasts_the_budget_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock(monkeypatch)
    session: Any = FakeSession(direct=clock.copying_in(1e6))
    lines: list[str] = []
    job = replace(JOB, max_nbytes=8, relative_ci=-1.0, budget_s=1.0)
    worker.measure(session, job, lines.append)
    *_, unfinished, end = map(json.loads, lines)
    assert unfinished == {
        "tune": "unfinished",
        "why": "budget",
        "cells": [["allreduce", 8]],
    }
    assert end == {"tune": "end"}
    assert not any(json.loads(text)["tune"] == "sample" for text in lines)


def test_every_turn_is_a_sign_of_life(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a size may last long in all, and only a call that does not end hangs."""
    clock = Clock(monkeypatch)
    calls = 0
    most = 0
    session: Any = FakeSession()

    def call(trial: Any) -> None:
        nonlocal calls, most
        calls += 1
        most = max(most, calls)
        clock.copying_in(1e5)(trial)

    def turn_of(index: int) -> None:
        nonlocal calls
        calls = 0

    session._calls = {"direct": call}
    session.turn_of = turn_of
    job = replace(JOB, max_nbytes=8, relative_ci=-1.0, max_repetitions=20)
    worker.measure(session, job, lambda _: None)
    assert most == 1


def test_a_size_is_measured_once_more_when_the_links_change() -> None:
    job = replace(JOB, max_nbytes=8)
    messages = _measured(job, links=["near", "far", "far", "far"], direct=_copy)
    assert [m["tune"] for m in messages if m["tune"] in ("begin", "sample")] == [
        "begin",
        "begin",
        "sample",
    ]
    assert messages[-2]["link_class"] == "far"
    changing = ["near", "far", "near", "far"]
    messages = _measured(job, changing, direct=_copy)
    assert "sample" not in {m["tune"] for m in messages}
    assert messages[-2]["why"] == "links"
    assert messages[-2]["cells"] == [["allreduce", 8]]


def test_ranks_that_are_not_on_two_cores_at_once_are_not_measured() -> None:
    job = replace(JOB, max_nbytes=8)
    messages = _measured(job, ["unknown", "near", "near"], direct=_copy)
    assert [m["link_class"] for m in messages if m["tune"] == "sample"] == ["near"]


@pytest.mark.parametrize(
    ("links", "seen"),
    [
        (["near", "unknown", "unknown", "far"], "far"),
        (["unknown", "near", "unknown"], "near"),
        (["unknown", "unknown", "unknown"], "single"),  # as the ranks began
        (["unknown", "near", "far"], None),
    ],
)
def test_a_busy_machine_is_measured_at_the_second_attempt(
    links: list[str], seen: str | None
) -> None:
    messages = _measured(replace(JOB, max_nbytes=8), links, direct=_copy)
    found = [m["link_class"] for m in messages if m["tune"] == "sample"]
    assert found == ([] if seen is None else [seen])


def test_a_size_is_measured_once_more_when_times_drift(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All links look alike, and yet the machine is another one at the end."""
    clock = Clock(monkeypatch)

    def sample_after(seconds: float, slow_us: float) -> list[int]:
        clock._now_ns = 0

        def call(trial: Any) -> None:
            slow = clock.monotonic() < seconds
            clock.copying_in(slow_us if slow else 100)(trial)

        session: Any = FakeSession(direct=call)
        lines: list[str] = []
        job = replace(JOB, max_nbytes=8, relative_ci=-1.0, max_repetitions=50)
        worker.measure(session, job, lines.append)
        messages = [json.loads(text) for text in lines]
        return [len(m["us"]) for m in messages if m["tune"] == "sample"] + [
            sum(m["tune"] == "begin" for m in messages)
        ]

    assert sample_after(0.012, 300) == [50, 2]
    assert sample_after(0.008, 150) == [50, 1]


def test_who_lost_early_is_seen_at_the_end_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """It met only a slow beginning, which its rival's many turns outweigh."""
    clock = Clock(monkeypatch)
    begun: list[float] = []

    def call(trial: Any) -> None:
        slow = clock.monotonic() < begun[0] + 0.022
        clock.copying_in(500 if slow else 100)(trial)

    session: Any = FakeSession(direct=clock.copying_in(100), ring=call)
    plain = session.buffers

    def buffers(*args: Any) -> Any:
        begun[:] = begun or [clock.monotonic()]
        return plain(*args)

    session.buffers = buffers
    lines: list[str] = []
    job = replace(JOB, max_nbytes=8, relative_ci=-1.0, max_repetitions=50)
    worker.measure(session, job, lines.append)
    times = {
        m["candidate"]: m["us"] for m in map(json.loads, lines) if m["tune"] == "sample"
    }
    assert set(times["shm/ring"]) == {100.0}


def test_samples_are_compared_within_the_state_they_were_taken_in() -> None:
    recording = Recording()
    facts = NEAR.__dict__
    recording.add(0, False, {"tune": "hello", "facts": facts, "software": {}})
    item = {"tune": "sample", "op": "bcast", "nbytes": 8, "candidate": str(DIRECT)}
    recording.add(0, False, {**item, "us": [1.0]})
    recording.add(0, False, {**item, "us": [2.0], "link_class": "far"})
    near, far = recording.groups()
    assert (near.link_class, far.link_class) == ("near", "far")
    assert [one.us for one in recording.of(far, held_out=False)] == [(2.0,)]


def test_a_spent_budget_ends_the_launch_cleanly() -> None:
    messages = _measured(replace(JOB, budget_s=0.0), direct=_copy)
    assert [message["tune"] for message in messages][-2:] == ["unfinished", "end"]
    assert len(messages[-2]["cells"]) == 8


def test_an_error_on_another_rank_is_not_called_a_wrong_result() -> None:
    class Other(FakeSession):
        def worst(self, values: list[float]) -> list[float]:
            return [max(value, self.others) for value in values]

    for others, words in ((1.0, "wrong result"), (2.0, "an error")):
        session: Any = Other(direct=_copy)
        session.others = others
        (wrong,) = (
            m
            for m in _measured_by(session, replace(JOB, max_nbytes=8))
            if m["tune"] == "wrong"
        )
        assert wrong["reason"] == f"{words} on another rank"


def _beside_another(
    clock: Clock, session: FakeSession, us: float, often: Callable[[int], bool]
) -> Callable[[Any], None]:
    """Return a call; while some of its calls run, something else has the core."""
    plain, late = clock.copying_in(us), clock.copying_in(us + 2500)
    made = [0]

    def call(trial: Any) -> None:
        made[0] += 1
        disturbed = often(made[0])
        session.lost += 2500 if disturbed else 0
        (late if disturbed else plain)(trial)

    return call


def _busy(
    monkeypatch: pytest.MonkeyPatch, often: Callable[[int], bool]
) -> list[dict[str, Any]]:
    clock = Clock(monkeypatch)
    session: Any = FakeSession()
    for name, us in (("direct", 300.0), ("ring", 400.0)):
        session._calls[name] = _beside_another(clock, session, us, often)
    return _measured_by(session, replace(JOB, max_nbytes=32, budget_s=9.0))


def test_a_repetition_beside_another_program_does_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    messages = _busy(monkeypatch, lambda call: call % 3 == 0)
    samples = [message for message in messages if message["tune"] == "sample"]
    assert {message["nbytes"] for message in samples} == {8, 32}
    for message in samples:
        right = {"shm/direct": 300.0, "shm/ring": 400.0}[message["candidate"]]
        assert message["us"] == pytest.approx([right] * len(message["us"]))
        assert len(message["us"]) >= 3
        assert message["disturbed"] > 0


def test_a_size_that_was_never_undisturbed_leaves_no_times(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    messages = _busy(monkeypatch, lambda call: True)
    assert _of(messages, "sample") == set()
    (told,) = [message for message in messages if message["tune"] == "unfinished"]
    assert told["why"] == "busy"
    assert told["cells"] == [["allreduce", 8], ["allreduce", 32]]
    begun = [message["nbytes"] for message in messages if message["tune"] == "begin"]
    assert sorted(begun) == [8] * 4 + [32] * 4  # each size twice, two candidates


def test_a_size_is_repeated_where_others_took_the_cores_time() -> None:
    session: Any = FakeSession(direct=_copy)
    session.taken = [0.5]
    messages = _measured_by(session, replace(JOB, max_nbytes=32))
    begun = [message["nbytes"] for message in messages if message["tune"] == "begin"]
    assert len(begun) == 3
    sampled = [message["nbytes"] for message in messages if message["tune"] == "sample"]
    assert sorted(sampled) == [8, 32]


def test_a_size_is_repeated_where_the_machine_was_slow() -> None:
    session: Any = FakeSession(direct=_copy)
    session.speeds = [1.0, 1.0, 1.0, 2.0]  # before and after each size
    messages = _measured_by(session, replace(JOB, max_nbytes=32))
    begun = [message["nbytes"] for message in messages if message["tune"] == "begin"]
    assert len(begun) == 3
    sampled = [message["nbytes"] for message in messages if message["tune"] == "sample"]
    assert sorted(sampled) == [8, 32]


def test_what_runs_without_a_table_is_said_for_every_size() -> None:
    messages = _measured(direct=_copy, ring=_copy)
    said = {m["nbytes"]: m["candidate"] for m in messages if m["tune"] == "unasked"}
    assert set(said.values()) == {"shm/direct"}
    assert set(said) == {m["nbytes"] for m in messages if m["tune"] == "begin"}
