# SPDX-License-Identifier: Apache-2.0
"""A choice is judged launch by launch, and by the median of its launches."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tuning_recordings import DIRECT, DOUBLING, record

from commrt.select.facts import Candidate
from commrt.tuning.decide import decide
from commrt.tuning.regret import held_out_regret, judge

ONE, TWO = Candidate.parse("shm/ring"), Candidate.parse("shm/direct")
NATIVE = Candidate.parse("mpi/native")


def test_one_odd_launch_of_three_does_not_decide() -> None:
    steady, odd = {ONE: [1.0], TWO: [1.0]}, {ONE: [9.0], TWO: [1.0]}
    verdict = judge(ONE, [steady, odd, steady])
    assert verdict is not None
    assert (verdict.ratio, verdict.beyond) == (1.0, 1.0)
    worse = judge(ONE, [steady, odd, odd])
    assert worse is not None
    assert (worse.best, worse.ratio, worse.beyond) == (TWO, 9.0, 1.0)


def test_launches_of_different_speed_are_compared_within_themselves() -> None:
    rows = [{ONE: [us], TWO: [us / 2]} for us in (1.0, 10.0, 100.0)]
    verdict = judge(ONE, rows)
    assert verdict is not None
    assert (verdict.best, verdict.ratio, verdict.beyond) == (TWO, 2.0, 2.0)


def test_a_single_launch_has_the_intervals_of_its_repetitions() -> None:
    apart = judge(ONE, [{ONE: [3.0, 3.3, 3.6], TWO: [1.0, 1.1, 1.5]}])
    assert apart is not None
    assert apart.ratio == pytest.approx(3.0)
    assert apart.beyond == pytest.approx(2.0)
    overlapping = judge(ONE, [{ONE: [1.0, 1.3, 1.6], TWO: [0.9, 1.0, 1.1]}])
    assert overlapping is not None
    assert overlapping.beyond < 1.0 < overlapping.ratio


def test_what_few_launches_measured_is_no_rival() -> None:
    rows = [{ONE: [1.0]}, {ONE: [1.0]}, {ONE: [1.0], TWO: [0.1]}]
    verdict = judge(ONE, rows)
    assert verdict is not None
    assert (verdict.best, verdict.ratio) == (ONE, 1.0)


def test_launches_without_the_choice_say_nothing() -> None:
    assert judge(None, [{ONE: [1.0]}]) is None
    assert judge(ONE, [{TWO: [1.0]}]) is None
    verdict = judge(ONE, [{TWO: [0.1]}, {ONE: [1.0], NATIVE: [4.0]}])
    assert verdict is not None
    assert (verdict.ratio, verdict.versus_native) == (1.0, 0.25)


def test_foresight_says_what_launches_differ_by() -> None:
    """Its launches agree but for noise; then one is of another mind."""
    recording = record(4, held_out=3)
    calm = held_out_regret(recording, decide(recording, 0.03))
    assert calm.by_launch is not None
    assert calm.foresight is not None
    assert all(1.0 <= one <= 1.05 for one in (calm.foresight, calm.by_launch))
    last = max(recording.launches)
    swapped = {DIRECT: DOUBLING, DOUBLING: DIRECT}
    recording.samples = [
        replace(one, candidate=swapped.get(one.candidate, one.candidate))
        if one.launch == last
        else one
        for one in recording.samples
    ]
    other = held_out_regret(recording, decide(recording, 0.03))
    assert other.foresight is not None
    assert other.foresight > calm.foresight


def test_one_judging_launch_has_no_foresight() -> None:
    recording = record(4, held_out=1)
    found = held_out_regret(recording, decide(recording, 0.03))
    assert (found.by_launch, found.foresight) == (None, None)
