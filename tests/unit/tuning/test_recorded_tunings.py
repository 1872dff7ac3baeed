# SPDX-License-Identifier: Apache-2.0
"""The tuner's decisions on what real runs recorded.

Two virtual cores that changed between near and far meanwhile; docs/performance.md.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import geometric_mean, median

import pytest

from commrt.select.facts import Candidate
from commrt.select.schema import DEFAULT_TIE_MARGIN
from commrt.tuning.agreement import agreements, overall
from commrt.tuning.decide import Decision, decide
from commrt.tuning.recording_reader import load_recording
from commrt.tuning.regret import held_out_regret, leave_one_out
from commrt.tuning.samples import Recording

_DATA = Path(__file__).parents[3] / "docs" / "data"


@cache
def _recording(number: int) -> Recording:
    return load_recording(_DATA / f"tuning-{number}.json.gz")


@cache
def _decisions(number: int) -> list[Decision]:
    return decide(_recording(number), DEFAULT_TIE_MARGIN)


def test_tuned_twice_the_choice_is_the_same_or_tied() -> None:
    found = agreements(_decisions(1), _decisions(2))
    assert {one.group.link_class for one in found} >= {"near", "far", "oversubscribed"}
    assert overall(found) >= 0.95


@pytest.mark.parametrize("judged", [1, 2])
@pytest.mark.parametrize("judge", [1, 2])
def test_the_choice_is_nearly_the_best_of_held_out_launches(
    judged: int, judge: int
) -> None:
    """By the launch that its own run held out, and by that of the other run."""
    found = held_out_regret(_recording(judge), _decisions(judged))
    assert found.cells > 100
    assert 1.0 <= found.regret <= 1.03
    assert found.versus_native is not None
    assert found.versus_native < 0.5


@pytest.mark.parametrize("number", [4, 5])
def test_several_launches_find_next_to_nothing_better_than_the_choice(
    number: int,
) -> None:
    """By five launches that a run of 230 s held out, near."""
    found = held_out_regret(_recording(number), _decisions(number))
    assert found.cells > 60
    assert 1.0 <= found.regret <= 1.02
    assert found.beyond <= 1.05


@pytest.mark.parametrize("number", [6, 7])
def test_runs_of_a_minute_choose_nearly_as_well(number: int) -> None:
    """By two launches that each held out, far."""
    found = held_out_regret(_recording(number), _decisions(number))
    assert found.cells > 60
    assert 1.0 <= found.regret <= 1.02


@pytest.mark.parametrize(
    ("number", "link_class", "beyond"),
    [(11, "far", 1.02), (11, "near", 1.055), (14, "far", 1.02), (15, "near", 1.03)],
)
def test_many_launches_find_the_choice_as_good(
    number: int, link_class: str, beyond: float
) -> None:
    """By runs of single operations, and one where the machine changed meanwhile."""
    recording = _recording(number)
    held_out = {at for at, launch in recording.launches.items() if launch.held_out}
    samples = [
        sample
        for sample in recording.samples
        if sample.launch in held_out
        and recording.group_of(sample).link_class == link_class
    ]
    found = held_out_regret(replace(recording, samples=samples), _decisions(number))
    assert found.cells > 60
    assert 1.0 <= found.regret <= 1.02
    assert found.beyond <= beyond


@pytest.mark.parametrize(
    ("number", "sizes", "mean", "slower"), [(8, 6, 0.91, 1), (10, 5, 0.95, 1)]
)
def test_where_two_levels_are_picked_they_are_as_fast_as_flat_ones(
    number: int, sizes: int, mean: float, slower: int
) -> None:
    """Four ranks on two pretended nodes, by the launches that the runs held out."""
    recording = _recording(number)
    chosen = {(one.group, one.op): one for one in _decisions(number)}
    held_out = {at for at, launch in recording.launches.items() if launch.held_out}
    cells: dict[tuple[str, int, int], dict[Candidate, float]] = {}
    picks: dict[tuple[str, int, int], Candidate] = {}
    for sample in recording.samples:
        decision = chosen.get((recording.group_of(sample), sample.op))
        if sample.launch in held_out and sample.us and decision is not None:
            pick = decision.at(sample.nbytes)
            key = (sample.op, sample.nbytes, sample.launch)
            cells.setdefault(key, {})[sample.candidate] = median(sample.us)
            if pick.has_two_levels:
                picks[key] = pick
    ratios: dict[tuple[str, int], list[float]] = {}
    for key, pick in picks.items():
        flat = [us for one, us in cells[key].items() if not one.has_two_levels]
        if pick in cells[key]:
            ratios.setdefault(key[:2], []).append(cells[key][pick] / min(flat))
    typical = [median(each) for each in ratios.values()]
    assert len(typical) == sizes
    assert geometric_mean(typical) < mean
    assert sum(ratio > 1.1 for ratio in typical) == slower


@pytest.mark.full
def test_every_launch_is_judged_by_all_the_others() -> None:
    found = leave_one_out(_recording(1), DEFAULT_TIE_MARGIN)
    assert found.cells > 1000
    assert found.regret <= 1.03
