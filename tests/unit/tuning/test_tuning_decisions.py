# SPDX-License-Identifier: Apache-2.0
"""From recorded times to ranges: fitted crossings, ties, stability, regret."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tuning_recordings import DIRECT, DOUBLING, NATIVE, NEAR, RING, TRUTH, record

from commrt.select.facts import Candidate
from commrt.tuning.agreement import agreements, overall
from commrt.tuning.decide import Decision, curves_of, decide, divide, tied, undecided
from commrt.tuning.fit import Curve
from commrt.tuning.model_choice import choice_without_table
from commrt.tuning.recording_reader import parse_recording
from commrt.tuning.regret import held_out_regret, leave_one_out
from commrt.tuning.samples import Group, Launch, Recording, Sample
from commrt.tuning.statistics import Estimate, estimate, geometric_mean, rank_test

MARGIN = 0.05
GRID = [8 * 4**step for step in range(12)]


def _exact(us: float, spread: float = 0.0) -> Estimate:
    return Estimate(us, (us * (1 - spread), us * (1 + spread)), 10, (us,) * 3)


def _curves(*functions: object) -> dict[Candidate, object]:
    return {
        Candidate("shm", f"c{number}"): Curve(
            {n: _exact(function(n)) for n in GRID}  # type: ignore[operator]
        )
        for number, function in enumerate(functions)
    }


def _only(recording: Recording) -> Decision:
    (decision,) = decide(recording, MARGIN)
    return decision


def test_an_estimate_is_the_median_of_launch_medians() -> None:
    seen = estimate([(3.0, 1.0, 2.0), (5.0, 5.0, 9.0), (4.0,)])
    assert (seen.us, seen.ci, seen.n, seen.launches) == (
        4.0,
        (2.0, 5.0),
        7,
        (2.0, 5.0, 4.0),
    )


def test_one_launch_has_the_interval_of_its_repetitions() -> None:
    assert estimate([(1.0, 2.0, 9.0)]).ci == (1.0, 9.0)


@pytest.mark.parametrize(
    ("first", "second", "p"),
    [
        ([1, 2, 3], [4, 5, 6], 0.1),
        ([1, 2, 3, 4], [5, 6, 7, 8], 2 / 70),
        ([1, 4], [2, 3], 1.0),
        ([1, 1, 1], [1, 1, 1], 1.0),
        ([], [1], 1.0),
    ],
)
def test_the_rank_test_is_exact(
    first: list[float], second: list[float], p: float
) -> None:
    assert rank_test(first, second) == pytest.approx(p)
    assert rank_test(second, first) == pytest.approx(p)


def test_the_rank_test_of_many_launches_is_close_to_the_exact_one() -> None:
    many = [float(n) for n in range(11)]
    assert rank_test(many, [n + 0.5 for n in many]) > 0.5
    assert rank_test(many, [n + 20 for n in many]) < 1e-3


def test_geometric_mean() -> None:
    assert geometric_mean([1.0, 4.0]) == pytest.approx(2.0)
    assert geometric_mean([]) == 1.0


def test_between_sizes_time_is_a_start_and_a_time_per_byte() -> None:
    curve = Curve({n: _exact(2.0 + 1e-4 * n) for n in GRID})
    for nbytes in (8, 100, 10**6, 10**8):
        assert curve.us(nbytes) == pytest.approx(2.0 + 1e-4 * nbytes)
    assert curve.us(1) == curve.us(8)


def test_a_change_of_protocol_is_followed() -> None:
    curve = Curve(
        {n: _exact(1 + 1e-3 * n if n < 5000 else 40 + 1e-4 * n) for n in GRID}
    )
    assert curve.us(2000) == pytest.approx(3.0)
    assert curve.us(10**4) == pytest.approx(41)


@given(st.lists(st.floats(0.1, 1e6), min_size=1, max_size=12))
def test_times_are_positive_whatever_was_measured(times: list[float]) -> None:
    curve = Curve({n: _exact(us) for n, us in zip(GRID, times, strict=False)})
    for nbytes in (1, 8, 777, 10**5, 10**9):
        assert curve.us(nbytes) > 0


def test_launches_are_compared_by_what_happened_within_them() -> None:
    """One that missed the slow launch gets no advantage from that."""
    recording = Recording(orders={"bcast": [DIRECT, RING]})
    for launch, slow in enumerate((1.0, 1.0, 2.0, 2.0, 2.0)):
        recording.launches[launch] = Launch(launch, NEAR, held_out=False)
        for candidate, us in ((DIRECT, 1.0), (RING, 1.1)):
            if candidate == DIRECT or slow == 1.0:
                sample = Sample(launch, "bcast", 8, candidate, (us * slow,) * 5)
                recording.samples.append(sample)
    curves = curves_of(recording, recording.groups()[0], "bcast")
    assert curves[DIRECT].us(8) == pytest.approx(2.0)
    assert curves[RING].us(8) == pytest.approx(2.2)


def test_a_state_that_was_hardly_seen_is_left_to_the_other() -> None:
    recording = record(seed=2)
    far = record(seed=3, facts=replace(NEAR, link_class="far"), launches=1, held_out=0)
    recording.launches[9] = replace(far.launches[0], index=9)
    recording.samples += [replace(one, launch=9) for one in far.samples]
    assert [one.group.link_class for one in decide(recording, MARGIN)] == ["near"]
    (alone,) = decide(far, MARGIN)
    assert (alone.group.link_class, alone.launches) == ("far", 1)


def test_the_crossover_is_fitted_not_placed_on_the_grid() -> None:
    curves = _curves(lambda n: 1 + 1e-3 * n, lambda n: 4 + 1e-4 * n)
    first, second = divide(curves, 0.0)  # type: ignore[arg-type]
    assert (first.lo, second.hi) == (0, None)
    assert first.hi == second.lo == pytest.approx(3 / 9e-4, abs=2)
    assert "cross" in str(second.crossover)


def test_ties_keep_the_simpler_candidate() -> None:
    curves = _curves(lambda n: 1.04 + 1.04e-4 * n, lambda n: 1 + 1e-4 * n)
    (only,) = divide(curves, MARGIN)  # type: ignore[arg-type]
    assert only.candidate.algorithm == "c0"
    assert divide(curves, 0.0)[0].candidate.algorithm == "c1"  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("gain", "picked"), [(0.03, False), (0.08, False), (0.2, True)]
)
def test_two_levels_must_save_more_than_launches_differ(
    gain: float, picked: bool
) -> None:
    """Else the luckiest of many hierarchies wins, by few launches."""
    two_level = Candidate("mpi", "two_level", {"inside": "direct", "leaders": 1})
    curves = {
        DIRECT: Curve({n: _exact(1 + 1e-4 * n) for n in GRID}),
        two_level: Curve({n: _exact((1 - gain) * (1 + 1e-4 * n)) for n in GRID}),
    }
    (only,) = divide(curves, MARGIN)
    assert (only.candidate == two_level) is picked


def test_overlapping_intervals_tie_but_not_without_limit() -> None:
    for slower, both in ((1.08, True), (1.3, False)):
        curves = {
            DIRECT: Curve({n: _exact(slower, 0.4) for n in GRID}),
            RING: Curve({n: _exact(1.0, 0.4) for n in GRID}),
        }
        assert (DIRECT in tied(curves, 100, MARGIN)) is both


def test_a_short_lead_within_the_margin_does_not_split_a_range() -> None:
    bump = {n: _exact(1 + 1e-4 * n) for n in GRID}
    bump[2048] = _exact(bump[2048].us * 1.03)
    curves = {
        DIRECT: Curve(bump),
        RING: Curve({n: _exact(1.01 + 1e-4 * n) for n in GRID}),
    }
    assert [one.candidate for one in divide(curves, MARGIN)] == [DIRECT]


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 10**6), st.integers(1, 5))
def test_ranges_tile_whatever_was_measured(seed: int, candidates: int) -> None:
    noise = random.Random(seed)
    curves = {
        Candidate("shm", f"c{number}"): Curve(
            {n: _exact(noise.uniform(0.1, 10), noise.random() / 5) for n in GRID}
        )
        for number in range(candidates)
    }
    ranges = divide(curves, MARGIN)
    assert ranges[0].lo == 0
    assert ranges[-1].hi is None
    for one, following in itertools.pairwise(ranges):
        assert one.hi == following.lo
        assert one.lo < following.lo
        assert one.candidate != following.candidate


@pytest.mark.parametrize("size", GRID)
def test_one_size_alone_is_no_range(size: int) -> None:
    curves = _curves(lambda n: 10.0)
    curves[RING] = Curve({size: _exact(1.0)})
    ranges = divide(curves, MARGIN)  # type: ignore[arg-type]
    assert ranges[0].lo == 0
    for one, following in itertools.pairwise(ranges):
        assert one.hi == following.lo
    for one in ranges:
        assert one.hi is None or one.hi - one.lo > 8
    best_at_an_end = size in (GRID[0], GRID[-1])
    assert (RING in {one.candidate for one in ranges}) is best_at_an_end
    if best_at_an_end:
        (decided,) = (one for one in ranges if one.candidate == RING)
        assert decided.lo <= size
        assert decided.hi is None or size < decided.hi


def test_the_true_winners_are_found_with_their_crossings() -> None:
    ranges = _only(record(seed=1)).ranges
    assert [one.candidate for one in ranges] in (
        [DOUBLING, DIRECT, RING],
        [DIRECT, RING],
    )
    assert 120_000 < ranges[-1].lo < 480_000


@pytest.mark.parametrize("seed", range(0, 20, 2))
def test_two_tunings_agree_over_nearly_the_whole_range(seed: int) -> None:
    first, second = (decide(record(one), MARGIN) for one in (seed + 100, seed + 101))
    (found,) = agreements(first, second)
    assert found.sizes > 300
    assert overall([found]) == pytest.approx(found.same + found.tied)
    assert overall([found]) >= 0.95


def test_agreement_sees_other_choices_and_counts_ties_apart() -> None:
    first = decide(record(seed=1), MARGIN)
    swapped = {DIRECT: TRUTH[RING], RING: TRUTH[DIRECT], NATIVE: TRUTH[NATIVE]}
    (found,) = agreements(first, decide(record(seed=1, truth=swapped), MARGIN))
    assert found.same + found.tied < 0.5
    equal = {DIRECT: TRUTH[DIRECT], DOUBLING: TRUTH[DIRECT]}
    other = {DOUBLING: TRUTH[DIRECT], DIRECT: TRUTH[DIRECT]}
    one, two = (decide(record(5, truth), MARGIN) for truth in (equal, other))
    (found,) = agreements(one, two)
    assert (found.same, found.tied) == (0.0, pytest.approx(1.0, abs=0.05))
    assert agreements(one, []) == []
    assert overall([]) == 0.0


@pytest.mark.parametrize("seed", range(5))
def test_choices_are_nearly_best_by_the_true_curves(seed: int) -> None:
    decision = _only(record(seed))
    sizes = [round(2 ** (3 + step / 4)) for step in range(22 * 4)]
    ratios = [
        TRUTH[decision.at(n)](n) / min(us(n) for us in TRUTH.values()) for n in sizes
    ]
    assert geometric_mean(ratios) < 1.03


def test_regret_of_held_out_launches_is_small_and_beats_native() -> None:
    recording = record(seed=3)
    found = held_out_regret(recording, decide(recording, MARGIN))
    assert found.cells == 15
    assert found.unmeasured == 0
    assert 1.0 <= found.regret < 1.05
    assert found.versus_native is not None
    assert found.versus_native < 0.7


def test_regret_sees_a_wrong_table() -> None:
    recording = record(seed=3)
    wrong = record(seed=3, truth={NATIVE: TRUTH[NATIVE]})
    found = held_out_regret(recording, decide(wrong, MARGIN))
    assert found.regret > 1.5
    assert found.versus_native == pytest.approx(1.0)


def test_every_launch_in_turn_is_judged_by_the_others() -> None:
    found = leave_one_out(record(seed=5, launches=4, held_out=0), MARGIN)
    assert found.cells == 4 * 16
    assert found.regret < 1.08


@pytest.mark.parametrize(("link_class", "cells"), [("far", 15), ("oversubscribed", 0)])
def test_only_near_and_far_stand_in_for_each_other(link_class: str, cells: int) -> None:
    recording = record(seed=3)
    moved = Group(2, 1, 2, link_class)
    decisions = [replace(one, group=moved) for one in decide(recording, MARGIN)]
    assert held_out_regret(recording, decisions).cells == cells


def test_a_candidate_that_failed_is_never_chosen() -> None:
    recording = record(seed=1)
    item = {"op": "allreduce", "nbytes": 8, "candidate": str(RING)}
    recording.fail(NEAR.size, item, "hung")
    assert all(one.candidate != RING for one in _only(recording).ranges)


def test_one_dropped_as_a_loser_is_not_extrapolated_into_large_sizes() -> None:
    recording = record(seed=1)
    recording.samples = [
        sample
        for sample in recording.samples
        if sample.candidate != DOUBLING or sample.nbytes <= 512
    ]
    assert _only(recording).at(10**9) == RING


def test_between_its_sizes_one_that_was_given_up_is_no_faster_than_the_best() -> None:
    """Straight lines from 8 B to 32 MiB pass below everybody's curve."""
    recording = record(seed=1)
    ends = {min(s.nbytes for s in recording.samples), 32 << 20}
    fast = Candidate("shm", "direct", {"inline": 48})
    recording.orders["allreduce"].append(fast)
    recording.samples += [
        replace(one, candidate=fast, us=tuple(0.8 * us for us in one.us))
        for one in recording.samples
        if one.candidate == DIRECT and one.nbytes in ends
    ]
    assert fast not in {_only(recording).at(n) for n in (128, 2048, 32768, 1 << 20)}


def test_what_few_launches_of_a_size_measured_does_not_lead_there() -> None:
    def choices(launches: int) -> set[Candidate]:
        recording = record(seed=1, launches=5)
        rare = Candidate("shm", "direct", {"inline": 48})
        recording.orders["allreduce"].append(rare)
        recording.samples += [
            replace(one, candidate=rare, us=tuple(0.5 * us for us in one.us))
            for one in recording.samples
            if one.candidate == DIRECT and one.launch < launches
        ]
        return {part.candidate for part in _only(recording).ranges} & {rare}

    assert choices(2) == set()
    assert choices(3) != set()


def test_launches_in_another_state_of_the_machine_say_nothing() -> None:
    """Two virtual cores take turns on one: there the library leads, as it sleeps."""
    recording = record(seed=1, launches=2)
    recording.samples = [
        replace(
            one, us=tuple(2000 * (1 if one.candidate == NATIVE else 2) for _ in one.us)
        )
        if one.launch == 1
        else one
        for one in recording.samples
    ]
    assert _only(recording).at(8) != NATIVE
    assert _only(recording).at(10**6) != NATIVE


def test_a_recording_reads_back_equal() -> None:
    recording = record(seed=2)
    recording.fail(2, {"op": "bcast", "nbytes": 8, "candidate": "shm/ring"}, "hung")
    assert parse_recording(recording.to_json()) == recording


def _disturbed(recording: Recording, sizes: set[int], *, spread: float) -> Recording:
    """Return it with other programs beside these sizes: all takes milliseconds.

    Native does best there, as the library sleeps while it waits.
    """
    chance = random.Random(7)

    def beside(one: Sample) -> Sample:
        if one.nbytes not in sizes:
            return one
        us = 2500.0 if one.candidate == NATIVE else 5000.0
        times = [us * (1 + spread * chance.random()) for _ in one.us]
        return replace(one, us=tuple(times))

    return replace(recording, samples=[beside(one) for one in recording.samples])


def _sizes(recording: Recording) -> list[int]:
    return sorted(recording.planned(2, "allreduce"))


@pytest.mark.parametrize("spread", [0.0, 10.0])
def test_a_disturbed_size_overrules_neither_the_model_nor_its_neighbours(
    spread: float,
) -> None:
    quiet = record(seed=3)
    for at in (2, 5, 7):
        nbytes = _sizes(quiet)[at]
        busy = _only(_disturbed(quiet, {nbytes}, spread=spread))
        # Its times are no evidence, and the sizes on both sides decide.
        assert all(nbytes not in curve.estimates for curve in busy.curves.values())
        assert busy.at(nbytes) in {_only(quiet).at(nbytes), DIRECT, DOUBLING}
        assert NATIVE not in {part.candidate for part in busy.ranges}


def test_where_too_few_sizes_can_be_trusted_nothing_is_decided() -> None:
    quiet = record(seed=3)
    sizes = _sizes(quiet)
    half = (len(sizes) + 1) // 2
    some = _disturbed(quiet, set(sizes[: len(sizes) - half]), spread=10.0)
    assert [one.op for one in decide(some, MARGIN)] == ["allreduce"]
    assert undecided(some) == []
    most = _disturbed(quiet, set(sizes[: len(sizes) - half + 1]), spread=10.0)
    assert decide(most, MARGIN) == []
    assert undecided(most) == [(quiet.groups()[0], "allreduce", half - 1, len(sizes))]


def test_far_from_what_was_measured_the_model_goes_on() -> None:
    """Ring is three times as fast at the largest sizes measured, and says no more."""
    slow = {**TRUTH, DIRECT: lambda n: 0.2 + 3e-4 * n, DOUBLING: lambda n: 1 + 5e-4 * n}
    recording = record(seed=3, truth=slow)
    sizes = _sizes(recording)
    for nbytes in sizes:
        recording.unasked[2, "near", "allreduce", nbytes] = DIRECT
    assert _only(recording).at(sizes[-1]) == RING
    beyond = sizes[-4:]
    recording.samples = [one for one in recording.samples if one.nbytes not in beyond]
    for nbytes in beyond:
        recording.unfinished[2, "allreduce", nbytes] = "busy"
    decided = _only(recording)
    assert decided.at(sizes[-5]) == RING
    assert decided.at(sizes[-1]) == DIRECT


def _beside_direct(faster: float) -> Recording:
    """Return a run in which the model chooses DIRECT; DOUBLING takes a part of it."""
    truth = {
        DIRECT: lambda n: 1.0 + 1e-4 * n,
        DOUBLING: lambda n: faster + faster * 1e-4 * n,
    }
    recording = record(seed=3, truth=truth)
    for nbytes in _sizes(recording):
        recording.unasked[2, "near", "allreduce", nbytes] = DIRECT
    return recording


def _chosen(recording: Recording) -> set[Candidate]:
    return {part.candidate for part in _only(recording).ranges}


@pytest.mark.parametrize(
    ("faster", "disturbed", "wins"),
    [(0.7, 0, True), (0.97, 0, False), (0.8, 200, False), (0.3, 200, True)],
)
def test_what_runs_without_a_table_is_replaced_by_what_is_faster_for_sure(
    faster: float, disturbed: int, wins: bool
) -> None:
    """The more repetitions were disturbed, the faster it has to be."""
    recording = _beside_direct(faster)
    recording.samples = [replace(one, disturbed=disturbed) for one in recording.samples]
    assert _chosen(recording) == ({DOUBLING} if wins else {DIRECT})


@pytest.mark.parametrize(
    ("launches", "faster", "wins"),
    [(1, 0.85, False), (3, 0.85, True), (1, 0.5, True)],
)
def test_a_single_launch_replaces_nothing_but_what_is_much_slower(
    launches: int, faster: float, wins: bool
) -> None:
    """It may be one of those that differ; beside other programs a run has few."""
    recording = _beside_direct(faster)
    kept = {one.launch for one in recording.samples if one.launch < launches}
    recording.samples = [one for one in recording.samples if one.launch in kept]
    assert _chosen(recording) == ({DOUBLING} if wins else {DIRECT})


def test_ranks_that_found_other_links_are_asked_for_their_own_choice() -> None:
    recording = record(seed=3)
    recording.unasked[2, "far", "allreduce", 8] = RING
    recording.unasked[2, "near", "allreduce", 8] = NATIVE
    (near,) = recording.groups()
    assert choice_without_table(recording, near, "allreduce")(1e6) == NATIVE
    far = near._replace(link_class="far")
    assert choice_without_table(recording, far, "allreduce")(8.0) == RING
    assert choice_without_table(recording, far._replace(nodes=2), "bcast")(8.0) is None
